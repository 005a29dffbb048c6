"""Plans by the name of their schedule: everything one rank posts, forward and backward, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from .heads import by_heads
from .itinerary import Post, bidirectional, double_ring, exchange, gather, ring
from .replicated import answers
from .task import Task


class Plan(Protocol):
    def forward(self) -> Iterator[Post[Any]]: ...

    def backward(self) -> Iterator[Post[Any]]: ...


PLANS: dict[str, Callable[[Task, int, int], Plan]] = {
    "ring": lambda task, rank, _: ring(task, rank),
    "bidirectional": lambda task, rank, _: bidirectional(task, rank),
    "double_ring": double_ring,
    "exchange": lambda task, rank, _: exchange(task, rank),
    "gather": lambda task, rank, _: gather(task, rank),
    "ulysses": lambda task, rank, _: by_heads(task, rank, task.ranks),
    "hybrid": by_heads,
}

REPLICATED = "replicated"
"""Not among those that queries which are dealt can choose from: it is for queries that every rank has whole."""


def plan(schedule: str, task: Task, rank: int, node_ranks: int | None = None) -> Plan:
    """What `rank` does under a schedule. `node_ranks` consecutive ranks are close: all, unless it says otherwise."""
    if schedule == REPLICATED:
        return answers(task, rank)
    return PLANS[schedule](task, rank, task.ranks if node_ranks is None else node_ranks)
