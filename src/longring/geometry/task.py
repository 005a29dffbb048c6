"""Tasks: one call of attention as integers, and which tiles its ranks' queries and keys make."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from .layouts import Layout, Shard
from .patterns import Pattern, Problem
from .ranges import moved
from .segments import Segments
from .tiles import Tile, count_tiles, cut_tiles


@dataclass(frozen=True)
class Task:
    """One call of attention as integers: what is asked, and who holds what."""

    pattern: Pattern
    problem: Problem
    queries: Layout
    keys: Layout
    heads: int = 0  # of the queries; 0 is as many as kv heads

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", self.heads or self.problem.kv_heads)

    @property
    def share(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.problem.kv_heads

    @property
    def ranks(self) -> int:
        return self.keys.ranks

    @cached_property
    def _hash(self) -> int:
        return hash((self.pattern, self.problem, self.queries, self.keys, self.heads))

    def __hash__(self) -> int:
        return self._hash


# ------------------------------------------------------------------------------------- which tiles meet


class Run(NamedTuple):
    """Ranks with which the tiles are the same, number for number."""

    ranks: range
    tiles: tuple[Tile, ...]


@lru_cache(maxsize=1024)
def tiles_between(task: Task, target: int, source: int) -> tuple[Tile, ...]:
    """Tiles of the target's queries over the source's keys; several schedules of a task ask for the same ones."""
    segments = segments_of(task)
    if segments is None:
        return tiles_of(task, task.queries.shards[target], task.keys.shards[source])
    return _known(task, segments.look(target, source), target, source)


@lru_cache(maxsize=64)
def segments_of(task: Task) -> Segments | None:
    """Where segments cut everybody's share, if that says which tiles there are."""
    return Segments.of(task.pattern, task.problem, task.queries, task.keys)


def tiles_over_all_keys(task: Task, target: int) -> tuple[Tile, ...]:
    """Tiles of the target's queries over every key, in the order of their positions."""
    return tiles_of(task, task.queries.shards[target], (range(task.problem.n_k),))


def tiles_of(task: Task, queries: Shard, keys: Shard) -> tuple[Tile, ...]:
    """Tiles of some queries over some keys, rows and columns numbered within these."""
    if not queries or not keys:
        return ()
    positions = tuple(moved(r, task.problem.offset) for r in queries)
    return cut_tiles(task.pattern.groups(task.problem, positions, keys), positions, keys)


def counted_tiles_of(task: Task, queries: Shard, keys: Shard) -> list[tuple[Tile, int]] | None:
    """The same, told once for many that look alike, where combs make so many of them; else None."""
    positions = tuple(moved(r, task.problem.offset) for r in queries)
    groups = list(task.pattern.groups(task.problem, positions, keys)) if task.pattern.only_limits is not None else []
    return count_tiles(groups[0], positions, keys) if len(groups) == 1 else None


@lru_cache(maxsize=512)
def runs_over_sources(task: Task, target: int) -> tuple[Run, ...]:
    """What `target` computes with the keys of every rank, as runs of ranks."""
    segments = segments_of(task)
    if segments is not None:
        return tuple(Run(ranks, tiles_between(task, target, ranks[0])) for ranks in segments.runs(target))
    twin = _twin(task.queries.shards[target], task.keys, task.problem.offset)
    return tuple(_runs(task, task.keys, twin, lambda source: (target, source)))


@lru_cache(maxsize=512)
def runs_over_targets(task: Task, source: int) -> tuple[Run, ...]:
    """What every rank computes with the keys of `source`, as runs of ranks."""
    twin = _twin(task.keys.shards[source], task.queries, -task.problem.offset)
    return tuple(_runs(task, task.queries, twin, lambda target: (target, source)))


def at_rank(runs: tuple[Run, ...], rank: int) -> tuple[Tile, ...]:
    return runs[bisect_right(runs, rank, key=lambda run: run.ranks.start) - 1].tiles


def _twin(shard: Shard, layout: Layout, shift: int) -> int | None:
    """The one rank that could hold the very positions of the shard, which make one square instead of several tiles."""
    return layout.rank_starting_at.get(shard[0].start + shift) if shard else None


def _runs(task: Task, layout: Layout, twin: int | None, pair: Callable[[int], tuple[int, int]]) -> Iterator[Run]:
    if task.pattern.only_limits is None:
        for rank in range(layout.ranks):
            yield Run(range(rank, rank + 1), tiles_between(task, *pair(rank)))
        return
    for family in layout.families:
        for ranks in _split_at(family, twin):
            yield from _runs_in_family(task, ranks, pair)


def _split_at(family: range, rank: int | None) -> list[range]:
    if rank is None or rank not in family:
        return [family]
    parts = range(family.start, rank), range(rank, rank + 1), range(rank + 1, family.stop)
    return [part for part in parts if part]


def _runs_in_family(task: Task, ranks: range, pair: Callable[[int], tuple[int, int]]) -> Iterator[Run]:
    """Halve until both ends look alike: limits move one way along a family, so all between look alike too."""
    first, last = (_look(task, *pair(rank)) for rank in (ranks[0], ranks[-1]))
    if first == last or len(ranks) == 1:
        yield Run(ranks, _tiles_that_look(task, *pair(ranks[0]), first))
        return
    half = len(ranks) // 2
    yield from _runs_in_family(task, ranks[:half], pair)
    yield from _runs_in_family(task, ranks[half:], pair)


def _tiles_that_look(task: Task, target: int, source: int, look: tuple[int, ...]) -> tuple[Tile, ...]:
    """Cut once for all pairs of ranks with equal shapes and looks; a rank's own positions make other tiles."""
    queries, keys = task.queries.shards[target], task.keys.shards[source]
    is_own = bool(queries and keys) and queries[0].start + task.problem.offset == keys[0].start
    return _known(task, (_shape(queries), _shape(keys), is_own, look), target, source)


MOST_KNOWN = 1024


def _known(task: Task, look: object, target: int, source: int) -> tuple[Tile, ...]:
    known = _known_tiles(task)
    if look not in known:
        if len(known) >= MOST_KNOWN:
            known.clear()
        known[look] = tiles_of(task, task.queries.shards[target], task.keys.shards[source])
    return known[look]


@lru_cache(maxsize=64)
def _known_tiles(task: Task) -> dict[object, tuple[Tile, ...]]:
    return {}


def _shape(shard: Shard) -> tuple[tuple[int, int], ...]:
    return tuple((len(piece), piece.step) for piece in shard)


def look_of_own(task: Task, rank: int) -> object:
    """The same for ranks that compute the same with their own keys, or with a half of them."""
    return _shape(task.queries.shards[rank]), _shape(task.keys.shards[rank]), _look(task, rank, rank)


def _look(task: Task, target: int, source: int) -> tuple[int, ...]:
    """The limits of every pair of pieces, as far as they bind: with equal shapes, equal looks give equal tiles."""
    assert task.pattern.only_limits is not None
    lo, hi = task.pattern.only_limits
    look: list[int] = []
    for q in task.queries.shards[target]:
        for k in task.keys.shards[source]:
            step = q.step if q.step == k.step else 1
            height, width = (q[-1] - q[0]) // step + 1, (k[-1] - k[0]) // step + 1
            gap = q.start + task.problem.offset - k.start
            look.append(-height if lo is None else min(max(-(-(lo + gap) // step), 1 - height), width))
            look.append(width if hi is None else max(min((hi + gap) // step, width - 1), -height))
    return tuple(look)
