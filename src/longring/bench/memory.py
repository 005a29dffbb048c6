"""Peak memory on the CPU, read off the allocator's own events: workspaces inside kernels are included."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


@dataclass
class Peak:
    """Bytes allocated at most at one time, since the measurement began; set when it ends."""

    bytes: int = 0
    until: dict[str, int] = field(default_factory=dict)  # the same up to each mark
    marks: dict[str, int] = field(default_factory=dict)  # when each was made, in nanoseconds of the system's clock

    def mark(self, name: str) -> None:
        """From here on `until[name]` does not grow."""
        self.marks[name] = time.time_ns()


@contextmanager
def measured_peak() -> Iterator[Peak]:
    """Follow every allocation of the current thread. Only one measurement can run at a time in a process."""
    peak = Peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        yield peak
    events = _events(prof)
    peak.bytes = _highest(events)
    peak.until = {name: _highest([event for event in events if event[0] <= at]) for name, at in peak.marks.items()}


def _events(prof: Any) -> list[tuple[int, int, int]]:
    return sorted(_allocations(prof.profiler.kineto_results.experimental_event_tree()))


def _highest(events: list[tuple[int, int, int]]) -> int:
    live = highest = 0
    sizes: dict[int, int] = {}
    for _, address, size in events:
        if size > 0:
            sizes[address] = size
            live += size
        else:  # what was allocated before the measurement and is freed in it does not make room
            live -= sizes.pop(address, 0)
        highest = max(highest, live)
    return highest


def _allocations(events: Any) -> Iterator[tuple[int, int, int]]:
    """(time, address, bytes; negative where freed) of every event on the CPU."""
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device == torch.device("cpu"):
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
