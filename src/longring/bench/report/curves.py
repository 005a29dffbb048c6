"""Curves: how something grows with something else, on logarithmic or even axes, measured beside predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .figure import data_table, figure
from .markup import Markup, tag
from .svg import hidden_svg, log_position, ticks
from .told import Told, shown, spoken

HEIGHT = 300
LINES = 8
MOST_MARKS = 12  # along one line


@dataclass(frozen=True)
class Curve:
    """Points (x, y) in the order of x; `kind` is measured, predicted or ideal, and is seen in the line."""

    name: str
    points: Sequence[tuple[Told, Told]]
    kind: str = "measured"
    colour: int = 0


@dataclass(frozen=True)
class Axes:
    x: str
    y: str
    x_unit: str = ""
    y_unit: str = ""
    logarithmic: bool = True


def draw(name: str, caption: object, curves: Sequence[Curve], axes: Axes) -> Markup:
    frame = _Frame(curves, axes)
    plot = hidden_svg(_grid(frame, axes), [_line(curve, frame) for curve in curves], height=HEIGHT, class_="plot")
    drawn = tag(
        "div",
        tag("p", axes.y, class_="y-name", aria_hidden="true"),
        plot,
        tag("p", axes.x, class_="x-name", aria_hidden="true"),
        class_="curves",
    )
    rows = [
        [curve.name, curve.kind, shown(x, axes.x_unit), shown(y, axes.y_unit)]
        for curve in curves
        for x, y in curve.points
    ]
    table = data_table(f"{axes.y} by {axes.x}", ["line", "kind", axes.x, axes.y], rows, words=2)
    return figure(name, caption, drawn, _legend(curves), table)


class _Frame:
    """From numbers to places, in parts of the plot's width and in pixels of its height."""

    def __init__(self, curves: Sequence[Curve], axes: Axes) -> None:
        xs = [x.number for curve in curves for x, _ in curve.points]
        ys = [y.number for curve in curves for _, y in curve.points if y.number > 0 or not axes.logarithmic]
        self.is_logarithmic = axes.logarithmic
        self.x_low, self.x_high = min(xs, default=0.0) if axes.logarithmic else 0.0, max(xs, default=1.0)
        self.y_low, self.y_high = (
            (min(ys, default=0.1), max(ys, default=1.0)) if axes.logarithmic else (0.0, max(ys, default=1.0))
        )
        if axes.logarithmic:
            self.y_low, self.y_high = 0.8 * self.y_low, 1.25 * self.y_high

    def x(self, value: float) -> float:
        inner = log_position(value, self.x_low, self.x_high) if self.is_logarithmic else self._even_x(value)
        return 9 + 86 * inner

    def _even_x(self, value: float) -> float:
        return (value - self.x_low) / (self.x_high - self.x_low) if self.x_high > self.x_low else 0.5

    def y(self, value: float) -> float:
        inner = log_position(value, self.y_low, self.y_high) if self.is_logarithmic else value / (self.y_high or 1.0)
        return HEIGHT - 30 - (HEIGHT - 50) * inner

    def y_ticks(self, unit: str) -> list[float]:
        if not self.is_logarithmic:
            return ticks(self.y_high, unit)
        for times in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
            found = [at * 10.0**power for power in range(-9, 16) for at in times]
            found = [at for at in found if self.y_low <= at <= self.y_high]
            if len(found) >= 3:
                break
        return found


def _grid(frame: _Frame, axes: Axes) -> list[Markup]:
    made = []
    for at in frame.y_ticks(axes.y_unit):
        y = frame.y(at)
        made.append(tag("line", x1="0", x2="100%", y1=y, y2=y, class_="grid"))
        made.append(tag("text", spoken(at, axes.y_unit), x=0, y=y - 4, class_="tick"))
    return made + _x_ticks(frame, axes)


def _x_ticks(frame: _Frame, axes: Axes) -> list[Markup]:
    low, high = frame.x_low, frame.x_high
    if frame.is_logarithmic:
        values = [2.0**power for power in range(64) if low <= 2**power <= high]
    else:
        values = [low + at for at in ticks(high - low, axes.x_unit)]
    kept = values[:: -(-len(values) // 6)] if values else []
    return [
        tag(
            "text",
            spoken(int(at) if at == int(at) else at, axes.x_unit),
            x=f"{frame.x(at):.2f}%",
            y=HEIGHT - 8,
            class_="tick",
            text_anchor="middle",
        )
        for at in kept
    ]


def _line(curve: Curve, frame: _Frame) -> Markup:
    places = [(frame.x(x.number), frame.y(y.number)) for x, y in curve.points if y.is_number]
    path = _straight(places) if frame.is_logarithmic else _in_steps(places)
    line = tag(
        "svg",
        tag("path", d=path, class_=f"line {curve.kind} l{curve.colour % LINES}", vector_effect="non-scaling-stroke"),
        viewbox=f"0 0 1000 {HEIGHT}",
        preserveAspectRatio="none",
        width="100%",
        height=HEIGHT,
    )
    every = -(-len(places) // MOST_MARKS) or 1
    return tag("g", line, *(_mark(f"{x:.3f}%", y, curve) for x, y in places[curve.colour % every :: every]))


def _straight(places: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{10 * x:.1f} {y:.1f}" for x, y in places)


def _in_steps(places: list[tuple[float, float]]) -> str:
    """What is held stays as it is until it changes."""
    (x, y), *others = places or [(0.0, 0.0)]
    return f"M{10 * x:.1f} {y:.1f}" + "".join(f"H{10 * x:.1f}V{y:.1f}" for x, y in others)


# Around 0, 0: disc, square, triangle, diamond, triangle, bar, hourglass, flag; what differs in colour differs here too
SHAPES = (
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "M-4 -4h8v8h-8z",
    "M0 -5.5l5 9h-10z",
    "M0 -6l5.5 6l-5.5 6l-5.5 -6z",
    "M0 5.5l5 -9h-10z",
    "M-6 -2h12v4h-12z",
    "M-4 -5h8l-8 10h8z",
    "M-4 -5l9 5l-9 5z",
)


def _mark(x: str, y: float, curve: Curve) -> Markup | None:
    """Full where it was measured, empty where it was predicted."""
    if curve.kind == "ideal":
        return None
    number = curve.colour % LINES
    drawn = tag("path", d=SHAPES[number], class_=f"mark {curve.kind} l{number}")
    return tag("svg", drawn, x=x, y=f"{y:.1f}", width=1, height=1)


def _legend(curves: Sequence[Curve]) -> Markup:
    entries = [
        tag(
            "li",
            tag(
                "svg",
                tag("path", d="M1 9H35", class_=f"line {curve.kind} l{curve.colour % LINES}"),
                _mark("18", 9, curve),
                width=36,
                height=18,
                aria_hidden="true",
                focusable="false",
            ),
            f" {curve.name} ({curve.kind})",
        )
        for curve in curves
    ]
    return tag("ul", *entries, class_="legend", aria_label="Lines")
