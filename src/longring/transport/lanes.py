"""Lanes: how messages of any size go through a few slots of memory that two ranks see.

A rank has a lane to every other. Its sender copies a piece of a message into a slot and says "ready: n"; the
receiver copies it out and says "taken: n", and the slot is free again. Pieces are counted on and on, and both ends
count alike, so that nothing but n need be said. Who waits for whom is left to a belt, which does one thing after
the other: a CUDA stream, without the host. But flags are in the host's memory, where a plain store can let go a belt
whose other end is lost.

A lane has belts of its own, one at each end: on a belt that several lanes shared, a piece for one rank would hold
up pieces for another, and ranks that send to each other in different orders would wait in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

SLOTS = 2  # while one is filled, the other is emptied
_PAGE = 4096
_FLAG = 64  # bytes from flag to flag


class Belt(Protocol):
    """Does what it is given in order, later, without the caller."""

    def follow(self, mark: Any) -> None:
        """Go on when another belt, or the caller's own work, has passed the mark."""
        ...

    def copy(self, into: Tensor, source: Tensor) -> None: ...

    def fill(self, into: Tensor, byte: int) -> None: ...

    def write(self, flag: Tensor, value: int) -> None:
        """After all that came before, as every other rank sees it."""
        ...

    def wait(self, flag: Tensor, value: int) -> None:
        """Go on when the flag has reached the value, counting modulo 2**32."""
        ...

    def mark(self) -> Any:
        """An event that has passed when all that was given so far is done; `query` asks, and does not wait."""
        ...


class Plan(NamedTuple):
    """How a rank's memories are divided: flags for each of the others, and a lane to each."""

    size: int
    outbox: int  # bytes of all lanes together, about

    @property
    def flags_bytes(self) -> int:
        return -(-2 * self.size * _FLAG // _PAGE) * _PAGE

    @property
    def slot(self) -> int:
        return max(_PAGE, self.outbox // (self.size - 1) // SLOTS // _PAGE * _PAGE)

    @property
    def lanes_bytes(self) -> int:
        return (self.size - 1) * SLOTS * self.slot

    def ready(self, flags: Tensor, sender: int) -> Tensor:
        """Among the receiver's flags: how many pieces the sender has sent."""
        return _flag(flags, 2 * sender)

    def taken(self, flags: Tensor, receiver: int) -> Tensor:
        """Among the sender's flags: how many pieces the receiver has taken."""
        return _flag(flags, 2 * receiver + 1)

    def lane(self, lanes: Tensor, sender: int, receiver: int) -> Tensor:
        """In the sender's memory: the slots to one receiver."""
        first = (receiver - (receiver > sender)) * SLOTS * self.slot
        return lanes[first : first + SLOTS * self.slot]


def _flag(flags: Tensor, number: int) -> Tensor:
    return flags[number * _FLAG : number * _FLAG + 4].view(torch.int32)


class Shared(NamedTuple):
    """The memories of all ranks, as one of them sees them."""

    plan: Plan
    flags: Sequence[Tensor]  # on the host
    lanes: Sequence[Tensor]


class Piece(NamedTuple):
    number: int  # of all that ever went this way
    slot: int
    part: range  # of the message, in bytes


class _Count:
    """Pieces of this lane so far, at one of its ends."""

    def __init__(self, slot: int) -> None:
        self._slot, self.pieces = slot, 0

    def cut(self, message: int) -> Iterator[Piece]:
        for first in range(0, message, self._slot):
            number, self.pieces = self.pieces, self.pieces + 1
            yield Piece(number, number % SLOTS, range(first, min(first + self._slot, message)))


def _signed(count: int) -> int:
    """The same 32 bits, with a sign."""
    return (count + 2**31) % 2**32 - 2**31


class _End:
    """One end of a lane. `other` is the rank at the other end."""

    def __init__(self, lane: Tensor, said: Tensor, heard: Tensor, belt: Belt, other: int) -> None:
        self._slots = lane.chunk(SLOTS)
        self._said, self.heard, self.belt, self.other = said, heard, belt, other
        self._count = _Count(self._slots[0].numel())

    @property
    def pieces(self) -> int:
        return self._count.pieces

    @property
    def slots(self) -> Sequence[Tensor]:
        return self._slots

    def let_go(self) -> None:
        """By the host: whatever this end waits for, it waits no more."""
        self.heard.fill_(_signed(self.pieces))


class Sending(_End):
    """Says "ready", hears "taken"."""

    @classmethod
    def over(cls, shared: Shared, rank: int, other: int, belt: Belt) -> Sending:
        plan, flags, lanes = shared
        lane = plan.lane(lanes[rank], rank, other)
        return cls(lane, plan.ready(flags[other], rank), plan.taken(flags[rank], other), belt, other)

    def move(self, message: Tensor) -> Iterator[None]:
        """Piece by piece; the message is bytes."""
        for number, slot, part in self._count.cut(message.numel()):
            if number >= SLOTS:
                self.belt.wait(self.heard, number - SLOTS + 1)  # the piece that was in this slot is taken
            self.belt.copy(self._slots[slot][: len(part)], message[part.start : part.stop])
            self.belt.write(self._said, number + 1)
            yield


class Receiving(_End):
    """Hears "ready", says "taken"."""

    @classmethod
    def over(cls, shared: Shared, rank: int, other: int, belt: Belt) -> Receiving:
        plan, flags, lanes = shared
        lane = plan.lane(lanes[other], other, rank)
        return cls(lane, plan.taken(flags[other], rank), plan.ready(flags[rank], other), belt, other)

    def move(self, buffer: Tensor) -> Iterator[None]:
        for number, slot, part in self._count.cut(buffer.numel()):
            self.belt.wait(self.heard, number + 1)
            self.belt.copy(buffer[part.start : part.stop], self._slots[slot][: len(part)])
            self.belt.write(self._said, number + 1)
            yield


End = Sending | Receiving


def move_all(ways: Iterable[tuple[End, Sequence[Tensor]]]) -> None:
    """A piece of every way in turn: where streams share a queue of the hardware, first pieces come before second ones
    on every rank, and none waits for one that is queued behind it."""
    going = [_all_of(end, messages) for end, messages in ways]
    while going:
        going = [each for each in going if next(each, _OVER) is not _OVER]


def _all_of(end: End, messages: Sequence[Tensor]) -> Iterator[None]:
    for message in messages:
        yield from end.move(message)


_OVER = object()


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
