"""What a schedule's forward would cost on a machine, estimated from a few ranks: enough to choose by.

Bytes and work are counted on the plan; speeds are those of a typical machine in `hardware`. Exact predictions of bytes
are in `traffic`.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

from ..geometry.heads import kv_heads_at
from ..geometry.itinerary import Itinerary, Lane, double_ring, ring
from ..geometry.parcels import needed
from ..geometry.patterns import Dilated
from ..geometry.task import Task, runs_over_sources
from .hardware import hardware

RANKS_TO_ASK, STEPS_TO_ASK = 8, 32


class Machine(NamedTuple):
    """Numbers a second of one rank, and bytes a second that it sends to its own node and to others."""

    flops: float
    inside: float
    outside: float


TYPICAL = {"cuda": "h200", "cpu": "cpu"}
"""By the kind of device, the hardware that speaks for it."""


@lru_cache(maxsize=8)
def typical(device: str) -> Machine:
    """Of a kind that nobody described, the CPU's."""
    found = hardware(TYPICAL.get(device, "cpu"))
    flops = found.flops("forward", itemsize=2)
    return Machine(flops, found.inside.bytes_per_second, found.outside.bytes_per_second)


class Estimate(NamedTuple):
    """Seconds of a forward: hidden behind the computation is what a relay moves, not what changes places first."""

    schedule: str
    computing: float
    moving: float
    overlaps: bool
    volume: float  # bytes that a rank receives, on average

    @property
    def seconds(self) -> float:
        return max(self.computing, self.moving) if self.overlaps else self.computing + self.moving


def estimates(task: Task, *, head_dim: int, itemsize: int, node_ranks: int, machine: Machine) -> list[Estimate]:
    """Of every schedule that `auto` may take; of equal ones it takes the first."""
    pairs = {rank: _pairs(task, rank) for rank in few(task.ranks, RANKS_TO_ASK)}
    busiest, mean = max(pairs.values()), sum(pairs.values()) / len(pairs)
    work = 4 * head_dim * task.share / machine.flops
    vector = head_dim * itemsize
    several_nodes = 1 < node_ranks < task.ranks
    far = machine.inside if node_ranks == task.ranks else machine.outside
    most, average = _relayed(task, "ring", node_ranks)
    found = [Estimate("ring", busiest * work, 2 * vector * most / far, True, 2 * vector * average)]
    if several_nodes:
        most, average = _relayed(task, "double_ring", node_ranks)
        crossing = (task.ranks // node_ranks - 1) / (task.ranks - 1)
        moving = 2 * vector * most * max(crossing / machine.outside, (1 - crossing) / machine.inside)
        found.append(Estimate("double_ring", busiest * work, moving, True, 2 * vector * average))
    most, average = _wanted(task)
    found.append(Estimate("exchange", busiest * work, 2 * vector * most / far, True, 2 * vector * average))
    moved = vector * _changing(task, task.ranks)
    found.append(Estimate("ulysses", mean * work, moved / far, False, moved))
    if several_nodes:
        inside, around = vector * _changing(task, node_ranks), 2 * vector * _between_nodes(task, node_ranks)
        moving = max(inside / machine.inside, inside / machine.inside + around / machine.outside - mean * work)
        found.append(Estimate("hybrid", mean * work, moving, False, inside + around))
    return found


def few(ranks: int, most: int) -> list[int]:
    """All, or a few evenly spaced that speak for all, the same on every rank."""
    some = min(ranks, most)
    return [ranks * i // some + ranks // (2 * some) for i in range(some)]


def _pairs(task: Task, rank: int) -> int:
    return sum(len(run.ranks) * sum(tile.pairs for tile in run.tiles) for run in runs_over_sources(task, rank))


def _wanted(task: Task) -> tuple[float, float]:
    """Vectors of keys that the neediest of a few ranks does not hold, and that they do not hold on average."""
    every: list[int] = []
    for rank in few(task.ranks, RANKS_TO_ASK):
        found = 0
        for run in runs_over_sources(task, rank):
            others = len(run.ranks) - (rank in run.ranks)
            if others and run.tiles:
                found += others * sum(share.vectors for share in needed(run.tiles))
        every.append(found)
    return max(every), sum(every) / len(every)


def _relayed(task: Task, schedule: str, node_ranks: int) -> tuple[float, float]:
    """Vectors of keys that reach a few ranks, at most and on average, from their first and last steps and some."""
    ends, between = _steps(task.ranks)
    every: list[float] = []
    for rank in few(task.ranks, RANKS_TO_ASK):
        plan: Itinerary = ring(task, rank) if schedule == "ring" else double_ring(task, rank, node_ranks)
        lane = plan.lanes[0]
        near, far = (sum(_arriving(lane, rank, step) for step in steps) for steps in (ends, between))
        every.append(near + far * (task.ranks - 1 - len(ends)) / max(1, len(between)))
    return max(every), sum(every) / len(every)


def _arriving(lane: Lane, rank: int, step: int) -> int:
    parcel = lane.parcel(lane.route.guest(rank, step), step)
    return 0 if parcel is None else parcel.vectors


def _steps(ranks: int) -> tuple[list[int], list[int]]:
    """(those at either end, some of those between): a window moves rows in the first steps alone."""
    every = range(1, ranks)
    if len(every) <= 2 * STEPS_TO_ASK:
        return list(every), []
    ends = [*every[: STEPS_TO_ASK // 2], *every[-STEPS_TO_ASK // 2 :]]
    inner = every[STEPS_TO_ASK // 2 : -STEPS_TO_ASK // 2]
    return ends, [inner[i] for i in few(len(inner), STEPS_TO_ASK)]


def _changing(task: Task, inner: int) -> float:
    """Vectors of one rank that change places: queries there, out back, and keys and values to all who read them."""
    problem, away = task.problem, (inner - 1) / inner
    kept = 1.0
    if isinstance(task.pattern, Dilated) and inner == task.ranks:
        local = min(filter(None, task.keys.sizes), default=1)
        kept = min(1.0, sum(1 / r for w, r in task.pattern.branches if w > local))
    copies = sum(len(kv_heads_at(task, inner, place)) for place in range(inner)) / problem.kv_heads
    rows_q, rows_k = max(task.queries.sizes), max(task.keys.sizes)
    there_and_back = 2 * rows_q * task.heads * away
    keys = 2 * rows_k * problem.kv_heads * (copies - copies / inner)
    return problem.batch * kept * (there_and_back + keys)


def _between_nodes(task: Task, node_ranks: int) -> float:
    """Vectors of keys that a rank of a hybrid hands on: all other nodes' rows of its heads."""
    heads = max(len(kv_heads_at(task, node_ranks, place)) for place in range(min(node_ranks, gcd(node_ranks, 8))))
    return task.problem.batch * heads * task.problem.n_k * (1 - node_ranks / task.ranks)
