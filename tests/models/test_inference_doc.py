"""What docs/inference.md shows runs as it is shown, and what it says of numbers is so."""

import re
from pathlib import Path

import pytest

from longring.geometry.layouts import deal, replicated
from longring.geometry.patterns import Dense, Problem
from longring.geometry.task import Task
from longring.plan.traffic import forward_bytes

PAGE = Path(__file__).parents[2] / "docs" / "inference.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_there_is_something_to_run():
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("code", BLOCKS, ids=[f"block {i}" for i in range(len(BLOCKS))])
def test_the_pages_code_runs(code, capsys):
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})


def test_what_a_message_weighs():
    assert "16,640 for 32 heads of d = 128" in PAGE.read_text()
    task = Task(Dense(), Problem(1, 1, 100, 8, 99), replicated(1, 5), deal("zigzag", 100, 5), 32)
    assert forward_bytes(task, "replicated", 2, head_dim=128, itemsize=2) == 4 * 16_640


def test_what_a_token_takes():
    assert "128 KiB a token" in PAGE.read_text()
    assert 2 * 32 * 8 * 128 * 2 == 128 << 10
    assert (1 << 20) // 8 * (128 << 10) == 16 << 30
