"""When the numbers are there: at once on the CPU, by events on a CUDA stream of its own on a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Crossing(Protocol):
    """The way of one post from the caller's stream to the transport's and back."""

    is_by_stream: bool  # waiting for a message makes the stream wait, not the host

    def posting(self) -> AbstractContextManager[None]:
        """A context to post in, in a carrier: what is sent is computed by then."""
        ...

    def mark_done(self) -> None:
        """In that context: what was posted so far is what the caller waits for."""
        ...

    def watch(self) -> None:
        """In a carrier: return when the transfer itself is over."""
        ...

    def hand_over(self) -> None:
        """In the caller: what it does from now on comes after the transfer."""
        ...


class OnHost:
    """The CPU has no streams: a message that was waited for is there."""

    is_by_stream = False

    def posting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark_done(self) -> None: ...

    def watch(self) -> None: ...

    def hand_over(self) -> None: ...


_streams: dict[int, torch.cuda.Stream] = {}


class OnDevice:
    """Made in the caller. The host never waits for the device, except a carrier that watches."""

    is_by_stream = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.index not in _streams:
            _streams[device.index] = torch.cuda.Stream(device)
        self._stream = _streams[device.index]
        self._computed, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._computed.record(torch.cuda.current_stream(device))

    @contextmanager
    def posting(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed)
            yield

    def mark_done(self) -> None:
        self._done.record(self._stream)

    def watch(self) -> None:
        while not self._done.query():
            time.sleep(0.0005)

    def hand_over(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)


def crossing(tensors: list[Tensor]) -> Crossing:
    """Of the tensors of one post, which are on one device."""
    return OnDevice(tensors[0].device) if tensors and tensors[0].device.type == "cuda" else OnHost()
