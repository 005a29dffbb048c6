"""Gathered: how long ranks compute that have all keys at hand, without cutting for each of them what looks alike.

Only the widths of tiles differ from rank to rank, and those of LongNet branch by branch: the tiles of a branch are the
same wherever its segments begin.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..geometry.itinerary import gather
from ..geometry.layouts import Shard
from ..geometry.patterns import Dilated
from ..geometry.ranges import moved
from ..geometry.stacks import alike
from ..geometry.task import Task, counted_tiles_of, tiles_of
from ..geometry.tiles import likeness, without_bands
from .event_pace import Launch, Pace


class Gathered:
    """What every rank of a gather computes."""

    def __init__(self, pace: Pace) -> None:
        self._pace, self._task = pace, pace.task
        self._branches = _Branches(pace) if _Branches.can(pace.task) else None

    def seconds(self, rank: int) -> float:
        launches = self._launches(self._task.queries.shards[rank])
        if launches is None:
            return self._pace.looking(gather(self._task, rank).tiles, is_first=True)
        return self._pace.taking(launches, is_first=True)

    def _launches(self, queries: Shard) -> list[Launch] | None:
        if self._branches is not None:
            return self._branches.launches(queries)
        task = self._task
        counted = counted_tiles_of(task, queries, (range(task.problem.n_k),))
        return None if counted is None else self._pace.many_launches(counted, task.share)


class _Part(NamedTuple):
    """What one branch launches, and the looks of its tiles, by which they would be joined with those of another."""

    launches: list[Launch]
    looks: frozenset[object]


class _Branches:
    """LongNet over runs of consecutive positions."""

    def __init__(self, pace: Pace) -> None:
        self._pace, self._task = pace, pace.task
        assert isinstance(pace.task.pattern, Dilated)
        self._pattern = pace.task.pattern
        self._known: dict[tuple[int, Shard, int], _Part] = {}

    @staticmethod
    def can(task: Task) -> bool:
        pattern = task.pattern
        if not isinstance(pattern, Dilated) or pattern.documents is not None:
            return False
        if task.problem.offset or task.problem.n_q > task.problem.n_k:  # queries behind the last key
            return False
        return all(piece.step == 1 for shard in task.queries.shards for piece in shard)

    def launches(self, queries: Shard) -> list[Launch] | None:
        """Those of all branches in turn; None where some of two branches go together."""
        parts = [self._part(number, queries) for number in range(len(self._pattern.branches))]
        looks = frozenset[object]().union(*(part.looks for part in parts))
        if len(looks) < sum(len(part.looks) for part in parts):
            return None
        return [launch for part in parts for launch in part.launches]

    def _part(self, number: int, queries: Shard) -> _Part:
        w, _ = self._pattern.branches[number]
        near, stop = _brought_to_the_beginning(queries, w, self._task.problem.n_k)
        key = number, near, stop
        if key not in self._known:
            self._known[key] = self._cut(*key)
        return self._known[key]

    def _cut(self, number: int, queries: Shard, stop: int) -> _Part:
        task, share = self._task, self._task.share
        alone = replace(task, pattern=self._pattern.some([number]), problem=replace(task.problem, n_k=stop))
        tiles = tiles_of(alone, queries, (range(stop),))
        pieces = alike((piece for tile in tiles for piece in without_bands(tile)), share)
        return _Part(self._pace.launches(tiles, share), frozenset([*map(likeness, tiles), *pieces]))


def _brought_to_the_beginning(queries: Shard, w: int, n_k: int) -> tuple[Shard, int]:
    """The queries in the first segments, and where the keys of their last one end: it makes the same tiles there.

    Two pieces may be brought closer, until as many segments are between them as they have themselves: tiles at equal
    spacing are joined, and so none of theirs must come to be at a spacing that they had not.
    """
    found: list[range] = []
    spans = [range(piece.start // w, piece[-1] // w + 1) for piece in queries]
    room = sum(map(len, spans)) + 2
    at = 0  # the segment that comes next
    for number, (piece, span) in enumerate(zip(queries, spans, strict=True)):
        if number:
            apart = span.start - spans[number - 1].stop
            at += min(apart, room) if len(queries) == 2 else apart
        found.append(moved(piece, (at - span.start) * w))
        at += len(span)
    if not queries:
        return (), 0
    return tuple(found), min(at * w, n_k - (spans[-1].stop - at) * w)
