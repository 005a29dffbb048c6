"""Itineraries: in which order a rank meets whose keys, and what is sent and received on the way.

Schedules execute an itinerary, plan counts it, so the two cannot disagree. A *stop* is one source whose
keys and values are at hand; a *parcel* is rows of one owner's keys (and, alike, values) on their way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import NamedTuple, overload

from .layouts import Layout, Shard
from .patterns import Pattern, Problem
from .ranges import as_ranges, moved, united
from .tiles import Tile, cut_tiles


@dataclass(frozen=True)
class Task:
    """One call of attention as integers: what is asked, and who holds what."""

    pattern: Pattern
    problem: Problem
    queries: Layout
    keys: Layout

    @property
    def ranks(self) -> int:
        return self.keys.ranks

    @cached_property
    def _hash(self) -> int:
        return hash((self.pattern, self.problem, self.queries, self.keys))

    def __hash__(self) -> int:
        return self._hash


# ------------------------------------------------------------------------------------- which tiles meet


class Run(NamedTuple):
    """Ranks with which the tiles are the same, number for number."""

    ranks: range
    tiles: tuple[Tile, ...]


def tiles_between(task: Task, target: int, source: int) -> tuple[Tile, ...]:
    """Tiles of the target's queries over the source's keys."""
    return _tiles(task, task.queries.shards[target], task.keys.shards[source])


def tiles_over_all_keys(task: Task, target: int) -> tuple[Tile, ...]:
    """Tiles of the target's queries over every key, in the order of their positions."""
    return _tiles(task, task.queries.shards[target], (range(task.problem.n_k),))


def _tiles(task: Task, queries: Shard, keys: Shard) -> tuple[Tile, ...]:
    if not queries or not keys:
        return ()
    positions = tuple(moved(r, task.problem.offset) for r in queries)
    return cut_tiles(task.pattern.groups(task.problem, positions), positions, keys)


@lru_cache(maxsize=8192)
def runs_over_sources(task: Task, target: int) -> tuple[Run, ...]:
    """What `target` computes with the keys of every rank, as runs of ranks."""
    twin = _twin(task.queries.shards[target], task.keys, task.problem.offset)
    return tuple(_runs(task, task.keys, twin, lambda source: (target, source)))


@lru_cache(maxsize=8192)
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
        yield Run(ranks, tiles_between(task, *pair(ranks[0])))
        return
    half = len(ranks) // 2
    yield from _runs_in_family(task, ranks[:half], pair)
    yield from _runs_in_family(task, ranks[half:], pair)


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


# ------------------------------------------------------------------------------------------ what travels


class Share(NamedTuple):
    """Local rows of an owner's keys, for some batch rows and kv heads."""

    batch: range
    kv_heads: range
    rows: tuple[range, ...]

    @property
    def vectors(self) -> int:
        return len(self.batch) * len(self.kv_heads) * sum(map(len, self.rows))


class Parcel(NamedTuple):
    """Rows of the owner's keys and as many of its values, or of their gradients, between two ranks."""

    sender: int
    receiver: int
    owner: int
    shares: tuple[Share, ...]

    @property
    def vectors(self) -> int:
        """Vectors of d numbers, of the keys; the values are as many again."""
        return sum(share.vectors for share in self.shares)

    @property
    def frame(self) -> range:
        """The narrowest range of the owner's local rows that has room for all that is in the parcel."""
        return _frame(self.shares)


@lru_cache(maxsize=4096)
def _frame(shares: tuple[Share, ...]) -> range:
    parts = [r for share in shares for r in share.rows]
    first, last = min(r[0] for r in parts), max(r[-1] for r in parts)
    step = gcd(*(r.step for r in parts if len(r) > 1), *(r[0] - first for r in parts)) or 1
    return range(first, last + 1, step)


@lru_cache(maxsize=8192)
def needed(tiles: tuple[Tile, ...]) -> tuple[Share, ...]:
    """The key rows that some tile names, each once for all tiles, batch row by batch row and head by head."""
    by_place: dict[tuple[int, int], set[range]] = {}
    for tile in tiles:
        columns = {moved(tile.cols, i * tile.repeat.cols) for i in range(tile.repeat.count)}
        for b in tile.batch:
            for h in tile.kv_heads:
                by_place.setdefault((b, h), set()).update(columns)
    by_rows: dict[tuple[range, ...], list[tuple[int, int]]] = {}
    unions: dict[frozenset[range], tuple[range, ...]] = {}
    for place, columns in by_place.items():
        key = frozenset(columns)
        if key not in unions:
            unions[key] = united(key)
        by_rows.setdefault(unions[key], []).append(place)
    return tuple(Share(batch, heads, rows) for rows, places in by_rows.items() for batch, heads in _rectangles(places))


def _rectangles(places: list[tuple[int, int]]) -> Iterator[tuple[range, range]]:
    """(batch rows, heads) as few products of ranges."""
    heads_of: dict[int, list[int]] = {}
    for b, h in places:
        heads_of.setdefault(b, []).append(h)
    batches_of: dict[tuple[int, ...], list[int]] = {}
    for b, heads in heads_of.items():
        batches_of.setdefault(tuple(sorted(heads)), []).append(b)
    for heads, batches in batches_of.items():
        for batch in united(range(b, b + 1) for b in batches):
            for group in as_ranges(heads):
                yield batch, group


# ------------------------------------------------------------------------------------------ the schedules


class Stop(NamedTuple):
    """One source at hand: its tiles, what moves so that it can be, and which gradients move afterwards."""

    source: int
    tiles: tuple[Tile, ...]
    sends: Parcel | None = None
    receives: Parcel | None = None
    gradient_sends: Parcel | None = None
    gradient_receives: Parcel | None = None


class Itinerary(Sequence[Stop]):
    """A rank's stops in order, each made when it is asked for: thousands of ranks have millions of them."""

    def __init__(self, length: int, stop_at: Callable[[int], Stop]) -> None:
        self._length, self._stop_at = length, stop_at

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Stop: ...
    @overload
    def __getitem__(self, index: slice) -> list[Stop]: ...
    def __getitem__(self, index: int | slice) -> Stop | list[Stop]:
        steps = range(self._length)[index]
        return [self._stop_at(step) for step in steps] if isinstance(steps, range) else self._stop_at(steps)


@lru_cache(maxsize=4096)
def ring(task: Task, rank: int) -> Itinerary:
    """Whole blocks, from neighbour to neighbour; the gradient of a block follows it and ends at home."""
    runs, size = runs_over_sources(task, rank), task.ranks
    after, before = (rank + 1) % size, (rank - 1) % size

    def parcel(sender: int, receiver: int, owner: int) -> Parcel | None:
        whole = _whole_shard(task, owner)
        return Parcel(sender, receiver, owner, whole) if whole else None

    def stop_at(step: int) -> Stop:
        source, sent, following = ((rank - step + shift) % size for shift in (0, 1, -1))
        tiles = at_rank(runs, source)
        if step == 0:
            return Stop(source, tiles)
        return Stop(
            source,
            tiles,
            sends=parcel(rank, after, sent),
            receives=parcel(before, rank, source),
            gradient_sends=parcel(rank, after, source),
            gradient_receives=parcel(before, rank, following),
        )

    return Itinerary(size, stop_at)


@lru_cache(maxsize=4096)
def exchange(task: Task, rank: int) -> Itinerary:
    """Needed rows only, directly from their owner; their gradients go straight back.

    Stops at which nothing moves stay: between two ranks, rows of one stop and gradients of another share
    a channel, and all ranks must post them in one order.
    """
    sources, targets, size = runs_over_sources(task, rank), runs_over_targets(task, rank), task.ranks

    def stop_at(step: int) -> Stop:
        source, target = (rank - step) % size, (rank + step) % size
        tiles = at_rank(sources, source)
        if step == 0:
            return Stop(source, tiles)
        return _direct_stop(rank, source, target, needed(tiles), needed(at_rank(targets, target)), tiles)

    return Itinerary(size, stop_at)


@lru_cache(maxsize=4096)
def gather(task: Task, rank: int) -> Itinerary:
    """Everything to everybody, owner by owner; the tiles of the last stop are over all keys in order."""
    size, tiles = task.ranks, tiles_over_all_keys(task, rank)

    def stop_at(step: int) -> Stop:
        if step == size - 1:
            return Stop(rank, tiles)
        source, target = (rank - step - 1) % size, (rank + step + 1) % size
        return _direct_stop(rank, source, target, _whole_shard(task, source), _whole_shard(task, rank), ())

    return Itinerary(size, stop_at)


def _direct_stop(
    rank: int, source: int, target: int, wanted: tuple[Share, ...], given: tuple[Share, ...], tiles: tuple[Tile, ...]
) -> Stop:
    return Stop(
        source,
        tiles,
        sends=Parcel(rank, target, rank, given) if given else None,
        receives=Parcel(source, rank, source, wanted) if wanted else None,
        gradient_sends=Parcel(rank, source, source, wanted) if wanted else None,
        gradient_receives=Parcel(target, rank, rank, given) if given else None,
    )


def _whole_shard(task: Task, owner: int) -> tuple[Share, ...]:
    rows = task.keys.sizes[owner]
    return (Share(range(task.problem.batch), range(task.problem.kv_heads), (range(rows),)),) if rows else ()


ITINERARIES: dict[str, Callable[[Task, int], Itinerary]] = {"ring": ring, "exchange": exchange, "gather": gather}
