"""Event simulation: the plan that the engine runs, played on a model of ranks and links.

Predicted, not measured: every rank computes its tiles at the rate its hardware attains, posts what the engine posts
where the engine posts it, and waits where the engine waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import ArgumentError
from ..geometry.heads import near_and_far
from ..geometry.plans import PLANS
from ..geometry.task import Task, tiles_between
from .event_clock import Clock, Span
from .event_gather import Gathered
from .event_lists import Messages, Row
from .event_pace import Pace
from .event_places import Places
from .event_rows import Freight, Move, from_first
from .event_score import LaneScore, Score, between_score, relay_score, slowed_at
from .event_sources import Sources
from .hardware import Hardware, Phase
from .links import Lines, Slow

RELAYS = ("ring", "bidirectional", "double_ring", "exchange")


class StepTime(NamedTuple):
    """The longest computing of a rank, and by how much more than that the last rank became later."""

    computing: float
    exposed: float


class Utilisation(NamedTuple):
    """The share of the time in which lines carry something: the mean of those that ever do."""

    inside: float
    outside: float


@dataclass(frozen=True)
class Played:
    """One pass, in predicted seconds."""

    schedule: str
    phase: Phase
    ends: tuple[float, ...]  # when each rank is done
    computing: tuple[float, ...]  # of each rank
    per_step: tuple[StepTime, ...]
    moving: float  # of all messages together, latency included
    utilisation: Utilisation
    spans: tuple[Span, ...] = ()

    @property
    def seconds(self) -> float:
        return max(self.ends)

    @cached_property
    def waiting(self) -> tuple[float, ...]:
        """Of each rank, until it is done."""
        return tuple(end - work for end, work in zip(self.ends, self.computing, strict=True))

    @property
    def critical_rank(self) -> int:
        """The one that is done last; of several the one that computes longest."""
        return max(range(len(self.ends)), key=lambda rank: (self.ends[rank], self.computing[rank], -rank))

    @property
    def hidden(self) -> float:
        """The share of a rank's messages that adds nothing to what the busiest rank computes: 1.0 is all of them."""
        exposed, each = self.seconds - max(self.computing), self.moving / len(self.ends)
        return 1.0 if exposed <= 0 else max(0.0, 1.0 - exposed / each) if each else 0.0


def play(
    task: Task,
    schedule: str,
    *,
    hardware: Hardware,
    head_dim: int,
    itemsize: int,
    node_ranks: int | None = None,
    phase: Phase = "forward",
    slow: Slow | None = None,
    keeps_spans: bool = False,
) -> Played:
    """How long one pass of a schedule takes, and where it waits.

    node_ranks: consecutive ranks that share a node; all, unless it says otherwise.
    slow: ranks and links that are slower than the others.
    keeps_spans: what every rank did when, for a drawing.
    """
    nodes = task.ranks if node_ranks is None else node_ranks
    _check(task, schedule, nodes, phase)
    lines = Lines(hardware, task.ranks, nodes, slow or Slow())
    lines.slow.check(task.ranks)
    play_ = _Play(Pace(hardware, task, phase, head_dim, itemsize), lines, Clock(lines, keeps_spans))
    play_.whole(schedule)
    clock = play_.clock
    return Played(
        schedule,
        phase,
        tuple(clock.rows.told(clock.at)),
        tuple(clock.rows.told(clock.computing)),
        tuple(play_.per_step),
        clock.moving,
        _utilisation(clock),
        tuple(clock.spans),
    )


def _utilisation(clock: Clock) -> Utilisation:
    whole = clock.rows.largest(clock.at)
    shares = (
        seconds / (lines * whole) if lines and whole else 0.0
        for seconds, lines in zip(clock.carried, clock.lines_used(), strict=True)
    )
    return Utilisation(*shares)


def _check(task: Task, schedule: str, node_ranks: int, phase: str) -> None:
    if schedule not in PLANS:
        raise ArgumentError(f"schedule must be one of {', '.join(PLANS)}, got {schedule!r}")
    if phase not in ("forward", "backward"):
        raise ArgumentError(f"phase must be forward or backward, got {phase!r}")
    if node_ranks < 1 or task.ranks % node_ranks:
        raise ArgumentError(f"{task.ranks} ranks are not whole nodes of {node_ranks}; take a number that divides them")


# ----------------------------------------------------------------------------------------- what is played


@dataclass
class _Play:
    """All ranks do the same in the same order; see schedules/ for what each line plays."""

    pace: Pace
    lines: Lines
    clock: Clock

    def __post_init__(self) -> None:
        self.per_step: list[StepTime] = []
        self.latest = 0.0  # when the last rank was done with the step before

    @property
    def task(self) -> Task:
        return self.pace.task

    @property
    def is_forward(self) -> bool:
        return self.pace.phase == "forward"

    def whole(self, schedule: str) -> None:
        if schedule in RELAYS:
            self.relay(relay_score(schedule, self.pace, self.clock.rows))
        elif schedule == "gather":
            self.gather()
        else:
            self.by_heads(self.lines.ranks if schedule == "ulysses" else self.lines.node_ranks)

    def _each(self, seconds: Callable[[int], float]) -> Row:
        return self.clock.rows.of([slowed_at(self.lines, rank, seconds(rank)) for rank in range(self.lines.ranks)])

    def _step_done(self, computing: float) -> None:
        latest = self.clock.rows.largest(self.clock.at)
        self.per_step.append(StepTime(computing, max(0.0, latest - self.latest - computing)))
        self.latest = latest

    # ---- relays

    def relay(self, score: Score) -> None:
        if self.is_forward:
            self._relay(score, "all")
        elif score.steps == 1:
            self._work_at_home(score, "all")
        else:
            self._relay(score, "late")
            self._work_at_home(score, "early")
            self.clock.wait(("gradients", score.steps - 1))
            self._step_done(0.0)

    def _work_at_home(self, score: Score, which: str) -> None:
        self._work(score.home(which))

    def _work(self, row: Row) -> None:
        self.clock.work(row)
        self._step_done(self.clock.rows.largest(row))

    def _relay(self, score: Score, at_home: str) -> None:
        """Gradients travel a step behind: they are there when the next guest's tiles are done."""
        self._post_rows(score, 0)
        row = score.home(at_home)
        self.clock.work(row)
        self.clock.wait(("rows", 1))
        self._step_done(self.clock.rows.largest(row))
        for step in range(1, score.steps):
            self.clock.step = step
            score.work.go_to(step)
            self._play_step(score, step)
        score.work.go_to(score.steps)
        self.clock.count_work(self.clock.rows.of(score.work.sums()))

    def _play_step(self, score: Score, step: int) -> None:
        clock = self.clock
        self._post_rows(score, step)
        if not score.work.is_nothing:
            clock.work(score.work.values, is_counted=False)
        if not self.is_forward:
            clock.wait(("gradients", step - 1))
            self._post_gradients(score, step)
        clock.wait(("rows", step + 1))
        self._step_done(score.work.largest)

    def _post_rows(self, score: Score, step: int) -> None:
        for lane, due in rows_leaving(score, step):
            self.clock.send(("rows", due), lane.to_next(due), lane.rows(due), lane.frame(due))

    def _post_gradients(self, score: Score, step: int) -> None:
        for lane in score.lanes:
            for leaving in lane.gradients_leaving(step):
                self.clock.send(("gradients", step), *leaving)
            home = lane.going_home(step)
            if home is not None:
                self.clock.scatter(("gradients", step), home)

    # ---- gather

    def gather(self) -> None:
        self._collect()
        self._work(self._each(Gathered(self.pace).seconds))
        if not self.is_forward:
            self._give_back()

    def _shards(self, kind: str) -> tuple[Freight, Row]:
        """What ranks' own rows are on the way, and how long it takes to copy them."""
        problem = self.task.problem
        each = [self.pace.bytes_of(kind, n * problem.batch * problem.kv_heads) for n in self.task.keys.sizes]
        freight = Freight(from_first(each), self.clock.rows)
        freight.go_to(0)
        return freight, self.clock.rows.of([self.pace.copying(nbytes) for nbytes in each])

    def _collect(self) -> None:
        """Rows are put into place while the next are on their way."""
        ranks, clock = self.lines.ranks, self.clock
        freight, copies = self._shards("rows")
        longest = clock.rows.largest(copies)
        stay = Move.by(ranks, 0)
        for step in range(1, ranks):
            clock.step = step
            if step == 1:
                clock.send(("rows", 1), Move.by(ranks, 1), freight, stay)
            clock.wait(("rows", step))
            if step + 1 < ranks:
                clock.send(("rows", step + 1), Move.by(ranks, step + 1), freight, stay)
            clock.work(self._slowed(Move.by(ranks, step).moved(copies)))
            self._step_done(longest)

    def _give_back(self) -> None:
        """Sums for others' rows, one after the other: cut out, swapped, added."""
        ranks, clock = self.lines.ranks, self.clock
        freight, copies = self._shards("gradients")
        own, longest = self._slowed(copies), clock.rows.largest(copies)
        for step in range(1, ranks):
            clock.step = ranks + step
            to_them = Move.by(ranks, step)
            clock.work(self._slowed(to_them.back.moved(copies)))
            clock.send(("gradients", step), to_them, freight, to_them.back)
            clock.wait(("gradients", step))
            clock.work(own)
            self._step_done(longest)

    def _slowed(self, row: Row) -> Row:
        if self.lines.slow.ranks:
            row = row.copy()
            for rank in self.lines.slow.ranks:
                row[rank] = slowed_at(self.lines, rank, float(row[rank]))
        return row

    # ---- by heads

    def by_heads(self, inner: int) -> None:
        pace, clock = self.pace, self.clock
        near = self._near()
        score = between_score(pace, clock.rows, inner)
        if score is None:
            self._work(near)
            return
        places = Places(pace, clock.rows, inner)
        received = self._post(places.there, inner, "there")
        clock.work(near)
        clock.wait("there")
        clock.work(self._seating(received))
        self._step_done(clock.rows.largest(near))
        self.relay(score)
        received = self._post(places.back, inner, "back")
        clock.wait("back")
        clock.work(self._seating(received))
        self._step_done(0.0)

    def _near(self) -> Row:
        """What everybody computes at home, once for all that look alike."""
        near, _ = near_and_far(self.task)
        if near is None:
            return self.clock.rows.full(0.0, self.lines.ranks)
        look, known = Sources(near).own_look, dict[object, float]()

        def seconds(rank: int) -> float:
            if look(rank) not in known:
                known[look(rank)] = self.pace.looking(tiles_between(near, rank, rank), is_first=True)
            return known[look(rank)]

        return self._each(seconds)

    def _post(self, messages: Callable[[int], Messages], inner: int, key: str) -> Row:
        """What goes to each place of all nodes, one after the other; the bytes that everybody gets."""
        rows = self.clock.rows
        received = rows.full(0, self.lines.ranks)
        for place in range(inner):
            some = messages(place)
            self.clock.scatter(key, some)
            received = rows.added(received, rows.received(some))
        return received

    def _seating(self, received: Row) -> Row:
        """Copying what has arrived to where it is used."""
        return self._each(lambda rank: self.pace.copying(int(received[rank])))


def rows_leaving(score: Score, step: int) -> list[tuple[LaneScore, int]]:
    """Lanes, and the later steps for which they send rows during this one."""
    dues = sorted({later for lane in score.lanes for later in lane.route.leaving(step)})
    return [(lane, due) for due in dues for lane in score.lanes if due in lane.route.leaving(step)]
