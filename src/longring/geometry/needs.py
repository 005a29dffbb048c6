"""Needs: which rows of an owner's keys some ranks could see, as intervals. Cheap, and never too few.

Tiles say it exactly, but cutting them for every pair of ranks costs too much where thousands pass rows on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import neg
from typing import NamedTuple

from .patterns import Span
from .ranges import united, united_intervals
from .task import Task


class _View(NamedTuple):
    """What the queries of one piece of a rank's shard could see."""

    first: int
    last: int
    rank: int


def rows_seen(task: Task, owner: int, ranks: Iterable[range]) -> tuple[range, ...]:
    """The owner's local rows that queries of these ranks could see."""
    limits = task.pattern.only_limits
    if limits is not None and limits[0] is None:  # then how far ahead they see decides
        return _rows_up_to(task, owner, _horizon(task, ranks))
    found: list[range] = []
    begin = 0
    for piece in task.keys.shards[owner]:
        for span in _spans(task, piece, ranks):
            first, last = max(span.first, piece[0]), min(span.last, piece[-1])
            start, stop = -(-(first - piece[0]) // piece.step), (last - piece[0]) // piece.step + 1
            found.append(range(begin + start, begin + stop))
        begin += len(piece)
    return united(found)


@lru_cache(maxsize=1024)
def _rows_up_to(task: Task, owner: int, horizon: int) -> tuple[range, ...]:
    """The owner's local rows of keys up to a position."""
    found: list[range] = []
    begin = 0
    for piece in task.keys.shards[owner]:
        seen = min((horizon - piece.start) // piece.step + 1, len(piece))
        found.append(range(begin, begin + seen))
        begin += len(piece)
    return united_intervals(found)


def count_seen(task: Task, owner: int, parties: Iterable[Iterable[range]]) -> int:
    """How many rows that is, of several parties of ranks together."""
    limits = task.pattern.only_limits
    if limits is None or limits[0] is not None:
        return sum(len(rows) for ranks in parties for rows in rows_seen(task, owner, ranks))
    pieces = [(piece.start, piece.step, len(piece)) for piece in task.keys.shards[owner]]
    horizons = [_horizon(task, ranks) for ranks in parties]
    return sum(
        min((horizon - start) // step + 1, size)
        for start, step, size in pieces
        for horizon in horizons
        if start <= horizon
    )


def _horizon(task: Task, ranks: Iterable[range]) -> int:
    """The last key that some query of these ranks sees."""
    doubled = _furthest_of_runs(task)
    furthest = -1
    for r in ranks:
        if r:
            power = len(r).bit_length() - 1
            row = doubled[power]
            furthest = max(furthest, row[r.start], row[r.stop - (1 << power)])  # two runs that cover it together
    return furthest


@lru_cache(maxsize=32)
def _furthest_of_runs(task: Task) -> list[list[int]]:
    """For runs of 1, 2, 4, ... ranks, by their first, the last key that one of them sees: rings ask for any run."""
    found = [_furthest(task)]
    while 1 << len(found) <= task.queries.ranks:
        row = found[-1]
        found.append(list(map(max, row, row[1 << (len(found) - 1) :])))
    return found


@lru_cache(maxsize=256)
def _furthest(task: Task) -> list[int]:
    """For every rank the last key one of its queries sees, or -1."""
    found = [-1] * task.ranks
    for first, last, rank in _views(task):
        if first <= last:
            found[rank] = max(found[rank], last)
    return found


def _spans(task: Task, piece: range, ranks: Iterable[range]) -> Iterator[Span]:
    """What these ranks could see of a piece of an owner's shard."""
    asked = united(ranks)
    for span in _spans_of(task, piece, asked):
        yield span
        if span.first <= piece[0] and piece[-1] <= span.last:  # nothing is left to be seen
            return


def _spans_of(task: Task, piece: range, asked: tuple[range, ...]) -> Iterator[Span]:
    strands = _strands(task)
    if sum(map(len, asked)) < len(strands):
        by_rank = _views_by_rank(task)
        yield from (Span(view.first, view.last) for some in asked for rank in some for view in by_rank[rank])
        return
    for strand in strands:
        for some in asked:
            yield from strand.seen(piece, some)


@dataclass(frozen=True)
class _Strand:
    """Views of several ranks, in an order in which both of their ends rise, so that they can be searched."""

    ranks: Sequence[int]  # rising, or falling
    firsts: list[int]
    lasts: list[int]
    gaps: list[int]  # the numbers of views behind which something is left out before the next

    def seen(self, piece: range, ranks: range) -> Iterator[Span]:
        """What some of the ranks see that is near the piece, as few spans."""
        numbers = self._numbers(ranks)
        start = max(numbers.start, bisect_left(self.lasts, piece[0]))
        stop = min(numbers.stop, bisect_right(self.firsts, piece[-1]))
        if start >= stop:
            return
        for gap in self.gaps[bisect_left(self.gaps, start) : bisect_left(self.gaps, stop - 1)]:
            yield Span(self.firsts[start], self.lasts[gap])
            start = gap + 1
        yield Span(self.firsts[start], self.lasts[stop - 1])

    def _numbers(self, ranks: range) -> range:
        """Of the views that these ranks have."""
        if self.ranks[0] <= self.ranks[-1]:
            return range(bisect_left(self.ranks, ranks.start), bisect_left(self.ranks, ranks.stop))
        return range(bisect_left(self.ranks, -ranks[-1], key=neg), bisect_right(self.ranks, -ranks[0], key=neg))


@lru_cache(maxsize=256)
def _strands(task: Task) -> tuple[_Strand, ...]:
    """All views: those of pieces with the same number, cut where ends begin to fall that rose, or to rise that fell."""
    by_number: dict[int, list[_View]] = {}
    for views in _views_by_rank(task):
        for number, view in enumerate(views):
            by_number.setdefault(number, []).append(view)
    return tuple(_strand(run) for views in by_number.values() for run in _monotonous(views))


def _monotonous(views: Sequence[_View]) -> Iterator[Sequence[_View]]:
    start, way = 0, 0
    for number, (a, b) in enumerate(pairwise(views), 1):
        here = _way(a, b)
        if here is None or here * way < 0:
            yield views[start:number]
            start, way = number, 0
        else:
            way = way or here
    yield views[start:]


def _way(a: _View, b: _View) -> int | None:
    """+1 or -1: which way both ends go; 0 if they stay; None if one rises and the other falls."""
    first, last = b.first - a.first, b.last - a.last
    if first < 0 < last or last < 0 < first:
        return None
    both = first + last
    return (both > 0) - (both < 0)


def _strand(views: Sequence[_View]) -> _Strand:
    if views[0] > views[-1]:
        views = views[::-1]
    firsts, lasts, ranks = (list(column) for column in zip(*views, strict=True))
    gaps = [number for number, (a, b) in enumerate(pairwise(views)) if b.first > a.last + 1]
    return _Strand(ranks, firsts, lasts, gaps)


@lru_cache(maxsize=256)
def _views_by_rank(task: Task) -> list[list[_View]]:
    found: list[list[_View]] = [[] for _ in range(task.queries.ranks)]
    for view in _views(task):
        if view.first <= view.last:
            found[view.rank].append(view)
    return found


def _views(task: Task) -> Iterator[_View]:
    for rank, shard in enumerate(task.queries.shards):
        for piece in shard:
            shift = task.problem.offset
            yield _View(*task.pattern.sees(task.problem, piece[0] + shift, piece[-1] + shift), rank)
