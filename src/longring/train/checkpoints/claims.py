"""One run saves into a folder. Its rank 0 holds a lock there for as long as it lives, however it ends."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import CheckpointError
from .meeting import Meeting

LOCK = "lock"
SIGNATURE = 1000  # bytes, at most
_NO_SIGNATURE = (ValueError, KeyError, TypeError, RecursionError)
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class _Claim(NamedTuple):
    lock: int  # an open file
    process: int  # whose it is: a forked child has the file too, but not the right


_held: dict[Path, _Claim] = {}


def reserve(folder: Path, *, group: Any = None, timeout: float | None = None) -> None:
    """Refuse on all ranks, by CheckpointError, to share the folder with another run, before anything is written there.

    Every rank of `group` calls it, and rank 0 claims the folder, as it does at its first `save` anyway. `timeout` is
    that of `save`.
    """
    meeting = Meeting(group, timeout=timeout)
    meeting.hold(f"claiming {folder}", lambda: None, lambda _: [claim(Path(folder))] * meeting.ranks)


def claim(folder: Path) -> bool:
    """See to it that nobody else saves into the folder until this process ends, or `release` is called.

    False where the file system has no locks, so that nothing is known of others.
    """
    folder = folder.resolve()
    if _is_ours(folder):
        return True
    lock = _opened(folder / LOCK)
    try:
        has_locks = _locked(lock, folder)
    except BaseException:
        os.close(lock)
        raise
    if not has_locks:
        os.close(lock)
        return False
    _sign(lock)
    _held[folder] = _Claim(lock, os.getpid())
    return True


def release(folder: Path) -> None:
    """Let another process save into the folder. A process that ends need not do this."""
    held = _held.pop(folder.resolve(), None)
    if held is not None:
        os.close(held.lock)


def is_lock(path: Path) -> bool:
    """Whether it is what a claim leaves, now or once, and not another file of that name."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            _signature(file.read(SIGNATURE))
    except (OSError, *_NO_SIGNATURE):
        return False
    return True


def _is_ours(folder: Path) -> bool:
    held = _held.get(folder)
    if held is None or held.process != os.getpid():
        return False
    try:
        is_there = os.path.samestat(os.fstat(held.lock), os.stat(folder / LOCK))
    except FileNotFoundError:  # the folder was removed, and made anew
        is_there = False
    if not is_there:
        release(folder)
    return is_there


def _opened(path: Path) -> int:
    """The lock file itself: writing through a link, or into a pipe or a device, would change what is not the run's."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        lock = os.open(path, flags, 0o644)
    except OSError as failure:
        if failure.errno == errno.ELOOP:
            raise _no_file(path) from None
        raise CheckpointError(f"{path} cannot be opened: {failure.strerror or failure}") from failure
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        os.close(lock)
        raise _no_file(path)
    return lock


def _no_file(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a link, a pipe or a device, and must be a file; remove it, or take another folder"
    )


def _locked(lock: int, folder: Path) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        raise CheckpointError(
            f"another run saves into {folder}: {_owner(lock)}; give this run a folder of its own, or end that one"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"the file system of {folder} has no locks ({error.strerror}): see to it yourself that no other run saves "
            "there; what killed runs left behind is not removed",
            stacklevel=2,
        )
        return False


def _sign(lock: int) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    owner = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(owner).encode() + b"\n", 0)


def _owner(lock: int) -> str:
    try:
        return _signature(os.pread(lock, SIGNATURE, 0))
    except _NO_SIGNATURE:
        return "it has not said who it is"


def _signature(told: bytes) -> str:
    owner = json.loads(told)
    return f"process {owner['process']} on {owner['host']}, since {owner['since']}"
