"""Bars: a table whose middle column is drawn, so that what is seen and what is heard are the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from .figure import data_table, figure
from .markup import Markup, tag, together
from .svg import axis, hidden_svg, percent, rect
from .told import Told, lengthy, shown, spoken

HEIGHT = 20
FILLS = 12  # of parts; a thirteenth begins again, and its letter tells it apart


@dataclass(frozen=True)
class Bar:
    """One row: a length, or the parts it is the sum of; quartiles where there are; more columns behind it."""

    name: object
    value: Told
    parts: Sequence[tuple[str, Told]] = ()
    low: Told | None = None
    high: Told | None = None
    limit: Told | None = None  # a mark to stay below
    kind: str = "measured"
    more: Sequence[object] = ()

    @property
    def reach(self) -> float:
        ends = [self.value, self.high, self.limit]
        return max([sum(part.number for _, part in self.parts), *(end.number for end in ends if end is not None)])


def draw(
    name: str,
    caption: object,
    bars: Sequence[Bar],
    unit: str,
    *,
    what: str,
    value: str = "value",
    more: Sequence[str] = (),
) -> Markup:
    """`what` heads the column of names, `value` that of numbers, `more` those behind them."""
    most = max((bar.reach for bar in bars), default=0.0)
    letters = _letters(bars)
    columns = [what, tag("span", "drawn", class_="unseen"), value, *more]
    heads = [tag("th", column, scope="col", class_="more" if at > 2 else None) for at, column in enumerate(columns)]
    rows = [_row(bar, most, unit, letters, more) for bar in bars]
    blank = [tag("td") for _ in range(1 + len(more))]
    foot = tag("tr", tag("td"), tag("td", axis(most, unit)), *blank, aria_hidden="true")
    drawn = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), tag("tfoot", foot), class_="bars")
    return figure(name, caption, _legend(letters), drawn, _parts_table(bars, letters, unit, what))


def _letters(bars: Sequence[Bar]) -> dict[str, str]:
    """A letter for each part, in the order in which they are met: colours alone would not tell them apart."""
    names = dict.fromkeys(part for bar in bars for part, told in bar.parts if told.number)
    return {part: ascii_lowercase[index % 26] for index, part in enumerate(names)}


def _row(bar: Bar, most: float, unit: str, letters: dict[str, str], more: Sequence[str]) -> Markup:
    spread = None
    if bar.low is not None and bar.high is not None and bar.low.is_number and bar.high.is_number:
        spread = tag("small", " (", shown(bar.low, unit), " to ", shown(bar.high, unit), ")")
    others = [*bar.more, *("" for _ in range(len(more) - len(bar.more)))]
    return tag(
        "tr",
        tag("th", bar.name, scope="row"),
        tag("td", _drawn(bar, most, unit, letters), class_="drawn"),
        tag("td", shown(bar.value, unit), spread),
        [_more(head, word) for head, word in zip(more, others, strict=True)],
    )


def _more(head: str, word: object) -> Markup:
    """With its heading, which a narrow page shows beside it."""
    return tag("td", word, class_="word", data_head=head if word else None)


def _drawn(bar: Bar, most: float, unit: str, letters: dict[str, str]) -> Markup:
    body = _stack(bar, most, unit, letters) if bar.parts else [_whole(bar, most)]
    return hidden_svg(*body, _spread(bar, most), _limit(bar, most, unit), height=HEIGHT, class_=f"bar {bar.kind}")


def _whole(bar: Bar, most: float) -> Markup:
    return rect("0", 3, percent(bar.value.number, most), HEIGHT - 6, class_=f"kind {bar.kind}")


def _stack(bar: Bar, most: float, unit: str, letters: dict[str, str]) -> list[Markup]:
    """Parts in the order of their letters, the same in every bar, so that bars can be compared part by part."""
    made, start, parts = [], 0.0, dict(bar.parts)
    for number, (part, letter) in enumerate(letters.items()):
        told = parts.get(part, Told(None))
        if not told.number:
            continue
        title, class_ = f"{lengthy(part)}: {spoken(told.value, unit)}", f"part p{number % FILLS}"
        made.append(rect(percent(start, most), 1, percent(told.number, most), HEIGHT - 2, class_=class_, title=title))
        if told.number > 0.035 * most:
            middle = percent(start + told.number / 2, most)
            made.append(tag("text", letter, x=middle, y=14, text_anchor="middle", class_="on-part"))
        start += told.number
    return made


def _spread(bar: Bar, most: float) -> Markup | None:
    if bar.low is None or bar.high is None or not bar.high.is_number:
        return None
    low, high, middle = percent(bar.low.number, most), percent(bar.high.number, most), HEIGHT / 2
    lines = [(low, high, middle, middle), *((at, at, middle - 5, middle + 5) for at in (low, high))]
    return together(
        *(
            tag("line", x1=x1, x2=x2, y1=y1, y2=y2, class_=class_)
            for class_ in ("halo", "ink")  # so that it is seen on a dark bar as well
            for x1, x2, y1, y2 in lines
        )
    )


def _limit(bar: Bar, most: float, unit: str) -> Markup | None:
    if bar.limit is None or not bar.limit.is_number:
        return None
    at = percent(bar.limit.number, most)
    return tag("line", tag("title", spoken(bar.limit.value, unit)), x1=at, x2=at, y1=0, y2=HEIGHT, class_="limit")


def _legend(letters: dict[str, str]) -> Markup | None:
    if not letters:
        return None
    entries = [
        tag(
            "li",
            tag(
                "svg",
                rect("1", 1, "16", 16, class_=f"part p{index % FILLS}"),
                tag("text", letter, x=9, y=13, text_anchor="middle", class_="on-part"),
                width=18,
                height=18,
                aria_hidden="true",
                focusable="false",
            ),
            f" {lengthy(part)}",
        )
        for index, (part, letter) in enumerate(letters.items())
    ]
    return tag("ul", *entries, class_="legend", aria_label="Parts of a bar")


def _parts_table(bars: Sequence[Bar], letters: dict[str, str], unit: str, what: str) -> Markup | None:
    if not letters:
        return None
    rows = [
        [bar.name, shown(bar.value, unit), *(shown(dict(bar.parts).get(part, Told(None)), unit) for part in letters)]
        for bar in bars
    ]
    return data_table("All parts of the bars", [what, "total", *map(lengthy, letters)], rows)
