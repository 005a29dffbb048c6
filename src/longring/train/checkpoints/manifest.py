"""The manifest: what a checkpoint must consist of to be trusted. It is written last, and has a checksum of its own."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import re
import reprlib
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from ...errors import ArgumentError, CheckpointError
from .durable import Facts, write

FORMAT = 1
NAME, SUM = "manifest.json", "manifest.sha256"
INDEX = ".metadata"  # where torch.distributed.checkpoint says what is in which file
LARGEST = 2**63 - 1  # of steps and sizes
RANKS = 1_000_000  # at most
DEEPEST = 50  # lists and dicts within each other
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{,99}[A-Za-z0-9_-]")
_CHECKSUM = re.compile(r"[0-9a-f]{64}")
ABOUT, A_FILE = 1 << 16, 300  # bytes that a manifest has at most for what the run says, and for each file
_SIZES = {NAME: 1 << 20, SUM: 1 << 10, INDEX: 1 << 28}  # bytes that a file has at most which is read whole
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


class Damaged(CheckpointError):
    """A folder is not the checkpoint it should be; the message completes "skipped step-00000120: ..."."""


@dataclass(frozen=True)
class Manifest:
    step: int
    ranks: int  # that wrote it
    files: Mapping[str, Facts]
    about: dict[str, Any]  # what the run says about itself

    @property
    def bytes(self) -> int:
        return sum(facts.bytes for facts in self.files.values())


def shown(value: Any) -> str:
    """What stands in a file that anyone may have written, for a message: not long, nor anything to a terminal.

    Of what may have much within it, or itself, the type alone.
    """
    if type(value) is tuple:
        return f"({', '.join(map(_shown, value[:6]))}{', ...' * (len(value) > 6)})"
    return _shown(value)


def _shown(value: Any) -> str:
    kind = type(value)
    if kind is int and value.bit_length() > 64:
        return f"an int of {value.bit_length()} bits"
    return _SHORT.repr(value) if kind in (str, bytes, bool, int, float, type(None)) else kind.__name__


def check_about(about: Any) -> None:
    try:
        text = _dumped(about)
        is_kept = isinstance(about, dict) and json.loads(text) == about
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"about must be what JSON can hold: {error}") from None
    if not is_kept:
        raise ArgumentError("about must come back from JSON as it is: a dict with keys of str, lists and no tuples")
    size, most = len(text.encode()), ABOUT
    if size > most or _is_deep(about, DEEPEST - 1):
        raise ArgumentError(
            f"about must have at most {most} bytes, and {DEEPEST - 1} lists and dicts within each other; it has {size} "
            "bytes. What is larger belongs into the state"
        )


def _dumped(content: Any) -> str:
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False)


def put(folder: Path, manifest: Manifest) -> None:
    """Write it, and its checksum after it, so that they are on the disk."""
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "ranks": manifest.ranks,
        "files": {name: facts._asdict() for name, facts in manifest.files.items()},
        "about": manifest.about,
        "written": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "versions": {
            "longring": sys.modules["longring"].__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }
    text = (_dumped(content) + "\n").encode()
    write(folder / NAME, text)
    write(folder / SUM, _sum_line(text))


def _sum_line(text: bytes) -> bytes:
    return f"{hashlib.sha256(text).hexdigest()}  {NAME}\n".encode()


def get(folder: Path) -> Manifest:
    """The manifest of a folder whose files are there with their sizes; what is in them is for `check_sums`."""
    text = _content(folder / NAME, more=A_FILE * _count(folder))
    if _content(folder / SUM) != _sum_line(text):
        raise Damaged(f"{NAME} is not what {SUM} says it was: one of them was changed or cut short")
    manifest = _parsed(text)
    for name, facts in manifest.files.items():
        _check_size(folder / name, facts)
    return manifest


def _count(folder: Path) -> int:
    """How many files there are in it, up to those of so many ranks as there can be."""
    try:
        with os.scandir(folder) as files:
            return sum(1 for _ in itertools.islice(files, RANKS))
    except OSError as error:
        raise Damaged(f"it cannot be read: {error.strerror}") from None


def _content(path: Path, more: int = 0) -> bytes:
    size, most = _size(path), _SIZES[path.name] + more
    if size > most:
        raise Damaged(f"{path.name} has {size} bytes, far more than any needs, which is {most}")
    try:
        with path.open("rb") as file:
            return file.read(most + 1)
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None


def _parsed(text: bytes) -> Manifest:
    try:
        content = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise Damaged(f"{NAME} is not a manifest") from None
    if type(content) is not dict or "format" not in content or _is_deep(content, DEEPEST):
        raise Damaged(f"{NAME} is not a manifest")
    version = content["format"]
    if type(version) is not int or version != FORMAT:
        raise Damaged(f"it has format {shown(version)}, and this version of longring reads format {FORMAT}")
    step, ranks, files, about = (content.get(name) for name in ("step", "ranks", "files", "about"))
    if not _is_whole(step, 0, LARGEST) or not _is_whole(ranks, 1, RANKS):
        raise Damaged(f"{NAME} says step {shown(step)}, written by {shown(ranks)} ranks")
    if type(files) is not dict or type(about) is not dict:
        raise Damaged(f"{NAME} lacks what format {FORMAT} has: files, and what they are about")
    for name in (*files, INDEX):
        if not _PLAIN_NAME.fullmatch(name) or name not in files:
            raise Damaged(f"{NAME} lists no file {INDEX}, or one that is not a plain name: {shown(name)}")
    return Manifest(step, ranks, {name: _facts(name, told) for name, told in files.items()}, about)


def _facts(name: str, told: Any) -> Facts:
    size, sha256 = (told.get("bytes"), told.get("sha256")) if type(told) is dict else (None, None)
    if not _is_whole(size, 0, LARGEST) or type(sha256) is not str or not _CHECKSUM.fullmatch(sha256):
        raise Damaged(f"{NAME} lacks what format {FORMAT} has: the size and checksum of {name}")
    return Facts(size, sha256)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _is_whole(value: Any, least: int, most: int) -> TypeGuard[int]:
    return type(value) is int and least <= value <= most  # which True, 4.0 and "4" are not


def _is_deep(content: Any, deepest: int) -> bool:
    """Whether more is within each other than one can walk through, and send to another rank, without a thought."""
    level = [content]
    for _ in range(deepest):
        level = [inner for outer in level if type(outer) in (list, dict) for inner in _inner(outer)]
    return any(type(outer) in (list, dict) for outer in level)


def _inner(outer: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def _check_size(path: Path, facts: Facts) -> None:
    size = _size(path)
    if size != facts.bytes:
        raise Damaged(f"{path.name} has {size} bytes, and was written with {facts.bytes}")


def _size(path: Path) -> int:
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):  # a link could lead anywhere, and a pipe would never end
        raise Damaged(f"{path.name} is not a file")
    return status.st_size


def check_sums(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read these files from end to end."""
    for name in names:
        try:
            with (folder / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from None
        if found != manifest.files[name].sha256:
            raise Damaged(f"{name} was changed since it was written: its checksum differs")


def checked_content(folder: Path, manifest: Manifest, name: str) -> bytes:
    """A small file, in the very bytes that the checksum is of."""
    content = _content(folder / name)
    if hashlib.sha256(content).hexdigest() != manifest.files[name].sha256:
        raise Damaged(f"{name} was changed since it was written: its checksum differs")
    return content
