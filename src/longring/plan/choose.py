"""What `auto` takes: the layout for a pattern, and the schedule for a task, each with its reason."""

from __future__ import annotations

from ..geometry.itinerary import Task
from ..geometry.patterns import Dense, Pattern
from .traffic import forward_bytes


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
    """(schedule, reason)."""
    if task.ranks == 1:
        return "ring", "one rank holds everything, and nothing moves"
    if task.pattern.only_limits is not None and task.pattern.only_limits[0] is None:
        return "ring", "dense attention needs nearly every block on every rank"
    ring, exchange = (_busiest(task, schedule) for schedule in ("ring", "exchange"))
    if exchange < ring:
        return "exchange", f"the busiest rank sends {exchange:,} needed vectors, and {ring:,} in a ring"
    return "ring", f"the busiest rank would send {exchange:,} vectors directly, and {ring:,} in a ring"


def _busiest(task: Task, schedule: str) -> int:
    return max(forward_bytes(task, schedule, rank, head_dim=1, itemsize=1) for rank in range(task.ranks)) // 2


def _reach(pattern: Dense, length: int) -> int | None:
    """How far back or ahead a query sees, or None if without limit on a side that is open to it."""
    lo, hi = pattern.limits
    if lo is None or hi is None:
        return None
    return max(-lo, hi, 0)
