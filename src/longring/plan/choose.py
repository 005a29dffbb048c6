"""What `auto` takes: the layout for a pattern, and the schedule for a task, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence

from ..geometry.patterns import Dense, Pattern
from ..geometry.task import Task
from .cost import Estimate, estimates, typical

MARGIN = 1.05  # estimates are rough: by less than this nobody is faster


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


def choose_schedule(
    task: Task, *, head_dim: int = 64, itemsize: int = 2, node_ranks: int | None = None, machine: str = "cuda"
) -> tuple[str, str]:
    """(schedule, reason): the fastest by estimate, forward and backward together; of those alike the first."""
    if task.ranks == 1:
        return "ring", "one rank holds everything, and nothing moves"
    found = estimates(
        task,
        head_dim=head_dim,
        itemsize=itemsize,
        node_ranks=node_ranks or task.ranks,
        machine=typical(machine),
    )
    taken = fastest(found)
    return taken.schedule, "; ".join(_spoken(one) for one in (taken, *(o for o in found if o is not taken)))


def fastest(found: Sequence[Estimate]) -> Estimate:
    """Of those as fast as the fastest, give or take a margin, the first."""
    least = min(one.seconds for one in found)
    return next(one for one in found if one.seconds <= MARGIN * least)


def _spoken(one: Estimate) -> str:
    told = [f"computing {_duration(one.computing)}"]
    if one.moving or not one.unhidden:
        told.append(f"while moving {_duration(one.moving)}")
    if one.unhidden:
        told.append(f"and changing places {_duration(one.unhidden)}")
    return f"{one.schedule} about {_duration(one.seconds)} ({' '.join(told)})"


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _reach(pattern: Dense, length: int) -> int | None:
    """How far back or ahead a query sees, or None if without limit on a side that is open to it."""
    lo, hi = pattern.limits
    if lo is None or hi is None:
        return None
    return max(-lo, hi, 0)
