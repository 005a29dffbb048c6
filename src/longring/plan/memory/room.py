"""A rank's memory as a machine that takes and gives back: bytes by component, and the most there ever were."""

from __future__ import annotations

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
        return Like(self.batch, self.rows, self.heads, self.d, max(4, self.itemsize))

    def of_rows(self, rows: int) -> Like:
        return Like(self.batch, rows, self.heads, self.d, self.itemsize)


class Room:
    """What one rank holds. A step's entry is the fullest moment of that step."""

    def __init__(self) -> None:
        self._held: Components = {}
        self._live = 0
        self._fullest = 0  # bytes of this step, so far
        self._is_fullest = False  # whether it is so right now, which is written down when it passes
        self._step = "start"
        self.peak_bytes = 0
        self.peak: Components = {}
        self.timeline: dict[str, Components] = {}

    def begin(self, step: str) -> None:
        self.write_down()
        self._step, self._fullest, self._is_fullest = step, self._live, True

    def take(self, component: str, size: int) -> Taken:
        self.change(component, size)
        return Taken(self, component, size)

    def briefly(self, component: str, size: int) -> None:
        self.change(component, size)
        self.change(component, -size)

    def change(self, component: str, size: int) -> None:
        if size < 0 and self._is_fullest:
            self.write_down()
        self._held[component] = self._held.get(component, 0) + size
        self._live += size
        if self._live > self._fullest:
            self._fullest, self._is_fullest = self._live, True

    def write_down(self) -> None:
        """What there is, if the step was never as full: before less is held, and at the end."""
        if not self._is_fullest:
            return
        self._is_fullest = False
        now = self.timeline[self._step] = {component: size for component, size in self._held.items() if size}
        if self._live > self.peak_bytes:
            self.peak_bytes, self.peak = self._live, now


class Taken:
    """Memory in somebody's hands, free when all who have it have let go; or taken for as long as a `with` lasts."""

    __slots__ = ("_component", "_room", "_users", "size")

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

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.give()

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

    __slots__ = ("_buffers", "_itemsize", "_users", "_whole")

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
