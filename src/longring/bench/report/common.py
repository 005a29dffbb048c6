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
    """The command, its arguments, versions and machine: what is needed to do it again."""
    facts = [_facts(told[key]) for key in ("arguments", "versions", "machine")]
    command = tag("p", "The command: ", tag("code", command_line(told.value)))
    titles = "Arguments", "Versions", "Machine"
    lists = [folded(title, fact, open_=True) for title, fact in zip(titles, facts, strict=True) if fact]
    return Part("setting", "How it was run", [command, *lists])


def _facts(told: Told) -> Markup | None:
    pairs = [(tag("dt", lengthy(key)), tag("dd", _plain(value.value))) for key, value in told.items()]
    return tag("dl", *pairs, class_="facts") if pairs else None


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{lengthy(str(key))} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    return spoken(value)


def command_line(record: dict[str, Any]) -> str:
    """As it could be typed; options that were left alone are not typed."""
    if isinstance(record.get("line"), str):
        return record["line"]
    words = ["longring", str(record.get("command", ""))]
    for key, value in (record.get("arguments") or {}).items():
        option = "--" + str(key).removeprefix("as_").replace("_", "-")
        if value is True:
            words.append(option)
        elif value not in (None, False, [], "") and not isinstance(value, dict):
            words.append(f"{option} {_typed(value)}")
    return " ".join(words)


def _typed(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return ",".join(":".join(map(str, one)) if isinstance(one, list) else str(one) for one in value)


def mark(ok: Any, *, good: str = "right", bad: str = "WRONG") -> Markup:
    """A judgement in a word, not in a colour alone."""
    return tag("span", good if ok else bad, class_="right" if ok else "wrong")
