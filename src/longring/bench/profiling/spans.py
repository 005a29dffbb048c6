"""When a rank computed, sent, waited and merged: read off the engine's own labels."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from ...schedules.labels import Activity, Doing
from ...transport.journal import Entry, Journal

Interval = tuple[float, float]
Messages = tuple[tuple[int, int], ...]  # (peer, bytes), in the order they were posted


class Span(NamedTuple):
    """A stretch of one rank's time, in seconds of the monotonic clock."""

    kind: str  # "compute", "post", "wait" or "merge"; "send" is beside them, from a post until it is done
    what: str
    phase: str
    step: int | None
    start: float
    end: float
    sends: Messages = ()
    receives: Messages = ()

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.sends)

    def moved(self, seconds: float) -> Span:
        return self._replace(start=self.start + seconds, end=self.end + seconds)


class Clock(Protocol):
    """Marks that are set in passing and read when all is over."""

    def mark(self) -> Any: ...

    def read(self, mark: Any) -> float:
        """Seconds of the monotonic clock."""
        ...


class HostClock:
    """Where computing is over when its call returns."""

    def mark(self) -> float:
        return time.monotonic()

    def read(self, mark: float) -> float:
        return mark


class DeviceClock:
    """Marks in the current CUDA stream: when the device was there, not when the host had asked for it."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._first = self.mark()
        self._first.synchronize()
        self._began = time.monotonic()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, mark: torch.cuda.Event) -> float:
        return self._began + self._first.elapsed_time(mark) / 1e3


class _Noted(NamedTuple):
    """An activity, without its tensors: nothing lives longer because it is watched."""

    kind: str
    doing: Doing
    start: Any
    end: Any
    sends: Messages
    receives: Messages
    entry: Entry | None  # of a post


class Recorder:
    """A watcher that notes every activity. What it gives is complete once the device and the carriers are done."""

    def __init__(self, clock: Clock, journal: Journal) -> None:
        self._clock, self._journal = clock, journal
        self._noted: list[_Noted] = []

    @contextmanager
    def __call__(self, activity: Activity) -> Iterator[None]:
        start = self._clock.mark()
        try:
            yield
        finally:
            end = self._clock.mark()
            entry = self._journal.entries[-1] if activity.kind == "post" and self._journal.entries else None
            sends, receives = (
                tuple((peer, x.nbytes) for peer, x in some) for some in (activity.sends, activity.receives)
            )
            self._noted.append(_Noted(activity.kind, activity.doing, start, end, sends, receives, entry))

    def spans(self) -> list[Span]:
        """What the rank did, and what was under way meanwhile."""
        return [span for noted in self._noted for span in self._spans(noted)]

    def boundaries(self) -> list[float]:
        """Beginning and end of every activity of the rank itself, in order."""
        return [self._clock.read(mark) for noted in self._noted for mark in (noted.start, noted.end)]

    def _spans(self, noted: _Noted) -> Iterator[Span]:
        doing, start, end = noted.doing, self._clock.read(noted.start), self._clock.read(noted.end)
        yield Span(noted.kind, doing.words, doing.phase, doing.step, start, end)
        if noted.entry is not None:
            began = max(start, noted.entry.posted_at)  # on a GPU the host posts before the device has what is sent
            done = max(began, end if noted.entry.done_at is None else noted.entry.done_at)
            yield Span("send", doing.words, doing.phase, doing.step, began, done, noted.sends, noted.receives)


# ----------------------------------------------------------------------------------------------- what was hidden


def under_way(spans: Iterable[Span]) -> float:
    """Seconds in which at least one message of the rank was under way."""
    return _length(_union(_of(spans, "send")))


def exposed(spans: Sequence[Span]) -> float:
    """Of these the seconds in which the rank did nothing but wait."""
    return sum(_length(_cut(wait, _union(_of(spans, "send")))) for wait in _union(_of(spans, "wait")))


def hidden_share(ranks: Iterable[Sequence[Span]]) -> float | None:
    """The share of the time with messages under way in which ranks had something else to do; None without messages."""
    moving, waiting = 0.0, 0.0
    for spans in ranks:
        moving += under_way(spans)
        waiting += exposed(spans)
    return 1 - waiting / moving if moving else None


def _of(spans: Iterable[Span], kind: str) -> list[Interval]:
    return [(span.start, span.end) for span in spans if span.kind == kind]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _cut(one: Interval, intervals: Iterable[Interval]) -> list[Interval]:
    found = ((max(one[0], start), min(one[1], end)) for start, end in intervals)
    return [(start, end) for start, end in found if start < end]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
