"""The pages that people read, as tests see them: blocks of code, the notes before them, and commands."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "examples")

NOT_RUN = "not run: "  # and why not
RUN_BY = "run by "  # the test that does, and why it is not done here
PRINTED = "printed by the code above"

_FENCE = re.compile(
    r"(?:^ *<!-- (?P<note>[^\n]*?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n`]*\n(?P<code>.*?)^(?P=indent)``` *$",
    flags=re.DOTALL | re.MULTILINE,
)
_SETTING = re.compile(r"\w+=")
_ENDS_A_COMMAND = set("|&;<>()")


class Block(NamedTuple):
    """What stands between two fences, and the HTML comment right above them, if there is one."""

    page: Path
    line: int  # of its first line, from 1
    language: str
    note: str
    code: str

    @property
    def is_python(self) -> bool:
        return self.language in ("python", "py")

    @property
    def is_run_here(self) -> bool:
        return self.is_python and not self.note.startswith((NOT_RUN, RUN_BY))

    @property
    def runner(self) -> Path | None:
        """The test that runs it, where its note names one."""
        if not self.note.startswith(RUN_BY):
            return None
        return ROOT / self.note.removeprefix(RUN_BY).partition(":")[0]

    def compiled(self) -> CodeType:
        """With the lines of the page, so that a traceback points into it."""
        return compile("\n" * (self.line - 1) + self.code, str(self.page), "exec")


def pages() -> list[Path]:
    """Every page of Markdown, the README first."""
    inside = [page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))]
    return [*sorted(ROOT.glob("*.md"), reverse=True), *inside]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start("code")) + 1
        code = textwrap.dedent(found["code"]) if found["indent"] else found["code"]
        yield Block(page, line, found["language"], found["note"] or "", code)


def code_of(name: str) -> list[str]:
    """The Python on the page of this name in docs/, block by block."""
    return [block.code for block in blocks(ROOT / "docs" / name) if block.is_python]


def commands(block: Block) -> Iterator[list[str]]:
    """Arguments of every `longring` that a block for a shell calls, by itself, by torchrun or by another launcher."""
    if block.language not in ("sh", "bash", "console"):
        return
    for line in block.code.replace("\\\n", " ").splitlines():
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ")
        for words in _calls(line):
            yield from _arguments(words)


def _calls(line: str) -> Iterator[list[str]]:
    """The words of a line, call by call: pipes, redirections and && end one."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    words: list[str] = []
    for word in reader:
        if set(word) <= _ENDS_A_COMMAND:
            yield words
            words = []
        else:
            words.append(word)
    yield words


def _arguments(words: list[str]) -> Iterator[list[str]]:
    while words and _SETTING.match(words[0]):
        words = words[1:]
    for at, word in enumerate(words):
        if word == "longring" and (at == 0 or words[at - 1] in ("-m", "--module")):
            yield words[at + 1 :]
            return
