"""What folders are called: a step that is complete, and the three states in which one is not, or no longer, wanted."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SAVING, DELETING, REPLACED = "saving", "deleting", "replaced"
_NAME = re.compile(rf"step-([0-9]{{8,30}})(?:\.({SAVING}|{DELETING}|{REPLACED})-[0-9a-f]{{8}})?")


class Entry(NamedTuple):
    path: Path
    step: int
    fate: str | None  # None: complete


def complete(step: int) -> str:
    return f"step-{step:08d}"


def marked(step: int, fate: str) -> str:
    """A name that nobody has used, for a folder that is not to be read."""
    return f"{complete(step)}.{fate}-{secrets.token_hex(4)}"


def entries(folder: Path) -> list[Entry]:
    """The checkpoints of a folder, whatever state they are in: newest first, and of one step the one in place first."""
    return sorted(_read(folder), key=lambda entry: (-entry.step, entry.fate or "", entry.path.name))


def _read(folder: Path) -> Iterator[Entry]:
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            yield Entry(path, int(match[1]), match[2])
