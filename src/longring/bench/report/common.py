"""What every page tells: what was asked, where, and what of it really ran."""

from __future__ import annotations

from typing import Any

from .figure import folded
from .markup import Markup, tag, together
from .page import Part
from .told import Told, lengthy, spoken


def summary(told: Told, verdict: object, *, is_right: bool | None) -> Markup:
    """Under the title: the verdict, and what was real about it."""
    kind = {True: "verdict right", False: "verdict wrong", None: "verdict"}[is_right]
    ran = [
        (tag("dt", word), tag("dd", told[key].text))
        for word, key in (("really ran", "real"), ("simulated or predicted", "simulated"))
        if told[key].text
    ]
    return together(tag("p", verdict, class_=kind), tag("dl", *ran, class_="facts") if ran else None)


def setting(told: Told) -> Part:
    """The command as it was typed, if the record has it, its arguments, versions and machine."""
    facts = [_facts(told[key]) for key in ("arguments", "versions", "machine")]
    words = [(tag("span", word), " ") for word in told["line"].text.split()]
    command = tag("p", "The command: ", tag("code", *words)) if words else None
    titles = "Arguments", "Versions", "Machine"
    lists = [folded(title, fact, open_=True) for title, fact in zip(titles, facts, strict=True) if fact]
    return Part("setting", "How it was run", [command, *lists])


def _facts(told: Told) -> Markup | None:
    pairs = [tag("div", tag("dt", lengthy(key)), tag("dd", _plain(value.value))) for key, value in told.items()]
    return tag("dl", *pairs, class_="short facts") if pairs else None


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{lengthy(str(key))} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    return spoken(value)


def mark(ok: Any, *, good: str = "right", bad: str = "WRONG") -> Markup:
    """A judgement in a word, not in a colour alone."""
    return tag("span", good if ok else bad, class_="right" if ok else "wrong")
