"""Draw the pictures of docs/concepts anew, from the plans that schedules run: python docs/draw_concepts.py"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from longring.bench.pictures import Step, steps_of
from longring.geometry.itinerary import direction
from longring.geometry.layouts import deal
from longring.geometry.looks import looks
from longring.geometry.patterns import Dense, Dilated, Pattern, Problem
from longring.geometry.plans import plan
from longring.geometry.task import Task

FOLDER = Path(__file__).parent / "images" / "concepts"
RANKS = 4

# Okabe and Ito's colours, which stay apart for every kind of colour vision, and the ink that is read on each
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
INKS = ("#ffffff", "#111111", "#111111", "#111111")

# A picture has a ground of its own: whatever a page's colours are, its own are readable on it.
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 12px }
.strong { font-weight: 600 }
.middle { text-anchor: middle }
.end { text-anchor: end }
.ground { fill: #ffffff }
.blank { fill: #eceff3 }
.tone { fill: #4a5560 }
.line { stroke: #4a5560; fill: none; stroke-width: 1.5 }
.tip { fill: #4a5560 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .ground { fill: #1c2128 }
  .blank { fill: #2d343d }
  .tone { fill: #b6c2cf }
  .line { stroke: #b6c2cf }
  .tip { fill: #b6c2cf }
}
"""
TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
)


class Drawing:
    """Shapes one after the other, and what somebody reads who cannot see them."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.shapes: list[str] = []

    def text(self, x: float, y: float, words: str, look: str = "", fill: str = "") -> None:
        style = f' style="fill: {fill}"' if fill else ""
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" class="{look}"{style}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, *, fill: str = "", look: str = "", round_: int = 0):
        colour = f'fill="{fill}"' if fill else f'class="{look}"'
        corner = f' rx="{round_}"' if round_ else ""
        self.shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{corner} {colour}/>')

    def arrow(self, path: str) -> None:
        self.shapes.append(f'<path d="{path}" class="line" marker-end="url(#tip)"/>')

    def of_rank(self, rank: int, x: float, y: float, width: float, height: float, words: str = "") -> None:
        """A box in the colour of a rank, with words in it."""
        self.box(x, y, width, height, fill=COLOURS[rank], round_=4)
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words, "middle", INKS[rank])

    def svg(self) -> str:
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                f'<defs>{TIP}<path d="M0 0L8 4L0 8z" class="tip"/></marker></defs>',
                f'<rect width="{self.width}" height="{self.height}" rx="8" class="ground"/>',
                *self.shapes,
                "</svg>\n",
            ]
        )


# -------------------------------------------------------------------------------------------------------- tasks


def task_of(pattern: Pattern, layout: str, n: int, ranks: int = RANKS) -> Task:
    dealt = deal(layout, n, ranks)
    return Task(pattern, Problem(1, n, n, 1, 0), dealt, dealt)


def visitors(task: Task) -> list[list[int]]:
    """Whose keys each rank has at each step of the ring: by rank, then by step."""
    owner = {at: rank for rank, shard in enumerate(task.keys.shards) for piece in shard for at in piece}
    return [[owner[found[0].keys[0]] for found in looks(plan("ring", task, rank))] for rank in range(task.ranks)]


def marked(step: Step) -> Iterator[tuple[int, int, int, int]]:
    """(query, key, how often the pair counts, who computes it)."""
    for i, (counts, workers) in enumerate(zip(step.counts, step.workers, strict=True)):
        for j, (count, worker) in enumerate(zip(counts, workers, strict=True)):
            if count:
                yield i, j, count, worker


# ----------------------------------------------------------------------------------------------------- pictures


def merge() -> Drawing:
    drawing = Drawing(760, 330, "Three parts of the keys, each with its out and lse, become one result")
    drawing.text(20, 34, "one query", "strong")
    drawing.box(20, 46, 44, 28, look="tone", round_=4)
    drawing.text(110, 34, "all keys, in three parts that nobody needs to hold together", "strong")
    for part in range(3):
        x = 110 + 215 * part
        for key in range(4):
            drawing.of_rank(part, x + 49 * key, 46, 44, 28, f"k{4 * part + key}")
        drawing.arrow(f"M{x + 95} 82V112")
        drawing.box(x, 118, 191, 62, look="blank", round_=6)
        drawing.text(x + 95, 142, f"out {part}: softmax of this part", "middle")
        drawing.text(x + 95, 166, f"lse {part}: log of its sum", "middle")
        drawing.arrow(f"M{x + 95} 186L{385 + 35 * part} 216")
    drawing.box(110, 222, 621, 84, look="blank", round_=6)
    drawing.text(420, 246, "merged: exactly the softmax over all twelve", "strong middle")
    drawing.text(420, 270, "lse = log( exp(lse 0) + exp(lse 1) + exp(lse 2) )", "middle")
    drawing.text(420, 294, "out = sum over parts of exp(lse part - lse) x out part", "middle")
    return drawing


def ring() -> Drawing:
    task = task_of(Dense(causal=False), "contiguous", 16)
    found = visitors(task)
    drawing = Drawing(760, 330, "Four ranks of a ring: queries stay, keys and values go round in three steps")
    drawing.text(20, 34, "the ring", "strong")
    places = [(85, 60), (165, 140), (85, 220), (5, 140)]
    for rank, (x, y) in enumerate(places):
        drawing.of_rank(rank, x + 15, y, 70, 40, f"rank {rank}")
    ways = ["M178 82Q205 95 212 132", "M212 188Q205 230 178 240", "M92 240Q60 230 50 188", "M50 132Q60 95 92 82"]
    assert direction(task) > 0  # as the arrows are drawn
    for way in ways:
        drawing.arrow(way)
    drawing.text(128, 165, "K and V", "middle small")
    drawing.text(20, 306, "while a rank computes, its block is on the way to the next", "small")
    drawing.text(290, 34, "what a rank computes with, step by step", "strong")
    for step in range(RANKS):
        drawing.text(408 + 92 * step, 62, f"step {step}", "middle small")
    for rank, owners in enumerate(found):
        y = 74 + 52 * rank
        drawing.text(290, y + 25, f"q {rank} stays")
        for step, owner in enumerate(owners):
            drawing.of_rank(owner, 366 + 92 * step, y, 84, 40, f"k {owner}, v {owner}")
    drawing.text(740, 306, "the colour is that of the rank whose keys they are", "small end")
    return drawing


def zigzag() -> Drawing:
    n, cell = 16, 14
    drawing = Drawing(760, 396, "Causal work of four ranks: unequal in contiguous parts, equal in zigzag")
    for at, layout in enumerate(("contiguous", "zigzag")):
        task = task_of(Dense(), layout, n)
        steps = steps_of(task, "ring")
        left = 24 + 376 * at
        drawing.text(left, 34, f"layout {layout}", "strong")
        drawing.text(left + 20 + n * cell / 2, 56, "key", "middle small")
        drawing.box(left + 20, 64, n * cell, n * cell, look="blank")
        for rank, shard in enumerate(task.queries.shards):
            for position in (position for piece in shard for position in piece):
                drawing.box(left, 64 + position * cell, 12, cell - 1, fill=COLOURS[rank])
        for step in steps:
            for i, j, _, worker in marked(step):
                drawing.box(left + 20 + j * cell, 64 + i * cell, cell - 1, cell - 1, fill=COLOURS[worker])
        for rank in range(RANKS):
            pairs = sum(worker == rank for step in steps for *_, worker in marked(step))
            y = 304 + 20 * rank
            drawing.text(left, y + 13, f"rank {rank}", "small")
            drawing.of_rank(rank, left + 48, y, 3.6 * pairs, 16)
            drawing.text(left + 54 + 3.6 * pairs, y + 13, f"{pairs} pairs", "small")
    return drawing


def dilated() -> Drawing:
    n, cell, kept = 32, 5.2, [(8, 1), (16, 2), (32, 4)]
    drawing = Drawing(
        760, 290, "LongNet's branches for one head: short and dense, long and sparse; together one softmax"
    )
    shown = [(f"segments of {w}, rate {r}", Dilated([w], [r])) for w, r in kept]
    shown.append(("all three, counted", Dilated([w for w, _ in kept], [r for _, r in kept])))
    for at, (words, pattern) in enumerate(shown):
        (step,) = steps_of(task_of(pattern, "contiguous", n, ranks=1), "ring")
        left, side = 20 + 184 * at, n * cell
        drawing.text(left, 34, words, "small strong")
        drawing.box(left, 46, side, side, look="blank")
        for i, j, count, _ in marked(step):
            opacity = 1.0 if at < 3 else (0.35, 0.65, 1.0)[count - 1]
            x, y = left + j * cell, 46 + i * cell
            drawing.shapes.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="4.6" height="4.6" fill="{_ink_of(at)}" opacity="{opacity:g}"/>'
            )
    drawing.text(20, 236, "rows are queries, columns keys; causal, the head with phase 0", "small")
    drawing.text(572, 236, "pale: once; full: three times", "small")
    drawing.text(
        20,
        262,
        "The longer a segment, the fewer of its rows are kept; a kept one meets at most 8 keys in each.",
        "small",
    )
    return drawing


def _ink_of(branch: int) -> str:
    return (*COLOURS[:3], "#D55E00")[branch]


def backward() -> Drawing:
    task = task_of(Dense(causal=False), "contiguous", 16)
    found = visitors(task)
    hosts = [next(rank for rank in range(RANKS) if found[rank][step] == 0) for step in range(RANKS)]
    drawing = Drawing(
        760, 330, "Backward: the gradients of rank 0's keys follow them round, and go home when they are whole"
    )
    drawing.text(20, 34, "the backward of rank 0's keys and values", "strong")
    for step, host in enumerate(hosts):
        x = 20 + 148 * step
        drawing.text(x + 64, 62, f"step {step}: rank {host}", "middle small")
        drawing.of_rank(0, x, 74, 128, 34, "k 0, v 0")
        if step:
            drawing.arrow(f"M{x - 18} 91H{x - 3}")
            _parts(drawing, x, 122, hosts[1 : step + 1])
            drawing.text(x + 64, 176, f"dk 0, dv 0: {step} of 3", "middle small")
        else:
            drawing.text(x + 64, 142, "own part: at home", "middle small")
        drawing.box(x, 196, 128, 52, look="blank", round_=6)
        drawing.text(x + 64, 218, f"q {host}, dout {host}, delta {host}", "middle small")
        drawing.text(x + 64, 238, f"dq {host} stays", "middle small")
        if step > 1:
            drawing.arrow(f"M{x - 18} 139H{x - 3}")
    drawing.text(620, 62, "home: rank 0", "small")
    drawing.arrow("M594 139H611")
    _parts(drawing, 616, 122, [*hosts[1:], 0])
    drawing.text(680, 176, "dk 0, dv 0 whole", "middle small")
    drawing.text(
        20,
        282,
        "Gradients travel in float32, one step behind the block they belong to, and home in one message.",
        "small",
    )
    drawing.text(
        20,
        304,
        "delta = rowsum(dout x out) - dlse is of the whole row: a tile needs nothing from other tiles.",
        "small",
    )
    return drawing


def _parts(drawing: Drawing, x: float, y: float, ranks: Sequence[int]) -> None:
    """Sums so far: a piece for every rank that has added to them."""
    drawing.box(x, y, 128, 34, look="blank", round_=4)
    for at, rank in enumerate(ranks):
        drawing.of_rank(rank, x + 2 + 31.5 * at, y + 2, 29, 30, str(rank))


PICTURES = {one.__name__: one for one in (merge, ring, zigzag, dilated, backward)}


def drawings() -> dict[Path, str]:
    """Every picture as it should be now."""
    return {FOLDER / f"{name}.svg": draw().svg() for name, draw in PICTURES.items()}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in drawings().items():
        path.write_text(text)
