"""What has been found so far, brought together as late as memory allows.

To merge a part into a float32 total is a pass over the total, and on a GPU a tile is computed in four times that.
So parts wait, and one pass takes all of them; the last one also rounds. Where there is no fused pass, as on the
CPU, every part is taken at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry.portions import ALWAYS_HELD, HELD, HELD_OF_SUMS, HELD_UNTIL_DONE, are_too_many
from ..numerics.online_softmax import Partial, accumulator_dtype, log_dtype, merge_, nothing_seen
from .places import Part, Place
from .triton import is_available


@cache
def is_lazy(device: torch.device) -> bool:
    """Whether parts may wait there."""
    return device.type == "cuda" and is_available(device)


class Seen:
    """Attention over the keys seen so far, for all rows of q.

    `is_one_look`: one call of a kernel brings everything, so that it can say when rows are done.
    """

    def __init__(self, q: Tensor, *, is_one_look: bool = False) -> None:
        self._q = q
        self._parts: list[Part] = []
        self._total: Partial | None = None
        self._rounded: Partial | None = None  # rows that are done, and a part that was written where it belongs
        self._home: Part | None = None  # that part, the first of all while it waits
        self._has_done = False
        self.can_be_done = is_one_look and is_lazy(q.device)

    @property
    def is_empty(self) -> bool:
        return self._total is None and not self._has_done and not self._parts

    def home(self, place: Place) -> Tensor | None:
        """Where the result of these rows may be written at once, for `add_at_home`; one part at a time can be there."""
        if not self.can_be_done or self._has_home():
            return None
        return place.view(self._results().out)

    def add_at_home(self, place: Place, out: Tensor, lse: Tensor) -> None:
        """As `add`, of an `out` that was written into `home(place)`."""
        assert not self._has_home()
        self._home = Part(place, out, lse)
        self._parts.insert(0, self._home)

    def add(self, place: Place, out: Tensor, lse: Tensor) -> None:
        """out [many, heads, rows, d] and lse [many, heads, rows] of some of the rows. They are used up."""
        if is_lazy(self._q.device) or (self.is_empty and place.covers(self._q)):
            self._parts.append(Part(place, out, lse))
            if _are_too_many(self._parts, self._q, HELD):
                self.in_place()
        else:
            total = self.in_place()
            merge_(place.view(total.out), place.row_view(total.lse), out, lse)

    def in_place(self) -> Partial:
        """Everything seen so far, as a total that may be merged into."""
        if self._total is None and self._is_whole():
            out, lse = _as_partial(self._parts.pop())
            lse = lse.to(log_dtype(self._q.device), memory_format=torch.contiguous_format)
            self._total = Partial(out.to(accumulator_dtype(self._q.dtype)), lse)
        elif self._parts:
            before = self._total
            self._total = before or _room(self._q, accumulator_dtype(self._q.dtype), log_dtype(self._q.device))
            self._bring_together(before, self._total, range(self._q.shape[1]))
        elif self._total is None:
            self._total = nothing_seen(self._q)
        return self._total

    def rows_done(self, window: range) -> None:
        """Nothing more comes for these rows."""
        assert self.can_be_done
        self._bring_together(self._total, self._results(), window)
        self._has_done = True

    def result(self) -> Partial:
        """The end of it: out may be in q's dtype, rounded once."""
        if self._rounded is not None and self._has_done and not self._parts:
            return self._rounded
        if self._total is None and self._is_whole():
            return _as_partial(self._parts[0])
        if self._parts:
            rounded = self._results()
            self._bring_together(self._total, rounded, range(self._q.shape[1]))
            self._total = rounded
            return rounded
        return self.in_place()

    def _results(self) -> Partial:
        """What is handed out in the end."""
        if self._rounded is None:
            self._rounded = _room(self._q, self._q.dtype, accumulator_dtype(self._q.dtype))
        return self._rounded

    def _has_home(self) -> bool:
        return bool(self._parts) and self._parts[0] is self._home

    def _is_whole(self) -> bool:
        return len(self._parts) == 1 and self._parts[0].place.covers(self._q)

    def _bring_together(self, before: Partial | None, into: Partial, window: range) -> None:
        from .triton.parts import merge_parts

        merge_parts(self._parts, window, before, into, is_first_at_home=self._has_home() and into is self._rounded)
        self._parts.clear()


class Sum:
    """A gradient: what was found of it so far, for all rows of a tensor like x.

    It is summed up in the memory that `room` gives, where there is such a thing, asked for when it is needed; what
    that held before has no meaning.
    """

    def __init__(self, x: Tensor, *, room: Callable[[], Tensor] | None = None, is_one_look: bool = False) -> None:
        self._x, self._room = x, room
        self._parts: list[Part] = []
        self._total: Tensor | None = None
        self._rounded: Tensor | None = None
        self._home: Part | None = None  # as in Seen
        self._has_done = False
        self._is_lent = False  # the memory is somebody else's, who will look at it
        self.can_be_done = is_one_look and is_lazy(x.device)

    @classmethod
    def on(cls, total: Tensor) -> Sum:
        """One that adds to what there is."""
        made = cls(total)
        made._total, made._is_lent = total, True
        return made

    def can_go_onto(self, total: Tensor) -> bool:
        """Whether nothing was summed up yet, and `total` is like it: then it may be added to as it is."""
        return self._total is None and self._rounded is None and total.shape == self._x.shape and is_lazy(total.device)

    def go_onto(self, total: Tensor) -> None:
        """From now on this is the memory it is summed up in, and what it holds counts."""
        self._total = total

    def of_heads(self, heads: slice) -> Sum:
        """The same sum, of some heads. What is added to it counts once it was handed back."""
        every = range(self.shape[2])
        return self if every[heads] == every else Sum.on(self.in_place()[:, :, heads])

    def handed_back(self) -> None:
        if self._is_lent:
            self.in_place()

    @property
    def shape(self) -> torch.Size:
        return self._x.shape

    @property
    def is_empty(self) -> bool:
        return self._total is None and not self._has_done and not self._parts

    def home(self, place: Place) -> Tensor | None:
        """Where the sum of these rows may be written at once, for `add_at_home`; one part at a time can be there."""
        if not self.can_be_done or self._has_home():
            return None
        return place.view(self._results())

    def add_at_home(self, place: Place, part: Tensor) -> None:
        """As `add`, of a part that was written into `home(place)`."""
        assert not self._has_home()
        self._home = Part(place, part, None)
        self._parts.insert(0, self._home)

    def add(self, place: Place, part: Tensor) -> None:
        """[many, heads, rows, d] of some of the rows."""
        if is_lazy(self._x.device) or (self.is_empty and place.covers(self._x)):
            self._parts.append(Part(place, part, None))
            if _are_too_many(self._parts, self._x, HELD_UNTIL_DONE if self.can_be_done else HELD_OF_SUMS):
                self.in_place()
        else:
            place.view(self.in_place()).add_(part)

    def add_all(self, x: Tensor) -> None:
        """A part of every row, [batch, n, heads, d]."""
        batch, n, heads, _ = x.shape
        self.add(Place(range(batch), 1, 0, range(heads), 0, range(n), 1), x.transpose(1, 2))

    def in_place(self) -> Tensor:
        """Everything so far, in the accumulator's dtype, as a total that may be added to."""
        if self._total is None and self._is_whole() and self._room is None:
            self._total = self._parts.pop().out.transpose(1, 2).to(accumulator_dtype(self._x.dtype))
        elif self._parts and is_lazy(self._x.device):
            before = self._total
            self._total = self._memory() if before is None else before
            self._bring_together(before, self._total, range(self._x.shape[1]))
        elif self._parts:
            self._total = self._memory().copy_(self._parts.pop().out.transpose(1, 2))
        elif self._total is None:
            self._total = self._memory().zero_()
        return self._total

    def rows_done(self, window: range) -> None:
        """Nothing more comes for these rows."""
        assert self.can_be_done
        self._bring_together(self._total, self._results(), window)
        self._has_done = True

    def result(self) -> Tensor:
        """The end of it: it may be in x's dtype, rounded once."""
        if self._rounded is not None and self._has_done and not self._parts:
            return self._rounded
        if self._total is None and self._is_whole():
            return self._parts[0].out.transpose(1, 2)
        if self._parts and is_lazy(self._x.device):
            rounded = self._results()
            self._bring_together(self._total, rounded, range(self._x.shape[1]))
            self._total = rounded
            return rounded
        return self.in_place()

    def _results(self) -> Tensor:
        """What is handed out in the end."""
        if self._rounded is None:
            self._rounded = torch.empty(self._x.shape, dtype=self._x.dtype, device=self._x.device)
        return self._rounded

    def _memory(self) -> Tensor:
        if self._room is not None:
            return self._room()
        return torch.empty(self._x.shape, dtype=accumulator_dtype(self._x.dtype), device=self._x.device)

    def _has_home(self) -> bool:
        return bool(self._parts) and self._parts[0] is self._home

    def _is_whole(self) -> bool:
        return len(self._parts) == 1 and self._parts[0].place.covers(self._x)

    def _bring_together(self, before: Tensor | None, into: Tensor, window: range) -> None:
        from .triton.parts import add_parts

        add_parts(self._parts, window, before, into, is_first_at_home=self._has_home() and into is self._rounded)
        self._parts.clear()


class Sums(NamedTuple):
    """The three gradients of some queries and of the keys at hand."""

    dq: Sum
    dk: Sum
    dv: Sum

    @classmethod
    def of(cls, q: Tensor, k: Tensor, *, is_one_look: bool = False) -> Sums:
        dq, dk, dv = (Sum(x, is_one_look=is_one_look) for x in (q, k, k))
        return cls(dq, dk, dv)


def _as_partial(part: Part) -> Partial:
    assert part.lse is not None
    return Partial(part.out.transpose(1, 2), part.lse)


def _are_too_many(parts: Sequence[Part], x: Tensor, most: int) -> bool:
    sizes = [part.out.nbytes for part in parts]
    return are_too_many(sizes, x.numel() * x.element_size(), most=most, always=ALWAYS_HELD)


def _room(q: Tensor, dtype: torch.dtype, lse_dtype: torch.dtype) -> Partial:
    batch, n, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    return Partial(out, torch.empty((batch, heads, n), dtype=lse_dtype, device=q.device))
