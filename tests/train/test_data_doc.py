"""What docs/data.md shows runs as it is shown."""

import re
from pathlib import Path

import pytest

from longring.train.retrieval import passkey

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_there_is_something_to_run():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("code", BLOCKS, ids=[f"block {i}" for i in range(len(BLOCKS))])
def test_the_pages_code_runs(code, capsys):
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})


def test_the_key_that_the_page_shows():
    assert bytes(passkey(4096, 0.25, 1).tokens[-5:].tolist()) == b"20695"
