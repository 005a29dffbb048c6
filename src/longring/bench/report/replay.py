"""The page of `longring replay`: one rank's whole share, run for real, beside what was predicted for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from . import bars, cells, errors
from .asked import asked
from .attending import Scene
from .common import mark
from .figure import figure, paragraph, table
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
        measured, foreseen = (
            (row["components"].items(), row["predicted_components"].items()) if unit == "bytes" else ([], [])
        )
        made.append(bars.Bar(f"{phase}, measured", row[key], measured, more=(_note(row, key),)))
        if row[predicted].is_number:
            made.append(bars.Bar(f"{phase}, predicted", row[predicted], foreseen, kind="predicted"))
    name = f"measured-{key.replace('_', '-')}"
    return bars.draw(name, caption, made, unit, what="pass", value=lengthy(key), more=("besides",))


def _note(row: Told, key: str) -> Markup:
    words: list[Markup] = []
    if key == "seconds":
        words += [shown(row["tflops"], "tflops")] if row["tflops"].is_number else []
        if row["made_up_seconds"].is_number:
            words.append(
                together(shown(row["made_up_seconds"], "seconds"), " to generate the others' keys, not included")
            )
    else:
        words += [_moved(row, way) for way in ("received", "sent") if row[f"bytes_{way}"].is_number]
    return together(*(together("; " if index else "", word) for index, word in enumerate(words)))


def _moved(row: Told, way: str) -> Markup:
    moved, planned = row[f"bytes_{way}"], row[f"planned_bytes_{way}"]
    if not planned.is_number:
        return together(shown(moved, "bytes"), f" {way}")
    agrees = mark(moved.value == planned.value, good="as planned", bad="NOT AS PLANNED")
    return together(shown(moved, "bytes"), f" {way}, ", agrees, " (", shown(planned, "bytes"), ")")


def _checks(told: Told) -> list[object]:
    checks = list(told["checks"])
    said = paragraph(
        "Rows were drawn at random, with the first, the last and those at borders, and computed anew in float64 from "
        "the same generator. A budget is derived from the precision in use, never tuned."
    )
    drawn = cells.draw(
        "Shares of error budgets",
        ["quantity", "of all sampled rows together", "of the worst row", "verdict"],
        [(one["quantity"].text, [_share(one, ""), _share(one, "worst_"), mark(one["ok"].value)]) for one in checks],
    )
    caption = "Errors of sampled rows, and the share of its budget that each uses: a full bar is a budget used up."
    rows = [
        [
            check["quantity"].text,
            _where(check),
            *(shown(check[key], "error") for key in ("error", "allowed", "worst_error", "worst_allowed")),
            mark(check["ok"].value),
        ]
        for check in checks
    ]
    columns = ["quantity", "rows", "error", "allowed", "of the worst row", "allowed", "verdict"]
    return [said, figure("sampled", caption, drawn), table("Every check", columns, rows, words=2)]


def _share(check: Told, which: str) -> cells.Cell | None:
    judged = errors.Judged("", "", check[f"{which}error"], check[f"{which}allowed"])
    return errors.cell(judged) if judged.is_judged else None


def _where(check: Told) -> str:
    rows = check["rows"].value or []
    if not isinstance(rows, list):
        return str(rows)
    few = ", ".join(f"{row:,}" if isinstance(row, int) else str(row) for row in rows[:6])
    return f"{few} and {len(rows) - 6} more" if len(rows) > 6 else few
