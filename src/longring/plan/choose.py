"""What `auto` takes: the layout for a pattern, and the schedule for a task, each with its reason."""

from __future__ import annotations

from ..geometry.itinerary import Task, needed, runs_over_sources
from ..geometry.patterns import Dense, Pattern

RANKS_TO_ASK = 8


def choose_layout(pattern: Pattern, length: int) -> tuple[str, str]:
    """(layout, reason)."""
    if not isinstance(pattern, Dense):
        return "contiguous", "dilated segments mostly fit a rank, and its work falls evenly"
    if pattern.documents is not None:
        return "dealt", "documents differ in length, so chunks are dealt by their work"
    reach = _reach(pattern, length)
    if reach is not None and 4 * reach <= length:
        return "contiguous", f"a window of {reach} is at most a quarter of {length} tokens: neighbours hold it"
    if not pattern.causal:
        return "contiguous", "without causality every rank has equal work"
    return "zigzag", "causal work is equal when each rank holds an early and a late chunk"


def choose_schedule(task: Task) -> tuple[str, str]:
    """(schedule, reason): the ring, unless what is needed is less than half of what a ring moves.

    A ring speaks to neighbours only and has its buffers from the start; direct messages cross the network.
    """
    if task.ranks == 1:
        return "ring", "one rank holds everything, and nothing moves"
    ranks = _some_ranks(task)
    wanted = sum(_vectors_wanted(task, rank) for rank in ranks)
    every = sum(_vectors(task, task.problem.n_k - task.keys.sizes[rank]) for rank in ranks)
    share = f"ranks need {wanted:,} of {every:,} vectors that others hold"
    if len(ranks) < task.ranks:
        share += f" (of {len(ranks)} ranks, taken for all)"
    if 2 * wanted < every:
        return "exchange", f"{share}: they come straight from their owners"
    return "ring", f"{share}: whole blocks pass from neighbour to neighbour"


def _some_ranks(task: Task) -> list[int]:
    """All, or a few evenly spaced that speak for all, the same on every rank."""
    few = min(task.ranks, RANKS_TO_ASK)
    return [task.ranks * i // few + task.ranks // (2 * few) for i in range(few)]


def _vectors_wanted(task: Task, rank: int) -> int:
    """Vectors of keys that the rank needs and does not hold."""
    found = 0
    for run in runs_over_sources(task, rank):
        others = len(run.ranks) - (rank in run.ranks)
        if others and run.tiles:
            found += others * sum(share.vectors for share in needed(run.tiles))
    return found


def _vectors(task: Task, rows: int) -> int:
    return rows * task.problem.batch * task.problem.kv_heads


def _reach(pattern: Dense, length: int) -> int | None:
    """How far back or ahead a query sees, or None if without limit on a side that is open to it."""
    lo, hi = pattern.limits
    if lo is None or hi is None:
        return None
    return max(-lo, hi, 0)
