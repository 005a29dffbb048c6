"""Time of the engine, and beside it the time in which others were made up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds between `running`'s ends, those within `aside` counted apart: on a GPU by its own events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._whole: list[tuple[object, object]] = []
        self._apart: list[tuple[object, object]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        start = self._now()
        yield
        self._whole.append((start, self._now()))

    @contextmanager
    def aside(self) -> Iterator[None]:
        start = self._now()
        yield
        self._apart.append((start, self._now()))

    def seconds(self) -> tuple[float, float]:
        """(of the engine, aside)."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        whole, apart = (sum(_between(*ends) for ends in spans) for spans in (self._whole, self._apart))
        return whole - apart, apart

    def _now(self) -> object:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between(start: object, end: object) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return start.elapsed_time(end) / 1e3
