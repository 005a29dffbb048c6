"""Where the time of a step goes: attention, messages, and the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ..schedules.labels import Activity

COMPUTING = ("compute", "merge")


class Meter:
    """Seconds that this rank computed attention, and that it sent and waited, since it was last read.

    On a GPU they are the stream's: the host only says what is to be done, and is elsewhere when it happens.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._attention: list[tuple[Any, Any]] = []
        self._messages: list[tuple[Any, Any]] = []

    def watch(self, activity: Activity) -> AbstractContextManager[None]:
        """As `longring.schedules.labels.watching` takes it."""
        return self._timed(self._attention if activity.kind in COMPUTING else self._messages)

    def messages(self) -> AbstractContextManager[None]:
        """A context in which this rank sends and waits for what is not attention's."""
        return self._timed(self._messages)

    def read(self) -> tuple[float, float]:
        """(seconds of attention, seconds of messages); then both begin at 0 again."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        attention, messages = (
            sum(self._seconds(*span) for span in spans) for spans in (self._attention, self._messages)
        )
        self._attention.clear()
        self._messages.clear()
        return attention, messages

    @contextmanager
    def _timed(self, spans: list[tuple[Any, Any]]) -> Iterator[None]:
        began = self._moment()
        try:
            yield
        finally:
            spans.append((began, self._moment()))

    def _moment(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, began: Any, ended: Any) -> float:
        return began.elapsed_time(ended) / 1000 if self._device.type == "cuda" else ended - began
