"""Errors beside what is allowed: the share of its budget that each used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import cells
from .common import mark
from .figure import data_table, figure
from .markup import Markup, together
from .told import Told, shown, spoken


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
    def is_judged(self) -> bool:
        return self.allowed.is_number

    @property
    def is_ok(self) -> bool:
        """What is not a number is not; what was measured but not judged is no fault."""
        return not self.is_judged or (self.error.is_number and self.error.number <= self.allowed.number)


def of_rows(rows: Sequence[tuple[str, Told]]) -> list[Judged]:
    """From rows that have `errors` and `allowed` by quantity."""
    return [
        Judged(case, quantity, error, row["allowed"][quantity])
        for case, row in rows
        for quantity, error in row["errors"].items()
    ]


def draw(name: str, caption: str, judged: Sequence[Judged]) -> Markup:
    """A line of small bars for each case, one for each quantity; a full bar is a budget used up."""
    quantities = list(dict.fromkeys(one.quantity for one in judged))
    rows = [
        (case, [*(cell(known.get(quantity)) for quantity in quantities), mark(all(o.is_ok for o in known.values()))])
        for case, known in _by_case(judged)
    ]
    drawn = cells.draw("Shares of error budgets", ["case", *quantities, "verdict"], rows)
    table = data_table(
        "Errors and what is allowed",
        ["case", "quantity", "error", "allowed", "verdict"],
        [[o.case, o.quantity, shown(o.error, "error"), shown(o.allowed, "error"), _verdict(o)] for o in judged],
        words=2,
    )
    return figure(name, caption, drawn, table)


def _by_case(judged: Sequence[Judged]) -> list[tuple[str, dict[str, Judged]]]:
    """Neighbours of one case together; a quantity that comes again begins another row, so that none is lost."""
    found: list[tuple[str, dict[str, Judged]]] = []
    for one in judged:
        if not found or found[-1][0] != one.case or one.quantity in found[-1][1]:
            found.append((one.case, {}))
        found[-1][1][one.quantity] = one
    return found


def cell(one: Judged | None) -> cells.Cell | None:
    """The error over the share of its budget."""
    if one is None:
        return None
    if not one.is_judged:
        return cells.Cell(together(shown(one.error, "error"), ", not judged"), 0.0)
    number = together(shown(one.error, "error"), f", {spoken(one.share, 'share')}")
    return cells.Cell(number, 1.0 if one.share is None else one.share, "measured" if one.is_ok else "faulty")


def _verdict(one: Judged) -> Markup:
    return mark(one.is_ok) if one.is_judged else together("not judged")
