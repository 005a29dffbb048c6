"""Replicated queries: every rank asks its own keys, and tells all others what it found.

What decoding needs: one query against keys that ranks hold. No key moves. A rank sends one message to each of the
others, in one round, and only if a key of its own could be seen: under a window few ranks have anything to tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache

from .itinerary import Post
from .parcels import Delivery, Piece
from .task import Task, tiles_between
from .tiles import Tile


class Answers:
    """What one rank computes and posts."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank = task, rank

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """All queries over this rank's own keys."""
        return tiles_between(self.task, self.rank, self.rank)

    @property
    def speakers(self) -> tuple[int, ...]:
        """The ranks that have something to tell, rising; the same on every rank."""
        return _speakers(self.task)

    def forward(self) -> Iterator[Post[Delivery]]:
        return iter(self._answers)

    def backward(self) -> Iterator[Post[Delivery]]:
        """Gradients of keys and values are at home where they are found; those of queries are summed."""
        return self._told("partial gradients")

    @cached_property
    def _answers(self) -> tuple[Post[Delivery], ...]:
        """Of all layers of a model, which ask alike."""
        return tuple(self._told("partial answers"))

    def _told(self, kind: str) -> Iterator[Post[Delivery]]:
        others = [rank for rank in range(self.task.ranks) if rank != self.rank]
        sends = [self._delivery(self.rank, other, kind) for other in others if self.rank in self.speakers]
        receives = [self._delivery(other, self.rank, kind) for other in others if other in self.speakers]
        if sends or receives:
            yield Post(tuple((0, one) for one in sends), tuple((0, one) for one in receives), 1)

    def _delivery(self, sender: int, receiver: int, kind: str) -> Delivery:
        problem, rows = self.task.problem, range(self.task.problem.n_q)
        piece = Piece(0, range(problem.batch), range(self.task.heads), rows, rows)
        return Delivery(sender, receiver, (piece,), kind)


@lru_cache(maxsize=64)
def _speakers(task: Task) -> tuple[int, ...]:
    """Ranks with a key between the first and the last that any query could see."""
    at = task.problem.query_positions
    first, last = task.pattern.sees(task.problem, at[0], at[-1])
    return tuple(
        rank
        for rank, shard in enumerate(task.keys.shards)
        if any(_has_one_between(held, first, last) for held in shard)
    )


def _has_one_between(held: range, first: int, last: int) -> bool:
    nearest = held.start + max(0, -(-(first - held.start) // held.step)) * held.step
    return nearest <= min(last, held[-1])


@lru_cache(maxsize=64)
def answers(task: Task, rank: int) -> Answers:
    return Answers(task, rank)
