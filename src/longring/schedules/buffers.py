"""Buffers that are received into, made once and used again: fresh memory costs more than a copy into it."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor


class _Pool:
    """Free buffers of one thread. It grows to what was in use at once, and a buffer that became too small goes."""

    def __init__(self) -> None:
        self.free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of at least so many numbers."""
        free = self.free.setdefault((dtype, device), [])
        for index, buffer in enumerate(free):  # the smallest comes first
            if buffer.numel() >= numbers:
                return free.pop(index)
        if free:
            free.pop(0)
        return torch.empty(numbers, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        free = self.free.setdefault((buffer.dtype, buffer.device), [])
        free.append(buffer)
        free.sort(key=Tensor.numel)


_of_thread = threading.local()
_pools: weakref.WeakSet[_Pool] = weakref.WeakSet()


def pool() -> _Pool:
    """The pool of the calling thread: each virtual rank has one of its own, gone when its thread ends."""
    found = getattr(_of_thread, "pool", None)
    if found is None:
        found = _of_thread.pool = _Pool()
        _pools.add(found)
    return found


def release_buffers() -> None:
    """Free every buffer that longring keeps for later calls. No call may be under way."""
    for found in list(_pools):
        found.free.clear()


class Loan:
    """A buffer of the pool, given back when all who use it have said so."""

    def __init__(self, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._pool = pool()
        self._whole = self._pool.take(numbers, dtype, device)
        self._users = 1
        self.flat = self._whole[:numbers]

    def shared(self) -> Loan:
        self._users += 1
        return self

    def done(self) -> None:
        self._users -= 1
        if not self._users:
            self._pool.give_back(self._whole)
