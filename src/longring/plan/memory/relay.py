"""What a relay holds: its own rows, the block at hand, the one that arrives, and gradients that follow them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...geometry.itinerary import HOME, Itinerary, Post, Step
from ...geometry.parcels import Parcel
from .desk import BackwardDesk, Desk, Setting
from .packing import is_one_block, pack
from .room import Buffers, Like, Loan, Taken

ARRIVING, AT_HAND, LEAVING = "K/V arriving", "K/V at hand", "K/V leaving"
FOUND, FOLLOWING, GOING = "dK/dV of visitors", "dK/dV arriving", "dK/dV leaving"
DK, DV = "dk", "dv"


@dataclass
class Trip:
    setting: Setting
    itinerary: Itinerary
    k: Like
    buffers: Buffers = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = Buffers(self.setting.room)

    def room(self, component: str, parcel: Parcel, itemsize: int) -> tuple[Loan, Loan]:
        first, second = (Loan(self.buffers, component, parcel.vectors * self.k.d, itemsize) for _ in "kv")
        return first, second

    def begin(self, number: int) -> None:
        self.setting.room.begin(f"step {number}")


def go_forward(trip: Trip, desks: Sequence[Desk]) -> None:
    travel = Travel(trip)
    for number, step in travel.steps():
        if number == 0:
            for desk, tiles in zip(desks, trip.itinerary.home.tiles, strict=True):
                desk.look(tiles, trip.k)
        for visit in step.visits:
            block = travel.taken_up(visit.lane)
            for desk, tiles in zip(desks, visit.tiles, strict=True):
                desk.look(tiles, block.k)
    travel.put_down()


def go_backward(trip: Trip, desks: Sequence[BackwardDesk]) -> tuple[int, int]:
    """Bytes of dk and dv, which are held."""
    itinerary, setting, k = trip.itinerary, trip.setting, trip.k
    if len(itinerary) == 1:
        return _stay_at_home(trip, desks)
    home = itinerary.home
    own = Own(setting, k, home.split)
    travel, following = Travel(trip), Following(trip, own)
    for number, step in travel.steps():
        if number == 0:
            for desk, tiles in zip(desks, home.late, strict=True):
                desk.look(tiles, k.of_rows(k.rows - home.split), *own.late)
            continue
        found: dict[int, Found] = {}
        for visit in step.visits:
            block = travel.taken_up(visit.lane)
            found[visit.lane] = Found(trip, block.k, visit.arrived)
            for desk, tiles in zip(desks, visit.tiles, strict=True):
                desk.look(tiles, block.k, *found[visit.lane].sums)
        following.arrive(found)
        following.leave(step, found)
    setting.room.begin("own keys, the rest")
    own.as_one()
    early = [setting.sum(k.of_rows(home.split), one, is_lent=True) for one in (DK, DV)]
    for desk, tiles in zip(desks, home.early, strict=True):
        desk.look(tiles, k.of_rows(home.split), *early)
    following.arrive({})
    travel.put_down()
    return k.accumulator.nbytes, k.accumulator.nbytes


def _stay_at_home(trip: Trip, desks: Sequence[BackwardDesk]) -> tuple[int, int]:
    setting, k = trip.setting, trip.k
    setting.room.begin("step 0")
    dk, dv = (setting.sum(k, one, is_one_look=len(desks) == 1) for one in (DK, DV))
    for desk, tiles in zip(desks, trip.itinerary.home.tiles, strict=True):
        desk.look(tiles, k, dk, dv)
    dk.result()
    dv.result()
    return dk.own_bytes, dv.own_bytes


# ------------------------------------------------------------------------------------------ keys and values


class Block(NamedTuple):
    parcel: Parcel
    k: Like
    loans: tuple[Loan, Loan]
    unpacked: tuple[Taken, ...]

    def give(self) -> None:
        for one in self.unpacked:
            one.give()


class UnderWay(NamedTuple):
    expected: list[tuple[int, Parcel, tuple[Loan, Loan]]]
    sending: list[Loan]
    packed: list[Taken]

    def wait(self) -> None:
        for loan in self.sending:
            loan.done()
        for copy in self.packed:
            copy.give()


class Travel:
    """Keys and values on their way, as a relay's `Travel` has them."""

    def __init__(self, trip: Trip) -> None:
        self._trip = trip
        self._due: dict[int, list[UnderWay]] = {}
        self._at_hand: dict[int, Block] = {}
        self._last: Block | None = None  # which the engine looked at last keeps what was unpacked of it

    def taken_up(self, lane: int) -> Block:
        block = self._at_hand[lane]
        self.put_down()
        for copy in block.unpacked:
            copy.shared()
        self._last = block
        return block

    def put_down(self) -> None:
        if self._last is not None:
            self._last.give()
            self._last = None

    def steps(self) -> Iterator[tuple[int, Step]]:
        itinerary = self._trip.itinerary
        before = -1
        for number in walked(itinerary):
            self._trip.begin(number)
            step = itinerary[number]
            if number != before + 1:
                self._be_there(step)
            for post in step.posts:
                self._due.setdefault(post.due, []).append(self._start(post))
            yield number, step
            for block in self._at_hand.values():
                for loan in block.loans:
                    loan.done()
            arrived = dict(self._arrived(number + 1))
            for block in self._at_hand.values():
                block.give()
            self._at_hand = arrived
            before = number

    def _be_there(self, step: Step) -> None:
        """At a step that was jumped to: with its guests at hand, and nothing else under way."""
        for due in sorted(self._due):
            for _ in self._arrived(due, give=True):
                pass
        for block in self._at_hand.values():
            for loan in block.loans:
                loan.done()
            block.give()
        itemsize = self._trip.k.itemsize
        self._at_hand = {
            visit.lane: self._unpacked(visit.arrived, self._trip.room(AT_HAND, visit.arrived, itemsize))
            for visit in step.visits
        }

    def _start(self, post: Post[Parcel]) -> UnderWay:
        packed: list[Taken] = []
        sending: list[Loan] = []
        for lane, parcel in post.sends:
            packed += self._packed(lane, parcel)
            if lane != HOME:
                sending += [loan.shared() for loan in self._at_hand[lane].loans]
        k = self._trip.k
        expected = [(lane, parcel, self._trip.room(ARRIVING, parcel, k.itemsize)) for lane, parcel in post.receives]
        return UnderWay(expected, sending, packed)

    def _packed(self, lane: int, parcel: Parcel) -> list[Taken]:
        room, k = self._trip.setting.room, self._trip.k
        if lane == HOME:
            return [pack(room, LEAVING, k, parcel, range(k.rows)) for _ in "kv"]
        block = self._at_hand[lane]
        if parcel.shares == block.parcel.shares:
            return []
        return [pack(room, LEAVING, block.k, parcel, block.parcel.frame) for _ in "kv"]

    def _arrived(self, step: int, *, give: bool = False) -> Iterator[tuple[int, Block]]:
        for under_way in self._due.pop(step, ()):
            under_way.wait()
            for lane, parcel, loans in under_way.expected:
                if give:
                    for loan in loans:
                        loan.done()
                else:
                    yield lane, self._unpacked(parcel, loans)

    def _unpacked(self, parcel: Parcel, loans: tuple[Loan, Loan]) -> Block:
        for loan in loans:
            loan.become(AT_HAND)
        like = self._trip.k.of_rows(len(parcel.frame))
        if is_one_block(parcel, like):
            return Block(parcel, like, loans, ())
        room = self._trip.setting.room
        return Block(parcel, like, loans, tuple(room.take(AT_HAND, like.nbytes) for _ in "kv"))


WALKED = 96  # steps that are walked one by one; of more, those at either end and some between
AROUND = 3
SAMPLES = 10


def walked(itinerary: Itinerary) -> list[int]:
    """Steps that show all there is: where thousands are alike, a few of them and what is around them."""
    steps = len(itinerary)
    if steps <= WALKED:
        return list(range(steps))
    chosen = set(range(2 * AROUND)) | set(range(steps - 2 * AROUND, steps))
    for i in range(1, SAMPLES):
        middle = steps * i // SAMPLES
        chosen |= set(range(middle - 1, middle + AROUND))
    return sorted(chosen)


# ------------------------------------------------------------------------------------------------ gradients


class Found:
    """This rank's part of a visitor's gradients, and what others found for it before."""

    def __init__(self, trip: Trip, k: Like, parcel: Parcel) -> None:
        self.parcel, self._trip, self._k = parcel, trip, k
        self.loans: list[Loan] = []
        setting = trip.setting
        self.sums = setting.sum(k, FOUND, memory=self._room), setting.sum(k, FOUND, memory=self._room)

    @property
    def like(self) -> Like:
        return self._k.accumulator

    def _room(self) -> None:
        like = self.like
        self.loans.append(Loan(self._trip.buffers, FOUND, like.vectors * like.d, like.itemsize))

    def add(self, parcel: Parcel, brought: Sequence[Loan]) -> None:
        is_alike = is_one_block(parcel, self._k) and parcel.frame == self.parcel.frame
        for mine, loan in zip(self.sums, brought, strict=True):
            if is_alike and self._trip.setting.kernel.is_lazy and not mine.has_total:
                mine.go_onto()
                loan.become(FOUND)
                self.loans.append(loan)
                mine.in_place()
            else:
                mine.in_place()
                loan.done()


class Own:
    """The gradients of the rank's own rows: late ones from the start, early ones when the first come home."""

    def __init__(self, setting: Setting, k: Like, split: int) -> None:
        self._setting, self._k, self._split = setting, k, split
        behind = k.of_rows(k.rows - split)
        self.late = setting.sum(behind, DK), setting.sum(behind, DV)
        self._early: list[Taken] = []
        self._is_one = False

    def add(self, parcel: Parcel) -> None:
        if self._is_one:
            return
        for one in self.late:
            one.in_place()
        if any(r.start < self._split for share in parcel.shares for r in share.rows):
            self._early = self._early or self._zeros()

    def as_one(self) -> None:
        room = self._setting.room
        early = self._early or self._zeros()
        for late, before, component in zip(self.late, early, (DK, DV), strict=True):
            late.in_place()
            if before.size:
                room.take(component, self._k.accumulator.nbytes)
                late.give()
                before.give()
        self._is_one = True

    def _zeros(self) -> list[Taken]:
        size = self._k.of_rows(self._split).accumulator.nbytes
        return [self._setting.room.take(component, size) for component in (DK, DV)]


class Following:
    """Gradients on their way: behind the visitor they belong to, or home."""

    def __init__(self, trip: Trip, own: Own) -> None:
        self._trip, self._own = trip, own
        self._under_way: UnderWay | None = None

    def arrive(self, found: dict[int, Found]) -> None:
        if self._under_way is None:
            return
        self._under_way.wait()
        for lane, parcel, loans in self._under_way.expected:
            if lane in found:
                found[lane].add(parcel, loans)
                continue
            if lane == HOME:
                self._own.add(parcel)
            for loan in loans:
                loan.done()
        self._under_way = None

    def leave(self, step: Step, found: dict[int, Found]) -> None:
        if step.gradients is not None:
            self._under_way = self._start(step.gradients, found)
        for part in found.values():
            for loan in part.loans:
                loan.done()

    def _start(self, post: Post[Parcel], found: dict[int, Found]) -> UnderWay:
        room = self._trip.setting.room
        packed: list[Taken] = []
        sending: list[Loan] = []
        for lane, parcel in post.sends:
            part = found[lane]
            for one in part.sums:
                one.in_place()
                packed.append(pack(room, GOING, part.like, parcel, part.parcel.frame))
            sending += [loan.shared() for loan in part.loans]
        itemsize = self._trip.k.accumulator.itemsize
        expected = [(lane, parcel, self._trip.room(FOLLOWING, parcel, itemsize)) for lane, parcel in post.receives]
        return UnderWay(expected, sending, packed)
