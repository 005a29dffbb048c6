"""Arrays: what event_lists.py does with lists, for thousands of ranks at once by numpy; to the tick the same.

Times are whole ticks, and sums of these are exact, so that their order changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..geometry.layouts import Layout
from .event_lists import Carried, Lists, Messages, Row
from .links import NEVER, TICK, Lines


class _Pieces(NamedTuple):
    """The pieces of every rank's shard, those with the same number together; who has fewer has empty ones."""

    starts: Row
    steps: Row
    sizes: Row

    @classmethod
    def of(cls, layout: Layout) -> _Pieces:
        most = max(map(len, layout.shards), default=0)
        padded = [[*shard, *[range(0)] * (most - len(shard))] for shard in layout.shards]
        told = np.array([[(piece.start, piece.step, len(piece)) for piece in shard] for shard in padded], np.int64)
        return cls(*told.reshape(len(padded), most, 3).transpose(2, 1, 0))


class Arrays:
    def __init__(self, lines: Lines) -> None:
        self.lines, ranks = lines, range(lines.ranks)
        self.everybody: Row = np.array(ranks)
        self._node = self.everybody // lines.node_ranks
        self._far_line = np.array([lines.line_out(rank) for rank in ranks])
        self._speed = [
            (lines.hardware.inside if is_inside else lines.hardware.outside).bytes_per_second
            for is_inside in (True, False)
        ]
        self._latency = [lines.latency(is_inside=is_inside) for is_inside in (True, False)]
        self._slow = {
            sender * lines.ranks + receiver: factor for (sender, receiver), factor in lines.slow.links.items()
        }
        self._slow_links = np.array(list(self._slow), np.int64)
        self._pieces: dict[int, tuple[Layout, _Pieces]] = {}

    def full(self, value: float, count: int) -> Row:
        return np.full(count, value)

    def of(self, values: Iterable[float]) -> Row:
        return np.array(values if isinstance(values, Sequence) else list(values), np.float64)

    def told(self, row: Row) -> list[float]:
        return row.tolist()

    def added(self, a: Row, b: Row) -> Row:
        return a + b

    def largest(self, row: Row) -> float:
        return float(row.max())

    def larger(self, a: Row, b: Row) -> Row:
        return np.maximum(a, b)

    def smaller(self, a: Row, b: Row) -> Row:
        return np.minimum(a, b)

    def total(self, row: Row) -> float:
        return float(np.asarray(row)[np.asarray(row) > NEVER].sum())

    def many(self, row: Row) -> int:
        return int(np.count_nonzero(row))

    def begun(self, here: Row, there: Row, on_line: Row, free: Row | None = None) -> Row:
        start = np.maximum(here, there)
        return (start if free is None else np.maximum(start, free)) + on_line

    def waited(self, at: Row, ends: Row, arriving: Row, latency: float) -> Row:
        found = np.maximum(at, ends)
        return np.maximum(found, arriving + latency if latency else arriving, out=found)

    def on_lines(self, nbytes: Row) -> tuple[Row, Row]:
        near, far = (np.where(nbytes > 0, _ticked(nbytes / speed), NEVER) for speed in self._speed)
        return near, far

    # ---- messages

    def messages(self, messages: Iterable[tuple[int, int, int]]) -> Messages:
        return Messages(*np.array(list(messages), np.int64).T)

    def _is_inside(self, messages: Messages) -> Row:
        return self._node[messages.senders] == self._node[messages.receivers]

    def _seconds(self, messages: Messages, is_inside: Row) -> Row:
        near, far = self._speed
        seconds = _ticked(messages.nbytes / np.where(is_inside, near, far))
        if self._slow:
            links = messages.senders * self.lines.ranks + messages.receivers
            for number in np.flatnonzero(np.isin(links, self._slow_links)):
                one = (int(column[number]) for column in messages)
                seconds[number] = self.lines.carrying(*one)
        return seconds

    def queued(self, at: Row, free: Row, messages: Messages) -> Row:
        sent = np.flatnonzero(messages.nbytes)
        some = Messages(*(column[sent] for column in messages))
        is_inside = self._is_inside(some)
        ready = np.maximum(at[some.senders], at[some.receivers])
        line = np.where(is_inside, some.senders, self._far_line[some.senders])
        seconds = self._seconds(some, is_inside)
        ends = np.empty(len(sent))
        for turn in _turns(line, ready, some):
            ends[turn] = np.maximum(ready[turn], free[line[turn]]) + seconds[turn]
            free[line[turn]] = ends[turn]
        found = np.full(len(messages.nbytes), NEVER)
        found[sent] = ends
        return found

    def done(self, messages: Messages, ends: Row) -> Row:
        found = np.full(self.lines.ranks, NEVER)
        near, far = self._latency
        np.maximum.at(found, messages.senders, ends)
        np.maximum.at(found, messages.receivers, ends + np.where(self._is_inside(messages), near, far))
        return found

    def carried(self, messages: Messages) -> Carried:
        sent = messages.nbytes > 0
        is_inside = self._is_inside(messages)
        seconds = self._seconds(messages, is_inside)
        near, far = sent & is_inside, sent & ~is_inside
        return Carried(float(seconds[near].sum()), float(seconds[far].sum()), int(near.sum()), int(far.sum()))

    def received(self, messages: Messages) -> Row:
        return np.bincount(messages.receivers, messages.nbytes, self.lines.ranks)

    # ---- positions

    def _pieces_of(self, layout: Layout) -> _Pieces:
        if id(layout) not in self._pieces:  # kept beside, so that no other has its id
            self._pieces[id(layout)] = layout, _Pieces.of(layout)
        return self._pieces[id(layout)][1]

    def held(self, layout: Layout, positions: Sequence[range], ranks: range) -> Row:
        starts, steps, sizes = (column[:, ranks.start : ranks.stop] for column in self._pieces_of(layout))
        found = np.zeros(len(ranks), np.int64)
        for some in positions:
            if some.step == 1:
                found += _between(some.start - starts, some.stop - starts, steps, sizes).sum(0)
            elif (steps == 1).all():
                found += _between(starts - some.start, starts + sizes - some.start, some.step, len(some)).sum(0)
            else:  # combs within combs
                found += np.array(Lists(self.lines).held(layout, [some], ranks))
        return found

    def before(self, layout: Layout, horizons: Row) -> Row:
        starts, steps, sizes = self._pieces_of(layout)
        behind = horizons - starts
        if (steps != 1).any():
            behind //= steps
        return np.minimum(np.maximum(behind + 1, 0), sizes).sum(0)

    def covered(self, pieces: Sequence[Row], firsts: Row, lasts: Row) -> tuple[Row, Row]:
        first, last, size = pieces
        is_whole = (firsts <= first) & (last <= lasts)
        return np.where(is_whole, size, 0), (firsts <= last) & (first <= lasts) & ~is_whole

    def numbers(self, row: Row) -> list[int]:
        return np.flatnonzero(row).tolist()

    def weighed(self, parts: Iterable[tuple[int, Row]], count: int) -> Row:
        found = np.zeros(count)
        for many, row in parts:
            found += many * np.asarray(row)
        return found

    def joined(self, rows: Sequence[Row]) -> Row:
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def of_place(self, inner: int, place: int) -> Row:
        return self.everybody // inner * inner + place

    def turned_over(self, rows: Sequence[Row], inner: int) -> Callable[[int], Row]:
        """Desks of several heads have one row in common, which is kept once."""
        different = {id(row): row for row in rows}
        numbers = {one: number for number, one in enumerate(different)}
        which = np.array([numbers[id(row)] for row in rows])
        stack = np.array(list(different.values())).reshape(len(different), -1, inner)
        return lambda place: stack[which, :, place].T.reshape(-1)


def _ticked(seconds: Row) -> Row:
    return np.rint(seconds / TICK) * TICK


def _between(first: Row, stop: Row, step: Row | int, size: Row | int) -> Row:
    """How many of the positions 0, step, ... of a comb of so many teeth lie from first on and before stop."""
    low, high = (np.minimum(np.maximum(-(-edge // step), 0), size) for edge in (first, stop))
    return np.maximum(high - low, 0)


def _turns(line: Row, ready: Row, messages: Messages) -> Iterable[Row]:
    """Numbers of messages, in each turn at most one a line, in the order in which lines serve them."""
    if np.bincount(line).max(initial=0) <= 1:
        return [slice(None)]
    order = np.lexsort((messages.nbytes, messages.receivers, messages.senders, ready, line))
    lines = line[order]
    begins = np.flatnonzero(np.diff(lines, prepend=-1))
    turn = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
    by_turn = np.argsort(turn, kind="stable")
    return np.split(order[by_turn], np.cumsum(np.bincount(turn))[:-1])
