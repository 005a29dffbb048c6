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
_SEEN_BY_ALL = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
_POINTER = ctypes.c_uint64
_ARGUMENTS: dict[str, list[Any]] = {
    "cuStreamWaitValue32_v2": [ctypes.c_void_p, _POINTER, ctypes.c_uint32, ctypes.c_uint],
    "cuStreamWriteValue32_v2": [ctypes.c_void_p, _POINTER, ctypes.c_uint32, ctypes.c_uint],
    "cuMemsetD8Async": [_POINTER, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p],
    "cuMemHostGetDevicePointer_v2": [ctypes.POINTER(_POINTER), ctypes.c_void_p, ctypes.c_uint],
    "cuCtxGetCurrent": [ctypes.POINTER(ctypes.c_void_p)],
    "cuCtxSetCurrent": [ctypes.c_void_p],
}


@cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return library


def _runtime() -> Any:
    return torch.cuda.cudart()


def _ask(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = f"{name} failed with error {code} of the CUDA driver"
        raise TransportError(f"{text}; LONGRING_TRANSPORT=staged goes another way")


def register(flags: Tensor) -> None:
    """Let the GPU reach flags on the host, under the address they have there."""
    code = _runtime().cudaHostRegister(flags.data_ptr(), flags.nbytes, _SEEN_BY_ALL)
    if int(code):
        raise TransportError(f"cudaHostRegister failed with error {int(code)}")
    address = _POINTER()
    _ask("cuMemHostGetDevicePointer_v2", ctypes.byref(address), flags.data_ptr(), 0)
    if address.value != flags.data_ptr():
        raise TransportError("the GPU has other addresses for memory of the host than the host itself")


def unregister(flags: Tensor) -> None:
    _runtime().cudaHostUnregister(flags.data_ptr())


def obstacle() -> str | None:
    """Why there can be no such belts here; None where there can."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "no NVIDIA GPU is available"
    try:
        _driver()
    except (OSError, AttributeError) as error:
        return f"the CUDA driver cannot be used ({error})"
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
        """Not by a kernel: loading one may wait for streams that wait for this."""
        _ask("cuMemsetD8Async", into.data_ptr(), byte, into.nbytes, self._stream.cuda_stream)

    def write(self, flag: Tensor, value: int) -> None:
        _ask("cuStreamWriteValue32_v2", self._stream.cuda_stream, flag.data_ptr(), value % 2**32, _IN_ORDER)

    def wait(self, flag: Tensor, value: int) -> None:
        _ask("cuStreamWaitValue32_v2", self._stream.cuda_stream, flag.data_ptr(), value % 2**32, _AT_LEAST)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


class CudaShore:
    """Where belts begin and end: the caller's own stream."""

    def __init__(self, device: torch.device) -> None:
        """In a thread that has used the device."""
        self.device = device
        self._context = ctypes.c_void_p()
        _ask("cuCtxGetCurrent", ctypes.byref(self._context))

    def belt(self) -> CudaBelt:
        return CudaBelt(self.device)

    def rescuers(self) -> list[CudaBelt]:
        """Of the usual priority, apart from all that wait for flags; so many that one is apart from who computes."""
        _ask("cuCtxSetCurrent", self._context)  # a carrier may not have used the device
        return [CudaBelt(self.device, _USUAL) for _ in range(_QUEUES)]

    def computed(self) -> torch.cuda.Event:
        """A mark behind all that the caller has asked for so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def hand_over(self, mark: torch.cuda.Event) -> None:
        """What the caller asks for from now on comes after the mark."""
        torch.cuda.current_stream(self.device).wait_event(mark)
