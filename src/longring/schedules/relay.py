"""Relay: queries stay, keys and values travel, their gradients follow them and are sent home.

One executor for every itinerary: the ring in one direction or in both, rings of rings, and the direct exchange.
Besides its own, at most two blocks of K and V are on a rank of a ring: the one it computes with, which is at
the same time on its way onward, and the one that is arriving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry.itinerary import HOME, Itinerary, Post, Step, Visit
from ..geometry.parcels import Parcel
from ..kernels.contract import Gradients, Upstream
from ..kernels.totals import Sum
from ..numerics.online_softmax import Partial, accumulator_dtype
from ..transport.contract import Conversation, Pending
from .buffers import Loan, buffers_of
from .contract import Journey, Schedule
from .debug import is_debugging
from .desk import BackwardDesk, Desk, Tiles
from .labels import Doing, during, posted
from .parcels import add_parcel, is_one_block, pack, unpack


def forward(journey: Journey, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    desk = Desk(journey.kernel, journey.scale, q, is_one_look=len(journey.plan) == 1)
    with journey.converse("forward", q) as talk:
        go_forward(Trip(journey, journey.plan, talk), [desk], k, v)
    with during("merge", Doing(journey, "forward", "results")):
        return desk.seen


def backward(journey: Journey, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    dq = Sum(q, is_one_look=len(journey.plan) == 1 and not is_debugging())
    desk = BackwardDesk(journey.kernel, journey.scale, q, upstream, dq)
    with journey.converse("backward", q) as talk:
        dk, dv = go_backward(Trip(journey, journey.plan, talk), [desk], k, v)
    with during("merge", Doing(journey, "backward", "gradients of queries")):
        return Gradients(dq.result(), dk, dv)


class Trip(NamedTuple):
    """One pass along an itinerary."""

    journey: Journey
    itinerary: Itinerary
    talk: Conversation

    def room(self, parcel: Parcel, dtype: torch.dtype, like: Tensor) -> tuple[Loan, Loan]:
        """To receive the parcel's two tensors in."""
        numbers = parcel.vectors * like.shape[3]
        return self.loan(numbers, dtype, like.device), self.loan(numbers, dtype, like.device)

    def loan(self, numbers: int, dtype: torch.dtype, device: torch.device) -> Loan:
        return Loan(buffers_of(self.journey.transport), numbers, dtype, device)


def go_forward(trip: Trip, desks: Sequence[Desk], k: Tensor, v: Tensor) -> None:
    """Every desk meets its own keys, and those of every visitor."""
    itinerary, journey = trip.itinerary, trip.journey
    travel = Travel(trip, k, v, "forward")
    for number, step in travel.steps():
        if number == 0:
            for desk, tiles in zip(desks, itinerary.home.tiles, strict=True):
                desk.look(tiles, k, v, Doing(journey, "forward", "own keys", 0))
        for visit in step.visits:
            _meet(desks, visit, travel.at_hand[visit.lane], Doing(journey, "forward", "keys", number, visit.owner))


def _meet(desks: Sequence[Desk], visit: Visit, block: Block, what: Doing) -> None:
    """A function of its own, as the next is, so that no name outlives the step and keeps the block."""
    for desk, tiles in zip(desks, visit.tiles, strict=True):
        desk.look(tiles, block.k, block.v, what)


def _meet_again(trip: Trip, desks: Sequence[BackwardDesk], visit: Visit, block: Block, what: Doing) -> Found:
    found = Found(trip, block.k, visit.arrived)
    for desk, tiles in zip(desks, visit.tiles, strict=True):
        desk.look(tiles, block.k, block.v, found.dk, found.dv, what)
    return found


def go_backward(trip: Trip, desks: Sequence[BackwardDesk], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """dK and dV of the rank's own rows.

    Its own block is computed in two parts: one first, while the first visitors are on their way, and one last,
    while the last gradients come home.
    """
    itinerary, journey = trip.itinerary, trip.journey
    if len(itinerary) == 1:
        return _stay_at_home(trip, desks, k, v)
    home, own = itinerary.home, Own(k, itinerary.home.split)
    first, last = (Doing(journey, "backward", "own keys", number) for number in (0, len(itinerary)))
    travel = Travel(trip, k, v, "backward")
    following = Following(trip, own, k)
    for number, step in travel.steps():
        if number == 0:
            _look_at_own(desks, home.late, k[:, own.split :], v[:, own.split :], *own.late, first)
            continue
        found: dict[int, Found] = {}
        for visit in step.visits:
            what = Doing(journey, "backward", "keys", number, visit.owner)
            found[visit.lane] = _meet_again(trip, desks, visit, travel.at_hand[visit.lane], what)
        following.arrive(number, found)
        following.leave(number, step, found)
        del found  # and with it the visitors' rows
    with during("merge", Doing(journey, "backward", "own gradients", last.step)):
        dk, dv = own.as_one()
    early_dk, early_dv = (Sum.on(x[:, : own.split]) for x in (dk, dv))
    _look_at_own(desks, home.early, k[:, : own.split], v[:, : own.split], early_dk, early_dv, last)
    following.arrive(len(itinerary), {})
    return dk, dv


def _look_at_own(
    desks: Sequence[BackwardDesk], cut: Sequence[Tiles], k: Tensor, v: Tensor, dk: Sum, dv: Sum, what: Doing
) -> None:
    for desk, tiles in zip(desks, cut, strict=True):
        desk.look(tiles, k, v, dk, dv, what)


def _stay_at_home(trip: Trip, desks: Sequence[BackwardDesk], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Where nobody visits, and rows are done as soon as their tiles are."""
    is_one_look = len(desks) == 1 and not is_debugging()
    dk, dv = Sum(k, is_one_look=is_one_look), Sum(v, is_one_look=is_one_look)
    for desk, tiles in zip(desks, trip.itinerary.home.tiles, strict=True):
        desk.look(tiles, k, v, dk, dv, Doing(trip.journey, "backward", "own keys", 0))
    return dk.result(), dv.result()


# ------------------------------------------------------------------------------------------ keys and values


class Block(NamedTuple):
    """A visitor's rows, as they are and as they came."""

    parcel: Parcel
    k: Tensor
    v: Tensor
    loans: tuple[Loan, ...]


class UnderWay(NamedTuple):
    """What was posted together: what is received for which lane, and whose memory is being sent."""

    pending: Pending
    expected: list[tuple[int, Parcel, tuple[Loan, Loan]]]
    sending: list[Loan]

    def wait(self) -> None:
        self.pending.wait()
        for loan in self.sending:
            loan.done()


class Travel:
    """Keys and values on their way. At every step what leaves is posted, and what the next needs waited for."""

    def __init__(self, trip: Trip, k: Tensor, v: Tensor, phase: str) -> None:
        self._trip, self._k, self._v, self._phase = trip, k, v, phase
        self._due: dict[int, list[UnderWay]] = {}
        self.at_hand: dict[int, Block] = {}  # by lane

    def steps(self) -> Iterator[tuple[int, Step]]:
        """Every step with its blocks at hand; those of the next are under way while the caller computes."""
        for number, step in enumerate(self._trip.itinerary):
            for post in step.posts:
                self._due.setdefault(post.due, []).append(self._start(post))
            yield number, step
            self._let_go()
            self.at_hand = dict(self._arrived(number + 1))

    def _let_go(self) -> None:
        """Of the blocks at hand, before the next are unpacked."""
        for block in self.at_hand.values():
            for loan in block.loans:
                loan.done()
        self.at_hand = {}

    def _start(self, post: Post[Parcel]) -> UnderWay:
        sends: list[tuple[int, Tensor]] = []
        sending: list[Loan] = []
        for lane, parcel in post.sends:
            sends += [(parcel.receiver, x) for x in self._packed(lane, parcel)]
            if lane != HOME:
                sending += [loan.shared() for loan in self.at_hand[lane].loans]
        expected = [(lane, parcel, self._trip.room(parcel, self._k.dtype, self._k)) for lane, parcel in post.receives]
        receives = [(parcel.sender, loan.flat) for _, parcel, room in expected for loan in room]
        what = f"{self._phase}, step {post.due} of {len(self._trip.itinerary) - 1}"
        doing = Doing(self._trip.journey, self._phase, "keys and values", post.due)
        return UnderWay(posted(self._trip.talk, sends, receives, what=what, doing=doing), expected, sending)

    def _packed(self, lane: int, parcel: Parcel) -> list[Tensor]:
        if lane == HOME:
            return [pack(x, parcel, range(x.shape[1])) for x in (self._k, self._v)]
        block = self.at_hand[lane]
        if parcel.shares == block.parcel.shares:  # all of it goes on, as it came
            return [loan.flat for loan in block.loans]
        return [pack(x, parcel, block.parcel.frame) for x in (block.k, block.v)]

    def _arrived(self, step: int) -> Iterator[tuple[int, Block]]:
        for under_way in self._due.pop(step, ()):
            under_way.wait()
            for lane, parcel, room in under_way.expected:
                k, v = (unpack(loan.flat, parcel, self._k.shape[0], self._k.shape[2]) for loan in room)
                yield lane, Block(parcel, k, v, room)


# ------------------------------------------------------------------------------------------------ gradients


class Found:
    """This rank's part of a visitor's gradients, and what others found for it before."""

    def __init__(self, trip: Trip, k: Tensor, parcel: Parcel) -> None:
        self.parcel, self.loans = parcel, list[Loan]()
        room = partial(_room, trip, k, self.loans)  # which does not know this object: a circle would keep the block
        self.dk, self.dv = Sum(k, room=room), Sum(k, room=room)

    def add(self, parcel: Parcel, brought: Sequence[Loan]) -> None:
        """What others found for the same visitor; its memory is used on, or given back."""
        for mine, loan in zip((self.dk, self.dv), brought, strict=True):
            batch, rows, heads, d = mine.shape
            is_alike = is_one_block(parcel, batch, heads) and parcel.frame == self.parcel.frame
            if is_alike and mine.can_go_onto(theirs := loan.flat.view(batch, rows, heads, d)):
                mine.go_onto(theirs)
                self.loans.append(loan)
                mine.in_place()
            else:
                add_parcel(mine.in_place(), loan.flat, parcel, self.parcel.frame)
                loan.done()


def _room(trip: Trip, k: Tensor, loans: list[Loan]) -> Tensor:
    """Taken when something is to be summed up: what was computed may wait until the others' part is there."""
    loans.append(trip.loan(k.numel(), accumulator_dtype(k.dtype), k.device))
    return loans[-1].flat.view(k.shape)


def _gradients_of(k: Tensor) -> tuple[Tensor, Tensor]:
    dk, dv = (torch.zeros(k.shape, dtype=accumulator_dtype(k.dtype), device=k.device) for _ in "kv")
    return dk, dv


class Own:
    """The gradients of the rank's own rows: late ones from the start, early ones when the first come home."""

    def __init__(self, k: Tensor, split: int) -> None:
        self.split = split
        self._k = k
        self.late = Sum(k[:, split:]), Sum(k[:, split:])
        self._early: tuple[Tensor, Tensor] | None = None
        self._whole: tuple[Tensor, Tensor] | None = None

    def add(self, parcel: Parcel, brought: Sequence[Tensor]) -> None:
        if self._whole is not None:
            self._add_to(self._whole, parcel, brought, 0)
            return
        self._add_to([one.in_place() for one in self.late], parcel, brought, self.split)
        if any(r.start < self.split for share in parcel.shares for r in share.rows):
            self._early = self._early or _gradients_of(self._k[:, : self.split])
            self._add_to(self._early, parcel, brought, 0)

    def _add_to(self, mine: Sequence[Tensor], parcel: Parcel, brought: Sequence[Tensor], first: int) -> None:
        for x, flat in zip(mine, brought, strict=True):
            add_parcel(x, flat, parcel, range(first, first + x.shape[1]))

    def as_one(self) -> tuple[Tensor, Tensor]:
        """One gradient after the other, so that never both are there twice."""
        late, early = list(self.late), list(self._early or _gradients_of(self._k[:, : self.split]))
        del self.late, self._early  # given up
        dk, dv = (_behind_each_other(early.pop(0), late.pop(0)) for _ in "kv")
        self._whole = dk, dv
        return dk, dv


def _behind_each_other(early: Tensor, late: Sum) -> Tensor:
    return torch.cat([early, late.in_place()], dim=1) if early.numel() else late.in_place()


class Following:
    """Gradients on their way: behind the visitor they belong to, to be added to and sent on, or home.

    They travel while the rank computes its own part of them.
    """

    def __init__(self, trip: Trip, own: Own, k: Tensor) -> None:
        self._trip, self._own, self._k = trip, own, k
        self._under_way: UnderWay | None = None

    def arrive(self, number: int, found: dict[int, Found]) -> None:
        """Wait for what is under way, and add it to this step's part of the same visitor, or to one's own."""
        if self._under_way is None:
            return
        self._under_way.wait()
        with during("merge", Doing(self._trip.journey, "backward", "gradients that came", number)):
            for lane, parcel, loans in self._under_way.expected:
                if lane == HOME:
                    self._own.add(parcel, [loan.flat for loan in loans])
                    for loan in loans:
                        loan.done()
                else:
                    found[lane].add(parcel, loans)
        self._under_way = None

    def leave(self, number: int, step: Step, found: dict[int, Found]) -> None:
        if step.gradients is not None:
            self._under_way = self._start(number, step.gradients, found)
        for part in found.values():
            for loan in part.loans:
                loan.done()

    def _start(self, number: int, post: Post[Parcel], found: dict[int, Found]) -> UnderWay:
        sends: list[tuple[int, Tensor]] = []
        sending: list[Loan] = []
        for lane, parcel in post.sends:
            part = found[lane]
            sends += [(parcel.receiver, pack(x.in_place(), parcel, part.parcel.frame)) for x in (part.dk, part.dv)]
            sending += [loan.shared() for loan in part.loans]
        dtype = accumulator_dtype(self._k.dtype)
        expected = [(lane, parcel, self._trip.room(parcel, dtype, self._k)) for lane, parcel in post.receives]
        receives = [(parcel.sender, loan.flat) for _, parcel, room in expected for loan in room]
        what = f"backward, gradients of step {number} of {len(self._trip.itinerary) - 1}"
        doing = Doing(self._trip.journey, "backward", "gradients", number)
        return UnderWay(posted(self._trip.talk, sends, receives, what=what, doing=doing), expected, sending)


RELAY = Schedule(forward, backward)
