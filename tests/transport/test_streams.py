"""How a message crosses from the caller's stream to the transport's and back, with stand-ins for CUDA."""

from contextlib import contextmanager

import pytest
import torch

from longring.transport import streams


class Calls(list):
    def note(self, *what):
        self.append(what)


@pytest.fixture
def calls(monkeypatch):
    seen = Calls()
    names = iter(["computed", "done"] * 2)

    class Stream:
        def __init__(self, device):
            self.name = f"transport's on {device}"

        def wait_event(self, event):
            seen.note("waits", self.name, event.name)

    class Event:
        def __init__(self):
            self.name, self.asked = next(names), 0

        def record(self, stream):
            seen.note("recorded", self.name, stream.name)

        def query(self):
            self.asked += 1
            return self.asked > 2

    current = Stream("the device")
    current.name = "caller's"

    @contextmanager
    def entered(what):
        seen.note("entered", getattr(what, "name", str(what)))
        yield

    monkeypatch.setattr(streams, "_streams", {})
    for name, stand_in in {"Stream": Stream, "Event": Event, "device": entered, "stream": entered}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    return seen


def test_a_post_on_a_device_follows_what_computed_it_and_the_caller_follows_the_post(calls):
    crossing = streams.OnDevice(torch.device("cuda", 0))
    with crossing.posting():
        calls.note("posted")
        crossing.mark_done()
    crossing.watch()
    crossing.hand_over()
    transports = "transport's on cuda:0"
    assert calls == [
        ("recorded", "computed", "caller's"),
        ("entered", "cuda:0"),
        ("entered", transports),
        ("waits", transports, "computed"),
        ("posted",),
        ("recorded", "done", transports),
        ("waits", "caller's", "done"),
    ]


def test_one_stream_for_each_device(calls):
    first, second = (streams.OnDevice(torch.device("cuda", 1)) for _ in range(2))
    assert first._stream is second._stream


def test_tensors_say_where_they_cross():
    assert isinstance(streams.crossing([]), streams.OnHost)
    assert isinstance(streams.crossing([torch.zeros(1)]), streams.OnHost)


def test_the_host_has_nothing_to_cross():
    crossing = streams.crossing([torch.zeros(1)])
    assert not crossing.is_by_stream
    with crossing.posting():
        crossing.mark_done()
    crossing.watch()
    crossing.hand_over()
