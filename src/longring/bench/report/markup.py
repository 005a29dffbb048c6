"""Markup: elements whose text is escaped unless it is markup itself, so that nobody can forget to."""

from __future__ import annotations

from html import escape


class Markup(str):
    """Text that is already markup."""

    __slots__ = ()


VOID = frozenset({"meta", "input", "br", "hr", "col"})


def tag(name: str, /, *inside: object, **attributes: object) -> Markup:
    """An element: `class_` is class, `data_at` is data-at; None and False leave an attribute out, True is its name."""
    start = name + "".join(_attribute(key, value) for key, value in attributes.items())
    return Markup(f"<{start}>" if name in VOID else f"<{start}>{together(*inside)}</{name}>")


def together(*inside: object) -> Markup:
    """Side by side; a list or a tuple is its members, None is nothing."""
    return Markup("".join(map(_escaped, inside)))


def _escaped(inside: object) -> str:
    if isinstance(inside, Markup):
        return inside
    if isinstance(inside, (list, tuple)):
        return together(*inside)
    return "" if inside is None else escape(str(inside), quote=False)


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-").replace("viewbox", "viewBox")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
