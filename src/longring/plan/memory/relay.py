"""What a relay holds: its own rows, the block at hand, the one that arrives, and gradients that follow them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...geometry.itinerary import HOME, Itinerary, Post, Step
from ...geometry.parcels import Parcel
from ...geometry.routes import DoubleRing
from ...geometry.task import runs_over_sources
from .desk import BackwardDesk, Desk, Setting
from .packing import is_one_block, packs
from .room import Buffers, Like, Loan, Taken
from .totals import DK, DV, Sum

ARRIVING, AT_HAND, LEAVING = "K/V arriving", "K/V at hand", "K/V leaving"
FOUND, FOLLOWING, GOING = "dK/dV of visitors", "dK/dV arriving", "dK/dV leaving"


@dataclass
class Trip:
    setting: Setting
    itinerary: Itinerary
    k: Like
    buffers: Buffers = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = Buffers(self.setting.room, are_kept=self.setting.kernel.device != "cuda")

    def room(self, component: str, parcel: Parcel, itemsize: int) -> tuple[Loan, Loan]:
        numbers = parcel.vectors * self.k.d
        return Loan(self.buffers, component, numbers, itemsize), Loan(self.buffers, component, numbers, itemsize)

    def begin(self, number: int) -> None:
        self.setting.room.begin(f"step {number}")


def go_forward(trip: Trip, desks: Sequence[Desk]) -> None:
    travel = Travel(trip)
    for number, step in travel.steps():
        if number == 0:
            for desk, tiles in zip(desks, trip.itinerary.home.tiles, strict=True):
                desk.look(tiles, trip.k)
        for visit in step.visits:
            block = travel.at_hand[visit.lane]
            for desk, tiles in zip(desks, visit.tiles, strict=True):
                desk.look(tiles, block.k)
        for desk in desks:
            desk.after_step(travel.skipped)


def go_backward(trip: Trip, desks: Sequence[BackwardDesk]) -> tuple[Taken, Taken]:
    """dk and dv."""
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
            block = travel.at_hand[visit.lane]
            found[visit.lane] = Found(trip, block.k, visit.arrived)
            for desk, tiles in zip(desks, visit.tiles, strict=True):
                desk.look(tiles, block.k, *found[visit.lane].sums)
        for desk in desks:
            desk.after_step(travel.skipped)
        following.arrive(found)
        following.leave(step, found)
        for part in found.values():
            part.give()
    setting.room.begin("own keys, the rest")
    found_here = own.as_one()
    early = [setting.sum(k.of_rows(home.split), one, is_lent=True) for one in (DK, DV)]
    for desk, tiles in zip(desks, home.early, strict=True):
        desk.look(tiles, k.of_rows(home.split), *early)
    following.arrive({})
    return found_here


def _stay_at_home(trip: Trip, desks: Sequence[BackwardDesk]) -> tuple[Taken, Taken]:
    setting, k = trip.setting, trip.k
    setting.room.begin("step 0")
    dk, dv = (setting.sum(k, one, is_one_look=len(desks) == 1) for one in (DK, DV))
    for desk, tiles in zip(desks, trip.itinerary.home.tiles, strict=True):
        desk.look(tiles, k, dk, dv)
    return dk.result(), dv.result()


# ------------------------------------------------------------------------------------------ keys and values


class Block(NamedTuple):
    parcel: Parcel
    k: Like
    loans: tuple[Loan, Loan]
    seen: tuple[Taken, ...]  # the memory it is looked at in: as it came, and unpacked

    def give(self) -> None:
        for one in self.seen:
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
        self.at_hand: dict[int, Block] = {}  # by lane
        self.skipped = 0  # steps before this one

    def steps(self) -> Iterator[tuple[int, Step]]:
        itinerary = self._trip.itinerary
        before = -1
        for number in walked(itinerary):
            self._trip.begin(number)
            step = itinerary[number]
            self.skipped = number - before - 1
            if self.skipped:
                self._jump()
            self._see_to(step)
            for post in step.posts:
                self._due.setdefault(post.due, []).append(self._start(post))
            yield number, step
            self._let_go()
            self.at_hand = dict(self._arrived(number + 1))
            before = number

    def _jump(self) -> None:
        """To a later step: what was under way to steps between is forgotten."""
        for due in sorted(self._due):
            for _, block in self._arrived(due):
                for loan in block.loans:
                    loan.done()
                block.give()
        self._let_go()

    def _see_to(self, step: Step) -> None:
        """That the step's guests are at hand, also where the steps that sent them were not walked."""
        for visit in step.visits:
            if visit.lane not in self.at_hand:
                loans = self._trip.room(AT_HAND, visit.arrived, self._trip.k.itemsize)
                self.at_hand[visit.lane] = self._unpacked(visit.arrived, loans)

    def _let_go(self) -> None:
        for block in self.at_hand.values():
            for loan in block.loans:
                loan.done()
            block.give()
        self.at_hand = {}

    def _start(self, post: Post[Parcel]) -> UnderWay:
        packed: list[Taken] = []
        sending: list[Loan] = []
        for lane, parcel in post.sends:
            packed += self._packed(lane, parcel)
            if lane != HOME:
                sending += [loan.shared() for loan in self.at_hand[lane].loans]
        k = self._trip.k
        expected = [(lane, parcel, self._trip.room(ARRIVING, parcel, k.itemsize)) for lane, parcel in post.receives]
        return UnderWay(expected, sending, packed)

    def _packed(self, lane: int, parcel: Parcel) -> list[Taken]:
        room, k = self._trip.setting.room, self._trip.k
        if lane == HOME:
            pack = packs(room, LEAVING, k, parcel, range(k.rows))
            return [pack(), pack()]
        block = self.at_hand[lane]
        if parcel.shares == block.parcel.shares:
            return []
        pack = packs(room, LEAVING, block.k, parcel, block.parcel.frame)
        packed = [pack(), pack()]
        return packed if packed[0].size else [*packed, *(one.shared() for one in block.seen)]  # sent as they lie

    def _arrived(self, step: int) -> Iterator[tuple[int, Block]]:
        for under_way in self._due.pop(step, ()):
            under_way.wait()
            for lane, parcel, loans in under_way.expected:
                yield lane, self._unpacked(parcel, loans)

    def _unpacked(self, parcel: Parcel, loans: tuple[Loan, Loan]) -> Block:
        for loan in loans:
            loan.become(AT_HAND)
        like = self._trip.k.of_rows(len(parcel.frame))
        seen = [loan.looked_at() for loan in loans]
        if not is_one_block(parcel, like):
            seen += [self._trip.setting.room.take(AT_HAND, like.nbytes) for _ in "kv"]
        return Block(parcel, like, loans, tuple(seen))


WALKED = 96  # steps that are walked one by one; of more, those at either end and some between
AROUND = 3
SAMPLES = 10


def walked(itinerary: Itinerary) -> list[int]:
    """Steps that show all there is: where thousands are alike, a few of them and what is around them."""
    steps = len(itinerary)
    if steps <= WALKED:
        return list(range(steps))
    route = itinerary.lanes[0].route
    begins = route.inner if isinstance(route, DoubleRing) else 1  # a round, with which rows leave for the next node
    turns = [steps * i // SAMPLES // begins * begins for i in range(1, SAMPLES)]
    chosen = {*range(2 * AROUND), *range(steps - 2 * AROUND, steps)}
    for turn in (*turns, *_turns(itinerary)):
        chosen |= {*range(max(0, turn - AROUND + 1), min(steps, turn + AROUND))}
    return sorted(chosen)


def _turns(itinerary: Itinerary) -> Iterator[int]:
    """Steps at which the tiles begin to look otherwise, where limits alone say how they look."""
    for lane in itinerary.lanes:
        if lane.task.pattern.only_limits is None:
            continue
        runs = runs_over_sources(lane.task, itinerary.member)[:SAMPLES]
        step_of = {lane.route.guest(itinerary.member, step): step for step in range(len(itinerary))}
        for run in runs:
            yield step_of[run.ranks[0]]
            yield step_of[run.ranks[-1]]


# ------------------------------------------------------------------------------------------------ gradients


class Found:
    """This rank's part of a visitor's gradients, and what others found for it before."""

    def __init__(self, trip: Trip, k: Like, parcel: Parcel) -> None:
        self.parcel, self._trip, self._k = parcel, trip, k
        self.loans: list[Loan] = []
        self._seen: list[Taken] = []
        setting = trip.setting
        self.sums = setting.sum(k, FOUND, memory=self._room), setting.sum(k, FOUND, memory=self._room)

    @property
    def like(self) -> Like:
        return self._k.accumulator

    def _room(self) -> None:
        like = self.like
        self._use(Loan(self._trip.buffers, FOUND, like.vectors * like.d, like.itemsize))

    def _use(self, loan: Loan) -> None:
        self.loans.append(loan)
        self._seen.append(loan.looked_at())

    def give(self) -> None:
        for one in self._seen:
            one.give()

    def add(self, parcel: Parcel, brought: Sequence[Loan]) -> None:
        is_alike = is_one_block(parcel, self._k) and parcel.frame == self.parcel.frame
        for mine, loan in zip(self.sums, brought, strict=True):
            if is_alike and self._trip.setting.kernel.is_lazy and not mine.has_total:
                mine.go_onto()
                loan.become(FOUND)
                self._use(loan)
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

    def as_one(self) -> tuple[Taken, Taken]:
        early = self._early or self._zeros()
        dk, dv = (self._behind_each_other(*pair) for pair in zip(early, self.late, (DK, DV), strict=True))
        self._is_one = True
        return dk, dv

    def _behind_each_other(self, early: Taken, late: Sum, component: str) -> Taken:
        behind = late.summed()
        if not early.size:
            return behind
        whole = self._setting.room.take(component, self._k.accumulator.nbytes)
        behind.give()
        early.give()
        return whole

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
            pack = packs(room, GOING, part.like, parcel, part.parcel.frame)
            for one in part.sums:
                one.in_place()
                packed.append(pack())
            sending += [loan.shared() for loan in part.loans]
        itemsize = self._trip.k.accumulator.itemsize
        expected = [(lane, parcel, self._trip.room(FOLLOWING, parcel, itemsize)) for lane, parcel in post.receives]
        return UnderWay(expected, sending, packed)
