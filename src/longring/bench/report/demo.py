"""The page of `longring demo`: every schedule and layout on processes of one machine, judged and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from . import bars, errors
from .asked import Asked
from .attending import Scene
from .common import mark
from .figure import table
from .markup import Markup, together
from .page import Part
from .told import Told, shown


def scenes(record: dict[str, Any]) -> Iterator[Callable[[], Scene]]:
    """The cases of the demonstration, whose patterns the record only names."""
    from ..demonstration import Size, cases

    size = Size(**record["size"])
    for case in cases(size):
        run = Asked(
            case.pattern, size.tokens, size.ranks, case.layout, case.schedule, case.nodes, size.kv_heads, size.heads
        )
        yield lambda run=run: Scene(run)


def verdict(told: Told) -> tuple[object, bool | None]:
    return told["verdict"].text, bool(told["right"].value)


def parts(told: Told, tiles: list[Part]) -> list[Part]:
    rows = [(_title(row), row) for row in told["rows"]]
    return [
        *tiles,
        Part("errors", "How exact it is", [_errors(rows)]),
        Part("memory", "What a rank holds", [_memory(rows)]),
        Part("bytes", "What a rank sends", [_sent(rows)]),
        Part("table", "All rows", [_table(rows), _left_out(told)]),
    ]


def _title(row: Told) -> str:
    return f"{row['pattern'].text}, {row['schedule'].text}, {row['layout'].text}"


def _errors(rows: list[tuple[str, Told]]) -> Markup:
    caption = (
        "Relative error of every result and gradient against the float64 definition, and the share of its budget that "
        "it uses. The budget is the error of the definition itself when it is computed in the same precision."
    )
    return errors.draw("budgets", caption, errors.of_rows(rows))


def _memory(rows: list[tuple[str, Told]]) -> Markup:
    made = [
        bars.Bar(
            title,
            _fullest(row["peak_bytes"]),
            limit=row["peak_bytes_alone"],
            more=(shown(row["share_of_one_rank"], "share"), shown(row["peak_bytes_alone"], "bytes")),
        )
        for title, row in rows
    ]
    caption = (
        "Most bytes that the fullest rank held at a time, forward and backward, counted by the engine's ledger. The "
        "dashed mark is what one rank needs that does everything alone."
    )
    return bars.draw(
        "held", caption, made, "bytes", what="case", value="fullest rank", more=("share of", "one rank alone")
    )


def _fullest(ranks: Told) -> Told:
    return max(ranks, key=lambda rank: rank.number, default=Told(None))


def _sent(rows: list[tuple[str, Told]]) -> Markup:
    """The rank that sends most, in both passes; the plan's number must be the same."""
    made = []
    for title, row in rows:
        for phase in ("forward", "backward"):
            sent = _fullest(row[phase]["bytes_sent"])
            rank = int(sent.at.rsplit("/", 1)[1]) if sent.at else 0
            planned = row[phase]["predicted_bytes"][rank]
            note = together(
                mark(sent.value == planned.value, good="equals", bad="DIFFERS FROM"),
                " the plan's ",
                shown(planned, "bytes"),
            )
            made.append(bars.Bar(f"{title}: {phase}", sent, limit=planned, more=(note,)))
    caption = "Bytes sent by the rank that sends most. The dashed mark is what the plan had predicted for that rank."
    return bars.draw("sent", caption, made, "bytes", what="case and pass", value="sent", more=("beside the plan",))


def _table(rows: list[tuple[str, Told]]) -> Markup:
    columns = ["case", "dtype", "kernel", "ranks", "nodes", "bytes as planned", "bits of simulate", "verdict"]
    cells = [
        [
            title,
            row["dtype"].text,
            row["kernel"].text,
            shown(row["ranks"]),
            shown(row["nodes"]),
            mark(row["bytes_agree"].value, good="yes", bad="NO"),
            "equal" if row["equals_simulated"].value else "others",
            mark(row["right"].value),
        ]
        for title, row in rows
    ]
    return table("Every row of the demonstration", columns, cells, words=3)


def _left_out(told: Told) -> Markup:
    from .figure import bullets

    return bullets([line.text for line in told["left_out"]]) if told["left_out"] else together()
