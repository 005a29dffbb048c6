"""Small files that are whole, or as they were before: written beside, and put in place by one rename."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def put(path: Path, text: str) -> None:
    """Make `text` the file's content. One at a time: what others began, who were killed, is removed first."""
    for left in path.parent.glob(f".{path.name}.*"):
        left.unlink(missing_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with beside.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
