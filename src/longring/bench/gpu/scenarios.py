"""The scenarios by name, in the order in which they matter, and how they are run one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...schedules.buffers import release_buffers
from ..records import Record, Row, new_record
from . import dense, dilated, error, longest, many, peers, ring
from .clock import release
from .contest import Stage

REAL = (
    "One GPU, one process. Every time is measured on it with CUDA events; every result was compared with float64 on "
    "sampled rows before it was timed; errors and memory are measured."
)
SIMULATED = (
    "Rings: the ranks are virtual and take turns on the one GPU. Each computes, merges and adds exactly what it would "
    "on a machine of its own, but nothing travels: messages are in place beforehand, and no link is timed "
    "(`simulated` rows: messages are copied within the GPU). Rows marked re-created are a peer's published algorithm "
    "written anew over torch's kernels, not its package."
)

SCENARIOS: dict[str, Callable[[Stage], Iterator[Row]]] = {
    "dense": dense.run,
    "ring": ring.run,
    "simulated ring": ring.run_with_messages,
    "far ring": ring.run_far,
    "dilated": dilated.run,
    "many tiles": many.run,
    "error": error.run,
    "peers": peers.run,
    "longest": longest.run,
}


def gpu_record(line: str, device: torch.device, is_quick: bool, arguments: dict[str, Any] | None = None) -> Record:
    return new_record(line, device, is_quick, real=REAL, simulated=SIMULATED, arguments=arguments)


def run_scenarios(
    stage: Stage,
    record: Record,
    names: Sequence[str],
    tell: Callable[[str, list[Row]], None],
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Fill the record, and say after each scenario what it found. One that breaks or is cut short leaves its rows."""
    for name in names:
        start = time.perf_counter()
        rows = record.scenarios[name] = []
        stage.begin(name)
        record.missing, record.failures = stage.missing, stage.failures
        try:
            for row in SCENARIOS[name](stage):
                rows.append(row)
                record.seconds[name] = round(time.perf_counter() - start, 1)
                keep()
        except Exception as broken:  # hours of a GPU are not thrown away for one scenario
            stage.failed(f"{type(broken).__name__}: {broken}")
        release_buffers()
        release(stage.device)
        record.seconds[name] = round(time.perf_counter() - start, 1)
        tell(name, rows)
