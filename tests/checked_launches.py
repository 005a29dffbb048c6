"""Integer check of Triton launches: every address that a kernel reads or writes lies in a tensor it was given.

The engine runs on tensors without memory (device "meta"), so that a million tokens cost nothing, and each launch is
interpreted by Triton's own interpreter: the very source of the kernel, with 32-bit and 64-bit arithmetic as a GPU has
it. Tensors without memory get made-up addresses with wide gaps between them; numbers read from them are 0. Tables of
integers lie on the CPU and are read as they are, so every offset is the one that a GPU would compute. No product is
computed.

An address must be that of an element of one of the tensors, not only lie in their memory: a row too far is seen even
where another head, another batch row or another rank's rows follow. Rows that a kernel takes for aligned must be so.

Of many launches some are run, of a large launch some programs, and of a long loop some iterations: the first, the last,
those at the edges of stacks and parts, and random ones. Where all programs of a launch were run, no element may have
been written twice.
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
from triton.language import standard
from triton.runtime import interpreter

from interpreted import mended_interpreter
from longring.kernels.triton import tiles

GAP = 1 << 40  # between made-up addresses: no 32-bit or 33-bit offset crosses it unseen
FIRST = 1 << 50  # above any real address


class OutOfBounds(AssertionError):
    """A kernel computed an address that is in none of its tensors."""


@dataclass
class Launches:
    """What was checked: launches, programs and addresses, by kernel."""

    launches: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    programs: Counter[str] = field(default_factory=Counter)
    addresses: Counter[str] = field(default_factory=Counter)


class _WithoutMemory:
    """A tensor argument as the interpreter sees it: a dtype and an address."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype, self._address = dtype, address

    def data_ptr(self) -> int:
        return self._address


class _Elements:
    """The addresses of a tensor's elements."""

    def __init__(self, x: torch.Tensor, first: int) -> None:
        used = [(stride, n) for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1 and stride]
        self._axes = sorted(used, reverse=True)
        self.first, self._size = first, x.element_size()
        self.stop = first + (1 + sum(stride * (n - 1) for stride, n in used)) * self._size if x.numel() else first
        inner = [1 + sum(stride * (n - 1) for stride, n in self._axes[i + 1 :]) for i in range(len(self._axes))]
        is_nested = all(stride >= extent for (stride, _), extent in zip(self._axes, inner, strict=True))
        self.has_gaps = is_nested and self.stop - first != x.numel() * self._size  # else all between is taken for its

    def are(self, addresses: np.ndarray) -> np.ndarray:
        rest = addresses - self.first
        inside = (rest >= 0) & (addresses + self._size <= self.stop)
        if self.has_gaps:
            inside &= rest % self._size == 0
            rest = rest // self._size
            for stride, n in self._axes:
                inside &= rest // stride < n
                rest = rest % stride
            inside &= rest == 0
        return inside


class _Memory:
    """The tensors of one launch, and the addresses they are given."""

    def __init__(self) -> None:
        self._given: dict[int, int] = {}
        self._tensors: dict[tuple[Any, ...], _Elements] = {}
        self._next = FIRST

    def argument(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return type(x)(*map(self.argument, x)) if hasattr(x, "_fields") else tuple(map(self.argument, x))
        if not isinstance(x, torch.Tensor):
            return x
        storage = x.untyped_storage()
        if storage._cdata not in self._given:
            self._given[storage._cdata] = self._next if x.is_meta else storage.data_ptr()
            self._next += GAP + (storage.nbytes() + GAP - 1) // GAP * GAP if x.is_meta else 0
        first = self._given[storage._cdata] + x.storage_offset() * x.element_size()
        self._tensors.setdefault((first, x.dtype, x.shape, x.stride()), _Elements(x, first))
        return _WithoutMemory(x.dtype, first)

    def check(self, what: str, addresses: np.ndarray) -> None:
        if not addresses.size:
            return
        lowest, highest = int(addresses.min()), int(addresses.max())
        near = [one for one in self._tensors.values() if one.first <= highest and lowest < one.stop]
        if len(near) == 1 and not near[0].has_gaps and near[0].are(np.array([lowest, highest])).all():
            return
        outside = np.ones(addresses.shape, dtype=bool)
        for one in near:
            outside &= ~one.are(addresses)
        if outside.any():
            wrong = int(addresses[outside][0])
            nearest = min((one.first for one in self._tensors.values()), key=lambda first: abs(first - wrong))
            raise OutOfBounds(
                f"{what} {int(outside.sum())} of {addresses.size} numbers that are in none of its tensors, one of them "
                f"{wrong - nearest:+,} bytes from the beginning of the nearest"
            )


class _Checker:
    def __init__(self, launches: int, programs: int, iterations: int, seed: int) -> None:
        self.most, self.programs, self.iterations, self.chance = launches, programs, iterations, Random(seed)
        self.done = Launches()
        self.memory = _Memory()
        self.kernel = ""
        self.written: list[np.ndarray] | None = None

    def launch(self, executor: Any, *args: Any, **kwargs: Any) -> None:
        kernel, names = executor.fn, inspect.getfullargspec(executor.fn).args
        self.kernel, self.memory = kernel.__name__, _Memory()
        if self._is_left_out():
            return
        given = inspect.getcallargs(kernel, *args, **{k: v for k, v in kwargs.items() if k in names})
        (count,) = executor.grid
        some = self._programs(given, count)
        given = {name: self.memory.argument(x) for name, x in given.items()}
        converted = {n: x if n in executor.constexprs else interpreter._implicit_cvt(x) for n, x in given.items()}
        self.written = [] if len(some) == count else None
        interpreter.interpreter_builder.set_grid_dim(count, 1, 1)
        scopes = [interpreter._patch_lang(standard.zeros.fn), interpreter._patch_lang(kernel)]  # Triton's own functions
        scopes[-1].set_attr(tl, "range", self.range)
        try:
            for program in some:
                interpreter.interpreter_builder.set_grid_idx(program, 0, 0)
                kernel(**converted)
        except OutOfBounds as error:
            raise OutOfBounds(f"{self.kernel}, program {program} of {count}: {error}") from None
        finally:
            for scope in reversed(scopes):
                scope.restore()
        self._check_written_once()
        self.done.launches[self.kernel] += 1
        self.done.programs[self.kernel] += len(some)

    def _is_left_out(self) -> bool:
        """The more there were, the more of a kernel's launches."""
        before = self.done.launches[self.kernel] + self.done.left_out[self.kernel]
        left_out = self.chance.random() * (1 + before) > self.most
        self.done.left_out[self.kernel] += left_out
        return left_out

    def _programs(self, given: dict[str, Any], count: int) -> list[int]:
        if count <= self.programs:
            return list(range(count))
        if "ITEMS" in given:
            edges, few = _at_edges_of_stacks(given["ITEMS"]), self.programs // 2
        elif "seats" in given:
            edges, few = _at_edges_of_parts(given, self.chance), 2 * self.programs  # which differ much, and are short
        else:
            edges, few = [], 0
        chosen = self.chance.sample(edges, min(len(edges), few))
        return sorted({*chosen, *self._some(count, max(2, self.programs - len(chosen)))})

    def _some(self, count: int, most: int) -> list[int]:
        """The first, the last and random ones of so many."""
        if count <= most:
            return list(range(count))
        ends = {0, count - 1} if most > 1 else {count - 1}
        return sorted(ends | set(self.chance.sample(range(count), max(0, most - len(ends)))))

    def _check_written_once(self) -> None:
        if not self.written:
            return
        addresses = np.concatenate(self.written)
        twice = addresses.size - np.unique(addresses).size
        assert not twice, f"{self.kernel} writes {twice} numbers twice"

    def load(self, ptrs: Any, mask: Any, other: Any, *_: Any) -> Any:
        dtype = interpreter._get_np_dtype(ptrs.get_element_ty())
        addresses, chosen = self._addresses("reads", ptrs, mask)
        found = np.zeros(np.shape(ptrs.data), dtype)
        if addresses.size and addresses[0] < FIRST:  # integers on the CPU
            found = interpreter._interpreter.load(ptrs.data, chosen, found, dtype)
        elif other is not None:
            found = np.where(chosen, found, other.data)
        return interpreter.TensorHandle(found, ptrs.get_element_ty())

    def store(self, ptrs: Any, value: Any, mask: Any, *_: Any) -> None:
        addresses, _chosen = self._addresses("writes", ptrs, mask)
        if self.written is not None:
            self.written.append(addresses)

    def _addresses(self, what: str, ptrs: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        chosen = np.broadcast_to(mask.data, np.shape(ptrs.data)).astype(bool)
        addresses = np.asarray(ptrs.data)[chosen].astype(np.int64)
        self.memory.check(what, addresses)
        self._check_aligned(ptrs, chosen)
        self.done.addresses[self.kernel] += addresses.size
        return addresses, chosen

    def _check_aligned(self, ptrs: Any, chosen: np.ndarray) -> None:
        """Where a kernel says that rows begin at multiples of so many bytes, they have to, or a GPU faults."""
        *_, multiple = ptrs.attr.get("tt.divisibility", (1,))
        if multiple > 1:
            begins = np.asarray(ptrs.data)[..., 0][chosen[..., 0]]
            assert not (begins % multiple).any(), (
                f"{self.kernel} has rows that begin at no multiple of {multiple} bytes"
            )

    def range(self, first: Any, stop: Any = None, step: Any = 1, **_: Any) -> list[int]:
        """In place of tl.range. The sums that a loop carries are not looked at, so some of its iterations will do."""
        numbers = range(0, first, step) if stop is None else range(first, stop, step)
        return [numbers[i] for i in self._some(len(numbers), self.iterations)]


def _at_edges_of_stacks(items: torch.Tensor) -> list[int]:
    """The first and the last block of each stack's first and last square."""
    stack, *rest = items.long().unbind(1)
    place = (rest[0] << 40) + (rest[1] << 24) + rest[2]
    many = int(stack.max()) + 1
    ends = []
    for way in ("amin", "amax"):
        end = torch.zeros(many, dtype=torch.int64).scatter_reduce(0, stack, place, way, include_self=False)
        ends += (place == end[stack]).nonzero().flatten().tolist()
    return sorted(set(ends))


def _at_edges_of_parts(given: dict[str, Any], chance: Random) -> list[int]:
    """Programs that ask for a part of which they have the first or last rows, and those right before and after."""
    heads, stride, each, count = (given[name] for name in ("heads", "stride", "each", "COUNT"))
    if not count:
        return []
    span, found = given["ROWS"] * stride, set()
    seats, asked = given["seats"].view(-1, heads, count, 4), given["asked"].view(-1, heads, stride)
    begins, last = seats[..., 0] - given["first"], seats[..., 1] - given["first"] - 1
    # in the middle of the tensor: its own first and last rows are in the first and the last program
    places = (begins > 0) & (begins < given["n"]), (last >= 0) & (last < given["n"] - 1)
    for edge, inside in zip((begins, last), places, strict=True):
        where = inside.nonzero().tolist()
        for b, h, i in chance.sample(where, min(32, len(where))):
            leads = [turn for turn, bits in enumerate(asked[b, h].tolist()) if bits >> i & 1]
            block = int(edge[b, h, i]) // span + chance.choice([-1, -1, 0] if edge is begins else [0, 1])
            if leads and 0 <= block < each // (heads * stride):
                lead = (chance.choice(leads) - given["phase"]) % stride
                found.add(b * each + (block * stride + lead) * heads + h)
    return sorted(found)


def _sizes_on_hopper(q: torch.Tensor) -> tiles.Sizes:
    width = max(64, tiles._width(q.shape[3]))
    return (tiles.FLOAT32 if q.dtype == torch.float32 else tiles.HOPPER)[width]


@contextmanager
def checked_launches(*, launches: int = 1, programs: int = 4, iterations: int = 2, seed: int = 0) -> Iterator[Launches]:
    """No launch of a Triton kernel inside is computed: so many are checked, and of the others ever fewer."""
    checker = _Checker(launches, programs, iterations, seed)
    builder = interpreter.InterpreterBuilder
    with (
        mended_interpreter(),
        patch.object(interpreter.GridExecutor, "__call__", lambda self, *a, **k: checker.launch(self, *a, **k)),
        # of a kernel's own function: it would replace the range again, and hide which error there was
        patch.object(interpreter.InterpretedFunction, "__call__", lambda self, *a, **k: self.rewrite()(*a, **k)),
        patch.object(builder, "create_masked_load", lambda _, *args: checker.load(*args)),
        patch.object(builder, "create_masked_store", lambda _, *args: checker.store(*args)),
        patch.object(builder, "create_dot", lambda _, a, b, total, *rest: total),
        patch.object(tiles, "sizes_for", _sizes_on_hopper),
    ):
        yield checker.done
