"""Meetings: which stretches of the sequence meet, who computes them and when, at the run's own size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from ...geometry.itinerary import Itinerary
from ...geometry.plans import plan
from ...geometry.task import Task, tiles_of
from .asked import BY_HEADS, Asked
from .figure import data_table, figure
from .markup import Markup, tag, together
from .svg import percent
from .told import Told, shown

MOST = 64  # stretches along an edge; beyond it every so many-th rank speaks for its neighbours
MOST_NUMBERED = 16  # stretches up to which a square has room for numbers
SHADES = 4


class Stretch(NamedTuple):
    """Positions that a rank holds, and which of its rows they are."""

    rank: int
    positions: range
    rows: range


def numbers(run: Asked, *, rank: int | None = None) -> dict[str, Any]:
    """Pairs by (stretch of queries, stretch of keys), and at which step; of one rank's queries alone if given."""
    task = run.task
    keys = _chosen(task, keep=rank)
    queries = keys if rank is None else [one for one in keys if one.rank == rank]
    pairs = [[_pairs(task, mine, theirs) for theirs in keys] for mine in queries]
    met, has_room = _Steps(run, task), rank is None and len(keys) <= MOST_NUMBERED and run.schedule not in BY_HEADS
    steps = [[met.of(mine, theirs) for theirs in keys] for mine in queries] if has_room else None
    work = {one.rank: 0 for one in queries}
    for mine, row in zip(queries, pairs, strict=True):
        work[mine.rank] += sum(row)
    return {
        "of": run.words,
        "tokens": run.tokens,
        "ranks": run.ranks,
        "drawn_ranks": len({one.rank for one in keys}),
        "by_heads": run.schedule in BY_HEADS,
        "queries": [_told(one) for one in queries],
        "keys": [_told(one) for one in keys],
        "pairs": pairs,
        "steps": steps,
        "work": [{"rank": each, "pairs": done} for each, done in sorted(work.items())],
    }


def _told(one: Stretch) -> dict[str, int]:
    return {"rank": one.rank, "first": one.positions[0], "last": one.positions[-1], "tokens": len(one.positions)}


def _chosen(task: Task, *, keep: int | None) -> list[Stretch]:
    """Stretches of all ranks in the order of their positions, or of ranks evenly chosen."""
    each = max(len(shard) for shard in task.keys.shards)
    every = -(-task.ranks * each // MOST)
    ranks = {*range(0, task.ranks, every), *([] if keep is None else [keep])}
    found = [stretch for rank in ranks for stretch in _stretches(task, rank)]
    return sorted(found, key=lambda one: (one.positions[0], one.rank))


def _stretches(task: Task, rank: int) -> Iterator[Stretch]:
    row = 0
    for positions in task.keys.shards[rank]:
        yield Stretch(rank, positions, range(row, row + len(positions)))
        row += len(positions)


def _pairs(task: Task, mine: Stretch, theirs: Stretch) -> int:
    """For all query heads."""
    return task.share * sum(tile.pairs for tile in tiles_of(task, (mine.positions,), (theirs.positions,)))


class _Steps:
    """When a stretch of keys is at hand, from the itinerary of the rank with the queries."""

    def __init__(self, run: Asked, task: Task) -> None:
        self.run, self.task = run, task
        self._visits = cache(self._visited)

    def of(self, mine: Stretch, theirs: Stretch) -> list[int]:
        """One step, or two where the halves of a stretch come from two sides."""
        visits = self._visits(mine.rank)
        if visits is None or mine.rank == theirs.rank:
            return [0]  # gather has everything at hand at once
        return [step for step, frame in visits.get(theirs.rank, []) if _touch(frame, theirs.rows)]

    def _visited(self, rank: int) -> dict[int, list[tuple[int, range]]] | None:
        made = plan(self.run.schedule, self.task, rank, self.run.node_ranks)
        if not isinstance(made, Itinerary):
            return None
        found: dict[int, list[tuple[int, range]]] = {}
        for number in range(1, len(made)):
            for visit in made[number].visits:
                found.setdefault(visit.owner, []).append((number, visit.arrived.frame))
        return found


def _touch(a: range, b: range) -> bool:
    return bool(a) and bool(b) and a[0] <= b[-1] and b[0] <= a[-1]


# ------------------------------------------------------------------------------------------------ drawing


def draw(told: Told, *, name: str) -> Markup:
    columns = ["queries of", "pairs with the keys drawn"]
    rows = [[f"rank {row['rank'].text}", shown(row["pairs"])] for row in told["work"]]
    drawn = _square(told) if len(told["queries"].value) == len(told["keys"].value) else _strip(told)
    table = data_table("Pairs of the queries of each rank, all heads together", columns, rows)
    return figure(name, _caption(told), drawn, table, class_="meeting")


_ALONE = "Which keys its queries meet, from the first position to the last: the higher, the more pairs of each key."
_SQUARE = (
    "The sequence is cut where ranks begin and end; queries down, keys across. The stronger a square's colour, the "
    "more of its pairs count. "
)
_BY_HEADS = "Under this schedule every rank computes all of it, for its own heads."
_NUMBERED = "It is computed by the rank of the first number, which holds the queries, at the step of the second."
_COLOURED = "It has the colour of the rank that computes it, which holds the queries."


def _caption(told: Told) -> Markup:
    ranks, drawn = told["ranks"].value, told["drawn_ranks"].value
    alone = len(told["queries"].value) < len(told["keys"].value)
    whose = f"rank {told['queries'][0]['rank'].text} of " if alone else ""
    colour = _BY_HEADS if told["by_heads"].value else _NUMBERED if _is_numbered(told) else _COLOURED
    return together(
        f"{told['of'].text[0].upper()}{told['of'].text[1:]}, at its own size: ",
        shown(told["tokens"]),
        f" tokens, {whose}",
        shown(told["ranks"]),
        f" rank{'s' if ranks > 1 else ''}. {_ALONE if alone else _SQUARE + colour}",
        f" {drawn:,} of {ranks:,} ranks are drawn, evenly chosen." if drawn < ranks else "",
    )


def _is_numbered(told: Told) -> bool:
    return bool(told["steps"])


def _square(told: Told) -> Markup:
    across = len(told["keys"].value)
    densest = max(
        (
            count / (mine["tokens"] * theirs["tokens"])
            for mine, row in zip(told["queries"].value, told["pairs"].value, strict=True)
            for theirs, count in zip(told["keys"].value, row, strict=True)
        ),
        default=1.0,
    )
    cells = [_cell(told, row, col, densest) for row in range(across) for col in range(across)]
    edge = 10 * across
    names = _names(told)
    margin = 3 + 0.75 * _name_size(across) * len(str(told["ranks"].value)) if names else 2
    view = f"{-margin} {-margin} {edge + margin + 1} {edge + margin + 1}"
    ground = tag("rect", x=-0.5, y=-0.5, width=edge + 1, height=edge + 1, class_="ground")
    return tag("svg", ground, *cells, *names, viewbox=view, role="img", aria_label=_words(told))


def _cell(told: Told, row: int, col: int, densest: float) -> Markup | None:
    mine, theirs, pairs = told["queries"][row].value, told["keys"][col].value, told["pairs"].value[row][col]
    if not pairs:
        return None
    shade = _shade(pairs, mine, theirs, densest)
    box = tag(
        "rect",
        x=10 * col,
        y=10 * row,
        width=9.4,
        height=9.4,
        class_=f"r{6 if told['by_heads'].value else mine['rank'] % 8} d{shade}",
    )
    if not _is_numbered(told):
        return box
    steps = told["steps"].value[row][col] if told["steps"] else []
    word = "·".join(filter(None, (str(mine["rank"]), "/".join(map(str, steps)))))
    return together(
        box,
        tag(
            "text",
            word,
            x=10 * col + 4.7,
            y=10 * row + 6.1,
            font_size=4 if len(word) < 5 else 3,
            text_anchor="middle",
            class_="on-rank" if shade > SHADES // 2 else "on-ground",
        ),
    )


def _shade(pairs: int, mine: dict[str, int], theirs: dict[str, int], densest: float) -> int:
    """By the share of the pairs that count, beside the square in which most do."""
    return max(1, math.ceil(SHADES * pairs / (mine["tokens"] * theirs["tokens"] * densest) - 1e-9))


def _name_size(across: int) -> float:
    return max(4.0, across / 6)


def _names(told: Told) -> list[Markup]:
    """Along the edges the ranks, as far as there is room."""
    keys = told["keys"].value
    if len(keys) > 4 * MOST_NUMBERED:
        return []
    size, every = _name_size(len(keys)), -(-len(keys) // MOST_NUMBERED)
    made = []
    for index, key in enumerate(keys):
        if index % every == 0:
            middle = 10 * index + 4.7
            made.append(tag("text", key["rank"], x=middle, y=-2, font_size=size, text_anchor="middle", class_="name"))
            made.append(
                tag("text", key["rank"], x=-2, y=middle + size / 3, font_size=size, text_anchor="end", class_="name")
            )
    return made


def _strip(told: Told) -> Markup:
    """One rank's queries: a bar for every stretch of keys, as wide as the stretch."""
    keys = told["keys"].value
    columns = [sum(row[col] for row in told["pairs"].value) for col in range(len(keys))]
    densest = max(count / key["tokens"] for key, count in zip(keys, columns, strict=True)) or 1.0
    whole, start, bars = sum(key["tokens"] for key in keys), 0, []
    for key, count in zip(keys, columns, strict=True):
        height = 0.94 * count / key["tokens"] / densest
        title = f"keys {key['first']:,} to {key['last']:,} of rank {key['rank']}: {count:,} pairs"
        if count:
            box = {"x": percent(start, whole), "width": percent(key["tokens"], whole)}
            box |= {"y": percent(1 - height, 1), "height": percent(height, 1)}
            bars.append(tag("rect", tag("title", title), class_="measured edged", **box))
        start += key["tokens"]
    ends = tag("p", tag("span", "key 0"), tag("span", f"key {keys[-1]['last']:,}"), class_="ends", aria_hidden="true")
    drawn = tag("svg", *bars, width="100%", height=120, class_="strip", role="img", aria_label=_words(told))
    return together(drawn, ends)


def _words(told: Told) -> str:
    said = [f"rank {row['rank'].text}: {row['pairs'].value:,}" for row in told["work"]]
    more = f"; and {len(said) - MOST_NUMBERED} ranks more, in the table" if len(said) > MOST_NUMBERED else ""
    return f"Pairs of the queries of each rank. {'; '.join(said[:MOST_NUMBERED])}{more}."
