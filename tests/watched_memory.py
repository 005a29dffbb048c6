"""Kernels that are interpreted, and watched: what they read and write must lie in tensors that they were given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


class Memory:
    """The storages of one launch's tensors."""

    def __init__(self, given: Iterable[Any]) -> None:
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(given)}
        self._starts = np.array(sorted(storages), dtype=np.int64)
        self._stops = np.array([start + storages[int(start)] for start in self._starts], dtype=np.int64)

    def check(self, what: str, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
        asked = np.broadcast_to(addresses, mask.shape)[mask.astype(bool)].astype(np.int64)
        place = np.searchsorted(self._starts, asked, side="right") - 1
        outside = (place < 0) | (asked + size > self._stops[place])
        assert not outside.any(), f"a kernel {what} {outside.sum()} numbers that are in none of its tensors"


def _tensors(given: Iterable[Any]) -> Iterator[torch.Tensor]:
    for one in given:
        if isinstance(one, tuple):
            yield from _tensors(one)
        elif isinstance(one, torch.Tensor):
            yield one


@contextmanager
def watched_memory() -> Iterator[None]:
    """Does nothing where kernels are compiled."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    prepare, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    now = Memory(())

    def prepared(self, args_dev, kwargs):
        nonlocal now
        args, words = prepare(self, args_dev, kwargs)
        now = Memory((*args, *words.values()))
        return args, words

    def watched_load(self, ptrs, mask, *others):
        now.check("reads", ptrs.data, mask.data, _size(interpreter, ptrs))
        return load(self, ptrs, mask, *others)

    def watched_store(self, ptrs, value, mask, *others):
        now.check("writes", ptrs.data, mask.data, _size(interpreter, ptrs))
        return store(self, ptrs, value, mask, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_init_args_hst", prepared)
        patch.setattr(builder, "create_masked_load", watched_load)
        patch.setattr(builder, "create_masked_store", watched_store)
        yield


def _size(interpreter, ptrs) -> int:
    return np.dtype(interpreter._get_np_dtype(ptrs.get_element_ty())).itemsize
