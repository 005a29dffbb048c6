"""Told: a place in the JSON object of a command, which knows the way there, and numbers as they are shown."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...plan.quantities import spoken_bytes, spoken_seconds
from .markup import Markup, tag


@dataclass(frozen=True)
class Told:
    """A value and its JSON pointer. What is not there is None, at any depth: records differ in what they have."""

    value: Any
    at: str = ""

    def __getitem__(self, key: str | int) -> Told:
        found = None
        if isinstance(self.value, dict):
            found = self.value.get(key)
        elif isinstance(self.value, list) and isinstance(key, int) and key < len(self.value):
            found = self.value[key]
        return Told(found, f"{self.at}/{str(key).replace('~', '~0').replace('/', '~1')}")

    def __iter__(self) -> Iterator[Told]:
        return (self[index] for index in range(len(self.value))) if isinstance(self.value, list) else iter(())

    def items(self) -> list[tuple[str, Told]]:
        return [(str(key), self[key]) for key in self.value] if isinstance(self.value, dict) else []

    def __bool__(self) -> bool:
        return self.value is not None and self.value not in ({}, [])

    @property
    def number(self) -> float:
        """For drawing; what is no number has no length."""
        return float(self.value) if self.is_number else 0.0

    @property
    def is_number(self) -> bool:
        return isinstance(self.value, (int, float)) and not isinstance(self.value, bool) and math.isfinite(self.value)

    @property
    def text(self) -> str:
        return "" if self.value is None else str(self.value)


NOTHING = "-"


def spoken(value: Any, unit: str = "") -> str:
    """The one place where a number of the record becomes words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return NOTHING
    if not isinstance(value, (int, float)):
        return str(value)
    return _SPOKEN[unit](value)


def _count(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


_SPOKEN = {
    "": _count,
    "bytes": spoken_bytes,
    "seconds": spoken_seconds,
    "share": lambda value: f"{100 * value:.3g} %",
    "ratio": lambda value: f"{value:.3g}",
    "error": lambda value: f"{value:.2e}",
    "tflops": lambda value: f"{value:.3g} TFLOP/s",
}


def shown(told: Told, unit: str = "") -> Markup:
    """A number of the record in the text, which says where in the record it stands."""
    if told.is_number:
        return tag("data", spoken(told.value, unit), value=repr(told.value), data_at=told.at)
    return tag("span", spoken(told.value, unit), class_="none" if told.value is None else None)


def lengthy(word: str) -> str:
    """A name of the record as words: peak_bytes is peak bytes."""
    return word.replace("_", " ")
