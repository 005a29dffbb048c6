"""Needs: which rows of an owner's keys some ranks could see, as intervals. Cheap, and never too few.

Tiles say it exactly, but cutting them for every pair of ranks costs too much where thousands pass rows on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from .patterns import Span
from .ranges import united
from .task import Task


class _View(NamedTuple):
    """What the queries of one piece of a rank's shard could see."""

    first: int
    last: int
    rank: int


def rows_seen(task: Task, owner: int, ranks: Iterable[range]) -> tuple[range, ...]:
    """The owner's local rows that queries of these ranks could see."""
    found: list[range] = []
    begin = 0
    limits = task.pattern.only_limits
    if limits is not None and limits[0] is None:  # then how far ahead they see decides
        horizon = _horizon(task, ranks)
        for piece in task.keys.shards[owner]:
            seen = min((horizon - piece.start) // piece.step + 1, len(piece))
            found.append(range(begin, begin + seen))
            begin += len(piece)
        return united(found)
    for piece in task.keys.shards[owner]:
        for span in _spans(task, piece, ranks):
            first, last = max(span.first, piece[0]), min(span.last, piece[-1])
            start, stop = -(-(first - piece[0]) // piece.step), (last - piece[0]) // piece.step + 1
            found.append(range(begin + start, begin + stop))
        begin += len(piece)
    return united(found)


def count_seen(task: Task, owner: int, ranks: Iterable[range]) -> int:
    """How many rows that is."""
    limits = task.pattern.only_limits
    if limits is None or limits[0] is not None:
        return sum(map(len, rows_seen(task, owner, ranks)))
    horizon = _horizon(task, ranks)
    pieces = (piece for piece in task.keys.shards[owner] if piece.start <= horizon)
    return sum(min((horizon - piece.start) // piece.step + 1, len(piece)) for piece in pieces)


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
    views, firsts, lasts = _sorted_views(task)
    candidates = views if firsts is None else views[bisect_left(lasts, piece[0]) : bisect_right(firsts, piece[-1])]
    asked = tuple(ranks)
    if sum(map(len, asked)) < len(candidates):
        by_rank = _views_by_rank(task)
        candidates = [view for some in asked for views in by_rank[some.start : some.stop] for view in views]
    for first, last, rank in candidates:
        if any(rank in some for some in asked):
            yield Span(first, last)
            if first <= piece[0] and piece[-1] <= last:  # nothing is left to be seen
                return


@lru_cache(maxsize=256)
def _views_by_rank(task: Task) -> list[list[_View]]:
    found: list[list[_View]] = [[] for _ in range(task.queries.ranks)]
    for view in _views(task):
        if view.first <= view.last:
            found[view.rank].append(view)
    return found


@lru_cache(maxsize=256)
def _sorted_views(task: Task) -> tuple[tuple[_View, ...], list[int] | None, list[int]]:
    """Views by position, with their firsts and lasts where both rise, so that they can be searched."""
    views = tuple(sorted(view for view in _views(task) if view.first <= view.last))
    firsts, lasts = [view.first for view in views], [view.last for view in views]
    rising = all(a <= b for a, b in pairwise(lasts))
    return views, (firsts if rising else None), lasts


def _views(task: Task) -> Iterator[_View]:
    for rank, shard in enumerate(task.queries.shards):
        for piece in shard:
            shift = task.problem.offset
            yield _View(*task.pattern.sees(task.problem, piece[0] + shift, piece[-1] + shift), rank)
