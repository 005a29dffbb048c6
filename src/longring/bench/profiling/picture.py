"""A picture of a profile: who did what when, what the fullest rank held, and what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ...errors import LongringError
from ...plan.quantities import spoken_bytes, spoken_seconds
from ..pictures import INK, PALETTE
from .memory import BY_HEADS, GRADIENTS, KEYS, OTHER, SYMMETRIC, TRAVELLING, WORKSPACE, Sample, highest
from .run import Profile, Rank

DOTS_PER_INCH = 160
WIDTH = 11.0  # inches
COLUMNS = 500  # of memory over time
MOST_NUMBERED = 8  # ranks, above which bars are too narrow for numbers
REST = "own keys, the rest"  # as the prediction calls what a backward computes last
GREY = "#8C8C8C"
BLUE, ORANGE, GREEN, _, SKY, RED = PALETTE[:6]
KINDS = {
    "compute": (BLUE, "compute"),
    "merge": (GREEN, "merge"),
    "post": (GREY, "hand over messages"),
    "wait": (ORANGE, "wait: nothing else to do"),
    "send": (SKY, "messages under way"),
}
# inputs and results blue and violet, what others bring green, what comes and goes orange; stacked in this order
COMPONENTS = {
    "q": "#08306B",
    "k": "#2171B5",
    "v": "#4292C6",
    "out": "#6BAED6",
    "lse": "#9ECAE1",
    "dout": "#C6DBEF",
    GRADIENTS: "#6A51A3",
    KEYS: "#74C476",
    TRAVELLING: "#006D2C",
    BY_HEADS: "#C7E9C0",
    WORKSPACE: "#FD8D3C",
    SYMMETRIC: "#FDD0A2",
    OTHER: "#BDBDBD",
}


def draw(profile: Profile, path: Path, title: str) -> None:
    """Save a PNG or an SVG, by the path's ending."""
    figure_class = _matplotlib()
    ranks = len(profile.ranks)
    heights = [0.45 + 0.5 * ranks, 2.4, 2.1]
    height = sum(heights) + 2.6
    figure = figure_class(figsize=(WIDTH, height), facecolor="white")
    timeline, memory, bars = figure.subplots(3, 1, height_ratios=heights)
    factor, unit = _time_unit(profile.end)
    fullest = max(profile.ranks, key=lambda rank: max(peak.bytes for peak in rank.peaks.values()))
    colours = _colours(profile)
    _draw_timeline(timeline, profile, factor)
    _draw_memory(memory, fullest, profile.end, factor, unit, colours)
    _draw_bars(bars, profile.ranks, colours)
    figure.suptitle(title, fontsize=13, color=INK, x=0.075, ha="left", y=1 - 0.2 / height)
    figure.text(0.075, 1 - 0.62 / height, _summary(profile), fontsize=9, color=INK, va="bottom")
    figure.subplots_adjust(left=0.075, right=0.985, top=1 - 1.15 / height, bottom=0.85 / height, hspace=0.42)
    _draw_components(figure, colours, height)
    figure.savefig(path, dpi=DOTS_PER_INCH, format=path.suffix.lower()[1:])


def _matplotlib() -> Any:
    """Figure, without pyplot: no window system, no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as failure:
        raise LongringError("pictures need matplotlib, which is not installed: pip install longring[plot]") from failure
    return Figure


def _summary(profile: Profile) -> str:
    runs = len(next(iter(profile.seconds.values())))
    seconds = ", ".join(f"{phase} {spoken_seconds(median(times))}" for phase, times in profile.seconds.items())
    hidden = "nothing was sent" if profile.overlap is None else f"{profile.overlap:.0%} of communication hidden"
    return f"{seconds} (median of {runs}), {hidden}; measured on {profile.device}, {profile.kernel} kernel"


def _time_unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 10 else (1e3, "ms") if seconds >= 1e-2 else (1e6, "µs")


# ---------------------------------------------------------------------------------------------------- timeline


def _draw_timeline(panel: Any, profile: Profile, factor: float) -> None:
    from matplotlib.patches import Patch

    for number, rank in enumerate(profile.ranks):
        for kind, (colour, _) in KINDS.items():
            of_kind = [span for span in rank.spans if span.kind == kind]
            bars = [(span.start * factor, (span.end - span.start) * factor) for span in of_kind]
            place = (number + 0.22, 0.13) if kind == "send" else (number - 0.4, 0.58)
            look = {"hatch": "////", "edgecolor": "white"} if kind == "wait" else {"edgecolor": "white"}
            panel.broken_barh(bars, place, facecolor=colour, linewidth=0.4, **look)
        _draw_steps(panel, rank, number, factor, profile.end)
    _draw_phases(panel, profile, factor)
    panel.set_ylim(len(profile.ranks) - 0.5, -0.5)
    panel.set_yticks(range(len(profile.ranks)), [f"rank {rank.rank}" for rank in profile.ranks])
    panel.set_xlim(0, profile.end * factor * 1.002)
    _settle(panel)
    handles = [
        Patch(facecolor=c, hatch="////" if kind == "wait" else "", edgecolor="white", label=name)
        for kind, (c, name) in KINDS.items()
    ]
    panel.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1, 1 + 0.28 / (0.45 + 0.5 * len(profile.ranks))),
        ncols=len(KINDS),
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
    )


def _draw_steps(panel: Any, rank: Rank, number: int, factor: float, end: float) -> None:
    """The number of a step, where there is room for it."""
    for span in rank.spans:
        if span.kind == "compute" and span.step is not None and span.end - span.start > 0.018 * end:
            middle = (span.start + span.end) / 2 * factor
            panel.text(middle, number - 0.11, str(span.step), ha="center", va="center", fontsize=8, color="white")


def _draw_phases(panel: Any, profile: Profile, factor: float) -> None:
    for phase in profile.asked.phases:
        start = min(rank.phases[phase][0] for rank in profile.ranks) * factor
        panel.axvline(start, color=INK, linewidth=0.8, linestyle=":")
        panel.text(start, -0.56, f" {phase}", fontsize=9, color=INK, va="bottom", style="italic")


def _settle(panel: Any) -> None:
    panel.tick_params(labelsize=8.5, colors=INK, length=2.5)
    for side, spine in panel.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#999999")


# ------------------------------------------------------------------------------------------------------ memory


def _colours(profile: Profile) -> dict[str, str]:
    """Of the components that can be seen, in the order they are stacked."""
    peaks = [peak for rank in profile.ranks for of in (rank.peaks, rank.predicted) for peak in of.values()]
    most = max((peak.bytes for peak in peaks), default=1)
    held = {name for peak in peaks for name, size in peak.components.items() if size > most / 2000}
    return {name: colour for name, colour in COMPONENTS.items() if name in held}


def _draw_memory(panel: Any, rank: Rank, end: float, factor: float, unit: str, colours: dict[str, str]) -> None:
    most = _most([rank])
    scale, name = _byte_unit(most)
    shown = in_columns(rank.samples, end)
    moments = [*(sample.at * factor for sample in shown), end * factor]
    layers = [[sample.components.get(part, 0) / scale for sample in (*shown, shown[-1])] for part in colours]
    panel.stackplot(moments, layers, colors=list(colours.values()), step="post", linewidth=0)
    for phase in rank.phases:
        for start, stop, size in predicted_stretches(rank, phase):
            panel.hlines(size / scale, start * factor, stop * factor, color=RED, linewidth=1.5)
    panel.set_ylim(0, 1.1 * most / scale)
    panel.set_ylabel(name, fontsize=9, color=INK)
    title = f"What rank {rank.rank}, the fullest, held; red lines: the fullest moment of a step as predicted"
    panel.set_title(title, fontsize=10, color=INK, loc="left")
    panel.set_xlabel(f"time in {unit}", fontsize=9, color=INK, labelpad=2)
    _settle(panel)
    panel.set_xlim(0, end * factor * 1.002)


def in_columns(samples: Sequence[Sample], end: float, columns: int = COLUMNS) -> list[Sample]:
    """The most that was held within each column, so that a peak of microseconds is as wide as a line."""
    width = end / columns
    shown: list[Sample] = []
    before, rest = Sample(0.0, {}), list(reversed(samples))
    for number in range(columns):
        within = [before]
        while rest and rest[-1].at < (number + 1) * width:
            within.append(before := rest.pop())
        shown.append(highest(within)._replace(at=number * width))
    return shown


def predicted_stretches(rank: Rank, phase: str) -> list[tuple[float, float, int]]:
    """(from, until, bytes) of every step, as far as the prediction tells of steps; else of the whole phase."""
    said = {step: sum(components.values()) for step, components in rank.predicted_steps[phase].items()}
    begin, end = rank.phases[phase]
    found: list[tuple[float, int]] = []
    for span in rank.spans:
        if span.kind == "compute" and span.phase == phase and span.step is not None:
            size = said.get(f"step {span.step}", said.get(REST))
            if size is not None:
                found.append((span.start if found else begin, size))
    if len(found) < 2:
        return [(begin, end, rank.predicted[phase].bytes)]
    ends = [start for start, _ in found[1:]] + [end]
    return [(start, stop, size) for (start, size), stop in zip(found, ends, strict=True)]


def _draw_bars(panel: Any, ranks: Sequence[Rank], colours: dict[str, str]) -> None:
    """Measured to the left, predicted to the right and hatched, each where the rank held most."""
    scale, name = _byte_unit(_most(ranks))
    for number, rank in enumerate(ranks):
        sides = (-0.2, rank.peaks[rank.fullest], ""), (0.2, rank.predicted[rank.fullest], "////")
        for shift, peak, hatch in sides:
            below = 0.0
            for part, colour in colours.items():
                size = peak.components.get(part, 0) / scale
                look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.3}
                panel.bar(number + shift, size, 0.38, bottom=below, **look)
                below += size
            if len(ranks) <= MOST_NUMBERED:
                words = spoken_bytes(peak.bytes)
                panel.text(number + shift, below, words, ha="center", va="bottom", fontsize=7.5, color=INK)
    panel.set_xticks(range(len(ranks)), [f"rank {rank.rank}" for rank in ranks])
    panel.set_ylabel(name, fontsize=9, color=INK)
    panel.set_ylim(0, 1.18 * _most(ranks) / scale)
    title = "The most that each rank held: measured, and hatched beside it as predicted"
    panel.set_title(title, fontsize=10, color=INK, loc="left")
    panel.set_xlim(-0.6, len(ranks) - 0.4)
    _settle(panel)


def _most(ranks: Sequence[Rank]) -> int:
    return max(peak.bytes for rank in ranks for of in (rank.peaks, rank.predicted) for peak in of.values())


def _draw_components(figure: Any, colours: dict[str, str], height: float) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    figure.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.53, 0.04 / height),
        ncols=len(handles) if len(handles) <= 10 else (len(handles) + 1) // 2,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=1.2,
        columnspacing=1.4,
    )


def _byte_unit(most: float) -> tuple[float, str]:
    for exponent, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if most >= 1024**exponent:
            return float(1024**exponent), name
    return 1.0, "bytes"
