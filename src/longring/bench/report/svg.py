"""What drawings share: widths in per cent, so that a drawing is as wide as its place and its text never shrinks."""

from __future__ import annotations

import math

from .markup import Markup, tag
from .told import spoken


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3f}%" if whole > 0 else "0%"


def rect(x: str, y: float, width: str, height: float, *, class_: str, title: str = "") -> Markup:
    inside = tag("title", title) if title else None
    return tag("rect", inside, x=x, y=y, width=width, height=height, class_=class_)


def hidden_svg(*inside: object, height: float, class_: str) -> Markup:
    """A drawing whose words stand beside it, in a table: nothing for a screen reader to say twice."""
    return tag("svg", *inside, width="100%", height=height, class_=class_, aria_hidden="true", focusable="false")


def ticks(most: float, unit: str = "", about: int = 4) -> list[float]:
    """Round numbers from 0 on, the last at or below `most`."""
    if most <= 0:
        return [0.0]
    step = _round_step(most / about, 1024.0 if unit == "bytes" else 1000.0)
    return [step * index for index in range(int(most / step + 1e-9) + 1)]


def _round_step(rough: float, base: float) -> float:
    """1, 2 or 5 times a power of ten of the unit that is spoken, so that ticks of bytes are round in MiB."""
    unit = base ** math.floor(math.log(rough, base)) if base == 1024.0 else 1.0
    power = 10.0 ** math.floor(math.log10(rough / unit))
    return unit * power * min((1, 2, 5, 10), key=lambda times: abs(times * power * unit - rough))


def axis(most: float, unit: str) -> Markup:
    """The numbers under horizontal bars."""
    marks = [
        (
            tag("line", x1=percent(at, most), x2=percent(at, most), y1=0, y2=5, class_="ink"),
            tag(
                "text",
                spoken(_whole(at), unit),
                x=percent(at, most),
                y=18,
                class_="tick",
                text_anchor=_anchor(at, most),
            ),
        )
        for at in ticks(most, unit, about=3)
    ]
    return hidden_svg(*marks, height=22, class_="axis")


def _anchor(at: float, most: float) -> str:
    return "start" if at < 0.08 * most else "end" if at > 0.92 * most else "middle"


def _whole(at: float) -> float:
    return int(at) if at == int(at) else at


def log_position(value: float, low: float, high: float) -> float:
    """0 to 1 along a logarithmic axis."""
    return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low)) if high > low > 0 < value else 0.5
