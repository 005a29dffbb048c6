"""Errors beside what is allowed: the share of its budget that each used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .common import mark
from .figure import data_table, figure
from .markup import Markup, tag
from .svg import hidden_svg, percent, rect
from .told import Told, shown, spoken

HEIGHT = 14


class Judged(NamedTuple):
    """One quantity of one case."""

    case: str
    quantity: str
    error: Told
    allowed: Told

    @property
    def share(self) -> float | None:
        if not self.error.is_number or not self.allowed.number:
            return None
        return self.error.number / self.allowed.number

    @property
    def is_ok(self) -> bool:
        return self.error.is_number and self.allowed.is_number and self.error.number <= self.allowed.number


def draw(name: str, caption: str, judged: Sequence[Judged]) -> Markup:
    """A line of small bars for each case, one for each quantity; a full bar is a budget used up."""
    cases = list(dict.fromkeys(one.case for one in judged))
    quantities = list(dict.fromkeys(one.quantity for one in judged))
    known = {(one.case, one.quantity): one for one in judged}
    head = tag("tr", [tag("th", word, scope="col") for word in ("case", *quantities, "verdict")])
    rows = [
        tag(
            "tr",
            tag("th", case, scope="row"),
            [_cell(known.get((case, quantity))) for quantity in quantities],
            tag("td", mark(all(one.is_ok for one in judged if one.case == case))),
        )
        for case in cases
    ]
    drawn = tag("table", tag("thead", head), tag("tbody", *rows), class_="numbers budgets")
    scroll = tag("div", drawn, class_="scroll", role="region", aria_label="Shares of error budgets", tabindex=0)
    table = data_table(
        "Errors and what is allowed",
        ["case", "quantity", "error", "allowed", "verdict"],
        [[o.case, o.quantity, shown(o.error, "error"), shown(o.allowed, "error"), mark(o.is_ok)] for o in judged],
        words=2,
    )
    return figure(name, caption, scroll, table)


def _cell(one: Judged | None) -> Markup:
    if one is None:
        return tag("td", "-", class_="none")
    share = one.share
    kind = "measured" if one.is_ok else "faulty"
    bar = hidden_svg(
        rect("0", 1, "100%", HEIGHT - 2, class_="ground"),
        rect("0", 1, percent(min(1.0, share if share is not None else 1.0), 1.0), HEIGHT - 2, class_=kind),
        height=HEIGHT,
        class_="budget",
    )
    return tag("td", bar, tag("small", shown(one.error, "error"), f", {spoken(share, 'share')}"), class_="drawn")


def of_rows(rows: Sequence[tuple[str, Told]]) -> list[Judged]:
    """From rows that have `errors` and `allowed` by quantity."""
    return [
        Judged(case, quantity, error, row["allowed"][quantity])
        for case, row in rows
        for quantity, error in row["errors"].items()
    ]
