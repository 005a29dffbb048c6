"""A case on its ranks, from outside: the processes are started, and what they found becomes rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ...errors import LongringError, TransportError
from ...geometry.layouts import deal
from ...geometry.patterns import Dense, Dilated, Pattern, Problem
from ...geometry.task import Task
from ...launching import launch
from ...plan.memory import held
from ..gpu.work import flops
from ..records import Row
from .case import Case, Contender
from .program import PASSES, Outcome, compete
from .truth import Truth, truth_of

SAME_WORK = "for the same work"
OF_PASS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


class Judge:
    """The float64 answers. One that is asked for twice is computed once: cases differ in their ranks alone."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Truth] = {}

    def truths(self, case: Case) -> dict[Pattern, Truth]:
        patterns = {case.computed_by(contender) for contender in case.contenders}
        return {pattern: self._truth(case, pattern) for pattern in patterns}

    def _truth(self, case: Case, pattern: Pattern) -> Truth:
        question = case.shape, case.dtype, case.seed, pattern
        if question not in self._known:
            self._known[question] = truth_of(case.inputs(), pattern)
        return self._known[question]


class Played(NamedTuple):
    rows: list[Row]
    missing: list[str]  # who is not installed
    failures: list[str]  # of ours


def play(case: Case, judge: Judge, *, timeout: float | None = None) -> Played:
    """A row for each contender and pass; of one that could not be run a single row, which says why."""
    truths = judge.truths(case)
    try:
        outcomes, *_ = launch(compete, case, truths, ranks=case.ranks, timeout=timeout, backend="gloo")
    except LongringError:
        raise
    except (OSError, EOFError, RuntimeError) as failure:  # of the system, the fork server, the store
        raise TransportError(f"{case.ranks} processes could not be started: {failure!r}") from failure
    here = [(contender, outcomes[contender.name]) for contender in case.contenders]
    rows = [row for contender, outcome in here if not outcome.is_missing for row in _rows(case, contender, outcome)]
    _compare(rows, case)
    missing = [f"{contender.name}: {outcome.problem}" for contender, outcome in here if outcome.is_missing]
    return Played(rows, missing, [_failure(row) for row in rows if row.kind == "ours" and row.time is None])


def _failure(row: Row) -> str:
    return f"{row.case}, {row.name}, {row.phase}: {row.note}"


def _rows(case: Case, contender: Contender, outcome: Outcome) -> Iterator[Row]:
    known: dict[str, Any] = {**_asked(case, contender), **_choices(contender, outcome)}
    if outcome.problem is not None:
        note = f"not timed: {outcome.problem}"
        yield Row(case.title, "both", contender.name, contender.kind, note=note, **known)
        return
    for phase in PASSES:
        time = outcome.times.get(phase)
        work = outcome.sequences * flops(case.shape, case.computed_by(contender), phase)
        row = Row(
            *(case.title, phase, contender.name, contender.kind, time),
            tflops=time and work / time.median / 1e12,
            errors={name: outcome.errors[name] for name in OF_PASS[phase]},
            allowed={name: outcome.allowed[name] for name in OF_PASS[phase]},
            note=_note(outcome, phase),
            peak_bytes=outcome.peak_bytes[phase],
            components=outcome.components[phase],
            **known,
        )
        if contender.kind == "ours" and row.schedule is not None:
            _predict(row, case, contender, outcome)
        yield row


def _asked(case: Case, contender: Contender) -> dict[str, Any]:
    pattern = case.computed_by(contender)
    assert isinstance(pattern, (Dense, Dilated))
    window = getattr(pattern, "window", None)
    branches = ",".join(f"{w}:{r}" for w, r in pattern.branches) if isinstance(pattern, Dilated) else None
    tokens, heads, kv_heads, head_dim = case.shape
    shape = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    reach = None if window is None or window[0] is None else window[0] + 1
    places = {"ranks": case.ranks, "nodes": contender.nodes}
    return shape | places | {"causal": pattern.causal, "window": reach, "dilated": branches}


def _choices(contender: Contender, outcome: Outcome) -> dict[str, str | None]:
    named = {"schedule": contender.schedule, "layout": contender.layout, "kernel": contender.kernel}
    return named | outcome.chosen


def _note(outcome: Outcome, phase: str) -> str:
    wrong = [name for name in OF_PASS[phase] if not outcome.errors[name] <= outcome.allowed[name]]
    told = (f"{name} by {outcome.errors[name]:.2g} ({outcome.allowed[name]:.2g} allowed)" for name in wrong)
    notes = [f"WRONG in {', '.join(told)}"] if wrong else []
    if outcome.sequences > 1:
        notes.append(f"{outcome.sequences} sequences at a time, a whole one on each rank")
    if not outcome.times:
        notes.append("not timed")
    return "; ".join(notes)


def _predict(row: Row, case: Case, contender: Contender, outcome: Outcome) -> None:
    """What the plan says that each rank holds, beside what it was measured to hold."""
    assert row.schedule is not None
    assert row.layout is not None
    dealt = deal(row.layout, case.shape.n, case.ranks)
    problem = Problem(1, case.shape.n, case.shape.n, case.shape.kv_heads, 0)
    task = Task(case.pattern, problem, dealt, dealt, case.shape.heads)
    found = [
        held(
            *(task, row.schedule, rank),
            head_dim=case.shape.d,
            itemsize=case.torch_dtype.itemsize,
            node_ranks=case.ranks // contender.nodes,
            phase="forward" if row.phase == "forward" else "backward",
            kernel=row.kernel or "auto",
            threads=outcome.threads,
        )
        for rank in range(case.ranks)
    ]
    fullest = max(found, key=lambda one: one.peak_bytes)
    row.predicted_bytes, row.predicted_components = fullest.peak_bytes, dict(fullest.components)


def _compare(rows: list[Row], case: Case) -> None:
    """With the baseline and, for those that are not ours, with the fastest of ours; by the time of one sequence."""
    for phase in PASSES:
        timed = [row for row in rows if row.phase == phase and row.tflops]
        for name, base in (
            (case.baseline, _named(timed, case.baseline)),
            ("the fastest of ours", _fastest(row for row in timed if row.kind == "ours")),
        ):
            for row in timed:
                if base is None or row is base or (row.kind == "ours" and name != case.baseline):
                    continue
                assert row.tflops is not None
                assert base.tflops is not None
                row.ratios[f"times {name}, {SAME_WORK}"] = base.tflops / row.tflops


def _named(rows: Iterable[Row], name: str) -> Row | None:
    return next((row for row in rows if row.name == name), None)


def _fastest(rows: Iterable[Row]) -> Row | None:
    return max(rows, key=lambda row: row.tflops or 0.0, default=None)
