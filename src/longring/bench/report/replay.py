"""The page of `longring replay`: one rank's whole share, run for real, beside what was predicted for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from . import bars, errors
from .asked import asked
from .attending import Scene
from .common import mark
from .figure import paragraph, table
from .markup import Markup, together
from .page import Part
from .told import Told, lengthy, shown


def scenes(record: dict[str, Any]) -> Iterator[Callable[[], Scene]]:
    words = {key: record.get(key) for key in ("layout", "schedule", "tokens", "ranks")}
    yield lambda: Scene(asked(record.get("arguments"), **words), rank=record.get("rank"))


def verdict(told: Told) -> tuple[object, bool | None]:
    checks = told["checks"].value or []
    wrong = sum(not check.get("ok") for check in checks)
    share = together(
        "Rank ",
        shown(told["rank"]),
        " of ",
        shown(told["ranks"]),
        " computed its whole share, ",
        shown(told["local_tokens"]),
        " of ",
        shown(told["tokens"]),
        " tokens. ",
    )
    said = (
        f"{wrong} of {len(checks)} checks failed."
        if wrong
        else f"All {len(checks)} checks against the float64 definition hold."
    )
    return together(share, said), bool(told["ok"].value)


def parts(told: Told, tiles: list[Part]) -> list[Part]:
    return [
        Part("cost", "Time, memory and traffic", [_measured(told, *words) for words in MEASURES]),
        Part("checks", "What was checked", _checks(told)),
        *tiles,
    ]


MEASURES = (
    ("seconds", "predicted_seconds", "seconds", "Time of the rank's own work, measured and predicted."),
    ("peak_bytes", "predicted_bytes", "bytes", "Most bytes that the rank held, measured and predicted."),
)


def _measured(told: Told, key: str, predicted: str, unit: str, caption: str) -> Markup:
    made = []
    for phase, row in told["phases"].items():
        made.append(bars.Bar(f"{phase}, measured", row[key], note=_note(row, key)))
        if row[predicted].is_number:
            made.append(bars.Bar(f"{phase}, predicted", row[predicted], kind="predicted"))
    return bars.draw(
        f"measured-{key.replace('_', '-')}", caption, made, unit, what="pass", value=lengthy(key), note="more"
    )


def _note(row: Told, key: str) -> Markup | None:
    if key == "seconds" and row["tflops"].is_number:
        return shown(row["tflops"], "tflops")
    if key == "peak_bytes" and row["bytes_received"].is_number:
        return together(
            shown(row["bytes_received"], "bytes"), " received, ", shown(row["bytes_sent"], "bytes"), " sent"
        )
    return None


def _checks(told: Told) -> list[object]:
    checks = list(told["checks"])
    judged = [
        errors.Judged(_where(check), check["quantity"].text, check["error"], check["allowed"]) for check in checks
    ]
    rows = [
        [
            check["quantity"].text,
            _where(check),
            shown(check["error"], "error"),
            shown(check["allowed"], "error"),
            mark(check["ok"].value),
        ]
        for check in checks
    ]
    summed = [
        bars.Bar(
            quantity,
            max(some, key=lambda one: one.error.number).error,
            limit=max(some, key=lambda one: one.error.number).allowed,
        )
        for quantity, some in _by_quantity(judged).items()
    ]
    worst = bars.draw(
        "worst",
        "The largest error of each quantity; the dashed mark is what is allowed for it.",
        summed,
        "error",
        what="quantity",
        value="largest error",
    )
    said = paragraph(
        "Rows were drawn at random, with the first, the last and those at borders, and computed anew in float64 from "
        "the same generator. A budget is derived from the precision in use, never tuned."
    )
    return [said, worst, table("Every check", ["quantity", "rows", "error", "allowed", "verdict"], rows, words=2)]


def _by_quantity(judged: list[errors.Judged]) -> dict[str, list[errors.Judged]]:
    found: dict[str, list[errors.Judged]] = {}
    for one in judged:
        found.setdefault(one.quantity, []).append(one)
    return found


def _where(check: Told) -> str:
    rows = check["rows"].value or []
    if not isinstance(rows, list):
        return str(rows)
    few = ", ".join(f"{row:,}" if isinstance(row, int) else str(row) for row in rows[:6])
    return f"{few} and {len(rows) - 6} more" if len(rows) > 6 else few
