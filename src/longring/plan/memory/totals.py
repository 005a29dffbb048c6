"""What has been found so far, as `kernels.totals` keeps it: totals, and on a GPU parts that wait to be merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...geometry.portions import ALWAYS_HELD, HELD, HELD_OF_SUMS, HELD_UNTIL_DONE, MERGED_AT_ONCE, is_too_much
from ...geometry.stacks import Place
from .room import Like, Room, Taken

LOG = 8  # bytes of an lse that is still to be merged

OUT, LSE, PARTS, MERGING = "out", "lse", "partial results", "merging"
DQ, DK, DV = "dq", "dk", "dv"


class Sizes(NamedTuple):
    """Of a part: the bytes of its out and lse."""

    place: Place
    out: int
    lse: int | None


class Part(NamedTuple):
    """What was computed for the rows of a place; `at_home`: bytes of it that lie in the result itself."""

    place: Place
    out: Taken
    lse: Taken | None
    at_home: int = 0

    def kept(self) -> Part:
        return self._replace(out=self.out.shared(), lse=None if self.lse is None else self.lse.shared())

    def give(self) -> None:
        self.out.give()
        if self.lse is not None:
            self.lse.give()

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.place, self.out.size, None if self.lse is None else self.lse.size)


class Total(NamedTuple):
    out: Taken
    lse: Taken

    def give(self) -> None:
        self.out.give()
        self.lse.give()


class Seen:
    """Attention over the keys seen so far, for all rows of q."""

    def __init__(self, room: Room, q: Like, *, is_lazy: bool, is_one_look: bool = False) -> None:
        self._room, self._q, self._is_lazy = room, q, is_lazy
        self._parts: list[Part] = []
        self._waiting = 0  # bytes of them
        self._total: Total | None = None
        self._rounded: Total | None = None
        self.latest: list[Sizes] = []  # what this step added
        self.is_piling_up = False  # whether the last one added something
        self.can_be_done = is_one_look and is_lazy

    @property
    def is_empty(self) -> bool:
        return self._total is None and self._rounded is None and not self._parts

    @property
    def has_total(self) -> bool:
        return self._total is not None or self._rounded is not None

    def home(self) -> bool:
        """Whether a part may be written into the result, which is made for it; one at a time."""
        if not self.can_be_done or any(part.at_home for part in self._parts):
            return False
        self._rounded = self._rounded or self._new(self._q, self._q.accumulator.itemsize)
        return True

    def add(self, part: Part) -> None:
        self.latest.append(part.sizes)
        if part.at_home:
            self._keep(part)
        elif self._is_lazy or (self.is_empty and part.place.covers(self._q)):
            self._keep(part)
            if len(self._parts) > 1 and is_too_much(self._waiting, self._q.nbytes, most=HELD, always=ALWAYS_HELD):
                self.in_place()
        else:
            self.in_place()
            merge(self._room, part.place.many * part.place.heads * len(part.place.rows), self._q.accumulator.itemsize)

    def _keep(self, part: Part) -> None:
        """Thousands may wait, so their bytes are added up as they come; they leave all at once."""
        self._waiting = (self._waiting if self._parts else 0) + part.out.size + part.at_home
        self._parts.append(part.kept())

    def in_place(self) -> Total:
        whole = self._whole()
        if self._total is None and whole is not None:
            lse = self._room.take(LSE, self._q.batch * self._q.rows * self._q.heads * LOG)
            out = _as_total(self._room, whole.out, self._q.accumulator.nbytes, OUT)
            assert whole.lse is not None
            whole.lse.give()
            self._parts.clear()
            self._total = Total(out, lse)
        elif self._total is None:
            self._total = self._new(self._q.accumulator, LOG)
        self._clear()
        return self._total

    def rows_done(self) -> None:
        self._rounded = self._rounded or self._new(self._q, self._q.accumulator.itemsize)
        self._clear()

    def result(self) -> Total:
        if self._rounded is not None and not self._parts:
            return self._rounded
        whole = self._whole()
        if self._total is None and whole is not None:
            assert whole.lse is not None
            return Total(whole.out.become(OUT), whole.lse.become(LSE))
        if self._parts:
            rounded = self._rounded or self._new(self._q, self._q.accumulator.itemsize)
            if self._total is None:
                _go_through(self._room, self._parts, self._q, LOG)
            self._clear()
            if self._total is not None:
                self._total.give()
            self._total = rounded
            return rounded
        return self.in_place()

    def _whole(self) -> Part | None:
        return self._parts[0] if len(self._parts) == 1 and self._parts[0].place.covers(self._q) else None

    def _new(self, like: Like, lse_itemsize: int) -> Total:
        return Total(self._room.take(OUT, like.nbytes), self._room.take(LSE, like.vectors * lse_itemsize))

    def _clear(self) -> None:
        for part in self._parts:
            part.give()
        self._parts.clear()


class Sum:
    """A gradient: what was found of it so far, for all rows of a tensor like x.

    `memory` gives what it is summed up in, where that is somebody else's; `is_lent`: it is there from the start.
    """

    def __init__(
        self,
        room: Room,
        x: Like,
        component: str,
        *,
        is_lazy: bool,
        is_one_look: bool = False,
        memory: Callable[[], None] | None = None,
        is_lent: bool = False,
    ) -> None:
        self._room, self._x, self._component, self._is_lazy = room, x, component, is_lazy
        self._memory, self._is_lent = memory, is_lent
        self._parts: list[Part] = []
        self._waiting = 0  # bytes of them
        self._has_total = is_lent
        self._total: Taken | None = None  # where the memory is its own
        self._rounded: Taken | None = None
        self.latest: list[Sizes] = []
        self.is_piling_up = False
        self.can_be_done = is_one_look and is_lazy

    @property
    def has_total(self) -> bool:
        return self._has_total or self._rounded is not None

    @property
    def is_empty(self) -> bool:
        return not self.has_total and not self._parts

    def of_heads(self, heads: int) -> Sum:
        """The same sum, of some heads."""
        if heads == self._x.heads:
            return self
        self.in_place()
        like = self._x._replace(heads=heads)
        return Sum(self._room, like, self._component, is_lazy=self._is_lazy, is_lent=True)

    def handed_back(self) -> None:
        if self._is_lent:
            self.in_place()

    def go_onto(self) -> None:
        """From now on it is summed up in somebody else's memory, and what that holds counts."""
        self._has_total = True

    def home(self) -> bool:
        """As in Seen."""
        if not self.can_be_done or any(part.at_home for part in self._parts):
            return False
        self._rounded = self._rounded or self._room.take(self._component, self._x.nbytes)
        return True

    def add(self, part: Part) -> None:
        self.latest.append(part.sizes)
        if part.at_home:
            self._keep(part)
        elif self._is_lazy or (self.is_empty and part.place.covers(self._x)):
            self._keep(part)
            most = HELD_UNTIL_DONE if self.can_be_done else HELD_OF_SUMS
            if len(self._parts) > 1 and is_too_much(self._waiting, self._x.nbytes, most=most, always=ALWAYS_HELD):
                self.in_place()
        else:
            self.in_place()

    def _keep(self, part: Part) -> None:
        """As in Seen."""
        self._waiting = (self._waiting if self._parts else 0) + part.out.size + part.at_home
        self._parts.append(part.kept())

    def in_place(self) -> None:
        if not self._has_total:
            if self._is_whole() and self._memory is None:
                whole = self._parts.pop()
                self._total = _as_total(self._room, whole.out, self._x.accumulator.nbytes, self._component)
            elif self._memory is not None:
                self._memory()
            else:
                self._total = self._room.take(self._component, self._x.accumulator.nbytes)
            self._has_total = True
        self._clear()

    def rows_done(self) -> None:
        self._rounded = self._rounded or self._room.take(self._component, self._x.nbytes)
        self._clear()

    def result(self) -> Taken:
        """The end of it, where the memory is its own."""
        if self._rounded is not None and not self._parts:
            return self._rounded
        if not self._has_total and self._is_whole():
            self._total, self._has_total = self._parts.pop().out.become(self._component), True
        elif self._parts and self._is_lazy:
            rounded = self._rounded or self._room.take(self._component, self._x.nbytes)
            if self._total is None:
                _go_through(self._room, self._parts, self._x)
            self._clear()
            if self._total is not None:
                self._total.give()
            self._total, self._has_total = rounded, True
        else:
            return self.summed()
        return self._total

    def summed(self) -> Taken:
        """The sum in the accumulator's dtype, where the memory is its own."""
        self.in_place()
        assert self._total is not None
        return self._total

    def _is_whole(self) -> bool:
        return len(self._parts) == 1 and self._parts[0].place.covers(self._x)

    def _clear(self) -> None:
        for part in self._parts:
            part.give()
        self._parts.clear()


def repeat(room: Room, total: Seen | Sum, skipped: int) -> None:
    """Where parts wait they pile up: those of steps that were not walked, between two that both brought some."""
    each, total.latest = total.latest, []
    for _ in range(skipped if total.is_piling_up and each else 0):
        for place, out, lse in each:
            if total.has_total:
                return
            part = Part(place, room.take(PARTS, out), None if lse is None else room.take(PARTS, lse))
            total.add(part)
            part.give()
    total.latest = []
    total.is_piling_up = bool(each)


def _go_through(room: Room, parts: list[Part], like: Like, lse_itemsize: int = 0) -> None:
    """More parts than one pass takes are brought together in an accumulator, before they are rounded."""
    accumulator = 0 if like.accumulator == like else like.accumulator.nbytes
    if len(parts) > MERGED_AT_ONCE:
        room.briefly(MERGING, accumulator + like.vectors * lse_itemsize)


def _as_total(room: Room, part: Taken, size: int, component: str) -> Taken:
    """A part of every row as the total: as it is, or rounded up to the accumulator's dtype."""
    if part.size == size:
        return part.become(component)
    made = room.take(component, size)
    part.give()
    return made


def merge(room: Room, rows: int, accumulator: int) -> None:
    """`numerics.merge_`: three logarithms, a weight and its rounding, of every row."""
    logarithms = 3 if accumulator < LOG else 2
    weight = LOG + (accumulator if accumulator < LOG else 0)
    room.briefly(MERGING, rows * (logarithms * LOG + weight))
