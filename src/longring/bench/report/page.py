"""The page: one file that asks nobody for anything, in which only its own script may run."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from .figure import section
from .markup import Markup, tag, together


class Part(NamedTuple):
    """A section: its name in links, its heading, what it holds."""

    name: str
    title: str
    inside: Sequence[object]


def page(*, title: str, summary: object, parts: Sequence[Part], record: dict[str, Any], saved_as: str) -> str:
    style, script = _file("page.css"), _file("page.js")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    links = [tag("li", tag("a", part.title, href=f"#{part.name}")) for part in parts]
    body = tag(
        "body",
        tag("a", "To the numbers", href="#main", class_="skip"),
        _patterns(),
        tag("header", tag("h1", title), summary),
        tag("nav", tag("ul", *links), aria_label="Contents"),
        tag("main", [section(*part[:2], *part.inside) for part in parts], id="main"),
        tag("footer", _end(saved_as)),
        tag("script", _embedded(record), type="application/json", id="data"),
        tag("script", Markup(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _file(name: str) -> str:
    return (files("longring.bench.report") / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Nothing is loaded, and no style or script is obeyed but these two, letter by letter."""
    return (
        f"default-src 'none'; style-src '{_fingerprint(style)}'; script-src '{_fingerprint(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _fingerprint(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embedded(record: dict[str, Any]) -> Markup:
    """The record as JSON in which no letter could end the script or begin a comment of HTML."""
    text = json.dumps(record, allow_nan=False, ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _end(saved_as: str) -> Markup:
    return together(
        tag(
            "p",
            "Every number of the run stands in its record, which is part of this page (the element data in its "
            "source), and is rounded only where it is shown. What was counted for the drawings is there under drawn; "
            "marks of axes and shares of a budget are computed from it.",
        ),
        tag("p", tag("button", "Save the record as JSON", type="button", id="save", data_name=saved_as, hidden=True)),
    )


def _patterns() -> Markup:
    """Stripes, crosses and dots: what differs in colour differs in these, too."""
    size = {"width": 6, "height": 6, "patternUnits": "userSpaceOnUse"}
    made = [
        tag("pattern", tag("path", d="M-1 1L1 -1M-1 7L7 -1M5 7L7 5"), id="striped", **size),
        tag("pattern", tag("path", d="M0 0L6 6M6 0L0 6"), id="crossed", **size),
        tag("pattern", tag("path", d="M3 0V6"), id="waiting", **size),
        tag("pattern", tag("circle", cx=2, cy=2, r=1.4), id="dotted", width=4, height=4, patternUnits="userSpaceOnUse"),
    ]
    return tag("svg", tag("defs", *made), class_="defs", aria_hidden="true", focusable="false")
