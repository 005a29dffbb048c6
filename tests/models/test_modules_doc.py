"""What docs/modules.md shows runs as it is shown, and what it says of numbers is so."""

import re
from pathlib import Path

import pytest

from longring.nn import XPos

PAGE = Path(__file__).parents[2] / "docs" / "modules.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_there_is_something_to_run():
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("code", BLOCKS, ids=[f"block {i}" for i in range(len(BLOCKS))])
def test_the_pages_code_runs(code, capsys):
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})


def test_what_xpos_holds():
    said = PAGE.read_text()
    assert "at most 32,695 tokens" in said
    assert XPos(64, length=32_695).scale_base == 512
    assert XPos(64, length=32_696).scale_base > 512
    assert "16,421 at a million tokens" in said
    assert 16_420 < XPos(64, length=1 << 20).scale_base < 16_421
