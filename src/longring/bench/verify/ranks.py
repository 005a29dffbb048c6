"""What the checks of `longring verify` share: what is wanted, rows of results, and how ranks agree on them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...errors import TransportError
from ..records import machine

T = TypeVar("T")

CONTROL = 300.0  # seconds that a rank waits for what the others say of a check
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@dataclass(frozen=True)
class Wanted:
    """only: words, one of which the name of a check holds; none for all checks. seconds: after so many no check begins.

    timeout: of waits in calls that should go well; fault_timeout: in those that lose a rank, where every other rank has
    so long, and `slack` more, to raise PeerLost. Disagreement has `disagreement` seconds.
    """

    only: tuple[str, ...] = ()
    faults: bool = False
    seconds: float = 480.0
    timeout: float = 60.0
    fault_timeout: float = 5.0
    slack: float = 0.5
    disagreement: float = 2.0

    def includes(self, name: str) -> bool:
        return not self.only or any(word.lower() in name.lower() for word in self.only)


@dataclass
class Row:
    """One check: what came of it, in words and in numbers."""

    check: str  # "exactness", "links", "overlap", "fault" or "world"
    name: str
    status: str  # PASSED, FAILED or NOT_RUN
    detail: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """With `passed`, where it was run."""
        return asdict(self) | ({} if self.status == NOT_RUN else {"passed": self.status == PASSED})


Add = Callable[[Row], None]


@dataclass
class Ranks:
    """This rank's view of the world, and the group over which ranks tell each other how a check went."""

    wanted: Wanted
    control: Any
    deadline: float
    reason: str | None = None  # why nothing more is run, the same on all ranks

    @classmethod
    def joined(cls, wanted: Wanted) -> Ranks:
        """As one of the ranks of an initialised world."""
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=CONTROL))
        return cls(wanted, control, time.monotonic() + wanted.seconds)

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @cached_property
    def device(self) -> torch.device:
        is_nccl = "nccl" in str(dist.get_backend_config())
        return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")

    def all_say(self, mine: T) -> list[T]:
        """What each rank says, the same list on all of them."""
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, mine, group=self.control)
        return said

    def why_not(self) -> str | None:
        """Why the next check is not to begin; by the clock of the first rank, so that all agree."""
        if self.reason is None and self.all_say(time.monotonic() > self.deadline)[0]:
            self.reason = f"{self.wanted.seconds:g} s were over"
        return self.reason

    def finish(self) -> None:
        """Wait for what this rank's GPU still does, which a lost peer may keep from ever ending."""
        if self.device.type != "cuda":
            return
        done, end = torch.cuda.Event(), time.monotonic() + self.wanted.timeout
        done.record()
        while not done.query():
            if time.monotonic() > end:
                raise TransportError(f"this rank's GPU was not done after {self.wanted.timeout:g} s")

    def described(self) -> dict[str, Any]:
        """The hardware of all ranks, each kind once, and how they are spread over it."""
        is_gpu = self.device.type == "cuda"
        gpu = str(torch.cuda.get_device_properties(self.device).uuid) if is_gpu else None
        node = socket.gethostname(), os.environ.get("GROUP_RANK", "0")
        here = machine(self.device)
        name = here["device"] if is_gpu else f"{here['processor']}, {here['cores']} cores"
        said = self.all_say((node, gpu, name))
        return {
            "hardware": "; ".join(sorted({name for _, _, name in said})),
            "backend": "nccl" if is_gpu else "gloo",
            "ranks": self.size,
            "nodes": len({node for node, _, _ in said}),
            "shares_a_gpu": is_gpu and len({(node, gpu) for node, gpu, _ in said}) < self.size,
        }
