"""Sources: with whose keys a rank computes the same, so that thousands of them are told in a few lines."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from ..geometry.heads import ByHeads, Desk, by_heads, desks, of_heads
from ..geometry.layouts import Layout, Shard
from ..geometry.parcels import needed
from ..geometry.segments import Segments
from ..geometry.task import Task, look_of_own, runs_over_sources, segments_of, tiles_between
from .event_pace import Tiles
from .event_views import Views


class Desks(NamedTuple):
    """Some sources, and what a rank computes with each of them: tiles, and query heads to a kv head, by desk."""

    sources: range
    work: tuple[tuple[Tiles, int], ...]


class Sources:
    """For a rank of a task, runs of sources with which it computes the same. It keeps all of them.

    turn: where sources look alike by turns, by as many as divide this.
    """

    def __init__(self, task: Task, turn: int = 1) -> None:
        self.task, self._turn = task, turn
        self._segments = segments_of(task)
        self._views = Views(task)
        self._runs: dict[int, list[tuple[range, Tiles]]] = {}
        self._vectors: dict[int, float] = {}

    def runs(self, rank: int) -> list[tuple[range, Tiles]]:
        if rank not in self._runs:
            self._runs[rank] = list(self._found(rank))
        return self._runs[rank]

    def _found(self, rank: int) -> Iterator[tuple[range, Tiles]]:
        task = self.task
        if task.pattern.only_limits is not None:
            yield from ((run.ranks, run.tiles) for run in runs_over_sources(task, rank))
        elif self._segments is not None:
            yield from self._cut_by_segments(rank, self._segments)
        else:
            yield from self._one_by_one(rank)

    def _cut_by_segments(self, rank: int, segments: Segments) -> Iterator[tuple[range, Tiles]]:
        for sources in segments.combs(rank, self._turn):
            is_own = sources == range(rank, rank + 1)  # asked for elsewhere, and dear
            yield sources, () if is_own else tiles_between(self.task, rank, sources[0])

    def _one_by_one(self, rank: int) -> Iterator[tuple[range, Tiles]]:
        """Those of whose keys the rank could see some, and runs of the others."""
        at = 0
        for source in sorted(self._views.owners(rank)):
            if at < source:
                yield range(at, source), ()
            yield range(source, source + 1), tiles_between(self.task, rank, source)
            at = source + 1
        if at < self.task.ranks:
            yield range(at, self.task.ranks), ()

    def desks(self, rank: int) -> Iterator[Desks]:
        for sources, tiles in self.runs(rank):
            yield Desks(sources, ((tiles, self.task.share),) if sources != range(rank, rank + 1) else ())

    def period(self) -> int:
        """After how many ranks looks come again: of all ranks, that of the one with the most."""
        combs = (sources for rank in range(self.task.ranks) for sources, _ in self.runs(rank) if len(sources) > 1)
        return lcm(*{comb.step for comb in combs})

    def wanted(self, rank: int) -> list[tuple[range, float]]:
        """Vectors of every other that the rank needs."""
        others = ((sources, tiles) for sources, tiles in self.runs(rank) if sources != range(rank, rank + 1))
        return [(sources, self._needed(tiles)) for sources, tiles in others]

    def _needed(self, tiles: Tiles) -> float:
        if id(tiles) not in self._vectors:  # kept, so that no other has its id
            self._vectors[id(tiles)] = float(sum(share.vectors for share in needed(tiles))) if tiles else 0.0
        return self._vectors[id(tiles)]

    def own_look(self, rank: int) -> object:
        """The same for ranks that compute the same with their own rows, if that can be told before."""
        if self.task.pattern.only_limits is not None:
            return look_of_own(self.task, rank)
        return rank if self._segments is None else self._segments.own_look(rank)


class Nodes:
    """The same for ranks that have changed places within their nodes: the sources are nodes, and each desk has its own.

    The desks of one number at one place of all nodes are one task, and often that of other places too.
    """

    def __init__(self, task: Task, inner: int) -> None:
        self._task, self._inner = task, inner
        self._at_place: dict[tuple[int, int], Sources] = {}
        self._by_queries: dict[tuple[Shard, ...], Sources] = {}
        self._of_heads: dict[tuple[int, range], Tiles] = {}

    def desks(self, rank: int) -> Iterator[Desks]:
        plan = self._plan(rank)
        nodes = plan.nodes[1].ranks
        if nodes == 1:
            return
        runs = [self._sources(plan, number).runs(plan.node) for number in range(len(plan.desks))]
        cuts = {0, nodes, *(sources.start for some in runs for sources, _ in some)}
        for first, stop in pairwise(sorted(cuts)):
            if range(first, stop) == range(plan.node, plan.node + 1):
                yield Desks(range(first, stop), ())
                continue
            looks = ((_tiles_at(some, first), desk) for some, desk in zip(runs, plan.desks, strict=True))
            yield Desks(range(first, stop), tuple((self._tiles(tiles, desk), desk.share) for tiles, desk in looks))

    def shares(self, rank: int) -> tuple[int, ...]:
        return tuple(desk.share for desk in self._plan(rank).desks)

    def own_look(self, rank: int) -> object:
        plan = self._plan(rank)
        return tuple(
            (id(sources), sources.own_look(plan.node), self._heads(desk))
            for desk, sources in ((desk, self._sources(plan, number)) for number, desk in enumerate(plan.desks))
        )

    def _plan(self, rank: int) -> ByHeads:
        return by_heads(self._task, rank, self._inner)

    def _heads(self, desk: Desk) -> object:
        """Heads of one length are alike where every head sees the same."""
        sees_alike = self._task.pattern.only_limits is not None
        return len(desk.kv_heads) if sees_alike else desk.kv_heads, desk.share

    def _tiles(self, tiles: Tiles, desk: Desk) -> Tiles:
        key = id(tiles), desk.kv_heads  # sources keep them, so that no other has its id
        if key not in self._of_heads:
            self._of_heads[key] = of_heads(tiles, desk.kv_heads)
        return self._of_heads[key]

    def _sources(self, plan: ByHeads, number: int) -> Sources:
        place = plan.place, number
        if place not in self._at_place:
            queries, keys = plan.nodes
            far = plan.far
            assert far is not None
            at_nodes = (desks(far, shard, self._inner, plan.place) for shard in queries.shards)
            of_number = tuple(some[number].queries if number < len(some) else () for some in at_nodes)
            if of_number not in self._by_queries:
                asking = Task(far.pattern, far.problem, Layout(queries.length, of_number), keys, far.heads)
                self._by_queries[of_number] = Sources(asking)
            self._at_place[place] = self._by_queries[of_number]
        return self._at_place[place]


def _tiles_at(runs: list[tuple[range, Tiles]], source: int) -> Tiles:
    return runs[bisect_right(runs, source, key=lambda run: run[0].start) - 1][1]
