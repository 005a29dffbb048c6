"""Buffers that are received into. In a host's memory they are made once and used again: fresh memory costs more there
than a copy into it. A GPU's go back to torch, which hands out memory at once and may use it for something else."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from ..transport.contract import Transport


class Buffers:
    """Free buffers of one rank. They grow to what was in use at once, and one that became too small goes.

    What a GPU still has to do with a buffer that is given back is in its stream already, before all that torch could
    use the memory for.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._lock = threading.Lock()  # on a GPU the backward runs in a thread of autograd's

    def take(self, numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of at least so many numbers."""
        with self._lock:
            free = self._free.setdefault((dtype, device), [])
            for index, buffer in enumerate(free):  # the smallest comes first
                if buffer.numel() >= numbers:
                    return free.pop(index)
            if free:
                free.pop(0)
        return torch.empty(numbers, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        if buffer.is_cuda:
            return
        with self._lock:
            free = self._free.setdefault((buffer.dtype, buffer.device), [])
            free.append(buffer)
            free.sort(key=Tensor.numel)

    def clear(self) -> None:
        with self._lock:
            self._free.clear()


_of_ranks: weakref.WeakKeyDictionary[Transport, Buffers] = weakref.WeakKeyDictionary()


def buffers_of(transport: Transport) -> Buffers:
    """One collection for a rank, gone with it: forward and backward use the same, virtual ranks each their own."""
    return _of_ranks.setdefault(transport, Buffers())


def release_buffers() -> None:
    """Free every buffer that longring keeps for later calls. No call may be under way."""
    for buffers in list(_of_ranks.values()):
        buffers.clear()


class Loan:
    """A buffer that goes back when all who use it have said so."""

    def __init__(self, buffers: Buffers, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._buffers = buffers
        self._whole = buffers.take(numbers, dtype, device)
        self._users = 1
        self.flat = self._whole[:numbers]

    def shared(self) -> Loan:
        self._users += 1
        return self

    def done(self) -> None:
        self._users -= 1
        if not self._users:
            self._buffers.give_back(self._whole)
            del self._whole, self.flat
