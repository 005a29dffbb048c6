"""Tiles: which pairs of query and key each rank computes at each step, drawn from the plan that schedules run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ...geometry.layouts import Layout, Shard
from ...geometry.patterns import Dilated
from ..pictures import Step, steps_of
from .asked import BY_HEADS, Asked, in_small
from .figure import data_table, figure
from .markup import Markup, tag, together
from .told import Told, shown

STRIP = 5.0  # width of the strips that say who holds what, in tokens
COLOURS = 8


class Panel(NamedTuple):
    """One step for one kv head, and what was computed before it."""

    number: int
    head: int
    step: Step
    before: Step


@dataclass(frozen=True)
class Lesson:
    """A run in small, panel by panel."""

    run: Asked
    small: Asked
    panels: tuple[Panel, ...]

    @property
    def heads(self) -> int:
        return len({panel.head for panel in self.panels})

    @cached_property
    def most(self) -> int:
        """How often the pair counts that counts most often."""
        return max((times for panel in self.panels for row in panel.step.counts for times in row), default=1)


def lesson(run: Asked) -> Lesson:
    small = in_small(run)
    shown_heads = small.kv_heads if run.schedule in BY_HEADS else 2 if isinstance(run.pattern, Dilated) else 1
    by_head = [
        steps_of(small.task, small.schedule, node_ranks=small.node_ranks, kv_head=head) for head in range(shown_heads)
    ]
    panels = [
        Panel(number, head, steps[number], _united(steps[:number], small.tokens))
        for number in range(len(by_head[0]))
        for head, steps in enumerate(by_head)
    ]
    return Lesson(run, small, tuple(panels))


def _united(steps: list[Step], tokens: int) -> Step:
    """All pairs of some steps, no matter whose and how often."""
    seen = [[int(any(step.counts[i][j] for step in steps)) for j in range(tokens)] for i in range(tokens)]
    return Step(seen, [[0] * tokens for _ in range(tokens)])


def numbers(taught: Lesson) -> dict[str, Any]:
    """What the drawing counts, for the record: pairs by rank, and whose keys they are with."""
    owners = _owners(taught.small.task.keys)
    return {
        "of": taught.run.words,
        "tokens": taught.small.tokens,
        "ranks": taught.small.ranks,
        "panels": [_counted(panel, owners, taught.small.ranks) for panel in taught.panels],
    }


def _counted(panel: Panel, owners: list[int], ranks: int) -> dict[str, Any]:
    pairs, met = [0] * ranks, [set[int]() for _ in range(ranks)]
    for workers, counts in zip(panel.step.workers, panel.step.counts, strict=True):
        for key, (rank, times) in enumerate(zip(workers, counts, strict=True)):
            if times:
                pairs[rank] += times
                met[rank].add(owners[key])
    return {"step": panel.number, "head": panel.head, "pairs": pairs, "keys_of": [sorted(some) for some in met]}


def _owners(layout: Layout) -> list[int]:
    holder = {position: rank for rank, shard in enumerate(layout.shards) for piece in shard for position in piece}
    return [holder[position] for position in range(layout.length)]


# ------------------------------------------------------------------------------------------------ drawing


def draw(taught: Lesson, told: Told, *, name: str) -> Markup:
    """All steps beside each other, and with scripts one of them at a time, by a slider."""
    words = [_words(panel, told["panels"][index], taught.heads) for index, panel in enumerate(taught.panels)]
    small = [
        tag("li", _svg(taught, panel, f"{name}-{index}", words[index]), tag("p", _title(panel, taught.heads)))
        for index, panel in enumerate(taught.panels)
    ]
    return figure(
        name,
        _caption(taught),
        _stage(taught, name, words),
        tag("ol", *small, class_="panels", aria_label="All steps"),
        data_table(
            "Pairs that each rank computes at each step",
            [
                "step",
                *(["kv head"] if taught.heads > 1 else []),
                *(f"rank {rank}" for rank in range(taught.small.ranks)),
            ],
            [_row(told["panels"][index], taught) for index in range(len(taught.panels))],
        ),
        class_="tiles",
    )


def _caption(taught: Lesson) -> str:
    small = taught.small
    nodes = f" on {small.nodes} nodes" if small.nodes > 1 else ""
    many = f"rank{'s' if small.ranks > 1 else ''}"
    return (
        f"{small.words[0].upper()}{small.words[1:]}, in small: {small.tokens} tokens on {small.ranks} {many}{nodes}. "
        "Down: queries; across: keys. A square belongs to the rank whose number and colour it has; strips say who "
        "holds the queries (left) and the keys (above); grey was computed at an earlier step."
    )


def _stage(taught: Lesson, name: str, words: list[str]) -> Markup:
    if len(words) == 1:
        return together()
    slider = tag(
        "input",
        type="range",
        id=f"{name}-slider",
        min=0,
        max=len(words) - 1,
        value=0,
        step=1,
        autocomplete="off",
        data_panels=name,
        aria_describedby=f"{name}-said",
    )
    return tag(
        "div",
        tag("svg", tag("use", href=f"#{name}-0"), viewbox=_view(taught), aria_hidden="true", focusable="false"),
        tag(
            "div",
            tag("label", "Step by step: move the slider, or use the arrow keys on it", for_=f"{name}-slider"),
            slider,
            tag("output", words[0], id=f"{name}-said", for_=f"{name}-slider"),
            class_="controls",
        ),
        tag("template", [tag("p", said) for said in words]),
        class_="stage",
        hidden=True,
    )


def _title(panel: Panel, heads: int) -> str:
    return f"Step {panel.number}" + (f", kv head {panel.head}" if heads > 1 else "")


def _words(panel: Panel, told: Told, heads: int) -> str:
    """What is to be seen, for who does not see it."""
    parts = [
        f"rank {rank} computes {pairs:,} pairs with keys of {_ranks(told['keys_of'][rank].value)}"
        for rank, pairs in enumerate(told["pairs"].value)
        if pairs
    ]
    return f"{_title(panel, heads)}: {'; '.join(parts) or 'nothing is computed'}."


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _row(told: Told, taught: Lesson) -> list[object]:
    cells: list[object] = [shown(told["step"])]
    if taught.heads > 1:
        cells.append(shown(told["head"]))
    for rank in range(taught.small.ranks):
        met = told["keys_of"][rank].value
        cells.append(together(shown(told["pairs"][rank]), f" with {_ranks(met)}" if met else ""))
    return cells


def _view(taught: Lesson) -> str:
    wide = taught.small.tokens + STRIP + 1.5
    return f"{-STRIP - 1} {-STRIP - 1} {wide} {wide}"


def _svg(taught: Lesson, panel: Panel, name: str, words: str) -> Markup:
    n, task = taught.small.tokens, taught.small.task
    blocks = _blocks(panel.step)
    drawn = tag(
        "g",
        tag("rect", x=0, y=0, width=n, height=n, class_="ground"),
        _path("done", _blocks(panel.before)),
        [
            _squares(rank, panel.step, [b for b in blocks if b.worker == rank], taught.most)
            for rank in range(task.ranks)
        ],
        [_strips(rank, shard) for rank, shard in enumerate(task.keys.shards)],
        id=name,
    )
    return tag("svg", drawn, viewbox=_view(taught), role="img", aria_label=words)


def _squares(rank: int, step: Step, blocks: list[Block], most: int) -> Markup:
    own = [block for block in blocks if block.worker == rank]
    depths = {depth: [b for b in own if _depth(b.times, most) == depth] for depth in (1, 2, 3)}
    squares = [_path(f"r{rank % COLOURS} x{depth}", some) for depth, some in depths.items()]
    return together(*squares, [_number(rank, *place) for place in _places(depths[3], step, rank, most)])


def _depth(times: int, most: int) -> int:
    """3 for pairs that count most often, down to 1."""
    return 3 if times >= most else 2 if times > 1 else 1


class Block(NamedTuple):
    """Neighbouring pairs that one rank computes, and how often each counts."""

    row: int
    col: int
    height: int
    width: int
    worker: int
    times: int


def _blocks(step: Step) -> list[Block]:
    """The step's pairs as few rectangles: runs of a row, joined with the row above where that is alike."""
    done: list[Block] = []
    above: dict[tuple[int, int, int, int], Block] = {}
    for row, (workers, counts) in enumerate(zip(step.workers, step.counts, strict=True)):
        here: dict[tuple[int, int, int, int], Block] = {}
        for col, width, worker, times in _runs(workers, counts):
            alike = (col, width, worker, times)
            earlier = above.pop(alike, None)
            grown = Block(row, col, 1, width, worker, times)
            here[alike] = earlier._replace(height=earlier.height + 1) if earlier else grown
        done += above.values()
        above = here
    return [*done, *above.values()]


def _runs(workers: list[int], counts: list[int]) -> Iterator[tuple[int, int, int, int]]:
    start = 0
    for col in range(1, len(counts) + 1):
        if col < len(counts) and (workers[col], counts[col]) == (workers[start], counts[start]):
            continue
        if counts[start]:
            yield start, col - start, workers[start], counts[start]
        start = col


def _path(class_: str, blocks: list[Block]) -> Markup | None:
    if not blocks:
        return None
    return tag("path", class_=class_, d="".join(f"M{b.col} {b.row}h{b.width}v{b.height}h-{b.width}z" for b in blocks))


def _places(blocks: list[Block], step: Step, rank: int, most: int) -> list[tuple[float, float]]:
    """Where a number has room: the middles of large blocks, and of the largest square in whatever the rank computes."""
    roomy = sorted((b for b in blocks if min(b.height, b.width) >= STRIP), key=lambda b: -b.height * b.width)
    middles = [(b.col + b.width / 2, b.row + b.height / 2) for b in roomy[:4]]
    square = _largest_square(step, rank, most)
    if square is not None and all(abs(square[0] - x) + abs(square[1] - y) > 2 * STRIP for x, y in middles):
        middles.append(square)
    return middles


def _largest_square(step: Step, rank: int, most: int) -> tuple[float, float] | None:
    best, middle = STRIP - 1, None
    above: list[int] = [0] * len(step.workers[0])
    for row, (workers, counts) in enumerate(zip(step.workers, step.counts, strict=True)):
        here: list[int] = []
        for col, worker in enumerate(workers):
            fits = worker == rank and counts[col] == most
            side = 1 + min(above[col], here[-1] if here else 0, above[col - 1] if col else 0) if fits else 0
            here.append(side)
            if side > best:
                best, middle = side, (col + 1 - side / 2, row + 1 - side / 2)
        above = here
    return middle


def _number(rank: int, x: float, y: float) -> Markup:
    return tag("text", rank, x=x, y=y + 1.6, class_="on-rank", text_anchor="middle", font_size=4.6)


def _strips(rank: int, shard: Shard) -> Markup:
    """Along the left edge who holds the queries, above who holds the keys, with their numbers where there is room."""
    stretches = [
        stretch
        for piece in shard
        for stretch in ([(piece.start, len(piece))] if piece.step == 1 else [(at, 1) for at in piece])
    ]
    edge = -STRIP - 0.7
    left = "".join(f"M{edge} {start}h{STRIP}v{length}h-{STRIP}z" for start, length in stretches)
    above = "".join(f"M{start} {edge}h{length}v{STRIP}h-{length}z" for start, length in stretches)
    middles = [start + length / 2 for start, length in stretches if length >= STRIP - 1]
    word = {"class_": "on-rank", "text_anchor": "middle", "font_size": 4.2}
    labels = [
        (tag("text", rank, x=edge + STRIP / 2, y=at + 1.5, **word), tag("text", rank, x=at, y=edge / 2 + 1.1, **word))
        for at in middles
    ]
    return together(tag("path", class_=f"r{rank % COLOURS}", d=left + above), labels)
