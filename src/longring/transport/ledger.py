"""What a virtual rank sent and held: bytes counted as they happen, not predicted."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ledger(TorchDispatchMode):
    """Counts, in the thread that entered it, the bytes of every storage its operations made and still hold.

    Views and in-place results share a storage with an argument and are not counted again. What a kernel
    allocates inside itself and frees before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes_sent = 0
        self.live_bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = {_storage(t).data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _storage(tensor).data_ptr() not in known:
                known.add(_storage(tensor).data_ptr())
                self._hold(_storage(tensor))
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, size).atexit = False

    def _release(self, size: int) -> None:
        self.live_bytes -= size


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
