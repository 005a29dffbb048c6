"""What a schedule is given, and what it promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..geometry.itinerary import Itinerary, Task
from ..kernels.contract import Gradients, Kernel, Upstream
from ..numerics.online_softmax import Partial
from ..transport.contract import Transport


@dataclass(frozen=True)
class Journey:
    """All that stays the same between forward and backward on one rank."""

    task: Task
    itinerary: Itinerary
    transport: Transport
    kernel: Kernel
    scale: float
    timeout: float | None


class Schedule(NamedTuple):
    """Forward and backward over the shards of one rank. Nothing is rounded to the inputs' dtype yet."""

    forward: Callable[[Journey, Tensor, Tensor, Tensor], Partial]
    backward: Callable[[Journey, Upstream, Tensor, Tensor, Tensor], Gradients]
