"""What a pass of a schedule takes, estimated from a few ranks: enough to choose by, and what a plan shows with a ~.

A few ranks are followed along their own itinerary, as if all others were as far as they are: a step takes as long as
computing or carrying, whichever is longer. Who waits for whom is left to the event simulation in `events`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import NamedTuple

from ..geometry.heads import ByHeads
from ..geometry.itinerary import Itinerary, gather
from ..geometry.layouts import Shard, size
from ..geometry.parcels import Parcel
from ..geometry.patterns import Dilated
from ..geometry.plans import plan
from ..geometry.routes import DoubleRing, Route
from ..geometry.task import Task
from .event_pace import Pace
from .hardware import DTYPES, Hardware, Phase, hardware
from .work import head_pairs

PHASES: tuple[Phase, Phase] = ("forward", "backward")
CHOSEN_BY_AUTO = ("ring", "double_ring", "exchange", "ulysses", "hybrid")
"""Of equal ones it takes the first. Early and late rows apart, or everything everywhere, one has to ask for by name."""

TYPICAL = {"cuda": "h200", "cpu": "cpu"}
"""By the kind of device, the hardware that speaks for it."""

STEPS_TO_ASK, FEW_STEPS, OTHERS_TO_ASK, PLACES_TO_ASK = 32, 8, 16, 4


@lru_cache(maxsize=8)
def typical(device: str) -> Hardware:
    """Of a kind that nobody described, the CPU's."""
    return hardware(TYPICAL.get(device, "cpu"))


class Estimate(NamedTuple):
    """Seconds of one pass, or of several."""

    schedule: str
    computing: float
    moving: float  # what computing can hide, if there is as much of it
    unhidden: float  # what nothing hides: changing places, and collecting before anything is computed
    seconds: float


def estimates(task: Task, *, head_dim: int, itemsize: int, node_ranks: int, machine: Hardware) -> list[Estimate]:
    """Forward and backward together, of every schedule that `auto` may take."""
    of_nodes = 1 < node_ranks < task.ranks
    names = [name for name in CHOSEN_BY_AUTO if of_nodes or name not in ("double_ring", "hybrid")]
    size = itemsize if itemsize in {DTYPES[dtype] for dtype in machine.forward_flops} else 4
    paces = [Pace(machine, task, phase, head_dim, size) for phase in PHASES]
    return [both(*(estimate(name, pace, node_ranks=node_ranks) for pace in paces)) for name in names]


@lru_cache(maxsize=64)
def estimate(schedule: str, pace: Pace, *, node_ranks: int) -> Estimate:
    """One pass, by some ranks."""
    task = pace.task
    if task.pattern.documents is None:
        ranks, steps = some_ranks(task, node_ranks) + _places(task, schedule, node_ranks), _steps_to_ask(task)
        return Follow(schedule, pace, node_ranks, steps).ranks(ranks)
    # documents differ from call to call and take long to look at: few steps, which may miss where the work is
    work = [head_pairs(task, schedule, rank, node_ranks) for rank in range(task.ranks)]
    ranks = sorted({*few(task.ranks, 2), work.index(max(work))})
    return not_faster(Follow(schedule, pace, node_ranks, FEW_STEPS).ranks(ranks), pace.at_best(max(work)))


def not_faster(about: Estimate, computing: float) -> Estimate:
    """No less than the busiest rank computes for: what was not looked at takes its time, too."""
    beyond = max(0.0, computing - about.computing)
    seconds = max(about.seconds, about.computing + beyond + about.unhidden)
    return about._replace(computing=about.computing + beyond, seconds=seconds)


def both(forward: Estimate, backward: Estimate) -> Estimate:
    return Estimate(forward.schedule, *(a + b for a, b in zip(forward[1:], backward[1:], strict=True)))


def few(ranks: int, most: int) -> list[int]:
    """All, or a few evenly spaced that speak for all, the same on every rank."""
    some = min(ranks, most)
    return [ranks * i // some + ranks // (2 * some) for i in range(some)]


def some_ranks(task: Task, node_ranks: int) -> list[int]:
    """The first of a node in the middle, where rows come from others, and the last of all, which sees most.

    Where segments begin and end at fixed positions, the other ends of that node and of all ranks, too.
    """
    ranks = task.ranks
    middle = ranks // node_ranks // 2 * node_ranks if node_ranks < ranks else ranks // 2
    ends = {middle, ranks - 1}
    sizes = task.queries.sizes
    if not all(sizes[end] for end in ends):  # ranks may outnumber queries, of which a cache has one
        ends.add(sizes.index(max(sizes)))
    return sorted(ends if task.pattern.only_limits else ends | {0, min(middle + node_ranks, ranks) - 1})


def _steps_to_ask(task: Task) -> int:
    """A window, and a segment, moves rows in a few steps alone; else they change little from one to the next."""
    limits = task.pattern.only_limits
    return STEPS_TO_ASK if limits is None or limits[0] is not None else STEPS_TO_ASK // 2


def _places(task: Task, schedule: str, node_ranks: int) -> list[int]:
    """Where ranks share a head, each has other rows of it: some more of them."""
    inner = {"ulysses": task.ranks, "hybrid": node_ranks}.get(schedule, 1)
    return list(range(min(inner // gcd(task.heads, inner), PLACES_TO_ASK))) if inner > 1 else []


def some_steps(count: int, most: int) -> Iterator[tuple[int, float]]:
    """(step, for how many it speaks): all from the first on, or those at either end and some between.

    A window moves rows in the first steps alone.
    """
    every = range(1, count)
    if len(every) <= most:
        yield from ((step, 1.0) for step in every)
        return
    end = most // 4
    inner = every[end:-end]
    yield from ((step, 1.0) for step in every[:end])
    yield from ((inner[i], len(inner) / (most - 2 * end)) for i in few(len(inner), most - 2 * end))
    yield from ((step, 1.0) for step in every[-end:])


# ------------------------------------------------------------------------------------------- following ranks


Traveller = tuple[Itinerary, tuple[int, ...]]
"""Who meets others, and for every desk its query heads to a kv head."""


@dataclass(frozen=True)
class Follow:
    """Ranks under one schedule, in one phase."""

    schedule: str
    pace: Pace
    node_ranks: int
    steps: int

    @property
    def task(self) -> Task:
        return self.pace.task

    @property
    def machine(self) -> Hardware:
        return self.pace.hardware

    @property
    def is_forward(self) -> bool:
        return self.pace.phase == "forward"

    def ranks(self, ranks: Sequence[int]) -> Estimate:
        """As long as the longest of them, step by step."""
        if self.schedule == "gather":
            return self._longest(self._gather(rank) for rank in ranks)
        plans = [plan(self.schedule, self.task, rank, self.node_ranks) for rank in ranks]
        by_heads = [one for one in plans if isinstance(one, ByHeads)]
        if by_heads:
            return self._by_heads(by_heads)
        itineraries = [(one, (self.task.share,)) for one in plans if isinstance(one, Itinerary)]
        computing, moving, seconds = self._relay(itineraries)
        return Estimate(self.schedule, computing, moving, 0.0, seconds)

    def _longest(self, every: Iterable[Estimate]) -> Estimate:
        return Estimate(self.schedule, *(max(each) for each in zip(*(one[1:] for one in every), strict=True)))

    # ---- lines

    def _carrying(self, nbytes: float, *, is_inside: bool, sharing: int) -> float:
        speed = self.machine.inside.bytes_per_second if is_inside else self.machine.out_of_node(sharing)
        return nbytes / speed

    def _latency(self, *, is_inside: bool) -> float:
        return (self.machine.inside if is_inside else self.machine.outside).latency_seconds

    def _is_inside(self, sender: int, receiver: int) -> bool:
        return sender // self.node_ranks == receiver // self.node_ranks

    def _sharing(self, step: int, ways: int = 1) -> int:
        """Ranks of a node that send out of it in a step; of a ring those at its ends, one for each way round."""
        if self.schedule in ("ring", "bidirectional"):
            return ways
        if self.schedule in ("exchange", "gather"):
            return max(1, min(step, self.node_ranks, self.task.ranks - step))
        return self.node_ranks if self.schedule != "double_ring" else min(self.node_ranks, self._in_reach)

    @cached_property
    def _in_reach(self) -> int:
        """Ranks before one, contiguous ones, of which its queries see something."""
        lo, hi = self.task.pattern.only_limits or (None, None)
        if lo is None or hi is None:
            return self.task.ranks
        return min(self.task.ranks, -(-max(-lo, hi, 1) // max(1, min(self.task.keys.sizes))))

    # ---- relays

    def _relay(self, every: Sequence[Traveller]) -> tuple[float, float, float]:
        """(computing, moving, seconds)."""
        count = len(every[0][0])
        homes = [self._at_home(*one) for one in every]
        steps = [(1.0, [(first, self._moved(one, 0)) for (one, _), (first, _) in zip(every, homes, strict=True)])]
        for step, often in some_steps(count, self.steps):
            steps.append((often, [(self._with_guests(*one, step), self._moved(one[0], step)) for one in every]))
        if not self.is_forward:
            last = [(early, self._moved(one, count)) for (one, _), (_, early) in zip(every, homes, strict=True)]
            steps.append((1.0, last))
        each = range(len(every))
        computing, moving = (
            max(sum(often * pairs[i][which] for often, pairs in steps) for i in each) for which in (0, 1)
        )
        slowest = [(often, pairs, max(moved for _, moved in pairs)) for often, pairs in steps]  # all wait for all rows
        seconds = max(sum(often * max(pairs[i][0], moved) for often, pairs, moved in slowest) for i in each)
        return computing, moving, seconds

    def _at_home(self, itinerary: Itinerary, shares: Sequence[int]) -> tuple[float, float]:
        """What is computed with the rank's own keys before it meets others, and afterwards."""
        if self.is_forward or len(itinerary) == 1:
            own = itinerary.own_tiles(itinerary.task)
            return self.pace.looking_at(zip(own, shares, strict=True), is_first=True), 0.0
        home = itinerary.home
        late, early = (zip(tiles, shares, strict=True) for tiles in (home.late, home.early))
        return self.pace.looking_at(late, is_first=True), self.pace.looking_at(early)

    def _with_guests(self, itinerary: Itinerary, shares: Sequence[int], step: int) -> float:
        found = 0.0
        for lane in itinerary.lanes:
            tiles = itinerary.guest_tiles(lane, lane.route.guest(itinerary.member, step), step)
            found += self.pace.looking_at(zip(tiles, shares, strict=True))
        return found

    def _moved(self, itinerary: Itinerary, step: int) -> float:
        """Of the busiest line in a step: rows for the next, and gradients of the one before.

        Rows that have several steps to arrive take their share of each.
        """
        lines: dict[tuple[int, bool], float] = {}
        latency = 0.0
        ways = len({lane.route.host(0, 1) for lane in itinerary.lanes if len(itinerary) > 1})
        sharing = self._sharing(step, ways)
        for parcel, steps in self._parcels(itinerary, step):
            is_inside = self._is_inside(parcel.sender, parcel.receiver)
            nbytes = self.pace.bytes_of(parcel.kind, parcel.vectors)
            seconds = self._carrying(nbytes, is_inside=is_inside, sharing=sharing)
            line = parcel.sender, is_inside
            lines[line] = lines.get(line, 0.0) + seconds / steps
            latency = max(latency, self._latency(is_inside=is_inside) / steps)
        return max(lines.values(), default=0.0) + latency

    def _parcels(self, itinerary: Itinerary, step: int) -> Iterator[tuple[Parcel, int]]:
        """Those the rank sends or receives, and over how many steps they may take."""
        member, last = itinerary.member, len(itinerary)
        for lane in itinerary.lanes:
            route = lane.route
            for due, steps in self._under_way(route, step) if step < last else ():
                for owner in {route.guest(member, route.origin(due)), route.guest(member, due)}:
                    yield from ((one, steps) for one in (lane.parcel(owner, due),) if one is not None)
            if self.is_forward or step < 2:
                continue
            before = step - 1
            owner = route.guest(member, before)
            found = [lane.following(owner, before), lane.returning(owner, before), lane.returning(member, before)]
            if step < last:
                found.append(lane.following(route.guest(member, step), before))
            yield from ((one, 1) for one in found if one is not None)

    def _under_way(self, route: Route, step: int) -> Iterator[tuple[int, int]]:
        """(step that rows are for, how many steps they have)."""
        yield from ((due, due - step) for due in route.leaving(step))
        if isinstance(route, DoubleRing) and step % route.inner:
            begun = step - step % route.inner
            yield from ((due, due - begun) for due in route.leaving(begun) if due > step)

    # ---- all to everybody

    def _gather(self, rank: int) -> Estimate:
        tiles = gather(self.task, rank).tiles
        work = self.pace.looking(tiles, is_first=True)
        rows, gradients = (self._blocks(kind) for kind in ("rows", "gradients"))
        there = sum(often * max(carried, copied) for often, carried, copied in rows)
        back = 0.0 if self.is_forward else sum(often * (carried + 2 * copied) for often, carried, copied in gradients)
        return Estimate(self.schedule, work, 0.0, there + back, work + there + back)

    def _blocks(self, kind: str) -> list[tuple[float, float, float]]:
        """(how often, carried, copied) of other ranks' blocks."""
        problem, sizes = self.task.problem, self.task.keys.sizes
        mean = problem.batch * problem.kv_heads * problem.n_k / len(sizes)
        nbytes = self.pace.bytes_of(kind, round(mean))
        is_inside = self.node_ranks == self.task.ranks
        return [
            (
                often,
                self._carrying(nbytes, is_inside=is_inside, sharing=self._sharing(step))
                + self._latency(is_inside=is_inside),
                self.pace.copying(nbytes),
            )
            for step, often in some_steps(self.task.ranks, self.steps)
        ]

    # ---- by heads

    def _by_heads(self, every: Sequence[ByHeads]) -> Estimate:
        near = max(self.pace.looking(one.near, is_first=True) if one.near else 0.0 for one in every)
        if every[0].far is None:
            return Estimate(self.schedule, near, 0.0, 0.0, near)
        there, back = (max(self._changing(one, way) for one in every) for way in ("there", "back"))
        travellers = [(one.between, tuple(desk.share for desk in one.desks)) for one in every]
        computing, moving, seconds = self._relay(travellers)
        unhidden = max(0.0, there - near) + back
        return Estimate(self.schedule, near + computing, moving, unhidden, near + unhidden + seconds)

    def _changing(self, one: ByHeads, way: str) -> float:
        """Changing places, there or back: carried by the busier line, and put where it is used."""
        carried, every = 0.0, 0.0
        for others, is_inside in self._others(one):
            nbytes = len(others) * self._changing_bytes(one, others, way)
            line = self._carrying(nbytes, is_inside=is_inside, sharing=self.node_ranks)
            carried, every = max(carried, line + self._latency(is_inside=is_inside)), every + nbytes
        return carried + self.pace.copying(round(every))

    def _others(self, one: ByHeads) -> Iterator[tuple[list[int], bool]]:
        for is_inside in (True, False):
            some = [other for other in one.others if self._is_inside(one.rank, other) == is_inside]
            if some:
                yield some, is_inside

    def _changing_bytes(self, one: ByHeads, others: Sequence[int], way: str) -> float:
        """Between the rank and one of the others, on average."""
        asked, given = self._changing_vectors(one, others)
        bytes_of = self.pace.bytes_of
        if way == "there":
            kind = "queries" if self.is_forward else "queries and gradients"
            return bytes_of(kind, 1) * asked + bytes_of("keys", 1) * given
        kind = "answers" if self.is_forward else "gradients" if not one.is_final else "query gradients"
        kind = kind if one.is_final else f"partial {kind}"
        return bytes_of(kind, 1) * asked + (0 if self.is_forward else bytes_of("gradients", 1) * given)

    def _changing_vectors(self, one: ByHeads, others: Sequence[int]) -> tuple[float, float]:
        """(of queries, of keys) that go to another rank; LongNet's rows would have to be named one by one."""
        task = self.task
        if not isinstance(task.pattern, Dilated):
            some = [others[i] for i in few(len(others), OTHERS_TO_ASK)]
            asked, given = ([way(one.rank, other).vectors for other in some] for way in (one.queries, one.keys))
            return sum(asked) / len(some), sum(given) / len(some)
        pairs = [_dilated_vectors(one, other % one.inner) for other in others[:: -(-len(others) // OTHERS_TO_ASK)]]
        asked, given = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
        return asked, given


def _dilated_vectors(one: ByHeads, place: int) -> tuple[float, float]:
    """Of queries and of keys that a rank gives to the desks of a place, about: rows that some branch keeps there."""
    far, problem = one.far, one.task.problem
    assert far is not None
    assert isinstance(far.pattern, Dilated)
    branches, is_causal = far.pattern.branches, far.pattern.causal
    travels_on = one.inner < one.task.ranks  # then rows are not looked at
    kept = 1.0 if travels_on else min(1.0, sum(1 / r for _, r in branches))
    asked = given = 0.0
    for desk in one.desks_of(place):
        seen = sum(_seen_by(desk.queries, w, is_causal=is_causal) / r for w, r in branches)
        asked += len(desk.heads) * kept * size(desk.queries) / size(one.nodes[0].shards[one.node])
        given += len(desk.kv_heads) * (1.0 if travels_on else min(1.0, seen / problem.n_k))
    queries, keys = max(one.task.queries.sizes), max(one.task.keys.sizes)
    return problem.batch * queries * asked, problem.batch * keys * given


def _seen_by(queries: Shard, w: int, *, is_causal: bool) -> int:
    """Positions of the segments in which queries lie, up to where they see."""
    return sum((q.stop if is_causal else -(-q.stop // w) * w) - q.start // w * w for q in queries)
