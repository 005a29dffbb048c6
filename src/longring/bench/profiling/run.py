"""A profile: a call on local ranks, all of them on one clock, with what they held beside what was predicted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

from ...call import check_pattern, choose_kernel, pick_schedule
from ...errors import LongringError, TransportError
from ...geometry.layouts import deal
from ...geometry.patterns import Problem
from ...geometry.plans import plan
from ...geometry.task import Task
from ...launching import launch
from ...plan.choose import choose_layout
from ...plan.memory import Held
from .memory import Sample, in_these_names, thinned
from .rank import Asked, Peak, Run, Seen, attend, on_another_run
from .spans import Span, exposed, hidden_share, under_way

KINDS = ("compute", "merge", "post", "wait")  # of what a rank itself does
MOST_SAMPLES = 500  # of memory, for each rank


@dataclass(frozen=True)
class Rank:
    """One rank's call. Times are seconds since the first rank began."""

    rank: int
    phases: dict[str, tuple[float, float]]
    spans: list[Span]
    samples: list[Sample]
    peaks: dict[str, Peak]
    predicted: dict[str, Peak]
    predicted_steps: dict[str, dict[str, dict[str, int]]]  # by phase and step: the fullest moment of it
    bytes_sent: dict[str, int]
    bytes_planned: dict[str, int]

    @property
    def fullest(self) -> str:
        """The phase in which it held most."""
        return max(self.peaks, key=lambda phase: self.peaks[phase].bytes)


@dataclass(frozen=True)
class Profile:
    asked: Asked
    schedule: str
    layout: str
    kernel: str
    device: str
    ranks: list[Rank]
    seconds: dict[str, list[float]]  # of every run, by phase: from the first rank's beginning to the last one's end
    chosen: int  # the run that is shown
    unsure: float  # of the clocks, at most

    @property
    def overlap(self) -> float | None:
        return hidden_share(rank.spans for rank in self.ranks)

    @property
    def end(self) -> float:
        return max(end for rank in self.ranks for _, end in rank.phases.values())


def check(asked: Asked) -> None:
    """What the ranks would refuse one by one, refused once and before any of them is started."""
    problem = Problem(asked.batch, asked.tokens, asked.tokens, asked.kv_heads, 0)
    check_pattern(asked.pattern, problem)
    layout = choose_layout(asked.pattern, asked.tokens)[0] if asked.layout == "auto" else asked.layout
    dealt = deal(layout, asked.tokens, asked.ranks, documents=asked.pattern.documents if layout == "dealt" else None)
    like = torch.empty(1, 1, 1, asked.head_dim, dtype=asked.dtype, device=asked.device)
    choose_kernel(asked.kernel, like, like, deterministic=False)
    task = Task(asked.pattern, problem, dealt, dealt, asked.heads)
    close = asked.ranks // asked.nodes
    plan(pick_schedule(asked.schedule, task, like, close).name, task, 0, close)


def profile(asked: Asked) -> Profile:
    """Run it on local ranks. Of the timed runs the one of median length is shown."""
    try:
        with _quiet_profiler():
            seen: list[Seen] = launch(attend, asked, ranks=asked.ranks, backend=_backend(asked))
    except LongringError:
        raise
    except (OSError, EOFError, RuntimeError) as failure:  # of the system, the fork server, the store
        raise TransportError(f"{asked.ranks} processes could not be started: {failure!r}") from failure
    return together(asked, seen)


def _backend(asked: Asked) -> str:
    return "gloo" if asked.device == "cpu" else "auto"


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """torch's profiler, which measures the peaks, announces itself on stderr unless the environment forbids it."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ[name] = before or "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def together(asked: Asked, seen: Sequence[Seen]) -> Profile:
    """What the ranks told, on rank 0's clock."""
    runs = [[_moved(run, one.offset) for run in one.runs] for one in seen]
    seconds = {phase: [_length(same, phase) for same in zip(*runs, strict=True)] for phase in asked.phases}
    whole = [sum(times) for times in zip(*seconds.values(), strict=True)]
    chosen = whole.index(sorted(whole)[(len(whole) - 1) // 2])
    begin = min(of_rank[chosen].phases["forward"][0] for of_rank in runs)
    first = seen[0]
    return Profile(
        asked=asked,
        schedule=first.schedule,
        layout=first.layout,
        kernel=first.kernel,
        device=first.device,
        ranks=[_rank(one, _moved(of_rank[chosen], -begin)) for one, of_rank in zip(seen, runs, strict=True)],
        seconds=seconds,
        chosen=chosen,
        unsure=max(one.unsure for one in seen),
    )


def _moved(run: Run, seconds: float) -> Run:
    phases = {phase: (start + seconds, end + seconds) for phase, (start, end) in run.phases.items()}
    return Run(phases, [span.moved(seconds) for span in run.spans], [moment + seconds for moment in run.boundaries])


def _length(runs: Sequence[Run], phase: str) -> float:
    return max(run.phases[phase][1] for run in runs) - min(run.phases[phase][0] for run in runs)


def _rank(seen: Seen, run: Run) -> Rank:
    moments = on_another_run([sample.at for sample in seen.samples], seen.memory_run, run)
    samples = [sample._replace(at=at) for sample, at in zip(seen.samples, moments, strict=True)]
    return Rank(
        rank=seen.rank,
        phases=run.phases,
        spans=run.spans,
        samples=thinned(samples, MOST_SAMPLES),
        peaks=seen.peaks,
        predicted={phase: _as_peak(said, phase) for phase, said in seen.predicted.items()},
        predicted_steps={phase: _steps(said, phase) for phase, said in seen.predicted.items()},
        bytes_sent=seen.bytes_sent,
        bytes_planned=seen.bytes_planned,
    )


def _as_peak(said: Held, phase: str) -> Peak:
    return Peak(said.peak_bytes, in_these_names(said.components, phase))


def _steps(said: Held, phase: str) -> dict[str, dict[str, int]]:
    return {step: in_these_names(components, phase) for step, components in said.timeline.items()}


# ------------------------------------------------------------------------------------------------------ told


def told(profile: Profile) -> dict[str, Any]:
    """As JSON, without the envelope."""
    return {
        "schedule": profile.schedule,
        "layout": profile.layout,
        "kernel": profile.kernel,
        "device": profile.device,
        "seconds": {phase: spread(times) for phase, times in profile.seconds.items()},
        "shown_run": profile.chosen,
        "clocks_unsure_by": profile.unsure,
        "overlap": profile.overlap,
        "ranks": [_rank_told(rank) for rank in profile.ranks],
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (seconds[0],) * 3
    return {"median": median(seconds), "low": low, "high": high, "runs": len(seconds)}


def _rank_told(rank: Rank) -> dict[str, Any]:
    peak, predicted = rank.peaks[rank.fullest], rank.predicted.get(rank.fullest)
    return {
        "rank": rank.rank,
        "spans": [_span_told(span) for span in rank.spans if span.kind != "post"],
        "posts": [_span_told(span) for span in rank.spans if span.kind == "post"],
        "memory": [
            {"at": sample.at, "bytes": sample.bytes, "components": sample.components} for sample in rank.samples
        ],
        "peak_bytes": peak.bytes,
        "predicted_bytes": None if predicted is None else predicted.bytes,
        "components": peak.components,
        "predicted": None if predicted is None else predicted.components,
        "peak_phase": rank.fullest,
        "phases": {phase: _phase_told(rank, phase) for phase in rank.phases},
        "seconds": {kind: sum(s.end - s.start for s in rank.spans if s.kind == kind) for kind in KINDS},
        "seconds_under_way": under_way(rank.spans),
        "seconds_exposed": exposed(rank.spans),
        "overlap": hidden_share([rank.spans]),
    }


def _phase_told(rank: Rank, phase: str) -> dict[str, Any]:
    peak, predicted = rank.peaks[phase], rank.predicted.get(phase)
    return {
        "start": rank.phases[phase][0],
        "end": rank.phases[phase][1],
        "peak_bytes": peak.bytes,
        "components": peak.components,
        "predicted_bytes": None if predicted is None else predicted.bytes,
        "predicted": None if predicted is None else predicted.components,
        "predicted_steps": rank.predicted_steps.get(phase),
        "bytes_sent": rank.bytes_sent[phase],
        "bytes_planned": rank.bytes_planned[phase],
    }


def _span_told(span: Span) -> dict[str, Any]:
    return {
        "kind": span.kind,
        "what": span.what,
        "phase": span.phase,
        "step": span.step,
        "start": span.start,
        "end": span.end,
        "bytes": span.bytes,
        "to": sorted({peer for peer, _ in span.sends}),
        "from": sorted({peer for peer, _ in span.receives}),
    }
