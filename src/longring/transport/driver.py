"""Belts that are CUDA streams: copies by the copy engines, flags by the driver's operations on stream memory.

A stream that waits for a flag occupies no multiprocessor and no thread of the host. Torch knows how to write a
flag but not how to wait for one, so both go to the driver itself.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..errors import TransportError

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: (int32)(*address - value) >= 0, which is right across an overflow
_IN_ORDER = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: with a fence before it
_NAMES = "cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"


@cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    for name in _NAMES:
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        function.restype = ctypes.c_int
    return library


def obstacle() -> str | None:
    """Why there can be no such belts here; None where there can."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "no NVIDIA GPU is available"
    try:
        _driver()
    except (OSError, AttributeError) as error:
        return f"the CUDA driver has no {' and '.join(_NAMES)} ({error})"
    return None


_URGENT, _USUAL = -1, 0
_QUEUES = 8  # of the hardware, if CUDA_DEVICE_MAX_CONNECTIONS does not say otherwise: more streams than that share them


class CudaBelt:
    """One stream. Of high priority, since such streams share no queue of the hardware with those that compute."""

    def __init__(self, device: torch.device, priority: int = _URGENT) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority)

    def follow(self, mark: Any) -> None:
        self._stream.wait_event(mark)

    def copy(self, into: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)

    def fill(self, into: Tensor, byte: int) -> None:
        with torch.cuda.stream(self._stream):
            into.fill_(byte)

    def write(self, flag: Tensor, value: int) -> None:
        self._ask("cuStreamWriteValue32_v2", flag, value, _IN_ORDER)

    def wait(self, flag: Tensor, value: int) -> None:
        self._ask("cuStreamWaitValue32_v2", flag, value, _AT_LEAST)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _ask(self, name: str, flag: Tensor, value: int, how: int) -> None:
        code = getattr(_driver(), name)(self._stream.cuda_stream, flag.data_ptr(), value % 2**32, how)
        if code:
            raise TransportError(
                f"{name} failed with error {code} of the CUDA driver; LONGRING_TRANSPORT=staged avoids it"
            )


class CudaShore:
    """Where belts begin and end: the caller's own stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def belt(self) -> CudaBelt:
        return CudaBelt(self.device)

    def rescuers(self) -> list[CudaBelt]:
        """Of the usual priority, apart from all that wait for flags; so many that one is apart from who computes."""
        return [CudaBelt(self.device, _USUAL) for _ in range(_QUEUES)]

    def computed(self) -> torch.cuda.Event:
        """A mark behind all that the caller has asked for so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def hand_over(self, mark: torch.cuda.Event) -> None:
        """What the caller asks for from now on comes after the mark."""
        torch.cuda.current_stream(self.device).wait_event(mark)
