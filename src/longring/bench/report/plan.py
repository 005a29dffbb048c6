"""The page of `longring plan`: what each schedule and layout would cost; nothing of it was run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from . import bars
from .asked import asked
from .attending import Scene
from .markup import Markup, together
from .page import Part
from .told import Told, shown


def scenes(record: dict[str, Any]) -> Iterator[Callable[[], Scene]]:
    """The recommended choice first, then one for each other schedule."""
    arguments = record.get("arguments")
    choices = [record.get("recommended") or {}, *record.get("choices", [])]
    for choice in choices[:4]:
        words = {key: choice.get(key) for key in ("layout", "schedule")}
        if words["schedule"]:
            yield lambda words=words: Scene(asked(arguments, **words))


def verdict(told: Told) -> tuple[object, bool | None]:
    best = told["recommended"]
    if not best:
        return "Nothing of what was asked for can be served.", None
    longest = together(" The longest context that fits: ", shown(told["longest_tokens"]), " tokens.")
    said = (
        f"Take {best['schedule'].text} with the {best['layout'].text} layout: {best['reason'].text}".rstrip(".") + "."
    )
    return together(said, longest if told["longest_tokens"].is_number else None), None


def parts(told: Told, tiles: list[Part]) -> list[Part]:
    choices = list(told["choices"])
    made = [Part("time", "Predicted time", [_time(choices)])]
    return [*made, Part("memory", "What a rank would hold", [_memory(choices)]), *tiles]


def _name(choice: Told) -> str:
    return f"{choice['schedule'].text}, {choice['layout'].text}"


def _time(choices: list[Told]) -> Markup:
    made = [
        bars.Bar(f"{_name(choice)}: {phase}", choice[phase]["seconds"], kind="predicted", note=_note(choice, phase))
        for choice in choices
        for phase in ("forward", "backward")
        if choice[phase]["seconds"].is_number
    ]
    caption = "Predicted time of one layer, by schedule and layout."
    return bars.draw(
        "predicted", caption, made, "seconds", what="choice and pass", value="predicted", note="efficiency"
    )


def _note(choice: Told, phase: str) -> Markup | None:
    efficiency = choice[phase]["efficiency"] if choice[phase]["efficiency"].is_number else choice["efficiency"]
    return together(shown(efficiency, "share"), " of perfect scaling") if efficiency.is_number else None


def _memory(choices: list[Told]) -> Markup:
    made = [
        bars.Bar(
            _name(choice), choice["memory"]["peak_bytes"], choice["memory"]["components"].items(), kind="predicted"
        )
        for choice in choices
    ]
    caption = "Predicted most bytes that the fullest rank would hold at a time, by what they are."
    return bars.draw("held", caption, made, "bytes", what="choice", value="peak of a rank")
