"""Forecasts: for one question every schedule and layout that can serve it, and which of them to take.

Everything here is predicted. Bytes and FLOPs are counted on the plans that the engine runs; memory by the machine in
`memory`; times from hardware's attained rates, of the leading choices by the event simulation, of the others as the
longer of computing and moving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import ceil, lcm

from ..errors import ArgumentError
from ..geometry.itinerary import direction
from ..geometry.layouts import LAYOUTS, deal
from ..geometry.patterns import Dilated, Pattern, Problem
from ..geometry.plans import PLANS
from ..geometry.task import Task
from .choose import choose_layout, fastest
from .cost import estimate, estimates, not_faster, typical
from .counts import Traffic, computing, traffic
from .event_pace import FLOPS_OF_A_PAIR, Pace
from .events import play
from .hardware import DTYPES, Hardware, Phase
from .memory import held
from .work import head_pairs, pairs

PHASES: tuple[Phase, Phase] = ("forward", "backward")
OF_NODES = ("double_ring", "hybrid")  # without several nodes of several ranks they are ring and ulysses
PLAYED_AT_ONCE, PLAYED_AT_MOST = 16, 256  # ranks up to which every choice is played, and the leading ones
DILATED_PLAYED_AT_MOST = 32  # where every pair of ranks is looked at
MOST_TOKENS = 10**15
SEGMENTS_COUNTED = 1 << 22  # on a rank, where they repeat
ONE_BY_ONE = 1024  # and where their rows are named one by one
LIKE_CARDS = 1 << 9  # times the ranks, where rows are dealt so: each of them meets each of the others in every one
FEW_RANKS = 16  # all of them are asked; of more a few, which speak for the rest
SHORT = 0.4  # of the memory: the fullest of many ranks was seen to hold up to 2.3 times what the one that is asked does
ROWS_NAMED = 1 << 18  # dilated rows that ulysses names one by one take seconds beyond
LONG = 1 << 20  # tokens of one rank, beyond which periods of LongNet's segments stand for each other
RANKS_NAMED = 512  # and so do as many messages to everybody
HARDLY = 0.02  # of the time
AS_FAST, AS_THRIFTY = 1.02, 1.1  # by less nobody is faster, or holds less
A_BLOCK = 128  # tokens: answers to "how long" are whole blocks of them on every rank
MANY_BLOCKS = 50
LAYERS_AT_WORK = 4  # layers that would keep as much as the one at work holds, at a guess


# ----------------------------------------------------------------------------------------------- the question


@dataclass(frozen=True)
class Question:
    """Attention of so many layers over a sequence, on so many ranks of some hardware."""

    pattern: Pattern
    tokens: int
    ranks: int
    nodes: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    hardware: Hardware
    batch: int = 1
    layers: int = 1
    reserve_bytes: int = 0  # set aside for what is not counted: weights, optimizer, other activations

    def __post_init__(self) -> None:
        for name in ("tokens", "ranks", "nodes", "heads", "kv_heads", "head_dim", "batch", "layers"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ArgumentError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if self.ranks % self.nodes:
            raise ArgumentError(f"{self.ranks} ranks cannot be spread evenly over {self.nodes} nodes")
        self.pattern.check(Problem(self.batch, self.tokens, self.tokens, self.kv_heads, 0))
        if self.dtype not in self.hardware.forward_flops:
            known = ", ".join(self.hardware.forward_flops)
            raise ArgumentError(f"hardware {self.hardware.name!r} has no rate for {self.dtype}; it has {known}")
        if self.reserve_bytes >= self.hardware.memory_bytes:
            raise ArgumentError(
                f"{self.reserve_bytes:,} bytes set aside leave nothing of the {self.hardware.memory_bytes:,} of "
                f"{self.hardware.name!r}"
            )

    @property
    def node_ranks(self) -> int:
        return self.ranks // self.nodes

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype]

    @property
    def local_tokens(self) -> int:
        return -(-self.tokens // self.ranks)

    @property
    def asks_every_rank(self) -> bool:
        """Where they are few; of more, some speak for the rest."""
        return self.ranks <= FEW_RANKS

    @property
    def memory_bytes(self) -> int:
        """What attention may take of a rank."""
        return self.hardware.memory_bytes - self.reserve_bytes

    @cached_property
    def saved_bytes(self) -> int:
        """What a layer keeps for its backward: q, k, v, out and lse."""
        rows = self.batch * self.local_tokens
        numbers = rows * self.head_dim * 2 * (self.heads + self.kv_heads)
        return numbers * self.itemsize + rows * self.heads * max(4, self.itemsize)

    @cached_property
    def pairs(self) -> int:
        """Of all ranks together, for one kv head's worth of query heads each."""
        return round(self.periods * pairs(self.alone.task("contiguous"), 0))

    @cached_property
    def alone(self) -> Question:
        """On one rank; of LongNet's very long ones only so many segments that all come out even, since they repeat."""
        return replace(self, ranks=1, nodes=1, tokens=self._period)

    @property
    def periods(self) -> float:
        return self.tokens / self._period

    @property
    def _period(self) -> int:
        if not isinstance(self.pattern, Dilated) or self.pattern.documents is not None or self.tokens <= LONG:
            return self.tokens
        once = lcm(*(w for w, _ in self.pattern.branches))
        return min(self.tokens, once * max(1, LONG // once))

    def flops(self, phase: Phase) -> int:
        """Of all ranks, a layer."""
        return FLOPS_OF_A_PAIR[phase] * self.head_dim * self.pairs * (self.heads // self.kv_heads)

    def task(self, layout: str) -> Task:
        return _task(self.pattern, self.batch, self.tokens, self.heads, self.kv_heads, layout, self.ranks)

    def pace(self, phase: Phase, layout: str) -> Pace:
        return Pace(self.hardware, self.task(layout), phase, self.head_dim, self.itemsize)


@lru_cache(maxsize=64)
def _task(pattern: Pattern, batch: int, tokens: int, heads: int, kv_heads: int, layout: str, ranks: int) -> Task:
    dealt = deal(layout, tokens, ranks, documents=pattern.documents if layout == "dealt" else None)
    return Task(pattern, Problem(batch, tokens, tokens, kv_heads, 0), dealt, dealt, heads)


# ------------------------------------------------------------------------------------------------ the answer


@dataclass(frozen=True)
class Pass:
    """One layer, forward or backward."""

    seconds: float
    computing: float  # of the rank that computes longest
    moving: float  # what computing can hide, if there is as much of it
    unhidden: float  # what it cannot: changing places, and collecting before anything is computed
    is_played: bool
    hidden: float | None  # the share of what moves behind which somebody computes; None where nothing was played
    flops: int  # of a rank, on average
    traffic: Traffic
    local_tokens: int

    @property
    def waiting(self) -> float:
        """Beyond what the busiest rank computes."""
        return self.seconds - self.computing

    @property
    def is_hidden(self) -> bool:
        """Whether hardly any of the time is waiting."""
        return self.hides_from is not None and self.hides_from <= self.local_tokens

    @property
    def hides_from(self) -> int | None:
        """Tokens a rank from which on that is so, or None if nothing is computed.

        With twice as many computing takes twice as long, if what moves is taken for the measure: dense, windows and
        segments alike.
        """
        work, moving, unhidden = self.computing, self.moving, self.unhidden
        if not work:
            return None
        while_moving = (1 - HARDLY) * (moving + unhidden)
        while_computing = max(moving, unhidden * (1 - HARDLY) / HARDLY)
        needed = while_moving if while_moving <= moving else while_computing
        return ceil(round(self.local_tokens * needed / work, 6))

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Memory:
    """What the fullest of the ranks that were asked holds, in one layer and in all."""

    rank: int
    forward: dict[str, int]
    backward: dict[str, int]
    saved_bytes: int  # by every other layer
    layers: int

    @property
    def forward_bytes(self) -> int:
        return sum(self.forward.values())

    @property
    def backward_bytes(self) -> int:
        return sum(self.backward.values())

    @property
    def peak_bytes(self) -> int:
        """While one layer is at work, the others keep what their backward needs."""
        return (self.layers - 1) * self.saved_bytes + max(self.forward_bytes, self.backward_bytes)


@dataclass(frozen=True)
class Choice:
    schedule: str
    layout: str
    question: Question
    forward: Pass
    backward: Pass
    memory: Memory
    balance: float  # the busiest rank's work over the mean
    seconds_alone: float  # one rank, forward and backward, if it could hold everything
    asked: int  # the rank whose messages were counted

    @property
    def seconds(self) -> float:
        """A layer, forward and backward."""
        return self.forward.seconds + self.backward.seconds

    @property
    def step_seconds(self) -> float:
        return self.question.layers * self.seconds

    @property
    def is_played(self) -> bool:
        return self.forward.is_played

    @property
    def flops_per_second(self) -> float:
        """Of a rank, forward and backward."""
        return (self.forward.flops + self.backward.flops) / self.seconds if self.seconds else 0.0

    @property
    def efficiency(self) -> float:
        """How many times as fast as one rank, over the number of ranks."""
        return self.seconds_alone / (self.question.ranks * self.seconds) if self.seconds else 1.0

    @property
    def fits(self) -> bool:
        return self.memory.peak_bytes <= self.question.memory_bytes


@dataclass(frozen=True)
class Auto:
    """What the engine takes where nobody names a schedule, by its own estimates for a typical machine."""

    schedule: str
    machine: str
    slower: float  # than what is recommended, as a share of that

    @property
    def is_as_good(self) -> bool:
        return self.slower < AS_FAST - 1


@dataclass(frozen=True)
class Forecast:
    question: Question
    choices: tuple[Choice, ...]
    recommended: Choice
    reason: str
    left_out: tuple[str, ...]  # schedules, with the reason
    auto: Auto | None  # None where one schedule was asked for, or it is not among the choices


def forecast(question: Question, *, schedule: str = "auto", layout: str = "auto", plays_all: bool = False) -> Forecast:
    """Every schedule in the layout for the pattern, and the ring in the others; or what was asked for by name."""
    pairs_, left_out = candidates(question, schedule=schedule, layout=layout)
    choices = [estimated(question, *pair) for pair in pairs_]
    most = PLAYED_AT_MOST if question.pattern.only_limits is not None else DILATED_PLAYED_AT_MOST
    if plays_all or question.ranks <= PLAYED_AT_ONCE:
        choices = [_played(choice) for choice in choices]
    elif question.ranks <= most:
        choices = _with_best_played(choices)
    best = _best(choices)
    auto = None
    if schedule == "auto" and question.ranks > 1:
        choices, auto = _with_auto(choices, best)
    return Forecast(question, tuple(choices), best, _reason(best, choices), left_out, auto)


def _with_auto(choices: list[Choice], best: Choice) -> tuple[list[Choice], Auto | None]:
    """What `schedule="auto"` would take in the recommended layout, timed as the recommended one was."""
    name, machine = _auto(best)
    for number, one in enumerate(choices):
        if (one.schedule, one.layout) == (name, best.layout):
            if best.is_played and not one.is_played:
                choices = [*choices[:number], _played(one), *choices[number + 1 :]]
            return choices, Auto(name, machine, max(0.0, choices[number].seconds / best.seconds - 1))
    return choices, None


def _auto(best: Choice) -> tuple[str, str]:
    question = best.question
    machine = typical(question.hardware.device)
    size = {"head_dim": question.head_dim, "itemsize": question.itemsize, "node_ranks": question.node_ranks}
    return fastest(estimates(question.task(best.layout), **size, machine=machine)).schedule, machine.name


def candidates(
    question: Question, *, schedule: str = "auto", layout: str = "auto"
) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """(schedule, layout) to look at, and what is left out, with the reason. layout "all": every one that can serve."""
    _check_name("schedule", schedule, ("auto", *PLANS))
    dealt = question.pattern.documents is not None  # which this layout is for, and nothing else
    _check_name("layout", layout, ("auto", "all", *(name for name in LAYOUTS if dealt or name != "dealt")))
    chosen = choose_layout(question.pattern, question.tokens)[0]
    layouts = [chosen] if layout == "auto" else _layouts(chosen) if layout == "all" else [layout]
    if schedule != "auto":
        return [(schedule, one) for one in layouts], ()
    if question.ranks == 1:
        return [("ring", layouts[0])], ("all but ring: one rank holds everything, and nothing moves",)
    left_out = tuple(_left_out(question))
    names = [name for name in PLANS if not any(line.split(":")[0] == name for line in left_out)]
    found = [(name, one) for one in layouts for name in names]
    if layout == "auto":
        found += [("ring", one) for one in _layouts(chosen)[1:]]
    return found, left_out


def _check_name(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ArgumentError(f"{what} must be one of {', '.join(known)}; got {name!r}")


def _layouts(chosen: str) -> list[str]:
    return [chosen, *(name for name in ("zigzag", "contiguous") if name != chosen)]


def _left_out(question: Question) -> Iterator[str]:
    if not 1 < question.node_ranks < question.ranks:
        yield "double_ring: without several nodes of several ranks it is ring"
        yield "hybrid: without several nodes of several ranks it is ulysses"
    if not is_counted_quickly(question, "ulysses") and question.tokens > ROWS_NAMED:
        yield "ulysses: its dilated rows are counted one by one, which takes seconds; ask for it by name"
    elif question.ranks > RANKS_NAMED:
        yield "ulysses: messages of everybody to everybody take seconds to count; ask for it by name"
    if question.ranks > RANKS_NAMED:
        yield "gather: messages of everybody to everybody take seconds to count; ask for it by name"


def is_counted_quickly(question: Question, schedule: str) -> bool:
    """At any length: ulysses names the rows that dilated branches keep one by one, of heads that differ in them."""
    return not (isinstance(question.pattern, Dilated) and schedule in ("ulysses", "hybrid"))


# ------------------------------------------------------------------------------------------------ one choice


def estimated(question: Question, schedule: str, layout: str) -> Choice:
    """From counts of one rank, without playing it."""
    asked = _asked(question, layout)
    forward, backward = (_estimated_pass(question, schedule, layout, asked, phase) for phase in PHASES)
    return Choice(
        schedule,
        layout,
        question,
        forward,
        backward,
        memory(question, schedule, layout),
        _balance(question, schedule, layout),
        seconds_alone(question),
        asked,
    )


def _estimated_pass(question: Question, schedule: str, layout: str, asked: int, phase: Phase) -> Pass:
    pace = question.pace(phase, layout)
    moved = _traffic(question, schedule, layout, asked, phase)
    about = not_faster(
        estimate(schedule, pace, node_ranks=question.node_ranks), pace.at_best(max(_work(question, schedule, layout)))
    )
    seconds = max(about.seconds, _carrying(question, moved))
    return Pass(
        seconds=seconds,
        computing=about.computing,
        **_waits(seconds, about.computing, about.moving, about.unhidden),
        is_played=False,
        hidden=None,
        flops=question.flops(phase) // question.ranks,
        traffic=moved,
        local_tokens=question.local_tokens,
    )


def _carrying(question: Question, moved: Traffic) -> float:
    """Seconds that the rank's busiest line needs, if it has the line for itself and nothing is waited for."""
    links = {"inside": question.hardware.inside, "outside": question.hardware.outside}
    return max(
        carried.bytes / links[where].bytes_per_second
        for way in (moved.sent, moved.received)
        for where, carried in way.items()
    )


def _waits(seconds: float, computing: float, moving: float, unhidden: float) -> dict[str, float]:
    """What moves as it adds up to the seconds: whatever else is waited for is taken for something that could hide."""
    waiting = max(0.0, seconds - computing)
    unhidden = min(unhidden, waiting)
    if waiting <= HARDLY * seconds or waiting == unhidden:
        return {"moving": min(moving, computing), "unhidden": unhidden}
    return {"moving": seconds - unhidden, "unhidden": unhidden}


def _traffic(question: Question, schedule: str, layout: str, rank: int, phase: Phase) -> Traffic:
    return traffic(
        question.task(layout),
        schedule,
        rank,
        head_dim=question.head_dim,
        itemsize=question.itemsize,
        node_ranks=question.node_ranks,
        phase=phase,
    )


@lru_cache(maxsize=64)
def _asked(question: Question, layout: str) -> int:
    """Early or late, as rows go down or up, since there most of them pass; next to another node, if there is one."""
    from_end = question.node_ranks if question.nodes > 1 else 1
    task = question.task(layout)
    found = max(0, question.ranks - 1 - from_end) if direction(task) > 0 else min(from_end, question.ranks - 1)
    sizes = task.queries.sizes
    return found if sizes[found] else sizes.index(max(sizes))  # ranks may outnumber tokens


@lru_cache(maxsize=256)
def _work(question: Question, schedule: str, layout: str) -> tuple[int, ...]:
    """Pairs of query heads and keys that each rank computes."""
    task, node_ranks = question.task(layout), question.node_ranks
    return tuple(head_pairs(task, schedule, rank, node_ranks) for rank in range(question.ranks))


def _balance(question: Question, schedule: str, layout: str) -> float:
    work = _work(question, schedule, layout)
    return max(work) * len(work) / sum(work) if any(work) else 1.0


@lru_cache(maxsize=64)
def seconds_alone(question: Question) -> float:
    """Forward and backward of a layer on one rank that could hold everything."""
    alone = question.alone
    return question.periods * sum(
        computing(alone.task("contiguous"), "ring", 0, node_ranks=1, pace=alone.pace(phase, "contiguous"))
        for phase in PHASES
    )


def memory(question: Question, schedule: str, layout: str) -> Memory:
    """Of the fullest rank, where they are few, or memory is short; else of one that speaks for all."""
    if question.asks_every_rank:
        return fullest(question, schedule, layout)
    one = _memory_of(question, schedule, layout, _asked(question, layout))
    is_short = SHORT * question.memory_bytes < one.peak_bytes <= question.memory_bytes
    return fullest(question, schedule, layout) if is_short else one


def fullest(question: Question, schedule: str, layout: str) -> Memory:
    """Of all ranks, or of those among which the fullest of many are: at both ends, and around the middle.

    What waits where goes by turns from rank to rank, and differs between those that begin early and late. Where heads
    are dealt, and do not come out even, there are more kinds of ranks, which are counted in less time.
    """
    ranks, middle = question.ranks, question.ranks // 2
    each = FEW_RANKS if schedule in ("ulysses", "hybrid") else 4
    ends = (*range(each), *range(ranks - each, ranks), *range(middle - each, middle + each))
    some = {_asked(question, layout), *(rank for rank in ends if 0 <= rank < ranks)}
    every = range(ranks) if question.asks_every_rank else sorted(some)
    return max((_memory_of(question, schedule, layout, rank) for rank in every), key=lambda one: one.peak_bytes)


@lru_cache(maxsize=256)
def _memory_of(question: Question, schedule: str, layout: str, rank: int) -> Memory:
    """By the fullest moments of a rank."""
    task = question.task(layout)
    forward, backward = (
        held(
            task,
            schedule,
            rank,
            head_dim=question.head_dim,
            itemsize=question.itemsize,
            node_ranks=question.node_ranks,
            phase=phase,
            device=question.hardware.device,
        ).components
        for phase in PHASES
    )
    return Memory(rank, forward, backward, question.saved_bytes, question.layers)


# -------------------------------------------------------------------------------------------- which to take


def _played(choice: Choice) -> Choice:
    forward, backward = (_played_pass(choice, phase) for phase in PHASES)
    return replace(choice, forward=forward, backward=backward)


def _played_pass(choice: Choice, phase: Phase) -> Pass:
    question = choice.question
    played = play(
        question.task(choice.layout),
        choice.schedule,
        hardware=question.hardware,
        head_dim=question.head_dim,
        itemsize=question.itemsize,
        node_ranks=question.node_ranks,
        phase=phase,
    )
    one = choice.forward if phase == "forward" else choice.backward
    work = max(played.computing)
    waits = _waits(played.seconds, work, one.moving, one.unhidden)
    return replace(one, seconds=played.seconds, computing=work, **waits, hidden=played.hidden, is_played=True)


def _with_best_played(choices: list[Choice]) -> list[Choice]:
    """The leading one is played, until one that was played leads: playing finds waits, and rarely saves time."""
    choices = list(choices)
    while True:
        best = _best(choices)
        if best.is_played:
            return choices
        choices[choices.index(best)] = _played(best)


def _best(choices: list[Choice]) -> Choice:
    """Of those that fit the fastest; of those as fast the one that holds least; of alike ones the first."""
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        return min(choices, key=lambda choice: choice.memory.peak_bytes)
    fastest = min(choice.seconds for choice in fitting)
    fast = [choice for choice in fitting if choice.seconds <= AS_FAST * fastest]
    least = min(choice.memory.peak_bytes for choice in fast)
    return next(choice for choice in fast if choice.memory.peak_bytes <= AS_THRIFTY * least)


def _reason(best: Choice, choices: list[Choice]) -> str:
    question = best.question
    if not best.fits:
        return (
            f"nothing fits: it holds least, {best.memory.peak_bytes / 2**30:,.1f} GiB a rank of the "
            f"{question.memory_bytes / 2**30:,.1f} GiB there are"
        )
    rivals = sorted((one for one in choices if one is not best), key=lambda one: one.seconds)
    fit = [one for one in rivals if one.fits]
    told = ["the only one looked at" if not rivals else "the only one that fits" if not fit else _ahead(best, fit[0])]
    told.append(_how_it_moves(best))
    if rivals and not rivals[0].fits and rivals[0].seconds < best.seconds:
        told.append(f"{rivals[0].schedule} would be faster, but does not fit")
    return "; ".join(told)


def _ahead(best: Choice, second: Choice) -> str:
    lead = second.seconds / best.seconds - 1 if best.seconds else 0.0
    what = f"{second.schedule}, {second.layout}"
    return f"fastest of those that fit, {lead:.1%} ahead of {what}" if lead >= AS_FAST - 1 else f"as fast as {what}"


def _how_it_moves(best: Choice) -> str:
    if not best.forward.traffic.bytes_sent and not best.backward.traffic.bytes_sent:
        return "nothing moves"
    forward, backward = (one.waiting / one.seconds if one.seconds else 0.0 for one in (best.forward, best.backward))
    if max(forward, backward) < 0.02:
        return "what moves is hidden behind computing"
    return f"waiting for what moves takes {forward:.0%} of the forward and {backward:.0%} of the backward"


# ------------------------------------------------------------------------------------- how long, and how many


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits, in whole granules, checked: at `tokens` it fits, a granule more does not.

    is_at_least: more was not looked at, since small segments are many tiles to count.
    """

    schedule: str
    layout: str
    tokens: int  # 0 if not even one granule fits
    granule: int
    bytes_at: int
    bytes_beyond: int
    is_at_least: bool = False


def longest(question: Question, schedule: str, layout: str, *, is_rough: bool = False) -> Longest:
    """In blocks of tokens on every rank, whatever the question's own length: of LongNet's in whole segments.

    Segments that ranks share make them hold more, and nobody deals a long sequence across them on purpose. They are
    the largest of which a rank holds many, so that the answer is no coarser than a fiftieth. `is_rough`: where there
    are many ranks one of them speaks for all, which takes moments.
    """
    fixed = [name for name in ("documents", "lengths") if getattr(question.pattern, name, None) is not None]
    if fixed:
        raise ArgumentError(
            f"how long a sequence fits cannot be asked of a pattern with {fixed[0]}, which are of {question.tokens:,} "
            f"tokens; ask it without {fixed[0]}"
        )
    *blocks, last = _blocks(question.pattern)
    for block in blocks:
        is_too_much = block * question.ranks > _countable_tokens(question, schedule, layout)
        if is_too_much or _likely_tokens(question) < MANY_BLOCKS * block:
            continue
        found = _longest(question, schedule, layout, block, is_rough)
        if found.is_at_least or found.tokens >= MANY_BLOCKS * found.granule:
            return found
    return _longest(question, schedule, layout, last, is_rough)


def _blocks(pattern: Pattern) -> list[int]:
    """In which all segments come out even, or but for the longest of them; the largest first, and no small ones."""
    segments = sorted({w for w, _ in pattern.branches}) if isinstance(pattern, Dilated) else []
    even = [length * -(-A_BLOCK // length) for length in accumulate(segments, lcm)]
    found = sorted(set(even), reverse=True)
    return found if found and segments[0] <= A_BLOCK else [*found, A_BLOCK]


def _longest(question: Question, schedule: str, layout: str, block: int, is_rough: bool) -> Longest:
    """Found by ranks that speak for the others; where another one does not fit, it speaks as well."""
    granule = block * question.ranks
    most = max(1, _countable_tokens(question, schedule, layout) // granule)
    guess = min(most, max(1, _likely_tokens(question) // block))
    is_few = question.asks_every_rank
    speakers = list(range(question.ranks)) if is_few else [_asked(replace(question, tokens=granule), layout)]

    def at_length(granules: int) -> Question:
        return replace(question, tokens=granules * granule)

    def needs(granules: int) -> int:
        every = (_memory_of(at_length(granules), schedule, layout, rank) for rank in speakers)
        return max(one.peak_bytes for one in every)

    while True:
        count, at, beyond = last_that_fits(needs, question.memory_bytes, first_guess=guess, most=most)
        found = Longest(schedule, layout, count * granule, granule, at, beyond, is_at_least=count == most)
        if is_few or is_rough or not count:
            return found
        full = fullest(at_length(count), schedule, layout)
        if full.peak_bytes <= question.memory_bytes:
            return replace(found, bytes_at=full.peak_bytes)
        speakers.append(full.rank)
        guess = max(1, count * question.memory_bytes // full.peak_bytes)


def _likely_tokens(question: Question) -> int:
    """About as many as a rank can hold, if its layer at work takes a few times what the others keep."""
    one = replace(question, tokens=1, ranks=1, nodes=1)
    return question.memory_bytes // (one.saved_bytes * (question.layers + LAYERS_AT_WORK))


def _countable_tokens(question: Question, schedule: str, layout: str) -> int:
    """So many at most, that a rank's tiles are counted in moments; segments that repeat are counted by thousands."""
    if not isinstance(question.pattern, Dilated):
        return MOST_TOKENS
    shortest = min(w for w, _ in question.pattern.branches)
    if layout == "striped" and question.ranks > 1:
        return shortest * max(1, LIKE_CARDS // question.ranks)
    counted = SEGMENTS_COUNTED if is_counted_quickly(question, schedule) else ONE_BY_ONE
    return min(MOST_TOKENS, shortest * counted * question.ranks)


def last_that_fits(
    needs: Callable[[int], int], limit: int, *, first_guess: int = 1, most: int = MOST_TOKENS
) -> tuple[int, int, int]:
    """(largest count whose need is within the limit, its need, the need of one more); 0 needs nothing.

    Where `most` fits, nothing beyond it is looked at, and the need of one more is given as 0.

    Bisection, with guesses on the line through what is known, since memory grows nearly evenly with length.
    """
    fits, need_fits = 0, 0
    fails, need_fails = 0, 0
    guess = first_guess
    while fits < most and (not fails or fails - fits > 1):
        need = needs(guess)
        if need <= limit:
            fits, need_fits = guess, need
        else:
            fails, need_fails = guess, need
        guess = min(most, _next_guess(fits, need_fits, fails, need_fails, limit))
    return fits, need_fits, need_fails


def _next_guess(fits: int, need_fits: int, fails: int, need_fails: int, limit: int) -> int:
    if not fails:
        ahead = fits * limit // max(1, need_fits)
        return max(fits + 1, min(ahead + 1, 64 * fits))
    slope = (need_fails - need_fits) / (fails - fits)
    on_the_line = fits + int((limit - need_fits) / slope) if slope > 0 else fits
    return min(max(on_the_line, fits + 1), fails - 1)


MOST_RANKS = 1 << 14


@dataclass(frozen=True)
class Fewest:
    """The fewest ranks whose memory holds the sequence, checked: one step fewer does not."""

    question: Question  # with that many ranks and nodes
    schedule: str
    layout: str
    fewer: int  # ranks of the step before; 0 if one rank is enough
    bytes_fewer: int  # what a rank would hold then, by the schedule that holds least


def fewest(question: Question, *, schedule: str = "auto", layout: str = "auto") -> Fewest:
    """Ranks are powers of two inside a node, and whole nodes beyond."""
    steps = _sizes(question.hardware.ranks_per_node)
    low, high = -1, 0
    while (found := _least(_sized(question, steps(high)), schedule, layout))[0] > question.memory_bytes:
        low, high = high, 2 * high + 1
        if steps(high) > MOST_RANKS:
            raise ArgumentError(
                f"{question.tokens:,} tokens do not fit {steps(low):,} ranks: each would hold {found[0]:,} bytes of "
                f"{question.memory_bytes:,}, and more ranks than {MOST_RANKS:,} are not looked at"
            )
    taken = found
    while high - low > 1:
        middle = (low + high) // 2
        found = _least(_sized(question, steps(middle)), schedule, layout)
        if found[0] <= question.memory_bytes:
            high, taken = middle, found
        else:
            low = middle
    fewer = steps(low) if low >= 0 else 0
    bytes_fewer = _least(_sized(question, fewer), schedule, layout)[0] if fewer else 0
    return Fewest(_sized(question, steps(high)), taken[1], taken[2], fewer, bytes_fewer)


def _sizes(node: int) -> Callable[[int], int]:
    """1, 2, 4, ... up to a node, then 2, 3, 4, ... nodes."""
    inside = [1 << i for i in range(node.bit_length()) if 1 << i < node] + [node]
    return lambda index: inside[index] if index < len(inside) else node * (index - len(inside) + 2)


def _sized(question: Question, ranks: int) -> Question:
    return replace(question, ranks=ranks, nodes=-(-ranks // question.hardware.ranks_per_node))


def _least(question: Question, schedule: str, layout: str) -> tuple[int, str, str]:
    """(bytes, schedule, layout) of the first that fits, or of the one that holds least."""
    found: list[tuple[int, str, str]] = []
    for name, one in candidates(question, schedule=schedule, layout=layout)[0]:
        found.append((memory(question, name, one).peak_bytes, name, one))
        if found[-1][0] <= question.memory_bytes:
            return found[-1]
    return min(found)
