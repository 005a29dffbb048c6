"""The loss of a run, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .small_files import putting

SMOOTH = 0.9  # of the line through many steps: how much of it stays from one to the next


def draw(records: Sequence[dict[str, Any]], path: Path, *, title: str) -> bool:
    """Loss by step, and smoothed where steps are many. False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    steps, losses = [record["step"] for record in records], [record["loss"] for record in records]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    many = len(steps) > 50
    axes.plot(steps, losses, color="#4477aa", alpha=0.35 if many else 1.0, linewidth=1.2, label="each step")
    if many:
        axes.plot(steps, _smoothed(losses), color="#4477aa", linewidth=2, label="smoothed")
        axes.legend(frameon=False)
    axes.set(xlabel="step", ylabel="loss, nats a token", title=title)
    axes.grid(alpha=0.3)
    with putting(path) as file:
        figure.savefig(file, format="png", dpi=120)
    return True


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Exponentially, without the pull of a first value."""
    found, kept, weight = [], 0.0, 0.0
    for loss in losses:
        kept, weight = SMOOTH * kept + (1 - SMOOTH) * loss, SMOOTH * weight + (1 - SMOOTH)
        found.append(kept / weight)
    return found
