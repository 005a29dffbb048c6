"""What a gather holds: all keys and values, and in the backward all their gradients."""

from __future__ import annotations

from ...geometry.itinerary import Gathering
from .desk import BackwardDesk, Desk, Setting
from .relay import ARRIVING, FOLLOWING, GOING
from .room import Like, Taken
from .totals import DK, DQ, DV, Total

ALL_KEYS, ALL_GRADIENTS = "K/V of all ranks", "dK/dV of all ranks"


def forward(setting: Setting, plan: Gathering, q: Like, k: Like) -> Total:
    every = collect(setting, plan, k)
    setting.room.begin("tiles")
    desk = Desk(setting, q, k.heads, setting.seen(q, is_one_look=True))
    desk.look(plan.tiles, every[1])
    total = desk.total.result()
    every[0].give()
    return total


def backward(setting: Setting, plan: Gathering, q: Like, k: Like) -> tuple[Taken, Taken, Taken]:
    keys, every = collect(setting, plan, k)
    setting.room.begin("tiles")
    dq = setting.sum(q, DQ)
    dk, dv = (setting.sum(every, ALL_GRADIENTS) for _ in "kv")
    BackwardDesk(setting, q, k.heads, dq).look(plan.tiles, every, dk, dv)
    found = dq.result(), dk.summed(), dv.summed()
    own = _scattered(setting, plan, k)
    for one in (keys, *found[1:]):
        one.give()
    return found[0], *own


def collect(setting: Setting, plan: Gathering, k: Like) -> tuple[Taken, Like]:
    """Whole tensors, and meanwhile blocks: one that is put in its place and one that arrives."""
    room, others = setting.room, _others(plan)
    room.begin("gathering")
    every = k.of_rows(plan.task.keys.length)
    keys = room.take(ALL_KEYS, 2 * every.nbytes)
    blocks = sorted((2 * k.of_rows(rows).nbytes for rows in others), reverse=True)
    room.briefly(ARRIVING, sum(blocks[:2]))
    return keys, every


def _scattered(setting: Setting, plan: Gathering, k: Like) -> tuple[Taken, Taken]:
    """Own rows taken out; then with every other rank in turn its rows, packed, against sums for one's own."""
    room, others, mine = setting.room, _others(plan), k.accumulator
    room.begin("scattering")
    own = room.take(DK, mine.nbytes), room.take(DV, mine.nbytes)
    if others:
        with room.take(GOING, 2 * mine.of_rows(max(others)).nbytes):
            room.briefly(FOLLOWING, 2 * mine.nbytes)
    return own


def _others(plan: Gathering) -> list[int]:
    sizes = plan.task.keys.sizes
    return [*sizes[: plan.rank], *sizes[plan.rank + 1 :]]
