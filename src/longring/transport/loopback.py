"""Ranks as threads of one process: a real exchange of messages, for laptops, tests and `simulate`.

A rank computes only while it holds the world's lock, and hands it on while it waits for a letter: ranks
take turns, each with all the cores, and a run is the same every time. A letter is opened when its
receiver waits for it, as late as the contract allows, so that a sender that overwrites a buffer too
early is caught.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import LongringError, PeerLost, TransportError

T = TypeVar("T")


@dataclass
class _Letter:
    tensor: Tensor
    opened: bool = False


@dataclass
class _World:
    """What the ranks share. Everything in it is read and written under its lock."""

    size: int
    running: int
    turn: threading.Lock = field(default_factory=threading.Lock)
    bells: list[threading.Condition] = field(init=False)  # one per rank, rung when it may go on
    letters: dict[tuple[int, int, int], _Letter] = field(default_factory=dict)  # by sender, receiver, number
    waiting: dict[int, Callable[[], bool]] = field(default_factory=dict)  # by rank: what it waits for
    failure: tuple[int, BaseException] | None = None

    def __post_init__(self) -> None:
        self.bells = [threading.Condition(self.turn) for _ in range(self.size)]

    def ring_all(self) -> None:
        for bell in self.bells:
            bell.notify()

    def is_stuck(self) -> bool:
        """Whether every rank waits for something that no rank is left to do."""
        return len(self.waiting) == self.running and not any(there() for there in self.waiting.values())


class Loopback:
    """One rank of a world of threads."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._sent: dict[int, int] = defaultdict(int)  # letters so far, by receiver
        self._expected: dict[int, int] = defaultdict(int)  # letters so far, by sender
        self.bytes_sent = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._world.size

    def __repr__(self) -> str:
        return f"Loopback(rank {self.rank} of {self.size})"

    def post(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        *,
        what: str,
        timeout: float | None = None,
    ) -> _InFlight:
        posted = []
        for peer, tensor in sends:
            _check_message(self, peer, tensor)
            letter = _Letter(tensor)
            self._world.letters[self.rank, peer, self._sent[peer]] = letter
            self._sent[peer] += 1
            self.bytes_sent += tensor.nbytes
            posted.append((peer, letter))
            self._world.bells[peer].notify()
        expected = []
        for peer, buffer in receives:
            _check_message(self, peer, buffer)
            expected.append((peer, self._expected[peer], buffer))
            self._expected[peer] += 1
        return _InFlight(self, posted, expected, what, timeout)


def _check_message(transport: Loopback, peer: int, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise TransportError(f"rank {transport.rank} can only send and receive contiguous tensors")
    if not 0 <= peer < transport.size or peer == transport.rank:
        raise TransportError(f"rank {transport.rank} of {transport.size} cannot exchange a message with rank {peer}")


@dataclass
class _InFlight:
    transport: Loopback
    posted: list[tuple[int, _Letter]]
    expected: list[tuple[int, int, Tensor]]
    what: str
    timeout: float | None

    def wait(self) -> None:
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        for peer, number, buffer in self.expected:
            self._open(peer, number, buffer, deadline)
        for peer, letter in self.posted:
            self._until(lambda letter=letter: letter.opened, peer, deadline)

    def _open(self, peer: int, number: int, buffer: Tensor, deadline: float | None) -> None:
        world, rank = self.transport._world, self.transport.rank
        place = (peer, rank, number)
        self._until(lambda: place in world.letters, peer, deadline)
        letter = world.letters.pop(place)
        if letter.tensor.shape != buffer.shape or letter.tensor.dtype != buffer.dtype:
            raise TransportError(
                f"rank {rank} expected {_spoken(buffer)} from rank {peer} ({self.what}), which sent "
                f"{_spoken(letter.tensor)}; all ranks must call with the same lengths, heads, dtype and pattern"
            )
        buffer.copy_(letter.tensor)
        letter.opened = True
        world.bells[peer].notify()

    def _until(self, there: Callable[[], bool], peer: int, deadline: float | None) -> None:
        """Hand the turn on until `there`, a peer's failure, the deadline, or the moment when all wait in vain."""
        world, rank = self.transport._world, self.transport.rank
        while not there():
            if world.failure is not None:
                lost, reason = world.failure
                raise PeerLost(f"rank {rank} waited for rank {peer} ({self.what}), but rank {lost} failed: {reason}")
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise PeerLost(f"rank {rank} waited {self.timeout:g} s for rank {peer} ({self.what}): no answer")
            world.waiting[rank] = there
            try:
                if world.is_stuck():
                    raise PeerLost(
                        f"rank {rank} waits for rank {peer} ({self.what}), and no rank is left that could go on: "
                        "all ranks must make the same calls in the same order"
                    )
                world.bells[rank].wait(left)
            finally:
                del world.waiting[rank]


def _spoken(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def run_ranks(
    size: int,
    program: Callable[[Loopback], T],
    *,
    context: Callable[[Loopback], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> list[T]:
    """Run the same program on every rank of a new world, and return what each returned, in order of rank.

    When a rank raises, the others stop waiting for it, and the first error is raised here. Grad mode is
    that of the caller. `context` is entered in each rank's thread, around its program.
    """
    if size < 1:
        raise TransportError(f"a world has at least one rank, got {size}")
    world = _World(size, running=size)
    results: list[T | None] = [None] * size
    grad_enabled = torch.is_grad_enabled()

    def live(transport: Loopback) -> None:
        with world.turn:
            try:
                with torch.set_grad_enabled(grad_enabled), context(transport):
                    results[transport.rank] = program(transport)
            except BaseException as error:
                if world.failure is None:
                    world.failure = (transport.rank, error)
            finally:
                world.running -= 1
                world.ring_all()

    threads = [threading.Thread(target=live, args=[Loopback(world, rank)], name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failure is not None:
        rank, error = world.failure
        if not isinstance(error, LongringError):
            error.add_note(f"raised on rank {rank} of {size}")
        raise error
    return results  # type: ignore[return-value]
