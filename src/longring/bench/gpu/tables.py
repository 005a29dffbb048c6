"""A record as tables: in plain text for a terminal, in Markdown for a document. The cells are the same."""

from __future__ import annotations

from collections.abc import Sequence

from ..records import EXTREMES, QUARTILES, Record, Row
from .goals import goals

TITLES = {
    "dense": "One call beside the kernels called directly",
    "ring": "A zigzag ring's work beside one call's",
    "simulated ring": "The same with its messages copied",
    "far ring": "Some ranks of a large ring",
    "dilated": "LongNet's dilated attention",
    "many tiles": "Packed documents, and windows",
    "longest": "The longest contexts",
    "error": "Errors against float64",
    "peers": "Peers in the same process",
}
SPREADS = {QUARTILES: "ms (quartiles)", EXTREMES: "ms (min to max)"}


def heads(spread: str = QUARTILES) -> tuple[str, ...]:
    return "case", "pass", "who", SPREADS[spread], "TFLOP/s", "compared", "extra memory", "worst error", "note"


Cells = list[tuple[str, ...]]


def cells(rows: Sequence[Row]) -> Cells:
    return [
        (
            row.case,
            row.phase,
            row.name if row.kind == "ours" else f"{row.name} ({row.kind})",
            _time(row),
            "" if row.tflops is None else f"{row.tflops:.0f}",
            "; ".join(f"{ratio:.3g} {what}" for what, ratio in row.ratios.items()),
            "" if row.extra_memory is None else f"{row.extra_memory:.2f} tensors",
            ", ".join(f"{name} {error:.1e}" for name, error in row.errors.items()),
            row.note,
        )
        for row in rows
    ]


def _time(row: Row) -> str:
    if row.time is None:
        return ""
    median, low, high = (1e3 * seconds for seconds in row.time[:3])
    return f"{median:.4g}" if row.time.runs == 1 else f"{median:.4g} ({low:.4g} to {high:.4g})"


def plain(rows: Sequence[Row]) -> str:
    """Columns that are empty throughout are left out."""
    return _aligned(_without_empty([heads(), *cells(rows)]))


def markdown(record: Record, scenario: str) -> str:
    rows = record.scenarios.get(scenario)
    return _marked(_without_empty([heads(record.spread), *cells(rows)])) if rows else "Not in this record.\n"


def goal_table(record: Record) -> str:
    found = goals(record)
    told = [(goal.what, goal.wanted, goal.got, "yes" if goal.is_met else "**no**") for goal in found]
    return _marked([("what", "wanted", "measured", "met"), *told]) if told else "Not in this record.\n"


def machine_table(record: Record) -> str:
    told = {**record.machine, **record.versions, "commit": record.commit, "command": f"`{record.line}`"}
    lines = _marked([("", ""), *((name, str(value)) for name, value in told.items())])
    notes = [
        f"Real: {record.real}",
        f"Simulated: {record.simulated}",
        *record.missing,
        *(f"FAILED: {x}" for x in record.failures),
    ]
    return lines + "".join(f"\n{note}\n" for note in notes)


def plain_goals(record: Record) -> str:
    told = [("yes" if goal.is_met else "NO", goal.what, goal.wanted, goal.got) for goal in goals(record)]
    return _aligned([("met", "what", "wanted", "measured"), *told])


def _without_empty(lines: Cells) -> Cells:
    kept = [i for i in range(len(lines[0])) if any(line[i] for line in lines[1:])]
    return [tuple(line[i] for i in kept) for line in lines]


def _aligned(lines: Cells) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join(padded) + "\n"


def _marked(lines: Cells) -> str:
    head, *body = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    rule = ["---"] * len(head)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *body))
