"""A rank's memory as a machine that takes and gives back: bytes by component, and the most there ever were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

Components = dict[str, int]


class Like(NamedTuple):
    """The sizes of a tensor [batch, rows, heads, d]."""

    batch: int
    rows: int
    heads: int
    d: int
    itemsize: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.rows, self.heads, self.d

    @property
    def vectors(self) -> int:
        return self.batch * self.rows * self.heads

    @property
    def nbytes(self) -> int:
        return self.vectors * self.d * self.itemsize

    @property
    def accumulator(self) -> Like:
        """The same, in the dtype that it is summed up in."""
        return self._replace(itemsize=max(4, self.itemsize))

    def of_rows(self, rows: int) -> Like:
        return self._replace(rows=rows)


class Room:
    """What one rank holds. A step's entry is the fullest moment of that step."""

    def __init__(self) -> None:
        self._held: Components = {}
        self._live = 0
        self._fullest = 0
        self._step = "start"
        self.peak_bytes = 0
        self.peak: Components = {}
        self.timeline: dict[str, Components] = {}

    def begin(self, step: str) -> None:
        self._step, self._fullest = step, -1
        self._look()

    def take(self, component: str, size: int) -> Taken:
        self.change(component, size)
        return Taken(self, component, size)

    @contextmanager
    def holding(self, component: str, size: int) -> Iterator[None]:
        """Taken meanwhile."""
        self.change(component, size)
        yield
        self.change(component, -size)

    def briefly(self, component: str, size: int) -> None:
        with self.holding(component, size):
            pass

    def change(self, component: str, size: int) -> None:
        self._held[component] = self._held.get(component, 0) + size
        self._live += size
        if size > 0:
            self._look()

    def _look(self) -> None:
        if self._live > self._fullest:
            self._fullest = self._live
            self.timeline[self._step] = self._now()
        if self._live > self.peak_bytes:
            self.peak_bytes, self.peak = self._live, self._now()

    def _now(self) -> Components:
        return {component: size for component, size in self._held.items() if size}


class Taken:
    """Memory in somebody's hands, free when all who have it have let go."""

    def __init__(self, room: Room, component: str, size: int) -> None:
        self._room, self._component, self.size, self._users = room, component, size, 1

    def shared(self) -> Taken:
        self._users += 1
        return self

    def give(self) -> None:
        self._users -= 1
        assert self._users >= 0, f"{self._component} was given back twice"
        if not self._users:
            self._room.change(self._component, -self.size)

    def become(self, component: str) -> Taken:
        """The same memory, called otherwise from now on."""
        if component != self._component:
            self._room.change(self._component, -self.size)
            self._room.change(component, self.size)
            self._component = component
        return self


# ---------------------------------------------------------------------------------- buffers that are used again

FREE = "free buffers"


class Buffers:
    """Free buffers of one rank, as a relay keeps them: the smallest that is large enough is taken. A GPU keeps none."""

    def __init__(self, room: Room, *, are_kept: bool) -> None:
        self._room, self._are_kept = room, are_kept
        self._free: dict[int, list[Taken]] = {}  # by item size, the smallest first

    def take(self, component: str, numbers: int, itemsize: int) -> Taken:
        free = self._free.setdefault(itemsize, [])
        for index, buffer in enumerate(free):
            if buffer.size >= numbers * itemsize:
                return free.pop(index).become(component)
        if free:
            free.pop(0).give()
        return self._room.take(component, numbers * itemsize)

    def give_back(self, buffer: Taken, itemsize: int) -> None:
        if not self._are_kept:
            buffer.give()
            return
        free = self._free.setdefault(itemsize, [])
        free.append(buffer.become(FREE))
        free.sort(key=lambda one: one.size)


class Loan:
    """A buffer that goes back when all who use it have said so."""

    def __init__(self, buffers: Buffers, component: str, numbers: int, itemsize: int) -> None:
        self._buffers, self._itemsize, self._users = buffers, itemsize, 1
        self._whole = buffers.take(component, numbers, itemsize)

    def shared(self) -> Loan:
        self._users += 1
        return self

    def become(self, component: str) -> None:
        self._whole.become(component)

    def looked_at(self) -> Taken:
        """Its memory, for one who sees it: it is not freed before, even where the buffers drop it."""
        return self._whole.shared()

    def done(self) -> None:
        self._users -= 1
        if not self._users:
            self._buffers.give_back(self._whole, self._itemsize)
