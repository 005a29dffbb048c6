"""Where a vector is: its position in the sequence, the row that its rank holds it in, its place in a parcel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...geometry.layouts import Shard
from ...geometry.parcels import Parcel
from ...geometry.ranges import meet
from ...geometry.task import Task
from .pairs import Met, queries_of


class Vector(NamedTuple):
    """A query, or a key, of one kv head (and so of all its query heads)."""

    batch: int
    position: int
    kv_head: int


class Stretch(NamedTuple):
    """Vectors that lie behind one another in a parcel: positions, each with these kv heads."""

    batch: int
    kv_heads: range
    positions: range

    @property
    def vectors(self) -> int:
        return len(self.positions) * len(self.kv_heads)

    def has(self, one: Vector) -> bool:
        return one.batch == self.batch and one.kv_head in self.kv_heads and one.position in self.positions


def own_queries(task: Task, rank: int, position: int, kv_head: int) -> Met:
    """The queries of a rank that see a key; one occurs as often as the pair counts."""
    problem = task.problem
    seeing = queries_of(task.pattern, problem.n_k, position, kv_head, problem.kv_heads)
    return tuple(both for piece in task.queries.shards[rank] for r in seeing if (both := meet(piece, r)))


def stretches(task: Task, parcel: Parcel) -> Iterator[Stretch]:
    """All of a parcel, in the order in which it is packed."""
    shard = task.keys.shards[parcel.owner]
    for share in parcel.shares:
        for rows in share.rows:
            for batch in share.batch:
                for positions in positions_of(shard, rows):
                    yield Stretch(batch, share.kv_heads, positions)


def vector_of(task: Task, parcel: Parcel, number: int) -> Vector:
    """One of a parcel's vectors, counted from its first."""
    for batch, kv_heads, positions in stretches(task, parcel):
        if number < len(positions) * len(kv_heads):
            row, head = divmod(number, len(kv_heads))
            return Vector(batch, positions[row], kv_heads[head])
        number -= len(positions) * len(kv_heads)
    raise IndexError(f"the parcel has {parcel.vectors} vectors")


def positions_of(shard: Shard, rows: range) -> Iterator[range]:
    """The positions of some local rows, piece by piece."""
    before = 0
    for piece in shard:
        first = max(0, -(-(before - rows.start) // rows.step))
        stop = min(len(rows), max(0, -(-(before + len(piece) - rows.start) // rows.step)))
        if first < stop:
            some = rows[first:stop]
            yield piece[some[0] - before : some[-1] - before + 1 : rows.step]
        before += len(piece)


def position_of(shard: Shard, row: int) -> int:
    return next(positions_of(shard, range(row, row + 1)))[0]


def row_of(shard: Shard, position: int) -> int:
    """Where a rank holds a position."""
    before = 0
    for piece in shard:
        if position in piece:
            return before + piece.index(position)
        before += len(piece)
    raise ValueError(f"position {position} is not in the shard {shard}")
