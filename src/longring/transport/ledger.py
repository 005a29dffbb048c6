"""What a virtual rank held: bytes counted as they happen, not predicted."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Ledger(TorchDispatchMode):
    """Counts, in the thread that entered it, the bytes of every storage its operations made and still hold.

    Views and in-place results share a storage with an argument and count nothing. What a kernel
    allocates inside itself and frees before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and the guard against it costs more than the counting."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _makes_new_storage(func):
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, size).atexit = False

    def _release(self, size: int) -> None:
        self.live_bytes -= size


@cache
def _makes_new_storage(func: Any) -> bool:
    """Whether the results share nothing with the arguments; the schema of one operation does not say that it does."""
    return func._schema.name != "aten::_unsafe_view" and not any(r.alias_info for r in func._schema.returns)
