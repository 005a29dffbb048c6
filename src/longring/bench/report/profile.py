"""The page of `longring profile`: what each rank did when, and what it held meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from . import bars, curves, timeline
from .asked import asked
from .attending import Scene
from .markup import together
from .page import Part
from .told import Told, shown


def scenes(record: dict[str, Any]) -> Iterator[Callable[[], Scene]]:
    words = {key: record.get(key) for key in ("layout", "schedule")}
    yield lambda: Scene(asked(record.get("arguments"), ranks=len(record.get("ranks", [])) or None, **words))


def counted(record: dict[str, Any]) -> dict[str, Any]:
    return {"steps": timeline.steps(record.get("ranks", []))}


def verdict(told: Told) -> tuple[object, bool | None]:
    overlap = told["overlap"]
    if not overlap.is_number:
        return f"{len(told['ranks'].value or [])} ranks were recorded.", None
    hidden = together(shown(overlap, "share"), " of the time in which messages were under way was not spent waiting.")
    faults = [fault.text for fault in told["faults"]]
    return together(hidden, *(f" WRONG: {fault}." for fault in faults)), False if faults else None


def parts(told: Told, tiles: list[Part]) -> list[Part]:
    ranks = told["ranks"]
    time = [timeline.draw("timeline", ranks), timeline.draw_steps("bystep", told["drawn"]["steps"])]
    memory = [_components(ranks)]
    if any(rank["memory"] for rank in ranks):
        memory.append(_over_time(ranks))
    return [Part("time", "Time and overlap", time), Part("memory", "What a rank holds", memory), *tiles]


def _components(ranks: Told) -> object:
    made = []
    for rank in ranks:
        name = f"rank {rank['rank'].text}"
        made.append(bars.Bar(f"{name}, measured", rank["peak_bytes"], rank["components"].items()))
        if rank["predicted_bytes"].is_number:
            made.append(
                bars.Bar(f"{name}, predicted", rank["predicted_bytes"], rank["predicted"].items(), kind="predicted")
            )
    caption = (
        "Most bytes that each rank held at a time, by what they are: measured, and under it predicted by the plan."
    )
    return bars.draw("held", caption, made, "bytes", what="rank", value="peak")


def _over_time(ranks: Told) -> object:
    lines = [
        curves.Curve(f"rank {rank['rank'].text}", [(at["at"], at["bytes"]) for at in rank["memory"]], "measured", index)
        for index, rank in enumerate(ranks)
    ]
    axes = curves.Axes("time", "bytes held", x_unit="seconds", y_unit="bytes", logarithmic=False)
    return curves.draw(
        "overtime", "Bytes that each rank held, from the moment at which the first rank began.", lines, axes
    )
