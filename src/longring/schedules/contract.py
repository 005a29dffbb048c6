"""What a schedule is given, and what it promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..geometry.task import Task
from ..kernels.contract import Gradients, Kernel, Upstream
from ..numerics.online_softmax import Partial
from ..transport.contract import Conversation, Transport
from .labels import Doing, heard


@dataclass(frozen=True)
class Journey:
    """All that stays the same between forward and backward on one rank."""

    task: Task
    plan: Any  # of the schedule; what else it offers besides its posts is between the two
    transport: Transport
    kernel: Kernel
    schedule: str
    scale: float
    timeout: float | None
    deterministic: bool = False

    @property
    def name(self) -> str:
        """Which rank of which schedule this is."""
        return f"rank {self.transport.rank} of {self.transport.size}, {self.schedule}"

    def converse(self, phase: str, q: Tensor) -> Conversation:
        talk = self.transport.converse(self.terms(phase, q), timeout=self.timeout)
        return heard(talk, Doing(self, phase, "the end of the call"))

    def terms(self, phase: str, q: Tensor) -> dict[str, object]:
        """What all ranks must have asked for alike: global facts only, never a rank's own sizes."""
        task, problem = self.task, self.task.problem
        return {
            "call": f"attention, {phase}",
            "length": problem.n_q,
            "length of keys": problem.n_k,
            "batch": problem.batch,
            "heads": task.heads,
            "kv heads": problem.kv_heads,
            "head dimension": q.shape[3],
            "dtype": q.dtype,
            "device": q.device.type,
            "pattern": task.pattern,
            "query offset": problem.offset,
            "how queries are dealt": task.queries,
            "how keys are dealt": task.keys,
            "schedule": self.schedule,
            "ranks of a node": self.transport.node_ranks,
            "scale": self.scale,
            "deterministic": self.deterministic,
        }


class Schedule(NamedTuple):
    """Forward and backward over the shards of one rank. Nothing is rounded to the inputs' dtype yet."""

    forward: Callable[[Journey, Tensor, Tensor, Tensor], Partial]
    backward: Callable[[Journey, Upstream, Tensor, Tensor, Tensor], Gradients]
