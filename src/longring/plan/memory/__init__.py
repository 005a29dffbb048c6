"""What a rank will hold: the most bytes at one time, component by component, counted on the plan that it runs.

A machine that takes and gives back memory walks the itinerary as the schedules do. It counts a call of attention by
itself, its inputs and results included; what is outside of it (weights, other layers, what a backend keeps for its
own messages) is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...errors import ArgumentError
from ...geometry.heads import ByHeads
from ...geometry.itinerary import Gathering, Itinerary
from ...geometry.plans import PLANS, Plan, plan
from ...geometry.task import Task
from . import by_heads, gather
from .desk import BackwardDesk, Desk, Setting
from .kernels import kernel_for
from .relay import Trip, go_backward, go_forward
from .room import Components, Like, Room, Taken
from .totals import DK, DQ, DV, LSE, OUT

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Held:
    """What one rank holds in one pass of one call.

    `components` are the bytes at the fullest moment, which sum up to `peak_bytes`. `timeline` has the fullest moment
    of each step, in order; where thousands of steps are alike, of a few of them.
    """

    peak_bytes: int
    components: Components
    timeline: dict[str, Components]


def held(
    task: Task,
    schedule: str,
    rank: int,
    *,
    head_dim: int,
    itemsize: int,
    node_ranks: int | None = None,
    phase: Phase = "forward",
    device: str = "cpu",
    kernel: str = "auto",
    threads: int = 1,
) -> Held:
    """What `rank` holds, its own q, k and v included, and in the backward out, lse and the gradient of out.

    `itemsize` is the bytes of a number of q. `threads` are those of a CPU, each of which has a workspace inside the
    kernel; 0 leaves those out, as a ledger does that sees whole tensors only.
    """
    _check(task, schedule, rank, head_dim, itemsize, node_ranks, phase)
    room = Room()
    setting = Setting(room, kernel_for(device, kernel, threads))
    q = Like(task.problem.batch, task.queries.sizes[rank], task.heads, head_dim, itemsize)
    k = Like(task.problem.batch, task.keys.sizes[rank], task.problem.kv_heads, head_dim, itemsize)
    for component, like in (("q", q), ("k", k), ("v", k)):
        room.take(component, like.nbytes)
    one = plan(schedule, task, rank, node_ranks)
    (_forward if phase == "forward" else _backward)(setting, one, q, k)
    room.write_down()
    return Held(room.peak_bytes, room.peak, room.timeline)


def _check(
    task: Task, schedule: str, rank: int, head_dim: int, itemsize: int, node_ranks: int | None, phase: str
) -> None:
    if schedule not in PLANS:
        raise ArgumentError(f"schedule must be one of {', '.join(PLANS)}, got {schedule!r}")
    if not 0 <= rank < task.ranks:
        raise ArgumentError(f"rank must be from 0 to {task.ranks - 1}, got {rank}")
    if head_dim < 1:
        raise ArgumentError(f"head_dim must be at least 1, got {head_dim}")
    if itemsize not in (2, 4, 8):
        raise ArgumentError(f"itemsize must be 2, 4 or 8 bytes, got {itemsize}")
    if node_ranks is not None and (node_ranks < 1 or task.ranks % node_ranks):
        raise ArgumentError(f"node_ranks must divide the {task.ranks} ranks, got {node_ranks}")
    if phase not in ("forward", "backward"):
        raise ArgumentError(f"phase must be forward or backward, got {phase!r}")


def _forward(setting: Setting, one: Plan, q: Like, k: Like) -> None:
    room = setting.room
    if isinstance(one, Gathering):
        total = gather.forward(setting, one, q, k)
    elif isinstance(one, ByHeads):
        total = by_heads.forward(setting, one, q, k)
    else:
        assert isinstance(one, Itinerary)
        desk = Desk(setting, q, k.heads, setting.seen(q, is_one_look=len(one) == 1))
        go_forward(Trip(setting, one, k), [desk])
        total = desk.total.result()
    room.begin("rounding")
    _round(room, OUT, total.out, q.nbytes)
    _round(room, LSE, total.lse, q.vectors * q.accumulator.itemsize)


def _backward(setting: Setting, one: Plan, q: Like, k: Like) -> None:
    room = setting.room
    room.take(OUT, q.nbytes)
    room.take(LSE, q.vectors * q.accumulator.itemsize)
    room.take("dout", q.nbytes)
    if isinstance(one, Gathering):
        found = gather.backward(setting, one, q, k)
    elif isinstance(one, ByHeads):
        found = by_heads.backward(setting, one, q, k)
    else:
        assert isinstance(one, Itinerary)
        dq = setting.sum(q, DQ, is_one_look=len(one) == 1)
        of_keys = go_backward(Trip(setting, one, k), [BackwardDesk(setting, q, k.heads, dq)])
        found = dq.result(), *of_keys
    room.begin("rounding")
    for component, taken, like in zip((DQ, DK, DV), found, (q, k, k), strict=True):
        _round(room, component, taken, like.nbytes)


def _round(room: Room, component: str, found: Taken, size: int) -> None:
    """What was found is still there while it is rounded."""
    if found.size != size:
        room.take(component, size)
