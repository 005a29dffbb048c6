"""Brute force: tiles and groups written out pair by pair, to be compared with the definition's counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from longring.geometry.layouts import Shard
from longring.geometry.ranges import moved
from longring.geometry.task import Task, tiles_between
from longring.geometry.tiles import Tile
from longring.numerics.definition import pair_counts


def positions(shard: Iterable[range]) -> np.ndarray:
    """The positions of a shard in the order of its local rows."""
    return np.array([position for r in shard for position in r], dtype=np.int64)


def meetings(tile: Tile) -> np.ndarray:
    """[rows, columns]: whether row a meets column b."""
    a, b = np.ogrid[: len(tile.rows), : len(tile.cols)]
    met = np.ones((len(tile.rows), len(tile.cols)), dtype=bool)
    if tile.lo is not None:
        met &= tile.lo <= b - a
    if tile.hi is not None:
        met &= b - a <= tile.hi
    return met


def standings(tile: Tile) -> Iterator[tuple[range, range]]:
    """(rows, columns) of every repeat."""
    for i in range(tile.repeat.count):
        yield moved(tile.rows, i * tile.repeat.rows), moved(tile.cols, i * tile.repeat.cols)


def add_tile(counts: np.ndarray, tile: Tile, queries: np.ndarray, keys: np.ndarray) -> None:
    """Add the tile's pairs to counts [batch, kv_heads, n_q, n_k]; `queries` and `keys` say what the local rows are."""
    met = meetings(tile)
    for rows, cols in standings(tile):
        assert 0 <= rows[0] <= rows[-1] < len(queries), "a row outside of the local queries"
        assert 0 <= cols[0] <= cols[-1] < len(keys), "a column outside of the keys at hand"
        counts[np.ix_(tile.batch, tile.kv_heads, queries[rows], keys[cols])] += met


def no_pairs(task: Task) -> np.ndarray:
    problem = task.problem
    return np.zeros((problem.batch, problem.kv_heads, problem.n_q, problem.n_k), dtype=np.int64)


def expected_pairs(task: Task) -> np.ndarray:
    """How often each pair counts, by the definition, which shares no code with the cutter."""
    return pair_counts(task.pattern, task.problem).numpy()


def covered_pairs(task: Task, cut: Callable[[Tile], Iterable[Tile]] = lambda tile: [tile]) -> np.ndarray:
    """How often the tiles of all (target, source) cover each pair, each tile first cut into others."""
    counts = no_pairs(task)
    for target, mine in enumerate(map(positions, task.queries.shards)):
        for source, theirs in enumerate(map(positions, task.keys.shards)):
            for tile in tiles_between(task, target, source):
                for part in cut(tile):
                    add_tile(counts, part, mine, theirs)
    return counts


def every_tile(task: Task) -> Iterator[Tile]:
    for target in range(task.ranks):
        for source in range(task.ranks):
            yield from tiles_between(task, target, source)


def held_once(shards: Iterable[Shard], length: int) -> bool:
    """Whether every position is on exactly one rank, and every rank's rise."""
    parts = [positions(shard) for shard in shards]
    rising = all((np.diff(part) > 0).all() for part in parts)
    return rising and sorted(np.concatenate(parts).tolist()) == list(range(length))
