"""Stand-ins for CUDA streams and symmetric memory: threads that do one thing after the other, and a shared file.

What runs on them is the transport itself, with its lanes, its vigil and its rescue, in real processes.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longring.transport.lanes import Plan, Shared
from longring.transport.symmetric import Region


class Mark:
    def __init__(self) -> None:
        self._passed = threading.Event()

    def query(self) -> bool:
        return self._passed.is_set()

    def put(self) -> None:
        self._passed.set()

    def wait(self) -> None:
        self._passed.wait()


class ThreadBelt:
    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._tasks.get()()

    def follow(self, mark: Mark) -> None:
        self._tasks.put(mark.wait)

    def copy(self, into: Tensor, source: Tensor) -> None:
        assert into.shape == source.shape
        assert into.dtype == source.dtype == torch.uint8
        self._tasks.put(lambda: into.copy_(source))

    def fill(self, into: Tensor, byte: int) -> None:
        self._tasks.put(lambda: into.fill_(byte))

    def write(self, flag: Tensor, value: int) -> None:
        self._tasks.put(lambda: flag.fill_(_wrapped(value)))

    def wait(self, flag: Tensor, value: int) -> None:
        def until() -> None:
            while _wrapped(int(flag.item()) - value) < 0:
                time.sleep(0.0002)

        self._tasks.put(until)

    def mark(self) -> Mark:
        mark = Mark()
        self._tasks.put(mark.put)
        return mark


def _wrapped(value: int) -> int:
    """As 32 bits with a sign."""
    return (value + 2**31) % 2**32 - 2**31


class ThreadShore:
    """Where the caller computes at once, a mark has passed when it is made, and to hand over is to wait."""

    device = torch.device("cpu")

    def belt(self) -> ThreadBelt:
        return ThreadBelt()

    def rescuers(self) -> list[ThreadBelt]:
        """The first is held up for ever, as one may be that shares a queue with what waits."""
        held_up, free = ThreadBelt(), ThreadBelt()
        held_up.follow(Mark())
        return [held_up, free]

    def computed(self) -> Mark:
        mark = Mark()
        mark.put()
        return mark

    def hand_over(self, mark: Mark) -> None:
        mark.wait()


def shared(path: str, plan: Plan) -> Shared:
    size = plan.flags_bytes + plan.lanes_bytes
    whole = torch.from_file(path, shared=True, size=plan.size * size, dtype=torch.uint8).view(plan.size, size)
    return Shared(plan, [each[: plan.flags_bytes] for each in whole], [each[plan.flags_bytes :] for each in whole])


def region_of(group: Any, outbox: int) -> Region:
    """In every rank of a world of processes."""
    plan = Plan(dist.get_world_size(group), outbox)
    said: list[Any] = [None] * plan.size
    path = None
    if dist.get_rank(group) == 0:
        handle, path = tempfile.mkstemp(prefix="longring-belts-")
        os.truncate(handle, plan.size * (plan.flags_bytes + plan.lanes_bytes))
    dist.all_gather_object(said, (os.getpid(), path), group=group)
    memories = shared(said[0][1], plan)
    dist.barrier(group)
    if path is not None:
        os.unlink(path)
    processes = {rank: process for rank, (process, _) in enumerate(said)}
    return Region(dist.get_rank(group), memories, ThreadShore(), processes)
