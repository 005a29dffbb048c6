"""From a record to a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from ...errors import ArgumentError, LongringError
from . import attending, bench, common, demo, everything, plan, profile, replay
from .attending import Scene
from .page import Part, page
from .told import Told


class Content(Protocol):
    """What is special to the page of one command."""

    def scenes(self, record: dict[str, Any]) -> Iterable[Callable[[], Scene]]: ...

    def verdict(self, told: Told) -> tuple[object, bool | None]: ...

    def parts(self, told: Told, tiles: list[Part]) -> list[Part]: ...


PAGES: dict[str, ModuleType] = {"demo": demo, "bench": bench, "profile": profile, "replay": replay, "plan": plan}


def write(path: Path | str, command: str, told: dict[str, Any]) -> Path:
    """The page for what `longring COMMAND --json` prints."""
    try:
        Path(path).write_text(html(command, told), encoding="utf-8")
    except OSError as failure:
        raise LongringError(f"the report {path} cannot be written: {failure.strerror or failure}") from failure
    return Path(path)


def html(command: str, told: dict[str, Any]) -> str:
    if command not in PAGES:
        raise ArgumentError(f"there are reports of {', '.join(PAGES)}; got {command!r}")
    content = cast(Content, PAGES[command])
    record = _plain(told)
    scenes = attending.prepare(content.scenes(record))
    record["drawn"] = {**attending.numbers(scenes), **_counted(content, record)}
    known = Told(record)
    verdict, is_right = content.verdict(known)
    tiles = attending.parts(scenes, known["drawn"])
    return page(
        title=f"longring {command}",
        summary=common.summary(known, verdict, is_right=is_right),
        parts=[*content.parts(known, tiles), everything.part(known), common.setting(known)],
        record=record,
        saved_as=f"longring-{command}.json",
    )


def _counted(content: Any, record: dict[str, Any]) -> dict[str, Any]:
    """What a page counts itself from the record, so that it stands in the record as well."""
    return content.counted(record) if hasattr(content, "counted") else {}


def _plain(told: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it: lists for tuples, text for what is neither, null for what is not finite."""
    return json.loads(json.dumps(told, default=str), parse_constant=lambda _: None)
