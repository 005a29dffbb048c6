"""Every number of a record in one table, so that nothing a command tells is missing from its page."""

from __future__ import annotations

from collections.abc import Iterator

from .figure import folded, table
from .markup import Markup
from .page import Part
from .told import Told, lengthy, shown

ELSEWHERE = ("drawn", "arguments", "versions", "machine")
MOST = 3000
UNITS = {
    "seconds": ("seconds", "median", "low", "high", "start", "end", "at", "computing", "waiting"),
    "bytes": ("bytes", "peak", "predicted bytes", "bytes sent", "bytes received", "alone"),
    "share": ("share", "efficiency", "overlap", "hidden"),
    "error": ("error", "allowed", "errors"),
    "tflops": ("tflops",),
}


def part(told: Told) -> Part:
    rows = list(_leaves(told))
    caption = "Every number of the record" + (f", the first {MOST:,} of {len(rows):,}" if len(rows) > MOST else "")
    cells = [[words, shown(leaf, unit)] for words, leaf, unit in rows[:MOST]]
    drawn: Markup = folded(f"{len(rows):,} numbers", table(caption, ["where", "number"], cells))
    return Part("everything", "Every number", [drawn])


def _leaves(told: Told, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Told, str]]:
    """(where, the number, its unit), in the order of the record."""
    if told.is_number:
        yield ", ".join(words), told, unit_of(words)
    for key, inner in told.items():
        if words or key not in ELSEWHERE:
            yield from _leaves(inner, (*words, lengthy(key)))
    for index, inner in enumerate(told):
        yield from _leaves(inner, (*words[:-1], f"{words[-1] if words else ''} {index}"))


def unit_of(words: tuple[str, ...]) -> str:
    """By the last word that says one: bytes of components are named by what they are of."""
    for word in reversed(words):
        plain = word.rstrip("0123456789 ")
        for unit, endings in UNITS.items():
            if plain in endings or any(plain.endswith(f" {ending}") for ending in endings):
                return unit
        if plain in ("components", "predicted", "memory"):
            return "bytes"
    return ""
