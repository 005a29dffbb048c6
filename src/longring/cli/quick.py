"""Commands that answer in moments: their words are read without what typer loads to read them.

typer 0.29 turns every word into its type by pydantic, which takes a tenth of a second to load. Older ones do not; and
what is not a text, a path, a flag or something with a reader of its own is left to typer in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup


class _Quick:
    def get_params(self, ctx: Any) -> list[Any]:
        """Those of the command, and --help."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for option in found:
            if not isinstance(vars(option).get("process_value"), _Read) and _reader(option) is not None:
                option.process_value = _Read(option)
        return found


class QuickCommand(_Quick, TyperCommand):
    pass


class QuickGroup(_Quick, TyperGroup):
    pass


class _Read:
    """An option's `process_value`."""

    def __init__(self, option: Any) -> None:
        self._option, self._reader, self._callback = option, _reader(option), option.callback

    def __call__(self, ctx: Any, value: Any) -> Any:
        found = value if value is None or self._reader is None else self._reader(value)
        return found if self._callback is None else self._callback(ctx, self._option, found)


def _reader(option: Any) -> Callable[[Any], Any] | None:
    """How the words of an option are read, where that is plain; None where typer should see to it."""
    described = getattr(option, "type_descriptor", None)
    if described is None or option.required or option.multiple or option.nargs != 1:
        return None
    plain = {str: str, Path: Path} | ({bool: bool} if option.is_flag else {})
    return described.parameter_info.parser or plain.get(described.annotation)
