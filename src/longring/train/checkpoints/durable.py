"""Bytes that are on the disk when a function returns, and the checksum of what was meant to be there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from torch.distributed.checkpoint.filesystem import FileSystem


class Facts(NamedTuple):
    """What is known of a file from when it was written."""

    bytes: int
    sha256: str


def write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        _sync(file)


def _sync(file: IO[bytes]) -> None:
    file.flush()  # fsync knows nothing of what Python still holds
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """So that the names in it survive; where a folder cannot be opened, the system sees to that itself."""
    if os.name == "nt":
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class SyncedFiles(FileSystem):
    """The files that torch.distributed.checkpoint writes: each synced when it is closed, and summed on its way."""

    def __init__(self) -> None:
        self.facts: dict[str, Facts] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        with Path(path).open("xb") as file:
            stream = _Summed(file)
            yield stream
            _sync(file)
        self.facts[Path(path).name] = Facts(stream.bytes, stream.digest.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        os.rename(path, new_path)
        self.facts[Path(new_path).name] = self.facts.pop(Path(path).name)


class _Summed:
    """A file that is written from its beginning to its end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.digest.update(view)
        self.bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Not yet: who opened the file syncs it first."""
