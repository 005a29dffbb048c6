"""The schedules by name."""

from ..errors import ScheduleRefusal
from ..geometry.plans import REPLICATED
from ..tensors import spoken
from . import replicated
from .by_heads import BY_HEADS
from .contract import Schedule
from .gather import GATHER
from .relay import RELAY

SCHEDULES: dict[str, Schedule] = {
    "ring": RELAY,
    "bidirectional": RELAY,
    "double_ring": RELAY,
    "exchange": RELAY,
    "gather": GATHER,
    "ulysses": BY_HEADS,
    "hybrid": BY_HEADS,
}
"""Those that queries which are dealt can choose from."""


def schedule_of(name: str) -> Schedule:
    return replicated.REPLICATED if name == REPLICATED else SCHEDULES[name]


def check_schedule(name: str) -> None:
    if not isinstance(name, str) or (name != "auto" and name not in SCHEDULES):
        raise ScheduleRefusal(f"schedule must be one of auto, {', '.join(SCHEDULES)}; got {spoken(name)}")
