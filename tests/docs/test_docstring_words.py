"""Docstrings are written to be read in the source; the reference shows the same words as lists and as code."""

from __future__ import annotations

import importlib.util

import pytest

from documents import ROOT

pytest.importorskip("griffe", reason="the tools of the site are not installed")


def readable(text: str) -> str:
    spec = importlib.util.spec_from_file_location("docstring_words", ROOT / "docs" / "docstring_words.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.readable(text)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("What it does: this.\nAnd that.", "What it does: this.\nAnd that."),
        ("layout:   how\n          and so on\nalign:    where", "- `layout`: how\n    and so on\n- `align`: where"),
        ("kdim, vdim: widths", "- `kdim`, `vdim`: widths"),
        ("First.\n\n>>> 1 + 1\n2", "First.\n\n```pycon\n>>> 1 + 1\n2\n```"),
        ("Error\n├── One   more\n└── Two", "```text\nError\n├── One   more\n└── Two\n```"),
    ],
)
def test_what_a_docstring_becomes(written, shown):
    assert readable(written) == shown
