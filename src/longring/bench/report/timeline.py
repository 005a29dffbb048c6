"""Timelines: what each rank did when. Computing above, moving and waiting below, on one clock."""

from __future__ import annotations

from typing import Any

from . import cells
from .figure import data_table, figure
from .markup import Markup, tag, together
from .svg import axis, hidden_svg, percent, rect
from .told import Told, shown, spoken

KINDS = ("compute", "merge", "send", "wait")
WORDS = {"compute": "computing tiles", "merge": "merging results", "send": "sending", "wait": "waiting"}
ABOVE = ("compute", "merge")
LANE = 18
MOST_SPANS = 1500  # of one rank; beyond it the shortest are left out, and the caption says so


def steps(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds by phase, step and kind: of every kind those of the rank that took longest."""
    found: dict[tuple[str, int], dict[str, dict[int, float]]] = {}
    for rank in ranks:
        for span in rank.get("spans", []):
            kinds = found.setdefault((str(span.get("phase")), int(span.get("step") or 0)), {})
            spent = kinds.setdefault(str(span["kind"]), {})
            spent[rank["rank"]] = spent.get(rank["rank"], 0.0) + span["end"] - span["start"]
    return [
        {"phase": phase, "step": step, **{kind: max(spent.values()) for kind, spent in kinds.items()}}
        for (phase, step), kinds in sorted(found.items(), key=lambda item: (item[0][0] != "forward", item[0]))
    ]


def draw(name: str, ranks: Told) -> Markup:
    last = max((span["end"].number for rank in ranks for span in rank["spans"]), default=0.0)
    rows = [_row(rank, last) for rank in ranks]
    foot = tag("tr", tag("td"), tag("td", axis(last, "seconds")), aria_hidden="true")
    head = tag("tr", tag("th", "rank", scope="col"), tag("th", "what it did, from left to right", scope="col"))
    drawn = tag("table", tag("thead", head), tag("tbody", *rows), tag("tfoot", foot), class_="bars timeline")
    return figure(name, _caption(ranks), _legend(), drawn, _table(ranks))


def _caption(ranks: Told) -> str:
    dropped = sum(max(0, len(rank["spans"].value or []) - MOST_SPANS) for rank in ranks)
    more = f" The {dropped:,} shortest spans are left out of the drawing." if dropped else ""
    return (
        "What each rank did, on one clock. Upper lane: computing tiles and merging their results; lower lane: "
        f"sending, and waiting for what was due. Numbers are steps.{more}"
    )


def _row(rank: Told, last: float) -> Markup:
    spans = sorted(rank["spans"], key=lambda span: span["start"].number - span["end"].number)[:MOST_SPANS]
    drawn = hidden_svg(*(_span(span, last) for span in spans), height=2 * LANE + 4, class_="lanes")
    return tag("tr", tag("th", rank["rank"].text, scope="row"), tag("td", drawn, _spoken(rank), class_="drawn"))


def _span(span: Told, last: float) -> Markup:
    kind, start, end = span["kind"].text, span["start"].number, span["end"].number
    lane = 0 if kind in ABOVE else LANE + 2
    size = f", {spoken(span['bytes'].value, 'bytes')}" if span["bytes"] else ""
    title = f"{span['what'].text or kind}: {spoken(end - start, 'seconds')}{size}"
    box = rect(percent(start, last), lane, percent(end - start, last), LANE, class_=f"span {kind}", title=title)
    if kind != "compute" or end - start < 0.03 * last or not span["step"].is_number:
        return box
    middle = percent((start + end) / 2, last)
    return together(box, tag("text", span["step"].text, x=middle, y=lane + 13, text_anchor="middle", class_="on-span"))


def _spoken(rank: Told) -> Markup:
    """The lane in a sentence, for who does not see it."""
    spent: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for span in rank["spans"]:
        kind = span["kind"].text
        spent[kind] = spent.get(kind, 0.0) + span["end"].number - span["start"].number
    told = ", ".join(f"{kind} {spoken(seconds, 'seconds')}" for kind, seconds in spent.items() if seconds)
    return tag("span", told or "nothing recorded", class_="unseen")


def _legend() -> Markup:
    entries = [
        tag(
            "li",
            tag("svg", rect("1", 2, "26", 14, class_=f"span {kind}"), width=28, height=18, aria_hidden="true"),
            f" {WORDS[kind]}",
        )
        for kind in KINDS
    ]
    return tag("ul", *entries, class_="legend", aria_label="Kinds of spans")


def _table(ranks: Told) -> Markup:
    rows = [
        [
            rank["rank"].text,
            span["phase"].text,
            shown(span["step"]),
            span["kind"].text,
            span["what"].text,
            shown(span["start"], "seconds"),
            shown(span["end"], "seconds"),
            shown(span["bytes"], "bytes"),
        ]
        for rank in ranks
        for span in list(rank["spans"])[:200]
    ]
    many = any(len(rank["spans"].value or []) > 200 for rank in ranks)
    caption = "Spans of every rank" + (", the first 200 of each; the record has all" if many else "")
    columns = ["rank", "phase", "step", "kind", "what", "from", "to", "bytes"]
    return data_table(caption, columns, rows, words=2)


def draw_steps(name: str, told: Told) -> Markup:
    """Time by step, of the rank that took longest for each kind."""
    kinds = [kind for kind in KINDS if any(row[kind].is_number for row in told)]
    most = max((row[kind].number for row in told for kind in kinds), default=1.0) or 1.0
    rows = [
        (
            f"{row['phase'].text}, step {row['step'].text}",
            [cells.Cell(shown(row[kind], "seconds"), row[kind].number / most, f"span {kind}") for kind in kinds],
        )
        for row in told
    ]
    caption = "Time by step: of computing, merging, sending and waiting, the rank that took longest."
    return figure(name, caption, cells.draw("Time by step", ["pass and step", *(WORDS[kind] for kind in kinds)], rows))
