"""Small files that the user names: regular ones of bounded size, read whole, and TOML of them.

A pipe would be waited for without end, and a device may never end. What is opened is what is looked at.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

from ..errors import ArgumentError

MOST = 1 << 20  # bytes of a file of settings
LARGEST = 2**63 - 1  # of a whole number: as TOML says, and 0xff... escapes Python's own limit of digits
DOTS = 4  # in one key; tomllib's time and memory grow with their square

# Strings and comments of TOML, in which dots mean nothing. One that is never closed is an error, and nothing behind it
# counts; without the question marks every such quote would be followed to the end of the file.
_NO_KEY = re.compile(
    r"""
      "{3}(?:[^"\\]|\\.|"{1,2}(?!"))*+(?:"{3,5})?
    | '{3}(?:[^']|'{1,2}(?!'))*+(?:'{3,5})?
    | "(?:[^"\\\n]|\\.)*+"?
    | '[^'\n]*+'?
    | \#[^\n]*+
    """,
    re.VERBOSE | re.DOTALL,
)
_MANY_DOTS = re.compile(rf"(?:\.[^.\n=,\[\]{{}}]*+){{{DOTS + 1}}}")


def read_bytes(path: Path, name: str, *, most: int = MOST) -> bytes:
    """All of a regular file; `name` is how errors call it."""
    try:
        _check_regular(path.stat(), name)
        opened = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(opened, "rb") as file:
            _check_regular(os.fstat(opened), name)
            found = file.read(most + 1)
    except (OSError, ValueError) as failure:
        if isinstance(failure, ArgumentError):
            raise
        raise ArgumentError(f"{name} cannot be read: {getattr(failure, 'strerror', None) or failure}") from failure
    if len(found) > most:
        raise ArgumentError(f"{name} cannot be read: it has more than {most:,} bytes, too much for such a file")
    return found


def _check_regular(status: os.stat_result, name: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(0, "Is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise ArgumentError(f"{name} cannot be read: it is a pipe or a device; write its content to a file first")


def read_text(path: Path, name: str, *, most: int = MOST) -> str:
    content = read_bytes(path, name, most=most)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise ArgumentError(f"{name} cannot be read: it is no text in UTF-8, at byte {failure.start}") from failure


def read_toml(path: Path, name: str) -> dict[str, Any]:
    text = read_text(path, name)
    if _MANY_DOTS.search(_NO_KEY.sub("_", text)):
        raise ArgumentError(f"{name} is not TOML that longring reads: a key has more than {DOTS} dots")
    try:
        found = tomllib.loads(text)
    except ValueError as failure:  # tomllib's own error is one, and a number of too many digits another
        raise ArgumentError(f"{name} is not TOML: {failure}") from failure
    except RecursionError:
        raise ArgumentError(f"{name} is not TOML that longring reads: it is nested too deeply") from None
    _check_numbers(found, name)
    return found


def _check_numbers(found: dict[str, Any], name: str) -> None:
    """Larger ones could be neither made floats nor shown."""
    ahead: list[tuple[str, Any]] = list(found.items())
    while ahead:
        key, value = ahead.pop()
        if isinstance(value, dict):
            ahead.extend(value.items())
        elif isinstance(value, list):
            ahead.extend((key, one) for one in value)
        elif isinstance(value, int) and not -LARGEST - 1 <= value <= LARGEST:
            raise ArgumentError(f"{name} is not TOML that longring reads: {key[:100]} is a whole number beyond 2**63")
