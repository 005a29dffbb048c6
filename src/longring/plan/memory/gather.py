"""What a gather holds: all keys and values, and in the backward all their gradients."""

from __future__ import annotations

from ...geometry.itinerary import Gathering
from .desk import Desk, Setting
from .relay import ARRIVING, DK, DV, FOLLOWING, GOING
from .room import Like

ALL_KEYS, ALL_GRADIENTS = "K/V of all ranks", "dK/dV of all ranks"


def forward(setting: Setting, plan: Gathering, q: Like, k: Like) -> None:
    collect(setting, plan, k)
    setting.room.begin("tiles")
    desk = Desk(setting, q, k.heads, setting.seen(q, is_one_look=True))
    every = k.of_rows(plan.task.keys.length)
    desk.look(plan.tiles, every)
    finished = desk.total.result()
    del finished


def collect(setting: Setting, plan: Gathering, k: Like) -> None:
    """Whole tensors, and meanwhile blocks: one that is put in its place and one that arrives."""
    room, others = setting.room, _others(plan)
    room.begin("gathering")
    every = k.of_rows(plan.task.keys.length)
    room.take(ALL_KEYS, 2 * every.nbytes)
    blocks = sorted((2 * k.of_rows(rows).nbytes for rows in others), reverse=True)
    room.briefly(ARRIVING, sum(blocks[:2]))


def scatter(setting: Setting, plan: Gathering, k: Like) -> None:
    """Own rows taken out; then with every other rank in turn its rows, packed, against sums for one's own."""
    room, others, mine = setting.room, _others(plan), k.accumulator
    room.begin("scattering")
    for component in (DK, DV):
        room.take(component, mine.nbytes)
    if others:
        left = mine.nbytes if len(others) > 1 else 0  # what the round before brought last
        with room.holding(GOING, 2 * mine.of_rows(max(others)).nbytes):
            room.briefly(FOLLOWING, 2 * mine.nbytes + left)


def _others(plan: Gathering) -> list[int]:
    sizes = plan.task.keys.sizes
    return [*sizes[: plan.rank], *sizes[plan.rank + 1 :]]
