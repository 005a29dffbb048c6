"""Pictures of tiles: who computes which pair at which step, from the very itineraries that schedules run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import LongringError
from ..geometry.itinerary import direction
from ..geometry.layouts import Shard, deal
from ..geometry.looks import looks
from ..geometry.patterns import Dense, Dilated, Pattern, Problem
from ..geometry.plans import plan
from ..geometry.task import Task
from ..geometry.tiles import Tile

Colour = tuple[float, float, float]

# Okabe and Ito's colours, which stay apart for every kind of colour vision; a ninth rank begins again
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
INK = "#333333"
DONE = "#E9E9E9"
BACKGROUND = "#FFFFFF"
STRIPS = "a tile has the colour of the rank that computes it; strips: who holds the queries (left) and the keys (above)"
PANEL = 2.55  # inches
DOTS_PER_INCH = 160


class Step(NamedTuple):
    """One step of all ranks: counts[i][j] is how often pair (query i, key j) counts, workers[i][j] who computes it.

    A worker of -1: nobody does in this step.
    """

    counts: list[list[int]]
    workers: list[list[int]]


def steps_of(
    task: Task, schedule: str, *, node_ranks: int | None = None, batch: int = 0, kv_head: int = 0
) -> list[Step]:
    """What every rank computes at each step for one batch row and one kv head, in global positions."""
    plans = [list(looks(plan(schedule, task, rank, node_ranks))) for rank in range(task.ranks)]
    steps = []
    for of_ranks in zip(*plans, strict=True):
        step = _empty_step(task.problem)
        for rank, found in enumerate(of_ranks):
            for look in found:
                if kv_head * task.share not in look.heads:
                    continue
                for a, b in _pairs(look.tiles, batch, kv_head - look.kv_heads.start):
                    step.counts[look.queries[a]][look.keys[b]] += 1
                    step.workers[look.queries[a]][look.keys[b]] = rank
        steps.append(step)
    return steps


def _empty_step(problem: Problem) -> Step:
    nothing, nobody = ([[value] * problem.n_k for _ in range(problem.n_q)] for value in (0, -1))
    return Step(nothing, nobody)


def _pairs(tiles: Sequence[Tile], batch: int, kv_head: int) -> Iterator[tuple[int, int]]:
    """(local row, local column) of every pair that the tiles compute for one batch row and kv head."""
    for tile in tiles:
        if batch in tile.batch and kv_head in tile.kv_heads:
            for one in tile.each_repeat():
                yield from _pairs_of(one)


def _pairs_of(tile: Tile) -> Iterator[tuple[int, int]]:
    for a, row in enumerate(tile.rows):
        first = 0 if tile.lo is None else max(0, a + tile.lo)
        stop = len(tile.cols) if tile.hi is None else min(len(tile.cols), a + tile.hi + 1)
        for b in range(first, stop):
            yield row, tile.cols[b]


# ------------------------------------------------------------------------------------------------ drawing


def draw_tiles(
    task: Task,
    schedule: str,
    path: Path | str,
    title: str | None = None,
    *,
    kv_heads: Sequence[int] = (0,),
) -> Path:
    """Save a PNG: a column of panels for each step, a row for each kv head asked for, coloured by rank.

    Meant for small sequences, in which single tokens can be seen. The strips beside a panel say who holds
    which queries (left) and keys (above). The more often a pair counts, the darker it is.
    """
    figure_class, patch_class = _matplotlib()
    drawn = [steps_of(task, schedule, kv_head=head) for head in kv_heads]
    most = max((count for steps in drawn for step in steps for row in step.counts for count in row), default=1)
    height = PANEL * len(drawn) + 1.45
    figure = figure_class(figsize=(PANEL * len(drawn[0]) + 0.75, height), facecolor=BACKGROUND)
    panels = figure.subplots(len(drawn), len(drawn[0]), squeeze=False)
    for line, (head, steps) in enumerate(zip(kv_heads, drawn, strict=True)):
        for number, panel in enumerate(panels[line]):
            _draw_panel(panel, _image(task, steps, number, max(1, most)))
            _draw_holders(panel, task, patch_class)
            if line == 0:
                panel.set_title(_caption(task, schedule, number), fontsize=10, color=INK, pad=13)
            _label(panel, task, below=line == len(drawn) - 1, left=number == 0)
        if len(drawn) > 1:
            panels[line][0].set_ylabel(f"kv head {head}\nquery position", fontsize=9, color=INK)
    figure.suptitle(title or f"{_spoken(task.pattern)}, {schedule}", fontsize=13, color=INK, y=1 - 0.12 / height)
    figure.text(0.5, 0.08 / height, STRIPS, ha="center", va="bottom", fontsize=8.5, color=INK)
    _draw_legend(figure, 0.21 / height, task.ranks, max(1, most), len(drawn[0]) > 1, patch_class)
    figure.subplots_adjust(
        left=0.75 / (PANEL * len(drawn[0]) + 0.75),
        right=0.99,
        top=1 - 0.72 / height,
        bottom=0.95 / height,
        wspace=0.14,
        hspace=0.14,
    )
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)
    return Path(path)


def draw_didactic_tiles(folder: Path) -> list[Path]:
    """The two pictures that explain most: a balanced causal ring, and LongNet's branches."""
    n, ranks, kv_heads = 64, 4, 4
    problem = Problem(1, n, n, kv_heads, 0)
    zigzag, contiguous = deal("zigzag", n, ranks), deal("contiguous", n, ranks)
    dilated = Dilated([16, 32, 64], [1, 2, 4])
    return [
        draw_tiles(
            Task(Dense(causal=True), problem, zigzag, zigzag),
            "ring",
            folder / "ring.png",
            f"Causal attention, zigzag layout, ring schedule: {n} tokens on {ranks} ranks",
        ),
        draw_tiles(
            Task(dilated, problem, contiguous, contiguous),
            "exchange",
            folder / "dilated.png",
            "Dilated attention (segments 16, 32, 64; rates 1, 2, 4), contiguous layout, exchange schedule",
            kv_heads=(0, 1),
        ),
    ]


def _matplotlib() -> tuple[Any, Any]:
    """Figure and Rectangle, without pyplot: no window system, no global state."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as failure:
        raise LongringError("pictures need matplotlib, which is not installed: pip install longring[plot]") from failure
    return Figure, Rectangle


def _image(task: Task, steps: list[Step], number: int, most: int) -> list[list[Colour]]:
    """Pixels of one panel: this step in the colours of its ranks, earlier steps pale, the rest blank."""
    blank, done = _rgb(BACKGROUND), _rgb(DONE)
    colours = [_rgb(_colour(rank)) for rank in range(task.ranks)]
    pixels = [[blank] * task.problem.n_k for _ in range(task.problem.n_q)]
    for step in steps[:number]:
        for i, j in _marked(step):
            pixels[i][j] = done
    for i, j in _marked(steps[number]):
        strength = _strength(steps[number].counts[i][j], most)
        pixels[i][j] = _tint(colours[steps[number].workers[i][j]], strength)
    return pixels


def _marked(step: Step) -> Iterator[tuple[int, int]]:
    return ((i, j) for i, row in enumerate(step.counts) for j, count in enumerate(row) if count)


def _strength(count: int, most: int) -> float:
    """1 for the pairs that count most often, never so little that it could be taken for blank."""
    return 1.0 if most == 1 else 0.45 + 0.55 * (count - 1) / (most - 1)


def _draw_panel(panel: Any, pixels: list[list[Colour]]) -> None:
    panel.imshow(pixels, interpolation="nearest", aspect="equal")
    for side in panel.spines.values():
        side.set(color="#999999", linewidth=0.6)


def _draw_holders(panel: Any, task: Task, patch_class: Any) -> None:
    """Strips of the ranks' colours along the edges: queries to the left, keys above."""
    width, gap = 0.03, 0.015
    across, down = panel.get_xaxis_transform(), panel.get_yaxis_transform()
    for rank in range(task.ranks):
        look = {"color": _colour(rank), "clip_on": False, "linewidth": 0}
        for start, length in _stretches(task.queries.shards[rank]):
            panel.add_patch(patch_class((-gap - width, start - 0.5), width, length, transform=down, **look))
        for start, length in _stretches(task.keys.shards[rank]):
            panel.add_patch(patch_class((start - 0.5, 1 + gap), length, width, transform=across, **look))


def _stretches(shard: Shard) -> Iterator[tuple[int, int]]:
    """(first position, how many) of the neighbouring positions in a shard."""
    for piece in shard:
        if piece.step == 1:
            yield piece.start, len(piece)
        else:
            yield from ((position, 1) for position in piece)


def _label(panel: Any, task: Task, *, below: bool, left: bool) -> None:
    panel.set_xticks(_ticks(task.problem.n_k))
    panel.set_yticks(_ticks(task.problem.n_q))
    panel.tick_params(labelsize=8, colors=INK, length=0, pad=3, labelbottom=below, labelleft=left)
    panel.tick_params(axis="y", pad=10)  # room for the strip
    if below:
        panel.set_xlabel("key position", fontsize=9, color=INK)
    if left:
        panel.set_ylabel("query position", fontsize=9, color=INK)


def _ticks(length: int) -> list[int]:
    return sorted({length * quarter // 4 for quarter in range(4)} | {length - 1})


def _caption(task: Task, schedule: str, number: int) -> str:
    if schedule == "gather":
        return "all keys at hand"
    if schedule not in ("ring", "exchange"):
        return f"step {number}"
    sign = "+" if schedule == "ring" and direction(task) < 0 else "-"
    return "step 0: a rank's own keys" if number == 0 else f"step {number}: keys of rank r {sign} {number}"


def _draw_legend(figure: Any, bottom: float, ranks: int, most: int, several_steps: bool, patch_class: Any) -> None:
    entries = [(_rgb(_colour(rank)), f"rank {rank}") for rank in range(ranks)]
    if most > 1:
        grey = _rgb("#444444")
        entries += [(_tint(grey, _strength(count, most)), _times(count)) for count in range(1, most + 1)]
    if several_steps:
        entries.append((_rgb(DONE), "earlier steps"))
    figure.legend(
        handles=[patch_class((0, 0), 1, 1, facecolor=colour, edgecolor="none") for colour, _ in entries],
        labels=[name for _, name in entries],
        loc="lower center",
        bbox_to_anchor=(0.5, bottom),
        ncols=len(entries),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.2,
        columnspacing=1.6,
    )


def _times(count: int) -> str:
    return {1: "counts once", 2: "twice"}.get(count, f"{count} times")


def _spoken(pattern: Pattern) -> str:
    kind = "Dilated" if isinstance(pattern, Dilated) else "Dense"
    return f"{kind} causal attention" if pattern.causal else f"{kind} attention"


def _colour(rank: int) -> str:
    return PALETTE[rank % len(PALETTE)]


def _rgb(colour: str) -> Colour:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def _tint(colour: Colour, strength: float) -> Colour:
    """The colour on white, at less than full strength."""
    red, green, blue = (1 - strength * (1 - part) for part in colour)
    return red, green, blue
