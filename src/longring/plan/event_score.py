"""Scores: what the ranks of an itinerary compute and send at every step, told as what changes from step to step.

All of it is asked of the itinerary that the engine runs. It is asked where something can change: which sources look
alike to a rank, and from which steps on the rows that an owner sends on are fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ..geometry.heads import ByHeads, by_heads
from ..geometry.itinerary import Itinerary, Lane, bidirectional, double_ring, exchange, ring
from ..geometry.layouts import Layout
from ..geometry.needs import rows_seen
from ..geometry.parcels import Share, needed
from ..geometry.patterns import Dilated
from ..geometry.routes import DoubleRing, Ring, Route, Star
from ..geometry.task import Task, look_of_own, runs_over_sources, tiles_between
from .event_clock import slowed
from .event_lists import Arithmetic, Messages, Row
from .event_pace import Pace, Tiles
from .event_rounds import Rounds, rounds
from .event_rows import AnyFreight, Changes, Freight, FreshFreight, Move, Strip
from .event_views import Views
from .links import Lines


class Desks(NamedTuple):
    """Some sources, and what a rank computes with each of them: tiles, and query heads to a kv head, by desk."""

    sources: range
    work: tuple[tuple[Tiles, int], ...]


class LaneScore:
    """What goes along one lane, by the steps at which it is due. Seats are ranks in order of (member, place)."""

    def __init__(
        self, lanes: Sequence[Lane], pace: Pace, rows: Arithmetic, wanted: Callable[[], Changes] | None = None
    ) -> None:
        """One lane over all ranks, or those of all places of the rings between nodes.

        wanted: of an exchange, the vectors that it brings to every rank.
        """
        self.route: Route = lanes[0].route
        self._lanes, self._pace, self._arithmetic = lanes, pace, rows
        self._wanted = wanted or list
        self.places = len(lanes)

    # ---- where

    def _move(self, across: int, within: int = 0) -> Move:
        ranks = self._arithmetic.lines.ranks
        if isinstance(self.route, DoubleRing):
            return Move(ranks, self.route.inner, across, within)
        return Move.by(ranks, across * self.places)

    def to_next(self, due: int) -> Move:
        """From who sends what is due at this step to who receives it."""
        route = self.route
        if isinstance(route, Ring):
            return self._move(route.direction)
        if isinstance(route, DoubleRing):
            return self._move(0, route.direction) if due % route.inner else self._move(route.direction)
        return self._move(due)

    def frame(self, due: int) -> Move:
        """From the index of what is due at this step to who sends it."""
        if isinstance(self.route, Star):
            return self._move(-due)  # told by receiver
        return self.hosts(self.route.origin(due))

    def hosts(self, step: int) -> Move:
        """From an owner to its host."""
        route = self.route
        if isinstance(route, Ring):
            return self._move(route.direction * step)
        if isinstance(route, DoubleRing):
            rounds, hops = divmod(step, route.inner)
            return self._move(route.direction * rounds, route.direction * hops)
        return self._move(step)

    # ---- how much

    def rows(self, due: int) -> AnyFreight:
        """Keys and values that are due at this step."""
        freight = self._rows_due
        freight.go_to(due)
        return freight

    @cached_property
    def _rows_due(self) -> AnyFreight:
        if isinstance(self.route, DoubleRing):
            return self._fresh(self._round.rows, "rows")
        return Freight(self._as_bytes(self._rows, "rows"), self._arithmetic)

    @cached_property
    def _round(self) -> Rounds:
        return rounds(self._lanes[0], self._arithmetic)

    def _fresh(self, vectors: Callable[[int], Row], kind: str) -> FreshFreight:
        """Round a ring of rings rows become fewer and more again."""
        rows, size = self._arithmetic, self._pace.bytes_of(kind, 1)
        return FreshFreight(lambda step: rows.weighed([(size, vectors(step))], rows.lines.ranks), rows)

    @cached_property
    def _following(self) -> AnyFreight:
        if isinstance(self.route, DoubleRing):
            return self._fresh(self._round.following, "gradients")
        return Freight(self._as_bytes([some for some, _ in self._gradients], "gradients"), self._arithmetic)

    def gradients_leaving(self, step: int) -> Iterator[tuple[Move, AnyFreight, Move]]:
        """(to whom, what, from whose index to who sends it) of the gradients that all send on, or straight home."""
        route = self.route
        if isinstance(route, Star):
            self._straight_home.go_to(step)
            yield self.to_next(step).back, self._straight_home, self.hosts(0)
            return
        self._following.go_to(step)
        assert isinstance(route, Ring | DoubleRing)
        if isinstance(route, Ring):
            yield self._move(route.direction), self._following, self.hosts(step)
            return
        yield self._move(0, route.direction), self._following, self.hosts(step)
        self._from_round.go_to(step)
        yield self.hosts(step).back, self._from_round, self.hosts(step)

    @cached_property
    def _from_round(self) -> AnyFreight:
        """Of a ring of rings: what is complete behind a step of a round."""
        return self._fresh(self._round.returning, "gradients")

    def going_home(self, step: int) -> Messages | None:
        """Gradients that are complete, beside those, where only some owners' are."""
        found = self._returning.get(step) if isinstance(self.route, Ring) else None
        return None if found is None else self._arithmetic.messages(found)

    @cached_property
    def _returning(self) -> dict[int, list[tuple[int, int, int]]]:
        """(sender, receiver, bytes) by step."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for number, (_, home) in enumerate(self._gradients):
            for step, vectors in home:
                message = self.hosts(step).target(number), number, self._pace.bytes_of("gradients", vectors)
                found.setdefault(step, []).append(message)
        return found

    @cached_property
    def _straight_home(self) -> Freight:
        return Freight(self._as_bytes(self._rows, "gradients"), self._arithmetic)

    def _as_bytes(self, changes: Sequence[Sequence[tuple[int, float]]], kind: str) -> Changes:
        size = self._pace.bytes_of(kind, 1)
        return [[(step, vectors * size) for step, vectors in some] for some in changes]

    @cached_property
    def _rows(self) -> Changes:
        """Vectors that are due at a step: of a ring by owner, of an exchange by receiver."""
        if isinstance(self.route, Star):
            return self._wanted()
        return self._by_owner(_rows_of)

    @cached_property
    def _gradients(self) -> list[tuple[list[tuple[int, float]], list[tuple[int, int]]]]:
        """(vectors that follow, vectors that go home), each by step, of every owner."""
        met = self._by_owner(_rows_met)
        return [
            _gradients_of(self._lanes[seat % self.places], seat // self.places, fewer, more)
            for seat, (fewer, more) in enumerate(zip(self._rows, met, strict=True))
        ]

    def _by_owner(self, of_owner: Callable[[Lane, int, Sequence[int]], list[tuple[int, float]]]) -> Changes:
        """Of every place of every owner. Where it changes for one owner is near where it did for the one before."""
        found: Changes = []
        guesses: list[list[int]] = [[] for _ in self._lanes]
        for owner in range(self.route.steps):
            for place, lane in enumerate(self._lanes):
                found.append(of_owner(lane, owner, guesses[place]))
                guesses[place] = [step for step, _ in found[-1]]
        return found


def _vectors(shares: tuple[Share, ...]) -> int:
    return sum(share.vectors for share in shares)


def _rows_of(lane: Lane, owner: int, guess: Sequence[int]) -> list[tuple[int, float]]:
    """(step, vectors from then on) that reach the owner's host: round a ring never more than before."""
    return list(_steps_of(lambda step: _vectors(lane.carried(owner, step)), range(1, lane.route.steps), guess))


def _changing(values: Iterable[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    last: float | None = None
    for step, value in values:
        if value != last:
            yield step, value
        last = value


def _steps_of(value: Callable[[int], int], steps: range, guess: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Where a value changes that only falls, or only rises: looked for near where its neighbour's did."""
    if not steps:
        return
    known: dict[int, int] = {}

    def at(step: int) -> int:
        if step not in known:
            known[step] = value(step)
        return known[step]

    here, last = steps[0], steps[-1]
    yield here, at(here)
    while at(last) != at(here):
        low, high = here, last  # at(low) is as here, at(high) is not
        for near in guess:
            for step in (near - 2, near - 1, near, near + 1):
                if low < step < high:
                    low, high = (step, high) if at(step) == at(here) else (low, step)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if at(middle) == at(here) else (low, middle)
        here = high
        yield here, at(here)


def _rows_met(lane: Lane, owner: int, guess: Sequence[int]) -> list[tuple[int, float]]:
    """(step, rows that some host has seen by then)."""

    def seen(step: int) -> int:
        hosts = tuple(lane.route.hosts(owner, range(1, step + 1)))
        return sum(map(len, rows_seen(lane.task, owner, hosts)))

    return list(_steps_of(seen, range(1, lane.route.steps), guess))


def _gradients_of(
    lane: Lane, owner: int, rows: Sequence[tuple[int, float]], met: Sequence[tuple[int, float]]
) -> tuple[list[tuple[int, float]], list[tuple[int, int]]]:
    """Between two changes of what is still needed, or was met, the same rows follow, and none goes home."""
    last = lane.route.steps - 1
    complete = {step - 1 for step, _ in rows if step > 1} | ({last} if last else set())
    asked = sorted(complete | {step for step, _ in met})
    follow = _changing((step, _vectors(lane.onward(owner, step))) for step in asked)
    home = ((step, _vectors(lane.homeward(owner, step))) for step in sorted(complete))
    return list(follow), [(step, vectors) for step, vectors in home if vectors]


# -------------------------------------------------------------------------------------------- which work


@dataclass(frozen=True)
class Score:
    """All ranks along one kind of itinerary."""

    rows: Arithmetic
    pace: Pace
    steps: int
    lanes: tuple[LaneScore, ...]
    _at: Callable[[int], Itinerary]
    _runs: tuple[Callable[[int], Iterator[Desks]], ...]  # by lane, for a rank
    _shares: Callable[[int], tuple[int, ...]]
    _own_look: Callable[[int], object]
    _places: int = 1

    @cached_property
    def work(self) -> Strip:
        """Seconds that ranks compute with their guests."""
        changes = [self._of_rank(rank) for rank in range(self.rows.lines.ranks)]
        return Strip(changes, self.rows)

    def _of_rank(self, rank: int) -> list[tuple[int, float]]:
        events: dict[int, float] = {}
        lanes = [dict(self._of_lane(rank, number)) for number in range(len(self.lanes))]
        for step in sorted({step for lane in lanes for step in lane}):
            events[step] = 0.0
        latest = [0.0] * len(lanes)
        for step in events:
            latest = [lane.get(step, before) for lane, before in zip(lanes, latest, strict=True)]
            events[step] = self._slowed(rank, sum(latest))
        return list(events.items())

    def _of_lane(self, rank: int, number: int) -> Iterator[tuple[int, float]]:
        member, route = rank // self._places, self.lanes[number].route
        runs = [(desks.sources, self.pace.looking_at(desks.work)) for desks in self._runs[number](rank)]
        yield from _by_steps(route, member, runs)

    def _slowed(self, rank: int, seconds: float) -> float:
        return slowed_at(self.rows.lines, rank, seconds)

    def home(self, which: str) -> Row:
        """Seconds that ranks compute with their own rows: all of them, or the "early" or "late" ones."""
        known: dict[object, float] = {}
        found: list[float] = []
        for rank in range(self.rows.lines.ranks):
            look = self._own_look(rank)
            if look not in known:
                known[look] = self._at_home(rank, which)
            found.append(self._slowed(rank, known[look]))
        return self.rows.of(found)

    def _at_home(self, rank: int, which: str) -> float:
        itinerary = self._at(rank)
        if which == "all":
            cut = itinerary.own_tiles(itinerary.task)
        else:
            home = itinerary.home
            cut = home.early if which == "early" else home.late
        return self.pace.looking_at(zip(cut, self._shares(rank), strict=True), is_first=which != "early")


def slowed_at(lines: Lines, rank: int, seconds: float) -> float:
    return slowed(seconds, lines.slow.ranks.get(rank, 1.0))


def _by_steps(route: Route, member: int, runs: Sequence[tuple[range, float]]) -> Iterator[tuple[int, float]]:
    """(step, value from then on), from values of runs of sources."""
    if isinstance(route, DoubleRing):
        yield from _by_rounds(route, member, runs)
        return
    ranks = route.steps
    way = route.direction if isinstance(route, Ring) else +1
    found: list[tuple[int, float]] = []
    for sources, value in runs:
        for part in (
            range(sources.start, min(sources.stop, member)),
            range(max(sources.start, member + 1), sources.stop),
        ):
            if part:
                first = min((way * (member - end)) % ranks for end in (part[0], part[-1]))
                found.append((first, value))
    yield from _changing(sorted(found))


def _by_rounds(route: DoubleRing, member: int, runs: Sequence[tuple[range, float]]) -> Iterator[tuple[int, float]]:
    """Whole nodes of a run are met in turn, round after round; of the nodes at its ends rank after rank."""
    inner, nodes = route.inner, route.nodes
    found: list[tuple[int, float]] = []
    for sources, value in runs:
        first, stop = -(-sources.start // inner), sources.stop // inner
        ends = (
            range(sources.start, min(sources.stop, first * inner)),
            range(max(sources.start, stop * inner), sources.stop),
        )
        for source in {source for end in ends for source in end}:
            found.append((_step_of(route, member, source), value))
        mine = member // inner
        for part in (range(first, min(stop, mine)), range(max(first, mine + 1), stop)):
            if part:
                rounds = (route.direction * (mine - node) % nodes for node in (part[0], part[-1]))
                found.append((min(rounds) * inner, value))
        if first <= mine < stop:
            found += [(_step_of(route, member, mine * inner + place), value) for place in range(inner)]
    yield from _changing((step, value) for step, value in sorted(found) if step)


def _step_of(route: DoubleRing, member: int, source: int) -> int:
    """At which the source is the member's guest."""
    inner, way = route.inner, route.direction
    (node, place), (their_node, their_place) = divmod(member, inner), divmod(source, inner)
    return way * (node - their_node) % route.nodes * inner + way * (place - their_place) % inner


# ------------------------------------------------------------------------------------ which sources are alike


class Sources:
    """For a rank of a task, runs of sources with which it computes the same. It keeps all of them."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._segments = _Segments(task) if _Segments.can(task) else None
        self._views = Views(task)
        self._runs: dict[int, list[tuple[range, Tiles]]] = {}
        self._vectors: dict[int, float] = {}

    def runs(self, rank: int) -> list[tuple[range, Tiles]]:
        if rank not in self._runs:
            self._runs[rank] = list(self._found(rank))
        return self._runs[rank]

    def _found(self, rank: int) -> Iterator[tuple[range, Tiles]]:
        task = self.task
        if task.pattern.only_limits is not None:
            yield from ((run.ranks, run.tiles) for run in runs_over_sources(task, rank))
        elif self._segments is not None:
            yield from self._segments.runs(rank)
        else:
            yield from self._one_by_one(rank)

    def _one_by_one(self, rank: int) -> Iterator[tuple[range, Tiles]]:
        """Those of whose keys the rank could see some, and runs of the others."""
        at = 0
        for source in sorted(self._views.owners(rank)):
            if at < source:
                yield range(at, source), ()
            yield range(source, source + 1), tiles_between(self.task, rank, source)
            at = source + 1
        if at < self.task.ranks:
            yield range(at, self.task.ranks), ()

    def desks(self, rank: int) -> Iterator[Desks]:
        for sources, tiles in self.runs(rank):
            yield Desks(sources, ((tiles, self.task.share),) if sources != range(rank, rank + 1) else ())

    def wanted(self) -> Changes:
        """Vectors that an exchange brings to a rank, by step."""
        star = Star(self.task.ranks)
        return [list(_by_steps(star, rank, self._wanted(rank))) for rank in range(self.task.ranks)]

    def _wanted(self, rank: int) -> list[tuple[range, float]]:
        others = ((sources, tiles) for sources, tiles in self.runs(rank) if sources != range(rank, rank + 1))
        return [(sources, self._needed(tiles)) for sources, tiles in others]

    def _needed(self, tiles: Tiles) -> float:
        if id(tiles) not in self._vectors:  # kept, so that no other has its id
            self._vectors[id(tiles)] = float(_vectors(needed(tiles))) if tiles else 0.0
        return self._vectors[id(tiles)]

    def own_look(self, rank: int) -> object:
        """The same for ranks that compute the same with their own rows, if that can be told before."""
        if self.task.pattern.only_limits is not None:
            return look_of_own(self.task, rank)
        return rank if self._segments is None else self._segments.own_look(rank)


class _Segments:
    """LongNet over contiguous shards: what two ranks compute together depends on where segments cut both."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._shards = [shard[0] if shard else range(0) for shard in task.keys.shards]
        self._known: dict[tuple[object, ...], Tiles] = {}
        self._starts = [shard.start for shard in self._shards]
        assert isinstance(task.pattern, Dilated)
        self._branches = task.pattern.branches

    @staticmethod
    def can(task: Task) -> bool:
        pattern = task.pattern
        if not isinstance(pattern, Dilated) or pattern.documents is not None:
            return False
        plain = all(len(shard) == 1 and shard[0].step == 1 for shard in task.keys.shards)
        return plain and task.queries == task.keys and not task.problem.offset and _are_in_order(task.keys)

    def runs(self, rank: int) -> Iterator[tuple[range, Tiles]]:
        for sources in self._alike(rank, self._branches):
            is_own = sources == range(rank, rank + 1)  # asked for elsewhere, and dear
            yield sources, () if is_own else self._tiles(rank, sources[0], self._branches)

    def own_look(self, rank: int) -> object:
        mine = self._shards[rank]
        return len(mine), tuple(_own_place(mine, w, r) for w, r in self._branches)

    def _alike(self, rank: int, branches: Sequence[tuple[int, int]]) -> Iterator[range]:
        """Cut where a segment of the rank's begins or ends, at either end of a family, and at the rank itself."""
        mine, ranks = self._shards[rank], len(self._shards)
        cuts = {0, rank, rank + 1, ranks}
        for family in self._task.keys.families:
            cuts |= {family.start, family.stop}
        for w, _ in branches:
            for edge in (mine[0] // w * w, (mine[-1] // w + 1) * w):
                if 0 <= edge < self._task.keys.length:
                    holder = self._holder(edge)
                    cuts |= {holder, holder + 1}
        borders = sorted(cut for cut in cuts if 0 <= cut <= ranks)
        for first, stop in pairwise(borders):
            if stop - first > 1 and not self._keeps_residues(range(first, stop), rank, branches):
                yield from (range(i, i + 1) for i in range(first, stop))
            else:
                yield range(first, stop)

    def _holder(self, position: int) -> int:
        low, high = 0, len(self._starts)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._starts[middle] <= position else (low, middle)
        return low

    def _keeps_residues(self, sources: range, rank: int, branches: Sequence[tuple[int, int]]) -> bool:
        """Whether every source begins at the same place of the rate of each branch that it shares with the rank."""
        apart = self._starts[sources[1]] - self._starts[sources[0]]
        shared = [r for w, r in branches if self._common(rank, sources[0], w)]
        return all(apart % r == 0 for r in shared)

    def _common(self, rank: int, source: int, w: int) -> bool:
        a, b = sorted((rank, source))
        return self._shards[a][-1] // w == self._shards[b][0] // w

    def _tiles(self, rank: int, source: int, branches: Sequence[tuple[int, int]]) -> Tiles:
        key = self._key(rank, source, branches)
        if key not in self._known:
            self._known[key] = tiles_between(self._task, rank, source)
        return self._known[key]

    def _key(self, rank: int, source: int, branches: Sequence[tuple[int, int]]) -> tuple[object, ...]:
        mine, theirs = self._shards[rank], self._shards[source]
        found: list[object] = [rank > source, len(mine), len(theirs)]
        for w, r in branches:
            if not self._common(rank, source, w):
                found.append(None)
                continue
            start = max(mine[0], theirs[0]) // w * w
            for shard in (mine, theirs):
                first, stop = max(shard.start, start), min(shard.stop, start + w)
                found.append((first - shard.start, stop - first, (first - start) % r))
        return tuple(found)


def _own_place(shard: range, w: int, r: int) -> tuple[int, ...]:
    first = shard[0] % w
    if shard[-1] // w == shard[0] // w:  # one segment
        return -1, first % r
    return first, 0


def _are_in_order(layout: Layout) -> bool:
    at = 0
    for shard in layout.shards:
        if shard[0].start != at:
            return False
        at = shard[0].stop
    return at == layout.length


# ------------------------------------------------------------------------------------------- by schedule


def relay_score(schedule: str, pace: Pace, rows: Arithmetic) -> Score:
    """Of ring, bidirectional, double_ring or exchange."""
    task = pace.task
    itineraries: dict[str, Callable[[int], Itinerary]] = {
        "ring": lambda rank: ring(task, rank),
        "bidirectional": lambda rank: bidirectional(task, rank),
        "double_ring": lambda rank: double_ring(task, rank, rows.lines.node_ranks),
        "exchange": lambda rank: exchange(task, rank),
    }
    at = itineraries[schedule]
    lanes = at(0).lanes
    sources = [Sources(lane.task) for lane in lanes]
    scores = tuple(LaneScore([lane], pace, rows, some.wanted) for lane, some in zip(lanes, sources, strict=True))
    runs = tuple(some.desks for some in sources)
    own = sources[0] if len(sources) == 1 else Sources(task)
    return Score(rows, pace, task.ranks, scores, at, runs, lambda rank: (task.share,), own.own_look)


def between_score(pace: Pace, rows: Arithmetic, inner: int) -> Score | None:
    """Of the rings between nodes: one for every place in them. None where everything is at home."""
    task = pace.task
    plans = [by_heads(task, place, inner) for place in range(inner)]
    if plans[0].far is None:
        return None
    lanes = [plan.between.lanes[0] for plan in plans]
    lane = LaneScore(lanes, pace, rows)

    def runs(rank: int) -> Iterator[Desks]:
        yield from _desk_runs(by_heads(task, rank, inner))

    def shares(rank: int) -> tuple[int, ...]:
        return tuple(desk.share for desk in by_heads(task, rank, inner).desks)

    return Score(
        rows,
        pace,
        task.ranks // inner,
        (lane,),
        lambda rank: by_heads(task, rank, inner).between,
        (runs,),
        shares,
        lambda rank: rank,
        inner,
    )


def _desk_runs(plan: ByHeads) -> Iterator[Desks]:
    """Runs of nodes with whose keys every desk computes the same."""
    between, nodes = plan.between, len(plan.nodes[1].shards)
    if plan.far is None or plan.far.pattern.only_limits is None:
        lane = between.lanes[0]
        for node in range(nodes):
            tiles = between.guest_tiles(lane, node, 0)
            yield Desks(range(node, node + 1), _with_shares(plan, tiles))
        return
    cuts = {0, nodes}
    for desk in plan.desks:
        alone = tuple(desk.queries if node == plan.node else () for node in range(nodes))
        asking = Task(
            plan.far.pattern, plan.far.problem, Layout(plan.nodes[0].length, alone), plan.nodes[1], plan.far.heads
        )
        for run in runs_over_sources(asking, plan.node):
            cuts |= {run.ranks.start, run.ranks.stop}
    borders = sorted(cuts)
    for first, stop in pairwise(borders):
        yield Desks(range(first, stop), _with_shares(plan, between.guest_tiles(between.lanes[0], first, 0)))


def _with_shares(plan: ByHeads, tiles: tuple[Tiles, ...]) -> tuple[tuple[Tiles, int], ...]:
    return tuple((some, desk.share) for some, desk in zip(tiles, plan.desks, strict=True))
