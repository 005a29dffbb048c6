"""Peak memory on the CPU, read off the allocator's own events: workspaces inside kernels are included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


@dataclass
class Peak:
    """Bytes allocated at most at one time, since the measurement began; set when it ends."""

    bytes: int = 0


@contextmanager
def measured_peak() -> Iterator[Peak]:
    """Follow every allocation of the current thread. Only one measurement can run at a time in a process."""
    peak = Peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        yield peak
    peak.bytes = _highest(prof)


def _highest(prof: Any) -> int:
    live = highest = 0
    sizes: dict[int, int] = {}
    for _, address, size in sorted(_allocations(prof.profiler.kineto_results.experimental_event_tree())):
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
