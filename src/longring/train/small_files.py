"""Files of a run's folder: written whole by one rename, and read only where they are regular files, not links.

A folder may come from somebody else: what stands in it may be a link to another file, a pipe, a device or a folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import ArgumentError


@contextmanager
def putting(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends; one rename makes it whole, or leaves the old.

    One at a time: what others began, who were killed, is removed first. A link is replaced, not followed.
    """
    for left in path.parent.glob(f".{path.name}.*"):
        with contextlib.suppress(OSError):  # as of a folder, which is not ours
            left.unlink()
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def put(path: Path, text: str) -> None:
    """Make `text` the file's content."""
    with putting(path) as file:
        file.write(text.encode())


def check_file(path: Path) -> None:
    """Refuse what is there, and is no regular file."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as failure:
        raise ArgumentError(f"{path} cannot be read: {failure.strerror or failure}") from failure
    if not stat.S_ISREG(mode):
        raise _no_file(path)


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """The regular file, for reading."""
    check_file(path)  # opening some devices does something
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        opened = os.open(path, flags)
        with open(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise _no_file(path)
            yield file
    except OSError as failure:
        raise ArgumentError(f"{path} cannot be read: {failure.strerror or failure}") from failure


def _no_file(path: Path) -> ArgumentError:
    return ArgumentError(
        f"{path} is a folder, a link, a pipe or a device, and must be a file; remove it, or take another --out"
    )
