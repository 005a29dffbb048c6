"""Ranks as threads of one process: a real exchange of messages, for laptops, tests and `simulate`.

A letter is opened when its receiver waits for it, as late as the contract allows, so that a sender that
overwrites a buffer too early is caught. With `take_turns` a rank computes only while it holds the turn, and
hands it on while it waits: each rank then has all the cores, one after the other.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import ArgumentError, Disagreement, PeerLost, TransportError
from ..interrupts import held_back
from .contract import Receives, Sends, Terms

T = TypeVar("T")

_GRACE = 2.0  # seconds that ranks which compute have to end, once the caller was interrupted
_SLICE = 0.05  # seconds between two moments at which the caller hears Ctrl-C


@dataclass
class _Letter:
    tensor: Tensor
    terms: Terms
    opened: bool = False
    refused: Terms | None = None  # those of its receiver, which makes another call


@dataclass
class _World:
    """What the ranks share. Everything in it but `turn` is read and written under its lock."""

    size: int
    node_ranks: int
    turn: threading.Lock | None  # who holds it computes; taken and given back only without the lock
    running: int = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)
    bells: list[threading.Condition] = field(init=False)  # one per rank, rung when it may go on
    letters: dict[tuple[int, int, int], _Letter] = field(default_factory=dict)  # by sender, receiver, number
    waiting: dict[int, Callable[[], bool]] = field(default_factory=dict)  # by rank: what it waits for
    failure: tuple[int | None, BaseException] | None = None  # of which rank; None: of the caller

    def __post_init__(self) -> None:
        self.running = self.size
        self.bells = [threading.Condition(self.lock) for _ in range(self.size)]

    def ring_all(self) -> None:
        for bell in self.bells:
            bell.notify()

    def fail(self, rank: int | None, error: BaseException) -> None:
        """The first failure counts. Every rank that waits raises."""
        with self.lock:
            self.failure = self.failure or (rank, error)
            self.ring_all()

    @property
    def is_given_up(self) -> bool:
        """Whether the caller was interrupted: then no rank goes on, even where what it waits for is there."""
        return self.failure is not None and self.failure[0] is None

    def is_stuck(self) -> bool:
        """Whether every rank waits for something that no rank is left to do."""
        return len(self.waiting) == self.running and not any(there() for there in self.waiting.values())

    @contextmanager
    def turn_handed_on(self) -> Iterator[None]:
        if self.turn is None:
            yield
            return
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()


class Loopback:
    """One rank of a world of threads."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._thread = 0  # of the rank's program, once it runs
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

    @property
    def node_ranks(self) -> int:
        return self._world.node_ranks

    @property
    def members(self) -> tuple[int, ...]:
        return (id(self._world), *range(self.size))  # the same ranks of another world are others

    def decline(self, error: Exception) -> None:
        """Nothing to do: the others learn of what a rank raises when they wait for it."""

    def converse(self, terms: Terms, *, timeout: float | None = None) -> _Talk:
        return _Talk(self, terms, timeout)

    def _post(self, sends: Sends, receives: Receives, what: str, terms: Terms, timeout: float | None) -> _InFlight:
        for peer, tensor in (*sends, *receives):
            _check_message(self, peer, tensor)
        self._check_thread()
        with self._world.lock:
            posted = [(peer, self._send(peer, tensor, terms)) for peer, tensor in sends]
        expected = []
        for peer, buffer in receives:
            expected.append((peer, self._expected[peer], buffer))
            self._expected[peer] += 1
        return _InFlight(self, posted, expected, what, terms, timeout)

    def _send(self, peer: int, tensor: Tensor, terms: Terms) -> _Letter:
        letter = _Letter(tensor, terms)
        self._world.letters[self.rank, peer, self._sent[peer]] = letter
        self._sent[peer] += 1
        self.bytes_sent += tensor.nbytes
        self._world.bells[peer].notify()
        return letter

    def _check_thread(self) -> None:
        """On a GPU, autograd runs every rank's backward in one thread of its own: they would wait for each other."""
        if threading.get_ident() != self._thread:
            raise TransportError(
                f"rank {self.rank} is a thread, and was called from another one, as autograd does in a backward on a "
                "GPU; use longring.simulate, which plays all ranks in one backward"
            )


@dataclass(frozen=True)
class _Talk:
    """One call's letters: each carries the terms of its call, which its receiver compares with its own."""

    transport: Loopback
    terms: Terms
    timeout: float | None

    def post(self, sends: Sends, receives: Receives, *, what: str) -> _InFlight:
        return self.transport._post(sends, receives, what, self.terms, self.timeout)

    def __enter__(self) -> _Talk:
        return self

    def __exit__(self, *error: object) -> None:
        return None


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
    terms: Terms
    timeout: float | None

    def wait(self) -> None:
        world, rank = self.transport._world, self.transport.rank
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        for peer, number, buffer in self.expected:
            place = (peer, rank, number)
            self._until(lambda place=place: place in world.letters, peer, deadline)
            with world.lock:
                letter = world.letters.pop(place)
            self._open(peer, letter, buffer)
            del letter  # its sender may free what it brought
        for peer, letter in self.posted:
            self._until(lambda letter=letter: letter.opened or letter.refused is not None, peer, deadline)
            if letter.refused is not None:
                self._check_terms(peer, letter.refused)

    def _open(self, peer: int, letter: _Letter, buffer: Tensor) -> None:
        world, rank = self.transport._world, self.transport.rank
        try:
            self._check_terms(peer, letter.terms)
        except Disagreement:
            with world.lock:  # its sender may hear nothing else of this rank
                letter.refused = self.terms
                world.bells[peer].notify()
            raise
        if letter.tensor.shape != buffer.shape or letter.tensor.dtype != buffer.dtype:
            raise TransportError(
                f"rank {rank} expected {_spoken(buffer)} from rank {peer} ({self.what}), which sent "
                f"{_spoken(letter.tensor)}; all ranks must call with the same lengths, heads, dtype and pattern"
            )
        buffer.copy_(letter.tensor)
        with world.lock:
            letter.opened = True
            world.bells[peer].notify()

    def _check_terms(self, peer: int, theirs: Terms) -> None:
        """Both sides must speak of the same call."""
        if self.terms is theirs or self.terms == theirs:
            return
        both = ((name, self.terms.get(name), theirs.get(name)) for name in {**self.terms, **theirs})
        differences = "; ".join(f"{name}: {_short(a)} here, {_short(b)} there" for name, a, b in both if a != b)
        raise Disagreement(
            f"rank {self.transport.rank} and rank {peer} disagree ({self.what}): {differences}; "
            "all ranks must make the same call"
        )

    def _until(self, there: Callable[[], bool], peer: int, deadline: float | None) -> None:
        """Hand the turn on until `there`, a peer's failure, the deadline, or the moment when all wait in vain."""
        world = self.transport._world
        with world.turn_handed_on(), world.lock:
            while world.is_given_up or not there():
                self._check_hope(peer, deadline)
                left = None if deadline is None else deadline - time.monotonic()
                world.waiting[self.transport.rank] = there
                try:
                    if world.is_stuck():
                        raise PeerLost(
                            f"rank {self.transport.rank} waits for rank {peer} ({self.what}), and no rank is left that "
                            "could go on: all ranks must make the same calls in the same order"
                        )
                    world.bells[self.transport.rank].wait(left)
                finally:
                    del world.waiting[self.transport.rank]

    def _check_hope(self, peer: int, deadline: float | None) -> None:
        world, rank = self.transport._world, self.transport.rank
        if world.failure is not None:
            lost, reason = world.failure
            who = "the caller" if lost is None else f"rank {lost}"
            raise PeerLost(f"rank {rank} waited for rank {peer} ({self.what}), but {who} failed: {reason}")
        if deadline is not None and time.monotonic() >= deadline:
            raise PeerLost(f"rank {rank} waited {self.timeout:g} s for rank {peer} ({self.what}): no answer")


def _spoken(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_node_ranks(node_ranks: int | None, size: int) -> int:
    """How many ranks a node has: all of them, or what was said."""
    if node_ranks is None:
        return size
    if not isinstance(node_ranks, int) or isinstance(node_ranks, bool) or node_ranks < 1 or size % node_ranks:
        raise ArgumentError(f"node_ranks must divide the {size} ranks, got {node_ranks!r}")
    return node_ranks


def run_ranks(
    size: int,
    program: Callable[[Loopback], T],
    *,
    node_ranks: int | None = None,
    take_turns: bool = False,
    context: Callable[[Loopback], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> list[T]:
    """Run the same program on every rank of a new world, and return what each returned, in order of rank.

    When a rank raises, the others stop waiting for it, and the first error is raised here. Grad mode is
    that of the caller. `node_ranks` consecutive ranks pass for close to each other. With `take_turns` only one
    rank computes at a time: a program that waits for another rank by other means than its group must not ask
    for that. `context` is entered in each rank's thread.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ArgumentError(f"size must be a whole number of ranks of at least 1, got {size!r}")
    world = _World(size, check_node_ranks(node_ranks, size), threading.Lock() if take_turns else None)
    results: list[T | None] = [None] * size
    grad_enabled = torch.is_grad_enabled()

    def live(transport: Loopback) -> None:
        transport._thread = threading.get_ident()
        try:
            with world.turn or nullcontext(), torch.set_grad_enabled(grad_enabled), context(transport):
                if not world.is_given_up:
                    results[transport.rank] = program(transport)
        except BaseException as error:
            world.fail(transport.rank, error)
        finally:
            with world.lock:
                world.running -= 1
                world.ring_all()

    threads = [threading.Thread(target=live, args=[Loopback(world, rank)], name=f"rank {rank}") for rank in range(size)]
    _run(threads, world)
    if world.failure is not None:
        rank, error = world.failure
        error.add_note(f"raised on rank {rank} of {size}")
        raise error
    return results  # type: ignore[return-value]


def _run(threads: list[threading.Thread], world: _World) -> None:
    """Start all and see them end. An interrupted caller tells them: they would wait for ranks that never start."""
    with held_back() as hear:
        try:
            for thread in threads:
                hear()
                thread.start()
            _join(threads, hear)
        except BaseException as error:
            world.fail(None, error)
            _join([thread for thread in threads if thread.ident], hear, within=_GRACE)
            raise


def _join(threads: list[threading.Thread], hear: Callable[[], None], within: float = math.inf) -> None:
    end = time.monotonic() + within
    for thread in threads:
        while thread.is_alive() and time.monotonic() < end:
            thread.join(_SLICE)
            hear()
