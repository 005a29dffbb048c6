"""What every rank runs: each contender once to be judged and measured, then all of them in turns to be timed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...geometry.patterns import Pattern
from ...schedules.buffers import release_buffers
from ..gpu.check import Errors
from ..gpu.given import Given
from ..memory import measured_peak
from ..records import Spread
from .case import Case, Contender
from .seats import Seat, take_seat
from .truth import Pieces, Truth, errors_in, pieces

PASSES = ("forward", "backward")


class Span(NamedTuple):
    """Of one run on one rank, by a clock that all processes of a machine share."""

    start: float
    middle: float  # the forward is done here
    resume: float  # and everywhere
    end: float


@dataclass
class Outcome:
    """Of one contender."""

    problem: str | None = None  # why it was not run
    is_missing: bool = False  # that it is not installed
    errors: Errors = field(default_factory=dict)
    allowed: Errors = field(default_factory=dict)
    times: dict[str, Spread] = field(default_factory=dict)  # by pass
    peak_bytes: dict[str, list[int]] = field(default_factory=dict)  # by pass: of each rank
    components: dict[str, dict[str, int]] = field(default_factory=dict)  # by pass: of the fullest rank
    chosen: dict[str, str] = field(default_factory=dict)
    sequences: int = 1
    threads: int = 1  # of a rank

    @property
    def is_wrong(self) -> bool:
        return any(not error <= self.allowed[name] for name, error in self.errors.items())


def compete(case: Case, truths: Mapping[Pattern, Truth]) -> dict[str, Outcome]:
    """The outcomes by name, the same on every rank."""
    os.dup2(2, 1)  # what other people's code prints is not our output
    x = case.inputs()
    seats: dict[str, Seat] = {}
    outcomes: dict[str, Outcome] = {}
    for contender in case.contenders:
        outcomes[contender.name] = outcome = Outcome(threads=torch.get_num_threads())
        seat = _agreed(outcome, lambda contender=contender: take_seat(contender, case))
        if seat is None:
            continue
        outcome.chosen, outcome.sequences = seat.chosen, seat.sequences
        if _judge(outcome, seat, x, truths[case.computed_by(contender)]) and _is_timed(contender, outcome):
            seats[contender.name] = seat
    for name, spans in _timed(case, seats, x).items():
        outcomes[name].times = {phase: Spread.of(spans[phase]) for phase in PASSES}
    return outcomes


def _is_timed(contender: Contender, outcome: Outcome) -> bool:
    """What is ours and wrong has no time; a peer's is told with its error."""
    return not (outcome.is_wrong and contender.kind == "ours")


def _agreed(outcome: Outcome, make: Any) -> Any:
    """What `make` gives, or None on all ranks if it raised on one, with the reason in the outcome."""
    made, problem = None, None
    try:
        made = make()
    except Exception as error:  # whatever a package raises, the others go on
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", isinstance(error, ImportError)
    problems = [told for told in _everybody(problem) if told is not None]
    if problems:
        outcome.problem, outcome.is_missing = problems[0]
    return None if problems else made


# ------------------------------------------------------------------------------------------------------- judged


class Tried(NamedTuple):
    pieces: Pieces | None
    peak: dict[str, int]
    components: dict[str, dict[str, int]]


def _judge(outcome: Outcome, seat: Seat, x: Given, truth: Truth) -> bool:
    """Fill in errors and memory; whether it could be run at all."""
    tried = _agreed(outcome, lambda: _try(seat, x, truth))
    if tried is None:
        return False
    ranks: list[Tried] = _everybody(tried)
    outcome.errors = errors_in(truth, [rank.pieces for rank in ranks if rank.pieces is not None])
    outcome.allowed = {name: truth.allowed[name] for name in outcome.errors}
    for phase in PASSES:
        outcome.peak_bytes[phase] = [rank.peak[phase] for rank in ranks]
        outcome.components[phase] = max(ranks, key=lambda rank: rank.peak[phase]).components[phase]
    return True


def _try(seat: Seat, x: Given, truth: Truth) -> Tried:
    """Once, with the memory followed: what is given to it is made anew, so that it is counted."""
    release_buffers()
    if seat.waits:
        return Tried(None, dict.fromkeys(PASSES, 0), {phase: {} for phase in PASSES})
    with _threads(seat), measured_peak() as peak:
        q, k, v = _qkv(x, seat)
        out = seat.attend(q, k, v)
        peak.mark("forward")
        dout = x.upstream[:, seat.positions]
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    peaks = {"forward": peak.until["forward"], "backward": peak.bytes}
    forward = {"q": q.nbytes, "k": k.nbytes, "v": v.nbytes, "out": out.nbytes}
    gradients = {"dout": dout.nbytes, "dq": dq.nbytes, "dk": dk.nbytes, "dv": dv.nbytes}
    components = {
        "forward": _with_rest(forward, peaks["forward"]),
        "backward": _with_rest(forward | gradients, peaks["backward"]),
    }
    return Tried(pieces(truth, seat.positions, out.detach(), dq, dk, dv), peaks, components)


def _qkv(x: Given, seat: Seat) -> tuple[Tensor, ...]:
    return tuple(whole[:, seat.positions].requires_grad_() for whole in (x.q, x.k, x.v))


def _with_rest(known: dict[str, int], peak: int) -> dict[str, int]:
    return known | {"beyond inputs and results": max(0, peak - sum(known.values()))}


# -------------------------------------------------------------------------------------------------------- timed


def _timed(case: Case, seats: dict[str, Seat], x: Given) -> dict[str, dict[str, list[float]]]:
    """Seconds by name and pass: rounds in which each takes its turn, begun by another and run both ways."""
    found: dict[str, dict[str, list[float]]] = {name: {phase: [] for phase in PASSES} for name in seats}
    begin = time.perf_counter()
    for number in range(case.rounds):
        if number > 1 and _first_rank_says(time.perf_counter() - begin > case.budget):
            break
        for name in _order(list(seats), number):
            for phase, seconds in _run(seats[name], x).items():
                found[name][phase].append(seconds)
    return found


def _order(names: list[str], number: int) -> list[str]:
    first = number // 2 % max(1, len(names))
    order = names[first:] + names[:first]
    return order[::-1] if number % 2 else order


def _run(seat: Seat, x: Given) -> dict[str, float]:
    """Of each pass, from when the first rank began until the last was done."""
    mine, dout = _qkv(x, seat), x.upstream[:, seat.positions]
    with _threads(seat):
        spans: list[Span] = _everybody(_span(seat, mine, dout))
    return {
        "forward": max(span.middle for span in spans) - min(span.start for span in spans),
        "backward": max(span.end for span in spans) - min(span.resume for span in spans),
    }


def _span(seat: Seat, mine: tuple[Tensor, ...], dout: Tensor) -> Span:
    works = not seat.waits
    dist.barrier()
    start = time.perf_counter()
    out = seat.attend(*mine) if works else None
    middle = time.perf_counter() if works else start
    dist.barrier()
    resume = time.perf_counter()
    if out is not None:
        torch.autograd.grad(out, mine, dout)
    return Span(start, middle, resume, time.perf_counter() if works else resume)


@contextmanager
def _threads(seat: Seat) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(seat.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------- among the ranks


def _everybody(mine: Any) -> list[Any]:
    """What each rank has, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _first_rank_says(mine: bool) -> bool:
    return _everybody(mine)[0]
