"""Integer check of Triton launches: every address that a kernel reads or writes lies in a tensor it was given.

The engine runs on tensors without memory (device "meta"), so that a million tokens cost nothing, and each launch is
interpreted by Triton's own interpreter: the very source of the kernel, with 32-bit and 64-bit arithmetic as a GPU has
it. Tensors without memory get made-up addresses with wide gaps between them; numbers read from them are 0. Tables of
integers lie on the CPU and are read as they are, so every offset is the one that a GPU would compute.

Of a large launch some programs are run, and of a long loop some iterations: the first, the last, and random ones.
Where all programs of a launch were run, no element may have been written twice.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from interpreted import mended_interpreter

GAP = 1 << 40  # between made-up addresses: no 32-bit or 33-bit offset crosses it unseen
FIRST = 1 << 50  # above any real address


class OutOfBounds(AssertionError):
    """A kernel computed an address that is in none of its tensors."""


@dataclass
class Launches:
    """What was checked: launches, programs and addresses, by kernel."""

    launches: Counter[str] = field(default_factory=Counter)
    programs: Counter[str] = field(default_factory=Counter)
    addresses: Counter[str] = field(default_factory=Counter)


class _WithoutMemory:
    """A tensor argument as the interpreter sees it: a dtype and an address."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype, self._address = dtype, address

    def data_ptr(self) -> int:
        return self._address


class _Memory:
    """The storages of one launch's tensors, with the addresses they are given."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[int, int]] = {}
        self._next = FIRST

    def argument(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return type(x)(*map(self.argument, x)) if hasattr(x, "_fields") else tuple(map(self.argument, x))
        if not isinstance(x, torch.Tensor):
            return x
        storage = x.untyped_storage()
        if storage._cdata not in self._given:
            start = self._next if x.is_meta else storage.data_ptr()
            self._given[storage._cdata] = start, start + storage.nbytes()
            self._next += GAP + (storage.nbytes() + GAP - 1) // GAP * GAP if x.is_meta else 0
        start, _ = self._given[storage._cdata]
        return _WithoutMemory(x.dtype, start + x.storage_offset() * x.element_size())

    def closed(self) -> None:
        spans = sorted(self._given.values())
        self._starts = np.array([start for start, _ in spans], dtype=np.int64)
        self._stops = np.array([stop for _, stop in spans], dtype=np.int64)

    def check(self, what: str, addresses: np.ndarray, size: int) -> None:
        place = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = (place < 0) | (addresses + size > self._stops[place])
        if outside.any():
            wrong = int(addresses[outside][0])
            nearest = int(self._starts[np.abs(self._starts - wrong).argmin()])
            raise OutOfBounds(
                f"{what} {int(outside.sum())} of {addresses.size} numbers that are in none of its tensors, one of them "
                f"{wrong - nearest:+,} bytes from the beginning of the nearest"
            )


class _Checker:
    def __init__(self, programs: int, iterations: int, seed: int) -> None:
        self.programs, self.iterations, self.chance = programs, iterations, Random(seed)
        self.done = Launches()
        self.memory = _Memory()
        self.kernel = ""
        self.written: list[np.ndarray] | None = None

    def launch(self, executor: Any, *args: Any, **kwargs: Any) -> None:
        kernel, names = executor.fn, inspect.getfullargspec(executor.fn).args
        self.kernel, self.memory = kernel.__name__, _Memory()
        given = inspect.getcallargs(kernel, *args, **{k: v for k, v in kwargs.items() if k in names})
        given = {name: self.memory.argument(x) for name, x in given.items()}
        self.memory.closed()
        converted = {n: x if n in executor.constexprs else interpreter._implicit_cvt(x) for n, x in given.items()}
        (count,) = executor.grid
        some = self._some(count, self.programs)
        self.written = [] if len(some) == count else None
        interpreter.interpreter_builder.set_grid_dim(count, 1, 1)
        scope = interpreter._patch_lang(kernel)
        scope.set_attr(tl, "range", self.range)
        try:
            for program in some:
                interpreter.interpreter_builder.set_grid_idx(program, 0, 0)
                kernel(**converted)
        except OutOfBounds as error:
            raise OutOfBounds(f"{self.kernel}, program {program} of {count}: {error}") from None
        finally:
            scope.restore()
        self._check_written_once()
        self.done.launches[self.kernel] += 1
        self.done.programs[self.kernel] += len(some)

    def _some(self, count: int, most: int) -> list[int]:
        """The first, the last and random ones of so many."""
        if count <= most:
            return list(range(count))
        ends = {*range(min(4, count)), *range(max(0, count - 4), count)}
        return sorted(ends | set(self.chance.sample(range(count), max(0, most - len(ends)))))

    def _check_written_once(self) -> None:
        if not self.written:
            return
        addresses = np.concatenate(self.written)
        twice = addresses.size - np.unique(addresses).size
        assert not twice, f"{self.kernel} writes {twice} numbers twice"

    def load(self, ptrs: Any, mask: Any, other: Any, *_: Any) -> Any:
        dtype = interpreter._get_np_dtype(ptrs.get_element_ty())
        addresses, chosen = self._addresses("reads", ptrs, mask, np.dtype(dtype).itemsize)
        found = np.zeros(np.shape(ptrs.data), dtype)
        if addresses.size and addresses[0] < FIRST:  # integers on the CPU
            found = interpreter._interpreter.load(ptrs.data, chosen, found, dtype)
        elif other is not None:
            found = np.where(chosen, found, other.data)
        return interpreter.TensorHandle(found, ptrs.get_element_ty())

    def store(self, ptrs: Any, value: Any, mask: Any, *_: Any) -> None:
        size = np.dtype(interpreter._get_np_dtype(ptrs.get_element_ty())).itemsize
        addresses, _chosen = self._addresses("writes", ptrs, mask, size)
        if self.written is not None:
            self.written.append(addresses)

    def _addresses(self, what: str, ptrs: Any, mask: Any, size: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = np.broadcast_to(mask.data, np.shape(ptrs.data)).astype(bool)
        addresses = np.asarray(ptrs.data)[chosen].astype(np.int64)
        self.memory.check(what, addresses, size)
        self.done.addresses[self.kernel] += addresses.size
        return addresses, chosen

    def range(self, first: Any, stop: Any = None, step: Any = 1, **_: Any) -> list[int]:
        """In place of tl.range. The sums that a loop carries are not looked at, so some of its iterations will do."""
        numbers = range(0, first, step) if stop is None else range(first, stop, step)
        return [numbers[i] for i in self._some(len(numbers), self.iterations)]


@contextmanager
def checked_launches(*, programs: int = 24, iterations: int = 6, seed: int = 0) -> Iterator[Launches]:
    """Every launch of a Triton kernel inside is checked instead of being computed."""
    checker = _Checker(programs, iterations, seed)
    builder = interpreter.InterpreterBuilder
    with (
        mended_interpreter(),
        patch.object(interpreter.GridExecutor, "__call__", lambda self, *a, **k: checker.launch(self, *a, **k)),
        patch.object(builder, "create_masked_load", lambda _, *args: checker.load(*args)),
        patch.object(builder, "create_masked_store", lambda _, *args: checker.store(*args)),
    ):
        yield checker.done
