"""What commands print on: a console, tables that fit 80 columns, a bar while something takes long, JSON.

Names of files, and texts in checkpoints and records, may come from strangers. None of their control characters reaches
the terminal, and none of their brackets is read as rich's markup: styles are given as arguments, or by `styled`.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

WIDTH = 100  # of output that goes to no terminal
_CONTROLS = re.compile(  # of ASCII and Latin-1, but newline and tab; and what turns the direction of the text around
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def shown(text: str) -> str:
    """The text with control characters spelt out, as \\x1b: a terminal would obey them."""
    return _CONTROLS.sub(lambda found: _spelt(ord(found[0])), text)


def _spelt(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def console(*, width: int = WIDTH) -> Console:
    """As wide as the terminal, or of this width where there is none."""
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise  # called while a BrokenPipeError is handled: main knows what to do with it

        def render_str(self, text: str, **kwargs: Any) -> Text:
            """Spelt out before a table is laid out, since control characters have no width."""
            return super().render_str(shown(text), **kwargs)

        def render(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
            """All that is printed comes through here: rich's own control sequences as such, the rest as text."""
            for segment in super().render(*args, **kwargs):
                yield segment if segment.control else segment._replace(text=shown(segment.text))

    plainly: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
    found = Screen(**plainly)
    return found if found.is_terminal else Screen(**plainly, width=width)


def styled(text: str, style: str) -> Text:
    """For a cell of a table."""
    from rich.text import Text

    return Text(shown(text), style)


def progress(on: Console, *, quiet: bool = False) -> Progress:
    """A bar that is gone when the work is done; nothing at all where nobody looks."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=on, transient=True, disable=quiet or not on.is_terminal)


def table(title: str, *words: str, numbers: tuple[str, ...] = ()) -> Table:
    """Columns of words to the left, columns of numbers to the right."""
    from rich import box
    from rich.table import Table

    made = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for header in words:
        made.add_column(header, overflow="fold")
    for header in numbers:
        made.add_column(header, justify="right")
    return made


def envelope(command: str, arguments: Mapping[str, Any], *, real: str, simulated: str) -> dict[str, Any]:
    """What the JSON of every command begins with: asked for what, where, and what of it really ran."""
    return {
        "command": command,
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()},
        "versions": _versions(),
        "machine": _machine(),
        "real": real,
        "simulated": simulated,
    }


def _versions() -> dict[str, str | None]:
    import platform
    from importlib import metadata

    try:
        torch = metadata.version("torch")  # asked of the package's papers: loading it takes a second
    except metadata.PackageNotFoundError:
        torch = None
    return {"longring": __version__, "torch": torch, "python": platform.python_version()}


def _machine() -> dict[str, Any]:
    """GPUs are named only by commands that have loaded torch anyway."""
    import platform

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {"system": platform.platform(), "processor": platform.machine(), "cores": cores}
    torch = sys.modules.get("torch")
    if torch is not None:
        gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        found |= {"threads": torch.get_num_threads(), "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus]}
    return found


def print_json(told: Any) -> None:
    import json

    print(json.dumps(finite(told), indent=2, allow_nan=False))


def finite(told: Any) -> Any:
    """JSON knows no nan and no infinity: they become null."""
    if isinstance(told, float):
        return told if math.isfinite(told) else None
    if isinstance(told, dict):
        return {name: finite(value) for name, value in told.items()}
    if isinstance(told, (list, tuple)):
        return [finite(value) for value in told]
    return told
