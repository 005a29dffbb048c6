"""The manifest: what a checkpoint must consist of to be trusted. It is written last, and has a checksum of its own."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import ArgumentError, CheckpointError
from .durable import Facts, write

FORMAT = 1
NAME, SUM = "manifest.json", "manifest.sha256"
INDEX = ".metadata"  # where torch.distributed.checkpoint says what is in which file
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]*[A-Za-z0-9_-]")
_LARGEST = 1 << 28  # bytes; nothing is read whole that could not be a manifest


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


def check_about(about: Any) -> None:
    try:
        is_kept = isinstance(about, dict) and json.loads(_dumped(about)) == about
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"about must be what JSON can hold: {error}") from None
    if not is_kept:
        raise ArgumentError("about must come back from JSON as it is: a dict with keys of str, lists and no tuples")


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
    text = _content(folder / NAME)
    if _content(folder / SUM) != _sum_line(text):
        raise Damaged(f"{NAME} is not what {SUM} says it was: one of them was changed or cut short")
    manifest = _parsed(text)
    for name, facts in manifest.files.items():
        _check_size(folder / name, facts)
    return manifest


def _content(path: Path) -> bytes:
    size = _size(path)
    if size > _LARGEST:
        raise Damaged(f"{path.name} has {size} bytes, far more than any manifest")
    try:
        return path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None


def _parsed(text: bytes) -> Manifest:
    try:
        content = json.loads(text)
        version = content["format"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise Damaged(f"{NAME} is not a manifest") from None
    if version != FORMAT:
        raise Damaged(f"it has format {version!r}, and this version of longring reads format {FORMAT}")
    try:
        files = {name: Facts(int(facts["bytes"]), str(facts["sha256"])) for name, facts in content["files"].items()}
        manifest = Manifest(int(content["step"]), int(content["ranks"]), files, dict(content["about"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{NAME} lacks what format {FORMAT} has: {error!r}") from None
    if manifest.ranks < 1 or manifest.step < 0:
        raise Damaged(f"{NAME} says step {manifest.step}, written by {manifest.ranks} ranks")
    for name in {*files, INDEX}:
        if not _PLAIN_NAME.fullmatch(name) or name not in files:
            raise Damaged(f"{NAME} lists no file {INDEX}, or one that is not a plain name: {name!r}")
    return manifest


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
