"""What was found on ranks, as cells of tables: a line for each contender, forward and backward side by side."""

from __future__ import annotations

from collections.abc import Sequence

from ...plan.quantities import spoken_bytes
from ..records import Record, Row, Spread

Cells = list[tuple[str, ...]]

TIMES = ("who", "forward ms", "backward ms", "of base", "held", "plan", "error")
MEMORY = ("who", "q, k, v", "out, dout", "dq, dk, dv", "beyond", "held", "plan")


def time_cells(rows: Sequence[Row]) -> Cells:
    """Medians with quartiles; the error is the worst of all as a share of what is allowed."""
    return [_times(*passes) for passes in _by_name(rows)]


def _times(*passes: Row) -> tuple[str, ...]:
    last = passes[-1]
    return (
        last.name,
        *(_time(row.time) for row in (passes if len(passes) == 2 else (last, last))),
        " ".join(f"{ratio:.2f}" for row in passes if (ratio := _to_base(row)) is not None),
        "" if last.most_bytes is None else spoken_bytes(last.most_bytes),
        _beside_plan(last),
        _worst(passes),
    )


def notes(rows: Sequence[Row]) -> list[str]:
    """What is to be said of some of them, each thing once."""
    told = [(row.name, row.phase, row.note) for row in rows if row.note]
    both = [(name, note) for name, _, note in told]
    return list(
        dict.fromkeys(
            f"{name}{'' if phase == 'both' or both.count((name, note)) > 1 else f', {phase}'}: {note}"
            for name, phase, note in told
        )
    )


def memory_cells(rows: Sequence[Row]) -> Cells:
    """Of the fullest rank, forward and backward together: measured, but for the plan's."""
    lasts = [passes[-1] for passes in _by_name(rows) if passes[-1].peak_bytes]
    return [
        (
            row.name,
            *(_sum_of(row, names) for names in (("q", "k", "v"), ("out", "dout"), ("dq", "dk", "dv"))),
            _sum_of(row, ("beyond inputs and results",)),
            spoken_bytes(row.most_bytes or 0),
            "" if row.predicted_bytes is None else spoken_bytes(row.predicted_bytes),
        )
        for row in lasts
    ]


def markdown(record: Record, scenario: str) -> str:
    """The cases of a scenario, a table of times and one of memory each."""
    rows = record.scenarios.get(scenario, [])
    parts = []
    for case in dict.fromkeys(row.case for row in rows):
        here = [row for row in rows if row.case == case]
        tables = [_marked([TIMES, *time_cells(here)]), _marked([MEMORY, *memory_cells(here)])]
        parts += [f"**{case}**\n", *tables, *(f"{note}\n" for note in notes(here))]
    return "\n".join(parts) or "Not in this record.\n"


def _by_name(rows: Sequence[Row]) -> list[tuple[Row, ...]]:
    return [tuple(row for row in rows if row.name == name) for name in dict.fromkeys(row.name for row in rows)]


def _to_base(row: Row) -> float | None:
    ratios = [ratio for what, ratio in row.ratios.items() if "of ours" not in what]
    return ratios[0] if ratios else None


def _time(spread: Spread | None) -> str:
    if spread is None:
        return ""
    median, low, high = (_ms(seconds) for seconds in spread[:3])
    return median if spread.runs == 1 else f"{median} ({low}-{high})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _beside_plan(row: Row) -> str:
    if not row.peak_bytes or not row.predicted_bytes:
        return ""
    return f"{row.predicted_bytes / max(row.peak_bytes):.3f}"


def _worst(passes: Sequence[Row]) -> str:
    shares = [row.errors[name] / most for row in passes for name, most in row.allowed.items() if most]
    if not shares:
        return ""
    return f"{max(shares):.0%}" if max(shares) < 10 else f"{max(shares):.0e} x"


def _sum_of(row: Row, names: Sequence[str]) -> str:
    return spoken_bytes(sum(row.components.get(name, 0) for name in names))


def _marked(lines: Cells) -> str:
    head, *body = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *body))
