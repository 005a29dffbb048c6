"""What pages and docstrings show is so: their Python runs, in order, their commands and data can be read.

The blocks of a page share one namespace. One that cannot run here says why in a comment above it: `not run: reason`,
or `run by tests/...: reason` where another test runs it; it is compiled all the same. A block of text under
`printed by the code above` is what the last Python before it printed.
"""

from __future__ import annotations

import ast
import doctest
import json
import os
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command

from documents import NOT_RUN, PRINTED, ROOT, Block, blocks, commands, name_of, pages
from longring.cli import app

BLOCKS = {page: list(blocks(page)) for page in pages()}
WITH_CODE = [page for page, found in BLOCKS.items() if any(block.is_run_here for block in found)]
PYTHON = [block for found in BLOCKS.values() for block in found if block.is_python]
DATA = [block for found in BLOCKS.values() for block in found if block.language in ("json", "toml", "yaml")]
SHOWN = [(block, words) for found in BLOCKS.values() for block in found for words in commands(block)]
FRAMEWORKS = {"transformers", "accelerate", "lightning", "deepspeed", "fairscale", "matplotlib"}

SOURCE = ROOT / "src"
WITH_EXAMPLES = sorted(path for path in SOURCE.rglob("*.py") if ">>> " in path.read_text())


def where(block: Block) -> str:
    return f"{name_of(block.page)}:{block.line}"


def test_there_is_something_to_run():
    assert len(WITH_CODE) >= 12
    assert len(SHOWN) >= 30
    assert len(WITH_EXAMPLES) >= 3


# ------------------------------------------------------------------------------------------------------ Python


@pytest.fixture
def _beside_the_commands(monkeypatch, tmp_path):
    """In a folder of its own, where `longring` is the one of this Python; graphs that were compiled are let go."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def imported(code: str) -> set[str]:
    """The packages that a piece of code asks for."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
@pytest.mark.usefixtures("_beside_the_commands")
def test_the_code_of_a_page_runs(page, capsys):
    here = [block for block in BLOCKS[page] if block.is_run_here]
    missing = {name for block in here for name in imported(block.code) & FRAMEWORKS if find_spec(name) is None}
    if missing:
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")
    names, printed = {"__name__": "page"}, ""
    for block in BLOCKS[page]:
        if block.is_run_here:
            exec(block.compiled(), names)
            printed = capsys.readouterr().out
        elif block.note == PRINTED:
            assert block.code == printed, where(block)


@pytest.mark.parametrize("block", [one for one in PYTHON if not one.is_run_here], ids=where)
def test_what_does_not_run_here_says_why_and_compiles(block):
    block.compiled()
    if block.runner is None:
        assert len(block.note) > len(NOT_RUN)
    else:
        assert block.page.name in block.runner.read_text(), "it does not know the page"


# -------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("block", DATA, ids=where)
def test_data_that_is_shown_can_be_read(block):
    if block.language == "yaml":
        yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
        assert all(yaml.safe_load_all(block.code))
    else:
        assert {"json": json.loads, "toml": tomllib.loads}[block.language](block.code)


# ---------------------------------------------------------------------------------------------------- commands


def parse(arguments: list[str]) -> None:
    """As the command line does, but without running anything."""
    command, name, context = get_command(app), "longring", None
    words = [word for word in arguments if word not in ("--debug", "--help", "--version")]
    while True:
        context = command.make_context(name, words, parent=context)
        words = [*getattr(context, "_protected_args", ()), *context.args]
        if not words:
            return
        name, command, words = command.resolve_command(context, words)


@pytest.mark.parametrize(
    ("block", "arguments"), SHOWN, ids=[f"{where(block)} {' '.join(words[:2])}" for block, words in SHOWN]
)
def test_a_command_that_is_shown_can_be_asked_for(block, arguments):
    parse(arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "--tokenz", "1M"], "--tokenz"),
        (["bench", "compare", "one.json"], "B.json"),
        (["plant"], "plant"),
        (["demo", "more"], "more"),
    ],
    ids=str,
)
def test_a_command_that_there_is_not_would_be_noticed(arguments, said):
    with pytest.raises(Exception, match=r"(?i)no such|missing|unexpected") as refused:
        parse(arguments)
    assert said in refused.value.format_message()


# -------------------------------------------------------------------------------------------------- docstrings


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_the_examples_of_docstrings(path):
    name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    found = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS)
    assert found.attempted
    assert not found.failed
