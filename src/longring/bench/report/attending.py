"""Who attends to whom: every run of a record in small, and at its own size as far as that can be seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ...errors import LongringError
from . import meeting, tiles
from .asked import Asked
from .figure import folded, paragraph
from .page import Part
from .told import Told

MOST = 12  # drawings of one page


class Scene(NamedTuple):
    """A run to be drawn, of one rank alone if `rank` says so."""

    run: Asked
    rank: int | None = None


class Scenes(NamedTuple):
    """What can be drawn, and why the rest cannot."""

    drawn: tuple[tuple[Scene, tiles.Lesson], ...]
    left_out: tuple[str, ...]


def prepare(wanted: Iterable[Callable[[], Scene]]) -> Scenes:
    """Each is made when its turn comes: a record may ask for what cannot be planned here, and the page goes on."""
    drawn: dict[Asked, tuple[Scene, tiles.Lesson]] = {}
    left_out: dict[str, None] = {}
    for make in wanted:
        try:
            scene = make()
            if scene.run in drawn:
                continue
            if len(drawn) == MOST:
                left_out[f"{scene.run.words}: {MOST} drawings are enough for one page"] = None
                continue
            drawn[scene.run] = scene, tiles.lesson(scene.run)
        except LongringError as failure:
            left_out[str(failure)] = None
    return Scenes(tuple(drawn.values()), tuple(left_out))


def numbers(scenes: Scenes) -> dict[str, Any]:
    return {
        "tiles": [tiles.numbers(lesson) for _, lesson in scenes.drawn],
        "meetings": [meeting.numbers(scene.run, rank=scene.rank) for scene, _ in scenes.drawn],
    }


def parts(scenes: Scenes, told: Told) -> list[Part]:
    """The first open, the others folded; nothing where nothing was to be drawn."""
    if not scenes.drawn and not scenes.left_out:
        return []
    inside: list[object] = [
        paragraph(
            "Drawn from the very plans that the engine follows: the same code that decides what a rank computes, and "
            "when, decided these squares."
        )
    ]
    for index, (scene, lesson) in enumerate(scenes.drawn):
        figures = (
            tiles.draw(lesson, told["tiles"][index], name=f"tiles{index}"),
            meeting.draw(told["meetings"][index], name=f"meeting{index}"),
        )
        title = f"{scene.run.words[0].upper()}{scene.run.words[1:]}"
        inside.append(folded(title, *figures, open_=index == 0) if len(scenes.drawn) > 1 else list(figures))
    inside += [paragraph(f"Not drawn: {why}.", class_="soft") for why in scenes.left_out]
    return [Part("tiles", "Who attends to whom", inside)]
