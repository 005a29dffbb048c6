"""Scores: what the ranks of an itinerary compute and send at every step, told as what changes from step to step.

All of it is asked of the itinerary that the engine runs. It is asked where something can change: which sources look
alike to a rank, and from which steps on the rows that an owner sends on are fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import lcm
from typing import TypeVar

from ..geometry.heads import by_heads
from ..geometry.itinerary import Itinerary, Lane, bidirectional, double_ring, exchange, halves, ring
from ..geometry.needs import rows_seen
from ..geometry.parcels import Share
from ..geometry.ranges import meet
from ..geometry.routes import DoubleRing, Ring, Route, Star
from .event_clock import slowed
from .event_lists import Arithmetic, Messages, Row
from .event_pace import Pace
from .event_rounds import Rounds, rounds
from .event_rows import AnyFreight, Changes, Freight, FreshFreight, Move, Strip, Turns
from .event_sources import Desks, Nodes, Sources
from .links import Lines

T = TypeVar("T")


class LaneScore:
    """What goes along one lane, by the steps at which it is due. Seats are ranks in order of (member, place)."""

    def __init__(
        self, lanes: Sequence[Lane], pace: Pace, rows: Arithmetic, wanted: Callable[[], list[Changes]] | None = None
    ) -> None:
        """One lane over all ranks, or those of all places of the rings between nodes.

        wanted: of an exchange, the vectors that it brings to every rank, told for steps that take turns.
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
        return _at_its_turn(self._rows_due, due)

    @cached_property
    def _rows_due(self) -> Sequence[AnyFreight]:
        if isinstance(self.route, DoubleRing):
            return [self._fresh(self._round.rows, "rows")]
        return self._freights("rows")

    def _freights(self, kind: str) -> list[Freight]:
        turns = self._wanted_by_turns if isinstance(self.route, Star) else [self._rows]
        return [Freight(self._as_bytes(changes, kind), self._arithmetic) for changes in turns]

    @cached_property
    def _wanted_by_turns(self) -> list[Changes]:
        return self._wanted()

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
            yield self.to_next(step).back, _at_its_turn(self._straight_home, step), self.hosts(0)
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
    def _straight_home(self) -> list[Freight]:
        return self._freights("gradients")

    def _as_bytes(self, changes: Sequence[Sequence[tuple[int, float]]], kind: str) -> Changes:
        size = self._pace.bytes_of(kind, 1)
        return [[(step, vectors * size) for step, vectors in some] for some in changes]

    @cached_property
    def _rows(self) -> Changes:
        """Vectors of a ring that are due at a step, by owner."""
        return self._by_owner(_rows_of)

    @cached_property
    def _gradients(self) -> list[tuple[list[tuple[int, float]], list[tuple[int, int]]]]:
        """(vectors that follow, vectors that go home), each by step, of every owner."""
        met = self._by_owner(_rows_met)

        def of_owner(lane: Lane, owner: int, place: int) -> tuple[list[tuple[int, float]], list[tuple[int, int]]]:
            seat = owner * self.places + place
            return _gradients_of(lane, owner, self._rows[seat], met[seat])

        return self._of_seats(of_owner)

    def _by_owner(self, of_owner: Callable[[Lane, int, Sequence[int]], list[tuple[int, float]]]) -> Changes:
        """Of every place of every owner. Where it changes for one owner is near where it did for the one before."""
        guesses: list[list[int]] = [[] for _ in self._lanes]

        def guessed(lane: Lane, owner: int, place: int) -> list[tuple[int, float]]:
            found = of_owner(lane, owner, guesses[place])
            guesses[place] = [step for step, _ in found]
            return found

        return self._of_seats(guessed)

    def _of_seats(self, asked: Callable[[Lane, int, int], T]) -> list[T]:
        """Of every owner at every place, asked once where lanes of several places carry the same."""
        found: list[T] = []
        for owner in range(self.route.steps):
            of_place = {place: asked(self._lanes[place], owner, place) for place in set(self._first_alike)}
            found += [of_place[place] for place in self._first_alike]
        return found

    @cached_property
    def _first_alike(self) -> list[int]:
        """For every place the first whose lane carries the same: where heads come out even, that of all."""
        tasks = [lane.task for lane in self._lanes]
        return [tasks.index(task) for task in tasks]


def _at_its_turn(freights: Sequence[AnyFreight], step: int) -> AnyFreight:
    for freight in freights:
        freight.go_to(step)
    return freights[step % len(freights)]


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
        hosts = lane.route.hosts(owner, range(1, step + 1))
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
    _period: Callable[[], int] = lambda: 1  # after how many steps ranks meet somebody who looks like the first

    @cached_property
    def work(self) -> Strip | Turns:
        """Seconds that ranks compute with their guests."""
        by_rank = [list(self._of_rank(rank)) for rank in range(self.rows.lines.ranks)]
        strips = [Strip(list(changes), self.rows) for changes in zip(*by_rank, strict=True)]
        return strips[0] if len(strips) == 1 else Turns(strips, self.rows)

    def _of_rank(self, rank: int) -> Iterator[list[tuple[int, float]]]:
        """For steps that take turns."""
        member, routes = rank // self._places, [lane.route for lane in self.lanes]
        by_lane = [[(some.sources, self._seconds(some)) for some in runs(rank)] for runs in self._runs]
        for turn in range(self._turns):
            lanes = (
                dict(_by_steps(route, member, _at_turn(runs, route.guest(member, turn), self._turns)))
                for route, runs in zip(routes, by_lane, strict=True)
            )
            yield self._together(rank, list(lanes))

    def _seconds(self, desks: Desks) -> float:
        key = tuple((id(tiles), share) for tiles, share in desks.work)  # sources keep them, so that no other has its id
        if key not in self._known:
            self._known[key] = self.pace.looking_at(desks.work)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[tuple[int, int], ...], float]:
        return {}

    def _together(self, rank: int, lanes: Sequence[dict[int, float]]) -> list[tuple[int, float]]:
        """Of all lanes, at every step at which one changes."""
        events: dict[int, float] = {}
        for step in sorted({step for lane in lanes for step in lane}):
            events[step] = 0.0
        latest = [0.0] * len(lanes)
        for step in events:
            latest = [lane.get(step, before) for lane, before in zip(lanes, latest, strict=True)]
            events[step] = self._slowed(rank, sum(latest))
        return list(events.items())

    @cached_property
    def _turns(self) -> int:
        return self._period()

    def _slowed(self, rank: int, seconds: float) -> float:
        return slowed_at(self.rows.lines, rank, seconds)

    def home(self, which: str) -> Row:
        """Seconds that ranks compute with their own rows: all of them, or the "early" or "late" ones."""
        known: dict[object, float] = {}
        found: list[float] = []
        for rank, look in enumerate(self._own_looks):
            if look not in known:
                known[look] = self._at_home(rank, which)
            found.append(self._slowed(rank, known[look]))
        return self.rows.of(found)

    @cached_property
    def _own_looks(self) -> list[object]:
        return [self._own_look(rank) for rank in range(self.rows.lines.ranks)]

    def _at_home(self, rank: int, which: str) -> float:
        itinerary = self._at(rank)
        early, late = halves(itinerary.task)
        cut = itinerary.own_tiles({"all": itinerary.task, "early": early, "late": late}[which])
        return self.pace.looking_at(zip(cut, self._shares(rank), strict=True), is_first=which != "early")


def slowed_at(lines: Lines, rank: int, seconds: float) -> float:
    return slowed(seconds, lines.slow.ranks.get(rank, 1.0))


def _at_turn(runs: Sequence[tuple[range, float]], first: int, period: int) -> Sequence[tuple[range, float]]:
    """Runs of those sources that come with the first of a turn; others between them do not come at these steps."""
    if period == 1:
        return runs
    some = ((meet(sources, range(first % period, sources.stop, period)), value) for sources, value in runs)
    return [(range(comb[0], comb[-1] + 1), value) for comb, value in some if comb]


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
    turn = rows.lines.node_ranks if schedule == "double_ring" and rows.lines.node_ranks > 1 else task.ranks
    sources = [Sources(lane.task, turn) for lane in lanes]
    scores = tuple(
        LaneScore([lane], pace, rows, partial(_wanted, some)) for lane, some in zip(lanes, sources, strict=True)
    )
    runs = tuple(some.desks for some in sources)
    own = sources[0] if len(sources) == 1 else Sources(task)
    return Score(
        rows,
        pace,
        task.ranks,
        scores,
        at,
        runs,
        lambda rank: (task.share,),
        own.own_look,
        _period=lambda: lcm(*(some.period() for some in sources)),
    )


def _wanted(sources: Sources) -> list[Changes]:
    """Vectors that an exchange brings to every rank, by step, for steps that take turns."""
    star, period = Star(sources.task.ranks), sources.period()
    return [
        [
            list(_by_steps(star, rank, _at_turn(sources.wanted(rank), star.guest(rank, turn), period)))
            for rank in range(star.size)
        ]
        for turn in range(period)
    ]


def between_score(pace: Pace, rows: Arithmetic, inner: int) -> Score | None:
    """Of the rings between nodes: one for every place in them. None where everything is at home."""
    task = pace.task
    plans = [by_heads(task, place, inner) for place in range(inner)]
    if plans[0].far is None:
        return None
    lanes = [plan.between.lanes[0] for plan in plans]
    nodes = Nodes(task, inner)
    return Score(
        rows,
        pace,
        task.ranks // inner,
        (LaneScore(lanes, pace, rows),),
        lambda rank: by_heads(task, rank, inner).between,
        (nodes.desks,),
        nodes.shares,
        nodes.own_look,
        inner,
    )
