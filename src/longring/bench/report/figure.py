"""Figures, tables and sections: whatever a page is made of, named so that it can be heard as well as seen."""

from __future__ import annotations

from collections.abc import Sequence

from .markup import Markup, tag


def figure(name: str, caption: object, *inside: object, class_: str | None = None) -> Markup:
    """A drawing under its caption, which is its name too."""
    said = tag("figcaption", caption, id=f"{name}-caption")
    return tag("figure", said, *inside, id=name, class_=class_, aria_labelledby=f"{name}-caption")


def table(caption: str, columns: Sequence[object], rows: Sequence[Sequence[object]], *, words: int = 1) -> Markup:
    """Rows of cells, the first `words` of which are names. Wide ones scroll by themselves, not the page."""
    heads = [tag("th", name, scope="col", class_="word" if at < words else None) for at, name in enumerate(columns)]
    body = [tag("tr", [_cell(cell, index, words) for index, cell in enumerate(row)]) for row in rows]
    made = tag("table", tag("caption", caption), tag("thead", tag("tr", *heads)), tag("tbody", *body), class_="numbers")
    return tag("div", made, class_="scroll", role="region", aria_label=caption, tabindex=0)


def _cell(cell: object, index: int, words: int) -> Markup:
    if index == 0:
        return tag("th", cell, scope="row")
    return tag("td", cell, class_="word" if index < words else None)


def data_table(caption: str, columns: Sequence[object], rows: Sequence[Sequence[object]], *, words: int = 1) -> Markup:
    """The numbers of a drawing, folded away."""
    return folded(f"Table: {caption[0].lower()}{caption[1:]}", table(caption, columns, rows, words=words))


def folded(summary: object, *inside: object, open_: bool = False) -> Markup:
    return tag("details", tag("summary", summary), *inside, open=open_)


def section(name: str, title: str, *inside: object) -> Markup:
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, *inside, id=name, aria_labelledby=f"{name}-title")


def paragraph(*inside: object, class_: str | None = None) -> Markup:
    return tag("p", *inside, class_=class_)


def bullets(points: Sequence[object]) -> Markup:
    return tag("ul", [tag("li", point) for point in points])
