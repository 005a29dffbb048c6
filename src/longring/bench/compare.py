"""Two records, row by row: what became slower, faster, heavier, lighter or wrong, and what is alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import ArgumentError
from .records import Record, Row, Spread

REGRESSIONS = ("wrong", "slower", "heavier")
VERDICTS = (*REGRESSIONS, "faster", "lighter", "right again", "alike")


class Key(NamedTuple):
    """What makes two rows the same measurement."""

    scenario: str
    case: str
    name: str
    phase: str


class Change(NamedTuple):
    """One row of both records."""

    key: Key
    verdict: str  # of VERDICTS: the gravest that holds
    ratio: float | None  # the later median over the earlier
    before: Spread | None
    after: Spread | None
    memory_ratio: float | None  # of the fullest rank's peak
    note: str

    def to_json(self) -> dict[str, Any]:
        told = {name: value for name, value in self._asdict().items() if name != "key"}
        times = {"before": self.before and self.before._asdict(), "after": self.after and self.after._asdict()}
        return self.key._asdict() | told | times


class Comparison(NamedTuple):
    changes: list[Change]
    gone: list[Key]  # rows of the earlier record alone
    new: list[Key]
    caveats: list[str]  # why the two may not be comparable
    tolerance: float

    @property
    def regressions(self) -> list[Change]:
        return [change for change in self.changes if change.verdict in REGRESSIONS]

    def to_json(self) -> dict[str, Any]:
        return {
            "tolerance": self.tolerance,
            "rows": [change.to_json() for change in self.changes],
            "gone": [key._asdict() for key in self.gone],
            "new": [key._asdict() for key in self.new],
            "caveats": self.caveats,
            "regressions": len(self.regressions),
        }


def compare(before: Record, after: Record, *, tolerance: float = 0.05) -> Comparison:
    """What differs by more than `tolerance` (0.05: five percent) and by more than the spread of both."""
    if not 0 <= tolerance < math.inf:
        raise ArgumentError(f"tolerance must be a share of at least 0, as 0.05 for five percent, got {tolerance}")
    earlier, later = _by_key(before), _by_key(after)
    common = [key for key in earlier if key in later]
    if not common:
        raise ArgumentError(
            f"the records have no row in common: one has {_scenarios(before)}, the other {_scenarios(after)}, "
            "or their cases differ in size"
        )
    return Comparison(
        [_change(key, earlier[key], later[key], tolerance) for key in common],
        [key for key in earlier if key not in later],
        [key for key in later if key not in earlier],
        [*_caveats(before, after), *_lost(earlier, later, common)],
        tolerance,
    )


def _by_key(record: Record) -> dict[Key, Row]:
    """An untimed row speaks for both passes; it stands in for whichever the other record has."""
    found: dict[Key, Row] = {}
    for scenario, rows in record.scenarios.items():
        for row in rows:
            phases = ("forward", "backward") if row.phase == "both" and row.time is None else (row.phase,)
            for phase in phases:
                found[Key(scenario, row.case, row.name, phase)] = row
    return found


def _change(key: Key, before: Row, after: Row, tolerance: float) -> Change:
    ratio = after.time.median / before.time.median if before.time and after.time else None
    memory = _memory_ratio(before, after)
    verdict = next(_verdicts(before, after, memory, tolerance), "alike")
    return Change(key, verdict, ratio, before.time, after.time, memory, after.note if verdict == "wrong" else "")


def _verdicts(before: Row, after: Row, memory: float | None, tolerance: float) -> Iterator[str]:
    """All that hold, the gravest first."""
    if _is_bad(after) and not _is_bad(before):
        yield "wrong"
    if _is_longer(after.time, before.time, tolerance):
        yield "slower"
    if memory is not None and memory > 1 + tolerance:
        yield "heavier"
    if _is_bad(before) and not _is_bad(after):
        yield "right again"
    if _is_longer(before.time, after.time, tolerance):
        yield "faster"
    if memory is not None and memory < 1 / (1 + tolerance):
        yield "lighter"


def _is_longer(one: Spread | None, other: Spread | None, tolerance: float) -> bool:
    """By more than the tolerance, and by more than the spread of both."""
    if one is None or other is None:
        return False
    return one.median > (1 + tolerance) * other.median and one.low > other.high


def _is_bad(row: Row) -> bool:
    """Wrong, or not run at all."""
    return row.is_wrong or (row.time is None and "not timed" in row.note)


def _memory_ratio(before: Row, after: Row) -> float | None:
    if before.most_bytes and after.most_bytes:
        return after.most_bytes / before.most_bytes
    if before.extra_memory and after.extra_memory and before.extra_memory > 0:
        return after.extra_memory / before.extra_memory
    return None


def _lost(before: dict[Key, Row], after: dict[Key, Row], common: Sequence[Key]) -> Iterator[str]:
    """What was measured and no longer is, so that nobody takes it for alike."""
    for what, has in (("time", lambda row: row.time), ("memory", lambda row: row.most_bytes or row.extra_memory)):
        lost = sum(bool(has(before[key]) and not has(after[key])) for key in common if not _is_bad(after[key]))
        if lost:
            yield f"{lost} of {len(common)} rows have a {what} in the first record and none in the second"


def _scenarios(record: Record) -> str:
    return ", ".join(record.scenarios) or "none"


def _caveats(before: Record, after: Record) -> Iterator[str]:
    for what in ("machine", "versions"):
        one, other = getattr(before, what), getattr(after, what)
        differing = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        told = ", ".join(f"{name} {one.get(name)} / {other.get(name)}" for name in differing)
        if differing:
            yield f"another {'machine' if what == 'machine' else 'version'}: {told}"
    for name, record in (("first", before), ("second", after)):
        if not record.is_complete:
            yield f"the {name} record was cut short"
        if record.is_quick:
            yield f"the {name} record is a quick one, whose sizes are too small to judge speed by"
    if before.spread != after.spread:
        yield f"spreads differ: {before.spread} / {after.spread}"
