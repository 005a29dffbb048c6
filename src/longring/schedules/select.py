"""The schedules by name."""

from ..errors import ScheduleRefusal
from .contract import Schedule
from .exchange import EXCHANGE
from .gather import GATHER
from .ring import RING

SCHEDULES: dict[str, Schedule] = {"ring": RING, "exchange": EXCHANGE, "gather": GATHER}


def check_schedule(name: str) -> None:
    if not isinstance(name, str) or (name != "auto" and name not in SCHEDULES):
        raise ScheduleRefusal(f"schedule must be one of auto, {', '.join(SCHEDULES)}; got {name!r}")
