"""What a belt asks of the CUDA driver, with a stand-in for it."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from longring.errors import TransportError
from longring.transport import driver


@pytest.fixture
def asked(monkeypatch):
    """Every call, as (name, arguments)."""
    seen = []

    class Stand:
        code = 0

        def __getattr__(self, name):
            return lambda *arguments: seen.append((name, *arguments)) or self.code

    class Stream:
        def __init__(self, device, priority):
            self.cuda_stream = 1000 - priority

        def wait_event(self, event):
            seen.append(("follows", event))

    @contextmanager
    def entered(stream):
        seen.append(("on", stream.cuda_stream))
        yield

    stand = Stand()
    monkeypatch.setattr(driver, "_driver", lambda: stand)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    return SimpleNamespace(seen=seen, stand=stand)


def test_a_belt_does_everything_on_its_stream(asked):
    belt, flag = driver.CudaBelt(torch.device("cuda", 0)), torch.zeros(1, dtype=torch.int32)
    into, source = torch.zeros(8, dtype=torch.uint8), torch.arange(8, dtype=torch.uint8)
    belt.follow("a mark")
    belt.wait(flag, 2**32 + 5)
    belt.copy(into, source)
    belt.write(flag, 6)
    belt.fill(into, 255)
    assert into.equal(source)
    assert asked.seen == [
        ("follows", "a mark"),
        ("cuStreamWaitValue32_v2", 1001, flag.data_ptr(), 5, 0),
        ("on", 1001),
        ("cuStreamWriteValue32_v2", 1001, flag.data_ptr(), 6, 0),
        ("cuMemsetD8Async", into.data_ptr(), 255, 8, 1001),
    ]


def test_what_the_driver_refuses_is_said(asked):
    asked.stand.code = 801
    with pytest.raises(TransportError, match=r"WaitValue32_v2 failed with error 801 .*LONGRING_TRANSPORT=staged"):
        driver.CudaBelt(torch.device("cuda", 0)).wait(torch.zeros(1, dtype=torch.int32), 1)


def test_rescuers_use_the_context_of_the_shore_and_the_usual_priority(asked):
    rescuers = driver.CudaShore(torch.device("cuda", 0)).rescuers()
    assert {rescuer._stream.cuda_stream for rescuer in rescuers} == {1000}
    assert [call[0] for call in asked.seen] == ["cuCtxGetCurrent", "cuCtxSetCurrent"]


@pytest.mark.parametrize(("code", "shift", "said"), [(1, 0, "Register failed with error 1"), (0, 64, "other add")])
def test_flags_that_the_gpu_cannot_reach_are_refused(asked, monkeypatch, code, shift, said):
    flags = torch.zeros(4096, dtype=torch.uint8)

    def pointer(address, host, _):
        address._obj.value = host + shift
        return 0

    asked.stand.cuMemHostGetDevicePointer_v2 = pointer
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *arguments: code))
    with pytest.raises(TransportError, match=said):
        driver.register(flags)


def test_without_a_gpu_there_are_no_belts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert driver.obstacle() == "no NVIDIA GPU is available"
