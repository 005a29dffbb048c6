"""The page of `longring plan`: what each schedule and layout would cost; nothing of it was run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from . import bars
from .asked import asked
from .attending import Scene
from .common import mark
from .figure import paragraph, table
from .markup import Markup, together
from .page import Part
from .told import Told, shown

MOST_SCENES = 4
OTHER_LAYERS = "kept by the other layers"


def scenes(record: dict[str, Any]) -> Iterator[Callable[[], Scene]]:
    """The recommended choice first, then the next ones."""
    arguments, choices = record.get("arguments") or {}, record.get("choices", [])
    best = record.get("recommended") or {}
    ordered = sorted(choices, key=lambda one: [one.get(key) for key in ("schedule", "layout")] != _names(best))
    for choice in ordered[:MOST_SCENES]:
        words = {key: choice.get(key) for key in ("layout", "schedule", "tokens", "ranks")}
        nodes = {"nodes": choice["nodes"]} if choice.get("nodes") else {}
        yield lambda words=words, nodes=nodes: Scene(asked({**arguments, **nodes}, **words))


def _names(choice: dict[str, Any]) -> list[Any]:
    return [choice.get(key) for key in ("schedule", "layout")]


def counted(record: dict[str, Any]) -> dict[str, Any]:
    """What layers that are not at work keep for their backward, by choice."""
    memory = [choice.get("memory") or {} for choice in record.get("choices", [])]
    return {"kept": [((one.get("layers") or 1) - 1) * (one.get("saved_bytes_of_a_layer") or 0) for one in memory]}


def verdict(told: Told) -> tuple[object, bool | None]:
    best, said = told["recommended"], together()
    if best:
        reason = best["reason"].text.rstrip(".")
        said = together(f"Take {best['schedule'].text} with the {best['layout'].text} layout: {reason}. ")
    if told["fewest_ranks"].is_number:
        said = together(shown(told["fewest_ranks"]), " ranks are enough. ", said)
    if told["longest_tokens"].is_number:
        said = together(said, "The longest context that fits: ", shown(told["longest_tokens"]), " tokens.")
    return said or "Nothing of what was asked for can be served.", None


def parts(told: Told, tiles: list[Part]) -> list[Part]:
    choices = list(told["choices"])
    small_print = [paragraph(told["counted"].text, class_="soft")] if told["counted"] else []
    return [
        Part("time", "Predicted time", [_time(choices), _table(choices)]),
        Part("memory", "What a rank would hold", [_memory(choices, told["drawn"]["kept"]), *small_print]),
        *tiles,
    ]


def _name(choice: Told) -> str:
    return f"{choice['schedule'].text}, {choice['layout'].text}"


def _time(choices: list[Told]) -> Markup:
    made = [
        bars.Bar(f"{_name(choice)}: {phase}", choice[phase]["seconds"], kind="predicted", more=_more(choice[phase]))
        for choice in choices
        for phase in ("forward", "backward")
        if choice[phase]["seconds"].is_number
    ]
    caption = "Predicted time of one layer, by schedule and layout."
    more = ("a rank's rate", "moving", "foreseen by")
    return bars.draw("predicted", caption, made, "seconds", what="choice and pass", value="predicted", more=more)


def _more(row: Told) -> tuple[object, ...]:
    hidden, played = row["is_hidden"].value, row["is_played"].value
    return (
        shown(row["tflops"], "tflops"),
        None if hidden is None else "hidden" if hidden else "NOT hidden",
        None if played is None else "events" if played else "an estimate",
    )


def _table(choices: list[Told]) -> Markup:
    columns = ["choice", "a step of all layers", "TFLOP/s", "efficiency", "balance", "sent forward", "backward", "fits"]
    rows = [
        [
            _name(choice),
            shown(choice["step_seconds"], "seconds"),
            shown(choice["tflops"]),
            shown(choice["efficiency"], "share"),
            shown(choice["balance"]),
            shown(choice["forward"]["bytes_sent"], "bytes"),
            shown(choice["backward"]["bytes_sent"], "bytes"),
            together("-") if choice["fits"].value is None else mark(choice["fits"].value, good="yes", bad="NO"),
        ]
        for choice in choices
    ]
    return table("Every choice", columns, rows)


def _memory(choices: list[Told], kept: Told) -> Markup:
    made = []
    for index, choice in enumerate(choices):
        parts = choice["memory"]["components"].items()
        parts += [(OTHER_LAYERS, kept[index])] if kept[index].number else []
        made.append(bars.Bar(_name(choice), choice["memory"]["peak_bytes"], parts, kind="predicted"))
    caption = "Predicted most bytes that the fullest rank would hold at a time, by what they are."
    return bars.draw("held", caption, made, "bytes", what="choice", value="peak of a rank")
