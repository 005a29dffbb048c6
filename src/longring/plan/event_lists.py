"""Lists: a number for every rank in a list, and what the clock does with them. Loads nothing.

`event_arrays.py` does the same with numpy, faster where ranks are many; a row is whatever one of the two has made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import add
from typing import Any, NamedTuple, Protocol

from ..geometry.layouts import Layout
from ..geometry.ranges import meet
from .links import NEVER, Lines

Row = Any  # numbers by rank: a list, or an array of numpy

MANY_RANKS = 384
"""From so many on arrays are worth loading numpy for."""


class Messages(NamedTuple):
    """Of one point, number by number: who sends how many bytes to whom; none is no message."""

    senders: Row
    receivers: Row
    nbytes: Row


class Carried(NamedTuple):
    """Seconds on lines inside nodes and outside of them, and how many messages those were."""

    near: float = 0.0
    far: float = 0.0
    many_near: int = 0
    many_far: int = 0


class Arithmetic(Protocol):
    """Rows are never changed in place, but for lines' `free` and where an index is written to."""

    lines: Lines
    everybody: Row  # the numbers of all ranks

    def full(self, value: float, count: int) -> Row: ...
    def of(self, values: Iterable[float]) -> Row: ...
    def told(self, row: Row) -> list[float]: ...
    def added(self, a: Row, b: Row) -> Row: ...
    def largest(self, row: Row) -> float: ...
    def larger(self, a: Row, b: Row) -> Row: ...
    def smaller(self, a: Row, b: Row) -> Row: ...
    def total(self, row: Row) -> float:
        """Of what is ever sent."""
        ...

    def many(self, row: Row) -> int:
        """How many are not 0."""
        ...

    def begun(self, here: Row, there: Row, on_line: Row, free: Row | None = None) -> Row:
        """When messages have left their lines: they start when both ends are there and the line is free."""
        ...

    def waited(self, at: Row, ends: Row, arriving: Row, latency: float) -> Row:
        """The later of now, of what left here, and of what came here a latency later."""
        ...

    def on_lines(self, nbytes: Row) -> tuple[Row, Row]:
        """Seconds that lines inside nodes, and outside of them, carry it; NEVER where there is nothing."""
        ...

    def messages(self, messages: Iterable[tuple[int, int, int]]) -> Messages: ...
    def queued(self, at: Row, free: Row, messages: Messages) -> Row:
        """When each has left its line, NEVER where it is none; lines are taken until then."""
        ...

    def done(self, messages: Messages, ends: Row) -> Row:
        """When each rank has sent and received all of its own."""
        ...

    def carried(self, messages: Messages) -> Carried: ...
    def received(self, messages: Messages) -> Row:
        """Bytes, by rank."""
        ...

    def held(self, layout: Layout, positions: Sequence[range], ranks: range) -> Row:
        """How many of these positions, each told once, each of the ranks holds."""
        ...

    def before(self, layout: Layout, horizons: Row) -> Row:
        """How many of its positions each rank holds up to a horizon of its own."""
        ...

    def covered(self, pieces: Sequence[Row], firsts: Row, lasts: Row) -> tuple[Row, Row]:
        """Of pieces (first, last, size): the size where all of it lies between these, and 1 where only a part does."""
        ...

    def numbers(self, row: Row) -> list[int]:
        """Of those that are not 0."""
        ...

    def weighed(self, parts: Iterable[tuple[int, Row]], count: int) -> Row:
        """The sum of so many times each row."""
        ...

    def joined(self, rows: Sequence[Row]) -> Row: ...
    def of_place(self, inner: int, place: int) -> Row:
        """For every rank, who has the given place in its node of `inner`."""
        ...

    def turned_over(self, rows: Sequence[Row], inner: int) -> Callable[[int], Row]:
        """For a place, and for every rank: of the row of the rank's own place, what stands at the given one's."""
        ...


def arithmetic(lines: Lines, *, keeps_spans: bool = False) -> Arithmetic:
    """What is drawn is told in lists, and nobody draws thousands of ranks."""
    if lines.ranks < MANY_RANKS or keeps_spans:
        return Lists(lines)
    from .event_arrays import Arrays

    return Arrays(lines)


class Lists:
    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.everybody: Row = list(range(lines.ranks))
        self._seconds: dict[float, tuple[float, float]] = {0: (NEVER, NEVER)}

    def full(self, value: float, count: int) -> Row:
        return [value] * count

    def of(self, values: Iterable[float]) -> Row:
        return list(values)

    def told(self, row: Row) -> list[float]:
        return row

    def added(self, a: Row, b: Row) -> Row:
        return list(map(add, a, b))

    def largest(self, row: Row) -> float:
        return max(row)

    def larger(self, a: Row, b: Row) -> Row:
        return list(map(max, a, b))

    def smaller(self, a: Row, b: Row) -> Row:
        return list(map(min, a, b))

    def total(self, row: Row) -> float:
        whole = sum(row)
        return whole if whole > NEVER else sum(x for x in row if x > NEVER)

    def many(self, row: Row) -> int:
        return len(row) - row.count(0)

    def begun(self, here: Row, there: Row, on_line: Row, free: Row | None = None) -> Row:
        if free is None:
            return [(a if a > b else b) + x for a, b, x in zip(here, there, on_line, strict=True)]
        return [
            ((a if a > f else f) if a > b else (b if b > f else f)) + x
            for a, b, f, x in zip(here, there, free, on_line, strict=True)
        ]

    def waited(self, at: Row, ends: Row, arriving: Row, latency: float) -> Row:
        return [
            (z if z > a else a) if (z := r + latency) > e else (e if e > a else a)
            for a, e, r in zip(at, ends, arriving, strict=True)
        ]

    def on_lines(self, nbytes: Row) -> tuple[Row, Row]:
        both = [self._carrying(one) for one in nbytes]
        return [near for near, _ in both], [far for _, far in both]

    def _carrying(self, nbytes: float) -> tuple[float, float]:
        if nbytes not in self._seconds:
            near, far = (self.lines.on_line(int(nbytes), is_inside=is_inside) for is_inside in (True, False))
            self._seconds[nbytes] = near, far
        return self._seconds[nbytes]

    # ---- messages

    def messages(self, messages: Iterable[tuple[int, int, int]]) -> Messages:
        return Messages(*map(list, zip(*messages, strict=True)))

    def queued(self, at: Row, free: Row, messages: Messages) -> Row:
        queues: dict[int, list[tuple[float, int, int, int, int]]] = {}
        for number, (sender, receiver, nbytes) in enumerate(zip(*messages, strict=True)):
            if nbytes:
                one = max(at[sender], at[receiver]), sender, receiver, nbytes, number
                queues.setdefault(self.lines.line(sender, receiver), []).append(one)
        ends = [NEVER] * len(messages.senders)
        for line, queue in queues.items():
            for ready, sender, receiver, nbytes, number in sorted(queue):
                ends[number] = free[line] = max(ready, free[line]) + self.lines.carrying(sender, receiver, nbytes)
        return ends

    def done(self, messages: Messages, ends: Row) -> Row:
        found = [NEVER] * self.lines.ranks
        near, far = (self.lines.latency(is_inside=is_inside) for is_inside in (True, False))
        for sender, receiver, end in zip(messages.senders, messages.receivers, ends, strict=True):
            latency = near if self.lines.is_inside(sender, receiver) else far
            found[sender] = max(found[sender], end)
            found[receiver] = max(found[receiver], end + latency)
        return found

    def carried(self, messages: Messages) -> Carried:
        seconds, many = [0.0, 0.0], [0, 0]  # near and far
        for sender, receiver, nbytes in zip(*messages, strict=True):
            if nbytes:
                is_far = not self.lines.is_inside(sender, receiver)
                seconds[is_far] += self.lines.carrying(sender, receiver, nbytes)
                many[is_far] += 1
        return Carried(seconds[0], seconds[1], many[0], many[1])

    def received(self, messages: Messages) -> Row:
        found = [0] * self.lines.ranks
        for receiver, nbytes in zip(messages.receivers, messages.nbytes, strict=True):
            found[receiver] += nbytes
        return found

    # ---- positions

    def held(self, layout: Layout, positions: Sequence[range], ranks: range) -> Row:
        shards = layout.shards[ranks.start : ranks.stop]
        return [sum(len(meet(piece, some)) for piece in shard for some in positions) for shard in shards]

    def before(self, layout: Layout, horizons: Row) -> Row:
        return [
            sum(max(0, min((horizon - piece.start) // piece.step + 1, len(piece))) for piece in shard)
            for shard, horizon in zip(layout.shards, horizons, strict=True)
        ]

    def covered(self, pieces: Sequence[Row], firsts: Row, lasts: Row) -> tuple[Row, Row]:
        every = list(zip(*pieces, firsts, lasts, strict=True))
        is_whole = [f <= a and b <= z for a, b, _, f, z in every]
        part = [int(not whole and f <= b and a <= z) for whole, (a, b, _, f, z) in zip(is_whole, every, strict=True)]
        return [size if whole else 0 for whole, size in zip(is_whole, pieces[2], strict=True)], part

    def numbers(self, row: Row) -> list[int]:
        return [number for number, value in enumerate(row) if value]

    def weighed(self, parts: Iterable[tuple[int, Row]], count: int) -> Row:
        found = [0] * count
        for many, row in parts:
            found = [x + many * y for x, y in zip(found, row, strict=True)]
        return found

    def joined(self, rows: Sequence[Row]) -> Row:
        return [x for row in rows for x in row]

    def of_place(self, inner: int, place: int) -> Row:
        return [rank - rank % inner + place for rank in self.everybody]

    def turned_over(self, rows: Sequence[Row], inner: int) -> Callable[[int], Row]:
        return lambda place: [rows[rank % inner][rank - rank % inner + place] for rank in self.everybody]
