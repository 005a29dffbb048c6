"""Rows: a number for every rank at every step, kept as what changes from step to step, and how ranks change places.

Thousands of ranks have millions of steps, but from one step to the next only few ranks change what they compute or
send; and what is told by owner stays while its rows go round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .event_lists import Arithmetic, Row
from .links import NEVER

Changes = list[list[tuple[int, float]]]  # for every index, (step, the value from then on)


@dataclass(frozen=True)
class Move:
    """Everybody moves `across` groups of `size` consecutive ranks, and `within` places inside of the group."""

    ranks: int
    size: int
    across: int = 0
    within: int = 0

    @classmethod
    def by(cls, ranks: int, places: int) -> Move:
        return cls(ranks, ranks, 0, places)

    @property
    def back(self) -> Move:
        return Move(self.ranks, self.size, -self.across, -self.within)

    def target(self, rank: int) -> int:
        group, place = divmod(rank, self.size)
        return (group + self.across) * self.size % self.ranks + (place + self.within) % self.size

    def moved(self, row: Row) -> Row:
        """What index i has is then at its target."""
        row = _turned(row, self.across * self.size)
        if self.within % self.size == 0:
            return row
        if self.size == self.ranks:
            return _turned(row, self.within)
        found = row.copy()
        for place in range(self.size):
            found[(place + self.within) % self.size :: self.size] = row[place :: self.size]
        return found

    def crossing(self, node_ranks: int) -> range | list[int]:
        """Those who leave their node of so many consecutive ranks on the way."""
        if node_ranks == self.ranks:
            return range(0)
        if self.size == node_ranks or self.within % self.size == 0:
            away = self.across * self.size % self.ranks
        else:
            away = self.within % self.ranks if self.size == self.ranks else None
        if away is not None and node_ranks <= away <= self.ranks - node_ranks:
            return range(self.ranks)
        if self.size == self.ranks and away == 1:
            return range(node_ranks - 1, self.ranks, node_ranks)
        if self.size == self.ranks and away == self.ranks - 1:
            return range(0, self.ranks, node_ranks)
        if self.size == node_ranks and away == 0:
            return range(0)
        return [rank for rank in range(self.ranks) if rank // node_ranks != self.target(rank) // node_ranks]


def _turned(row: Row, places: int) -> Row:
    count = len(row)
    cut = -places % count
    if not cut:
        return row
    found = row.copy()
    found[: count - cut], found[count - cut :] = row[cut:], row[:cut]
    return found


class Strip:
    """The values of one step, taken on to the next by what changes."""

    def __init__(self, changes: Changes, rows: Arithmetic) -> None:
        self.values: Row = rows.full(0.0, len(changes))
        self._changes: dict[int, list[tuple[int, float]]] = {}
        self._total: list[float] = [0.0] * len(changes)  # over the steps that were taken
        self._since: list[int] = [0] * len(changes)
        self.step = 0
        self.counts: Counter[float] = Counter({0.0: len(changes)})
        for index, some in enumerate(changes):
            for step, value in some:
                self._changes.setdefault(step, []).append((index, value))

    def go_to(self, step: int) -> list[tuple[int, float]]:
        """The next step; what changed."""
        changes = self._changes.get(step, [])
        values, counts = self.values, self.counts
        for index, value in changes:
            before = float(values[index])
            self._total[index] += before * (step - self._since[index])
            self._since[index] = step
            counts[before] -= 1
            if not counts[before]:
                del counts[before]
            counts[value] += 1
            values[index] = value
        self.step = step
        return changes

    @property
    def is_nothing(self) -> bool:
        return len(self.counts) == 1 and 0.0 in self.counts

    @property
    def largest(self) -> float:
        return max(self.counts)

    def sums(self) -> list[float]:
        """What every index had at all steps before this one, together."""
        step = self.step
        return [
            total + float(value) * (step - since)
            for total, value, since in zip(self._total, self.values, self._since, strict=True)
        ]


class Turns:
    """Strips that take turns: with two of them one has the even steps and the other the odd ones."""

    def __init__(self, strips: Sequence[Strip], rows: Arithmetic) -> None:
        self._strips, self._rows, self._now = strips, rows, strips[0]
        self._total: Row = rows.full(0.0, len(strips[0].values))

    def go_to(self, step: int) -> None:
        self._total = self._rows.added(self._total, self._now.values)
        for strip in self._strips:
            strip.go_to(step)
        self._now = self._strips[step % len(self._strips)]

    @property
    def values(self) -> Row:
        return self._now.values

    @property
    def is_nothing(self) -> bool:
        return self._now.is_nothing

    @property
    def largest(self) -> float:
        return self._now.largest

    def sums(self) -> list[float]:
        return self._rows.told(self._total)


class Freight:
    """Bytes that somebody sends at every step, by an index that goes with them, and how long lines carry them."""

    def __init__(self, changes: Changes, rows: Arithmetic) -> None:
        self._strip = Strip(changes, rows)
        self._lines = rows.lines
        self.inside: Row = rows.full(NEVER, len(changes))
        self.outside: Row = rows.full(NEVER, len(changes))
        self._seconds: dict[float, tuple[float, float]] = {0.0: (NEVER, NEVER)}

    def go_to(self, step: int) -> None:
        inside, outside = self.inside, self.outside
        for index, nbytes in self._strip.go_to(step):
            inside[index], outside[index] = self._carried(nbytes)

    def _carried(self, nbytes: float) -> tuple[float, float]:
        if nbytes not in self._seconds:
            near, far = (self._lines.on_line(int(nbytes), is_inside=is_inside) for is_inside in (True, False))
            self._seconds[nbytes] = near, far
        return self._seconds[nbytes]

    @property
    def nbytes(self) -> Row:
        return self._strip.values

    @property
    def are_all_sent(self) -> bool:
        return 0.0 not in self._strip.counts

    @property
    def is_nothing(self) -> bool:
        return self._strip.is_nothing

    @property
    def seconds(self) -> tuple[float, float, int]:
        """Of all of them on lines inside nodes, outside of them, and how many they are."""
        near = far = 0.0
        messages = 0
        for nbytes, count in self._strip.counts.items():
            if nbytes:
                one_near, one_far = self._carried(nbytes)
                near, far, messages = near + count * one_near, far + count * one_far, messages + count
        return near, far, messages


class FreshFreight:
    """The same, where so much changes that it is told anew for every step."""

    are_all_sent = False  # which nobody has looked up, and which only saves time

    def __init__(self, nbytes_at: Callable[[int], Row], rows: Arithmetic) -> None:
        self._nbytes_at, self._rows = nbytes_at, rows

    def go_to(self, step: int) -> None:
        self.nbytes: Row = self._nbytes_at(step)
        self.inside, self.outside = self._rows.on_lines(self.nbytes)

    @property
    def is_nothing(self) -> bool:
        return not self._rows.largest(self.nbytes)

    @property
    def seconds(self) -> tuple[float, float, int]:
        rows = self._rows
        return rows.total(self.inside), rows.total(self.outside), rows.many(self.nbytes)


AnyFreight = Freight | FreshFreight


def from_first(values: Sequence[float] | Iterable[float], step: int = 0) -> Changes:
    """Values that stay."""
    return [[(step, value)] for value in values]
