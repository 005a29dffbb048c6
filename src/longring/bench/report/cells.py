"""Cells: a table with a small bar over every number, where many are to be compared in two directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .markup import Markup, tag
from .svg import hidden_svg, percent, rect

HEIGHT = 14


class Cell(NamedTuple):
    """A number as it is shown, and how much of its place the bar over it fills, 0 to 1."""

    number: object
    share: float
    kind: str = "measured"


def draw(title: str, columns: Sequence[str], rows: Sequence[tuple[object, Sequence[Cell | Markup | None]]]) -> Markup:
    """`columns` names the rows first; a cell that is markup already has no bar, one that is None has nothing."""
    head = tag("tr", [tag("th", column, scope="col") for column in columns])
    body = [tag("tr", tag("th", name, scope="row"), [_cell(cell) for cell in cells]) for name, cells in rows]
    drawn = tag("table", tag("thead", head), tag("tbody", *body), class_="numbers cells")
    return tag("div", drawn, class_="scroll", role="region", aria_label=title, tabindex=0)


def _cell(cell: Cell | Markup | None) -> Markup:
    if cell is None:
        return tag("td", "-", class_="none")
    if isinstance(cell, Markup):
        return tag("td", cell)
    bar = hidden_svg(
        rect("0", 1, "100%", HEIGHT - 2, class_="ground"),
        rect("0", 1, percent(min(1.0, cell.share), 1.0), HEIGHT - 2, class_=cell.kind),
        height=HEIGHT,
        class_="cell",
    )
    return tag("td", bar, tag("small", cell.number))
