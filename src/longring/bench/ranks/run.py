"""Cases one after the other, into a record that is kept after each of them; and how long all of them will take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch

from ...errors import ArgumentError, LongringError
from ...functional import attention
from ...geometry.patterns import Dense, Pattern
from ..gpu.given import Place, Shape, given
from ..gpu.work import flops
from ..records import Record, Row, cores, version_of
from .case import Case, Contender
from .contest import Judge, play
from .program import PASSES
from .seats import ALONE, DATA_PARALLEL, ONE_PROCESS

REAL = (
    "Processes of this machine, a rank each, over torch.distributed with Gloo on loopback. Times are those of the wall "
    "clock, from when the first rank begins until the last is done, contenders in turns; memory is read off the "
    "allocator's events on each rank. Every result was compared with float64 on sampled rows before it was timed."
)
SIMULATED = (
    "Nothing is. Ranks of one machine share its cores and memory and have no network between them, and predicted bytes "
    "are the plan's, not measured."
)
ELSEWHERE = {"ring-flash-attn": "flash-attn on CUDA", "yunchang": "flash-attn on CUDA"}
CALIBRATION = 1 << 10  # tokens
START = 4.0  # seconds to start the ranks of a case, and to import what they need
PATIENCE = 20.0  # times the seconds that a case should take, after which something hangs


def be_quiet() -> None:
    """Before the first rank is started: the profiler and DeepSpeed would speak on every rank."""
    for name, value in {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR", "DS_ACCELERATOR": "cpu"}.items():
        os.environ.setdefault(name, value)


def absent() -> list[str]:
    """Known rings that cannot take part here, and why."""
    return [
        f"{name}: {'not installed' if version_of(name) == 'not installed' else f'installed, but needs {needs}'}"
        for name, needs in ELSEWHERE.items()
    ]


def run_cases(
    cases: Sequence[Case],
    record: Record,
    tell: Callable[[Case, list[Row]], None],
    keep: Callable[[], None],
    *,
    pace: float,
    begin: Callable[[Case], None] = lambda case: None,
) -> None:
    """Fill the record. A case that breaks is a failure of its own, and the next is tried."""
    judge = Judge()
    record.missing += absent()
    for case in cases:
        begin(case)
        start = time.perf_counter()
        rows: list[Row] = []
        try:
            played = play(case, judge, timeout=max(300.0, PATIENCE * seconds_of(case, pace)))
        except ArgumentError:
            raise
        except LongringError as broken:  # minutes of others are not thrown away for one
            record.failures.append(f"{case.title}: {broken}")
        else:
            rows = played.rows
            record.missing += [note for note in played.missing if note not in record.missing]
            record.failures += played.failures
        record.scenarios.setdefault(case.scenario, []).extend(rows)
        took = record.seconds.get(case.scenario, 0.0) + time.perf_counter() - start
        record.seconds[case.scenario] = round(took, 1)
        keep()
        tell(case, rows)


# ------------------------------------------------------------------------------------------------------ how long


def measured_pace(case: Case) -> float:
    """Multiplications and additions a second of one core, forward and backward, on the case's kind of heads."""
    shape = Shape(min(CALIBRATION, case.shape.n), *case.shape[1:])
    x = given(shape, Place(torch.device("cpu"), case.torch_dtype)).with_gradients()
    pattern = Dense(causal=True)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            torch.autograd.grad(attention(*x[:3], pattern=pattern), x[:3], x.upstream)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return _work(shape, pattern) / min(times)


def seconds_of(case: Case, pace: float) -> float:
    """Estimated: the work of every contender over the cores it has, once to be judged, then round by round."""
    a_round = sum(_seconds(contender, case, pace) for contender in case.contenders)
    rounds = min(case.rounds, max(2, 1 + int(case.budget / a_round)))
    return START + (1 + rounds) * a_round


def _seconds(contender: Contender, case: Case, pace: float) -> float:
    sequences = case.ranks if contender.name == DATA_PARALLEL else 1
    workers = cores() if contender.name in (ONE_PROCESS, ALONE) else min(cores(), case.ranks * _threads(case.ranks))
    return sequences * _work(case.shape, case.computed_by(contender)) / (pace * workers)


def _threads(ranks: int) -> int:
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() else max(1, cores() // ranks)


def _work(shape: Shape, pattern: Pattern) -> int:
    return sum(flops(shape, pattern, phase) for phase in PASSES)
