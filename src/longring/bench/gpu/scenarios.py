"""The scenarios by name, in the order in which they matter, and how they are run one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from ...schedules.buffers import release_buffers
from . import dense, dilated, error, longest, peers, ring
from .clock import release
from .contest import Stage
from .record import Record, Row

SCENARIOS: dict[str, Callable[[Stage], Iterator[Row]]] = {
    "dense": dense.run,
    "ring": ring.run,
    "simulated ring": ring.run_with_messages,
    "far ring": ring.run_far,
    "dilated": dilated.run,
    "error": error.run,
    "peers": peers.run,
    "longest": longest.run,
}


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
        try:
            for row in SCENARIOS[name](stage):
                rows.append(row)
                record.seconds[name] = round(time.perf_counter() - start, 1)
                keep()
        except Exception as broken:  # hours of a GPU are not thrown away for one scenario
            stage.failures.append(f"{name}: {type(broken).__name__}: {broken}")
        release_buffers()
        release(stage.device)
        record.seconds[name] = round(time.perf_counter() - start, 1)
        record.missing, record.failures = stage.missing, stage.failures
        tell(name, rows)
