"""What a schedule is given, and what it promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from ..geometry.itinerary import Itinerary, Task
from ..kernels.contract import Gradients, Kernel, Upstream
from ..numerics.online_softmax import Partial
from ..transport.contract import Pending, Transport


@dataclass(frozen=True)
class Journey:
    """All that stays the same between forward and backward on one rank."""

    task: Task
    itinerary: Itinerary
    transport: Transport
    kernel: Kernel
    schedule: str
    scale: float
    timeout: float | None

    @cached_property
    def terms(self) -> dict[str, object]:
        """What all ranks must have asked for alike: global facts only, never a rank's own sizes."""
        task = self.task
        return {
            "pattern": task.pattern,
            "batch, lengths, kv heads and query offset": task.problem,
            "how queries are dealt": task.queries,
            "how keys are dealt": task.keys,
            "schedule": self.schedule,
            "scale": self.scale,
        }

    def post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], what: str) -> Pending:
        return self.transport.converse(self.terms, timeout=self.timeout).post(sends, receives, what=what)


class Schedule(NamedTuple):
    """Forward and backward over the shards of one rank. Nothing is rounded to the inputs' dtype yet."""

    forward: Callable[[Journey, Tensor, Tensor, Tensor], Partial]
    backward: Callable[[Journey, Upstream, Tensor, Tensor, Tensor], Gradients]
