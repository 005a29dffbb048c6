"""What was aimed for, and what a record says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..records import Record, Row
from .dense import TO_THE_BEST
from .dilated import DENSE_RATE, TO_LONGNET
from .error import TO_ITS_LSE, TO_ONE_CALL
from .ring import EFFICIENCY

EFFICIENCIES = {4: (0.98, 0.97), 8: (0.97, 0.95), 16: (0.93, 0.90)}  # by ranks: forward, backward
FAR = 0.97
MILLISECONDS = {"forward": 42.0, "backward": 120.0}
TIMES_LONGNET = {"1M": {"forward": 6.5, "backward": 3.3}, "64K": {"forward": 4.0, "backward": 4.0}}
EXTRA_MEMORY = {"forward": 1.5, "backward": 3.0}


class Goal(NamedTuple):
    what: str
    wanted: str
    got: str
    is_met: bool


def goals(record: Record) -> list[Goal]:
    """One for each row that a goal speaks of; none where the record has no such row."""
    parts: tuple[Callable[[Record], Iterator[Goal]], ...] = (_dense, _rings, _dilated, _longest, _error)
    return [goal for part in parts for goal in part(record)]


def _dense(record: Record) -> Iterator[Goal]:
    for row in record.scenarios.get("dense", []):
        if TO_THE_BEST in row.ratios:
            limit = 1.03 if "n = 8K" in row.case else 1.01
            yield _at_most(_what(row.name, row), row.ratios[TO_THE_BEST], limit, f" {TO_THE_BEST}")


def _rings(record: Record) -> Iterator[Goal]:
    for row in (*record.scenarios.get("ring", []), *record.scenarios.get("far ring", [])):
        if EFFICIENCY not in row.ratios or not row.name.startswith("ring of"):
            continue
        ranks, backward = int(row.name.split()[-1]), row.phase == "backward"
        wanted = EFFICIENCIES[ranks][backward] if ranks in EFFICIENCIES else FAR
        yield _at_least(_what("ring", row), row.ratios[EFFICIENCY], wanted, f" {EFFICIENCY}")


def _dilated(record: Record) -> Iterator[Goal]:
    for row in record.rows("dilated", name="longring"):
        if row.time is None:
            continue
        what = _what("dilated", row)
        if "n = 1M, 16 heads" in row.case:
            yield _at_most(what, 1e3 * row.time.median, MILLISECONDS[row.phase], " ms")
        for length, wanted in TIMES_LONGNET.items():
            if f"n = {length}," in row.case and TO_LONGNET in row.ratios:
                yield _at_least(what, row.ratios[TO_LONGNET], wanted[row.phase], f" {TO_LONGNET}")
        if "n = 1M" in row.case and row.extra_memory is not None:
            yield _at_most(what, row.extra_memory, EXTRA_MEMORY[row.phase], " tensors beyond inputs and outputs")
        if "n = 1M" in row.case and DENSE_RATE in row.ratios:
            yield _at_least(what, row.ratios[DENSE_RATE], 0.8, f" {DENSE_RATE}")


def _longest(record: Record) -> Iterator[Goal]:
    for row in record.scenarios.get("longest", []):
        yield Goal(row.case, "fits, and is right", "yes" if row.time else row.note, row.time is not None)


def _error(record: Record) -> Iterator[Goal]:
    for row in record.scenarios.get("error", []):
        for what in (TO_ONE_CALL, TO_ITS_LSE):
            if row.kind == "ours" and what in row.ratios:
                yield _at_most(f"error, {row.name}, {row.case}", row.ratios[what], 1.5, f" {what}")


def _what(scenario: str, row: Row) -> str:
    return f"{scenario}, {row.phase}, {row.case}"


def _at_most(what: str, got: float, limit: float, unit: str) -> Goal:
    return Goal(what, f"at most {limit:g}{unit}", f"{got:.3g}", got <= limit)


def _at_least(what: str, got: float, limit: float, unit: str) -> Goal:
    return Goal(what, f"at least {limit:g}{unit}", f"{got:.3g}", got >= limit)
