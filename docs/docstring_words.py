"""How the reference shows docstrings: words that are explained one under the other become a list, examples become code.

Docstrings are written to be read in the source:

    sharding:   which rank holds what
                and goes on here
    timeout:    seconds
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

WORD = re.compile(r"^(?P<words>[a-z_]\w*(?:, [a-z_]\w*)*): +(?P<rest>.+)$")
DRAWN = re.compile(r"^[ ├└│─]*[├└│]──")


class Readable(Extension):
    """Every docstring, once all of them are there."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)


def readable(text: str) -> str:
    """Paragraph by paragraph."""
    return "\n\n".join(_shown(part) for part in text.split("\n\n"))


def _shown(part: str) -> str:
    lines = part.splitlines()
    if part.startswith(">>> "):
        return f"```pycon\n{part.rstrip()}\n```"
    if any(DRAWN.match(line) for line in lines):
        return f"```text\n{part.rstrip()}\n```"
    if lines and WORD.match(lines[0]) and all(WORD.match(line) or line.startswith("  ") for line in lines):
        return "\n".join(_item(line) for line in lines)
    return part


def _item(line: str) -> str:
    found = WORD.match(line)
    if not found:
        return f"    {line.strip()}"
    return f"- `{found['words'].replace(', ', '`, `')}`: {found['rest']}"
