"""Files of data: which of a folder are read, what samples of them say, and bytes of them wherever one looks."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from io import FileIO
from pathlib import Path

from ..errors import ArgumentError, DataChanged
from ..plan.quantities import spoken_bytes
from .checkpoints.claims import LOCK, is_lock

HEAD, SAMPLE = 8192, 4096  # bytes looked at: at the beginning, and in the middle and at the end
STREAM = 1 << 22  # bytes in memory while a file is read through
MAPS = 64  # files mapped at once: a process may have about 65,000 maps and often only 1,024 descriptors
PACKED = {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z"}


@dataclass(frozen=True)
class File:
    """A file as it was when the corpus was opened."""

    path: Path
    name: str  # relative to the folder, with slashes; a file that was named by itself has its own name
    size: int
    is_binary: bool  # as far as its head shows
    digest: bytes  # of head, middle and tail, or of all where the file is small

    @property
    def suffix(self) -> str:
        return self.path.suffix.lower()


@dataclass
class Found:
    """The files of a folder in the order of their names, and how many of what were left out."""

    files: list[File]
    left_out: Counter[str] = field(default_factory=Counter)


# -------------------------------------------------------------------------------------------------------- finding


def find_files(path: Path, wanted: Callable[[str, bool], bool] | None = None, *, without: Path | None = None) -> Found:
    """Every file under a folder, or the one file that `path` is. Nothing is followed out of the folder.

    `wanted(name, is_folder)` says what to look at, by the relative name; what it declines is not counted. Runs that lie
    in the folder are left out, and so is `without`, which may be about to become one: what they write is no data.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return Found([_looked_at(path, path.name)])
    except FileNotFoundError:
        raise ArgumentError(f"there is no file or folder {path}") from None
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise ArgumentError(f"{path} is neither a file nor a folder")
    return _of_folder(path, wanted or (lambda name, is_folder: True), _identity(without))


def _identity(folder: Path | None) -> tuple[int, int] | None:
    """(device, inode) of a folder that is there."""
    try:
        status = None if folder is None else folder.stat()
    except OSError:
        return None
    return None if status is None else (status.st_dev, status.st_ino)


def _of_folder(folder: Path, wanted: Callable[[str, bool], bool], without: tuple[int, int] | None) -> Found:
    found, unreadable = Found([]), dict[str, str]()
    names = sorted(_names(folder, wanted, without, found.left_out, unreadable), key=os.fsencode)
    for name in names:
        try:
            file = _looked_at(folder / name, name)
        except ArgumentError as error:
            unreadable[name] = str(error).rpartition(": ")[2]
            continue
        if file.size:
            found.files.append(file)
        else:
            found.left_out["empty"] += 1
    if unreadable:
        raise ArgumentError(_refusal_of_unreadable(folder, unreadable))
    return found


def _names(
    folder: Path,
    wanted: Callable[[str, bool], bool],
    without: tuple[int, int] | None,
    left_out: Counter[str],
    unreadable: dict[str, str],
) -> Iterator[str]:
    """Relative names of regular files. Links stay behind: inside the folder they would repeat what they point to.

    A stack, since folders may be nested deeper than Python's calls can be.
    """
    ahead = [""]
    while ahead:
        under = ahead.pop()
        try:
            entries = list(os.scandir(folder / under))
        except OSError as error:
            unreadable[under or "."] = str(error.strerror)
            continue
        for entry in entries:
            name = f"{under}{entry.name}"
            is_folder = entry.is_dir(follow_symlinks=False)
            if not wanted(name, is_folder):
                continue
            if entry.name.startswith("."):
                left_out["hidden"] += 1
            elif entry.is_symlink():
                left_out["link"] += 1
            elif is_folder and _is_run(folder / name, without):
                left_out["run"] += 1
            elif is_folder:
                ahead.append(f"{name}/")
            elif entry.is_file(follow_symlinks=False):
                yield name
            else:
                left_out["special"] += 1  # a pipe or a device, which might be waited for without end


def _is_run(folder: Path, without: tuple[int, int] | None) -> bool:
    """Whether it is the folder that a run is to have, or has: by its lock, which a refused start leaves, too.

    Where the system has no locks nobody signs them, and it takes what the first step leaves.
    """
    if without is not None and _identity(folder) == without:
        return True
    try:
        return is_lock(folder / LOCK) or all(
            (folder / name).is_file() for name in ("config.json", "metrics.jsonl", LOCK)
        )
    except OSError:  # as of a path that is too long: reading the folder says so
        return False


def _refusal_of_unreadable(folder: Path, reasons: dict[str, str], most: int = 3) -> str:
    names = sorted(reasons)
    told = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    return f"{folder}: {told} cannot be read ({reasons[names[0]]}); mend it, or take it out of the folder"


def _looked_at(path: Path, name: str) -> File:
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            head = _exactly(file, 0, size if size <= HEAD + 2 * SAMPLE else HEAD)
            seen = blake2b(head, digest_size=16)
            if len(head) < size:
                seen.update(_exactly(file, (size - SAMPLE) // 2, SAMPLE))
                seen.update(_exactly(file, size - SAMPLE, SAMPLE))
            return File(path, name, size, b"\0" in head[:HEAD], seen.digest())
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}") from error


def _exactly(file: FileIO, place: int, count: int) -> bytes:
    """Without a buffer a read may give less than was asked for, though more is there."""
    file.seek(place)
    parts = []
    while count and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


# -------------------------------------------------------------------------------------------------------- reading


def read_bytes(file: File, start: int, stop: int) -> bytes:
    """Bytes start..stop-1 of a file, of which nothing else is read and nothing stays in memory."""
    if start == stop:
        return b""
    mapped = _mapped(file.path, file.size)
    if mapped.size() != file.size:  # touching what is gone would end the process by SIGBUS
        raise _changed(file, mapped.size())
    found = mapped[start:stop]
    _forget(mapped, start, stop)
    return found


@lru_cache(maxsize=MAPS)
def _mapped(path: Path, size: int) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except ValueError:  # of mmap, where the file is shorter
        raise DataChanged(f"{path} had {spoken_bytes(size)} when it was opened, and has less now") from None
    except OSError as error:
        raise DataChanged(f"{path} cannot be read any more: {error.strerror}") from None


def _forget(mapped: mmap.mmap, start: int, stop: int, around: int = 1 << 16) -> None:
    """Give the pages back, which would count as this process's memory until the file is closed.

    The system's own copy stays, and a page that is touched comes with its neighbours.
    """
    if hasattr(mapped, "madvise"):
        start = max(0, start - around) // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # advice that is not taken costs memory, and is no error
            mapped.madvise(mmap.MADV_DONTNEED, start, min(stop + around, len(mapped)) - start)


def _changed(file: File, size: int) -> DataChanged:
    return DataChanged(f"{file.path} had {file.size:,} bytes when it was opened and has {size:,} now")


def stream(file: File, start: int = 0, *, block: int = STREAM) -> Iterator[bytes]:
    """All of a file from byte `start` on, in blocks; by plain reads, which leave no pages behind."""
    try:
        with file.path.open("rb", buffering=0) as opened:
            opened.seek(start)
            left = file.size - start
            while left and (part := opened.read(min(block, left))):
                left -= len(part)
                yield part
    except OSError as error:
        raise ArgumentError(f"{file.path} cannot be read: {error.strerror}") from None
    if left:
        raise _changed(file, file.size - left)
