"""What commands print on: a console, tables that fit 80 columns, a bar while something takes long, JSON."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

WIDTH = 100  # of output that goes to no terminal


def console() -> Console:
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH)


def progress(on: Console, *, quiet: bool = False) -> Progress:
    """A bar that is gone when the work is done; nothing at all where nobody looks."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
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


def print_json(told: Any) -> None:
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
