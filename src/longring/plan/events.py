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
from ..geometry.heads import ByHeads, by_heads
from ..geometry.itinerary import gather
from ..geometry.plans import PLANS
from ..geometry.task import Task
from .event_clock import Clock, Message, Span
from .event_pace import Pace
from .event_rows import Freight, Move, from_first
from .event_score import LaneScore, Score, between_score, relay_score, slowed_at
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
        tuple(clock.at),
        tuple(clock.computing),
        tuple(play_.per_step),
        clock.moving,
        _utilisation(clock),
        tuple(clock.spans),
    )


def _utilisation(clock: Clock) -> Utilisation:
    whole = max(clock.at)
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


# ------------------------------------------------------------------------------------ while nobody waits


class Glide:
    """Steps in which everything arrives while everybody computes: then clocks need not be looked at.

    A message is there at the latest when who sends and who receives it have both posted it, the line has carried all
    of the step's, and a latency has passed. If that is less than the shortest computing of the step, nobody waits, and
    everybody is later by what it computes. It is an upper bound: steps that fail it are played one by one.
    """

    def __init__(self, playing: _Play, score: Score) -> None:
        self._play, self._clock, self._score = playing, playing.clock, score
        self._can = not self._clock.keeps_spans and all(lane.arrives_next for lane in score.lanes)
        self._factor = max([1.0, *self._clock.lines.slow.links.values()]) * self._clock.lines.most_on_a_line
        self._latency = max(self._clock.lines.latency(is_inside=is_inside) for is_inside in (True, False))
        self._work = score.work
        self._since: list[float] | None = None  # what everybody had computed when it began
        self._apart = 0.0
        self._rest, self._tries = 0, 0  # steps to be played before the next try; tries in vain

    def takes(self, step: int) -> bool:
        """Whether nobody waits in this step; then it has been taken."""
        if not self._can:
            return False
        slack = self._slack(step)
        if self._since is not None and slack is not None and self._apart + self._homeward(step) <= slack:
            return self._taken(step)
        self.end(step)
        if slack is None or slack < 0 or self._rest:
            self._rest = max(0, self._rest - 1)
            return False
        return self._begins(step, slack)

    def _begins(self, step: int, slack: float) -> bool:
        clock, key = self._clock, ("gradients", step - 1)
        self._apart = max((clock.apart(lane.meeting(step)) for lane in self._score.lanes), default=0.0)
        late = max(clock.still_to_wait(key), clock.lines_taken())
        if self._apart + late + self._homeward(step) > slack:
            self._tries += 1
            self._rest = min(64, 1 << self._tries)
            return False
        self._tries = 0
        clock.forget(key)
        self._since = self._work.sums()
        return self._taken(step)

    def _taken(self, step: int) -> bool:
        counts = self._work.counts
        self._apart += max(counts) - min(counts)
        self._count(step)
        self._play.per_step.append(StepTime(max(counts), 0.0))
        return True

    def end(self, step: int) -> None:
        """Before this step: look at all clocks again, and post what is on its way."""
        if self._since is None:
            return
        clock, since = self._clock, self._since
        self._since = None
        clock.at = [a + s - b for a, s, b in zip(clock.at, self._work.sums(), since, strict=True)]
        self._play.latest = max(clock.at)
        if not self._play.is_forward:
            moved, carried = clock.moving, clock.carried
            self._play.post_gradients(self._score, step - 1)
            clock.moving, clock.carried = moved, carried  # they were counted

    def _slack(self, step: int) -> float | None:
        """How far apart ranks may be; None if somebody may have messages and nothing to compute."""
        load, latency = 0.0, 0.0
        for lane, due in rows_leaving(self._score, step):
            load += lane.rows(due).longest
        if not self._play.is_forward and step > 1:
            for lane in self._score.lanes:
                load += lane.gradients_leaving(step - 1)[1].longest
                load += max((self._on_line(m) for m in lane.going_home(step - 1)), default=0.0)
        latency = self._latency if load else 0.0
        shortest = min(self._work.counts)
        return None if load and not shortest else shortest - self._factor * load - latency

    def _on_line(self, message: Message) -> float:
        return max(self._clock.lines.on_line(message[2], is_inside=is_inside) for is_inside in (True, False))

    def _homeward(self, step: int) -> float:
        """How far apart those are between whom gradients go home."""
        if self._play.is_forward or step < 2:
            return 0.0
        pairs = [(m[0], m[1]) for lane in self._score.lanes for m in lane.going_home(step - 1)]
        return max((abs(self._now(a) - self._now(b)) for a, b in pairs), default=0.0)

    def _now(self, rank: int) -> float:
        since = 0.0 if self._since is None else self._work.summed(rank) - self._since[rank]
        return self._clock.at[rank] + since

    def _count(self, step: int) -> None:
        for lane, due in rows_leaving(self._score, step):
            self._clock.count(lane.to_next(due), lane.rows(due), lane.frame(due))
        if not self._play.is_forward:
            for lane in self._score.lanes:
                self._clock.count(*lane.gradients_leaving(step))
                self._clock.count_messages(lane.going_home(step))


def rows_leaving(score: Score, step: int) -> list[tuple[LaneScore, int]]:
    """Lanes, and the later steps for which they send rows during this one."""
    dues = sorted({later for lane in score.lanes for later in lane.route.leaving(step)})
    return [(lane, due) for due in dues for lane in score.lanes if due in lane.route.leaving(step)]


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
            self.relay(relay_score(schedule, self.pace, self.lines))
        elif schedule == "gather":
            self.gather()
        else:
            self.by_heads(self.lines.ranks if schedule == "ulysses" else self.lines.node_ranks)

    def _each(self, seconds: Callable[[int], float]) -> list[float]:
        return [slowed_at(self.lines, rank, seconds(rank)) for rank in range(self.lines.ranks)]

    def _step_done(self, computing: float) -> None:
        latest = max(self.clock.at)
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
        row = score.home(which)
        self.clock.work(row)
        self._step_done(max(row))

    def _relay(self, score: Score, at_home: str) -> None:
        """Gradients travel a step behind: they are there when the next guest's tiles are done."""
        self._post_rows(score, 0)
        row = score.home(at_home)
        self.clock.work(row)
        self.clock.wait(("rows", 1))
        self._step_done(max(row))
        glide = Glide(self, score)
        for step in range(1, score.steps):
            self.clock.step = step
            score.work.go_to(step)
            if not glide.takes(step):
                self._play_step(score, step)
        score.work.go_to(score.steps)
        glide.end(score.steps)
        self.clock.count_work(score.work.sums())

    def _play_step(self, score: Score, step: int) -> None:
        clock = self.clock
        self._post_rows(score, step)
        if not score.work.is_nothing:
            clock.work(score.work.values, is_counted=False)
        if not self.is_forward:
            clock.wait(("gradients", step - 1))
            self.post_gradients(score, step)
        clock.wait(("rows", step + 1))
        self._step_done(score.work.largest)

    def _post_rows(self, score: Score, step: int) -> None:
        for lane, due in rows_leaving(score, step):
            self.clock.send(("rows", due), lane.to_next(due), lane.rows(due), lane.frame(due))

    def post_gradients(self, score: Score, step: int) -> None:
        for lane in score.lanes:
            self.clock.send(("gradients", step), *lane.gradients_leaving(step))
            self.clock.scatter(("gradients", step), lane.going_home(step))

    # ---- gather

    def gather(self) -> None:
        self._collect()
        row = self._each(lambda rank: self.pace.looking(gather(self.task, rank).tiles, is_first=True))
        self.clock.work(row)
        self._step_done(max(row))
        if not self.is_forward:
            self._give_back()

    def _shards(self, kind: str) -> tuple[Freight, list[float]]:
        """What ranks' own rows are on the way, and how long it takes to copy them."""
        problem = self.task.problem
        each = [self.pace.bytes_of(kind, n * problem.batch * problem.kv_heads) for n in self.task.keys.sizes]
        freight = Freight(from_first(each), self.lines)
        freight.go_to(0)
        return freight, [self.pace.copying(nbytes) for nbytes in each]

    def _collect(self) -> None:
        """Rows are put into place while the next are on their way."""
        ranks, clock = self.lines.ranks, self.clock
        freight, copies = self._shards("rows")
        stay = Move.by(ranks, 0)
        for step in range(1, ranks):
            clock.step = step
            if step == 1:
                clock.send(("rows", 1), Move.by(ranks, 1), freight, stay)
            clock.wait(("rows", step))
            if step + 1 < ranks:
                clock.send(("rows", step + 1), Move.by(ranks, step + 1), freight, stay)
            placed = Move.by(ranks, step).moved(copies)
            clock.work(self._slowed(placed))
            self._step_done(max(placed))

    def _give_back(self) -> None:
        """Sums for others' rows, one after the other: cut out, swapped, added."""
        ranks, clock = self.lines.ranks, self.clock
        freight, copies = self._shards("gradients")
        for step in range(1, ranks):
            clock.step = ranks + step
            to_them = Move.by(ranks, step)
            clock.work(self._slowed(to_them.back.moved(copies)))
            clock.send(("gradients", step), to_them, freight, to_them.back)
            clock.wait(("gradients", step))
            clock.work(self._slowed(copies))
            self._step_done(max(copies))

    def _slowed(self, row: list[float]) -> list[float]:
        return row if not self.lines.slow.ranks else self._each(row.__getitem__)

    # ---- by heads

    def by_heads(self, inner: int) -> None:
        pace, clock, task = self.pace, self.clock, self.task
        plans = [by_heads(task, rank, inner) for rank in range(self.lines.ranks)]
        near = self._each(lambda rank: pace.looking(plans[rank].near, is_first=True))
        score = between_score(pace, self.lines, inner)
        if score is None:
            clock.work(near)
            self._step_done(max(near))
            return
        there, back = self._changing_places(plans, inner)
        for some in there:
            clock.scatter("there", some)
        clock.work(near)
        clock.wait("there")
        clock.work(self._seating(there))
        self._step_done(max(near))
        self.relay(score)
        for some in back:
            clock.scatter("back", some)
        clock.wait("back")
        clock.work(self._seating(back))
        self._step_done(0.0)

    def _changing_places(self, plans: list[ByHeads], inner: int) -> tuple[list[list[Message]], list[list[Message]]]:
        """Messages to the desks and back, by the place they go to."""
        final = plans[0].is_final
        if self.is_forward:
            queries, keys = "queries", "keys"
            answers, gradients = "answers" if final else "partial answers", None
        else:
            queries, keys = "queries and gradients", "keys"
            answers, gradients = "query gradients" if final else "partial gradients", "gradients"
        there: list[list[Message]] = [[] for _ in range(inner)]
        back: list[list[Message]] = [[] for _ in range(inner)]
        for sender, plan in enumerate(plans):
            for receiver in plan.others:
                asked, given = plan.queries(sender, receiver).vectors, plan.keys(sender, receiver).vectors
                nbytes = self.pace.bytes_of(queries, asked) + self.pace.bytes_of(keys, given)
                there[receiver % inner].append((sender, receiver, nbytes))
                nbytes = self.pace.bytes_of(answers, asked)
                nbytes += self.pace.bytes_of(gradients, given) if gradients else 0
                back[sender % inner].append((receiver, sender, nbytes))
        return there, back

    def _seating(self, messages: list[list[Message]]) -> list[float]:
        """Copying what has arrived to where it is used."""
        received = [0] * self.lines.ranks
        for some in messages:
            for _, receiver, nbytes in some:
                received[receiver] += nbytes
        return self._each(lambda rank: self.pace.copying(received[rank]))
