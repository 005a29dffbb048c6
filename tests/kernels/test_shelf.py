"""What is remembered of calls, and what is forgotten."""

from __future__ import annotations

import pytest

from longring.kernels.shelf import Shelf


@pytest.fixture
def shelf():
    return Shelf(10, len)


def test_what_was_used_last_is_kept(shelf):
    for text in ("aaaa", "bbbb", "aaaa", "cccc"):
        shelf.find(text[0], lambda text=text: text)
    assert shelf.find("a", lambda: pytest.fail("made again")) == "aaaa"
    assert shelf.find("b", lambda: "new") == "new"


def test_what_is_too_heavy_is_alone(shelf):
    shelf.find(1, lambda: "a")
    heavy = shelf.find(2, lambda: 99 * "b")
    assert shelf.find(2, lambda: "another") is heavy
    assert shelf.find(1, lambda: "new") == "new"


def test_weights_are_those_of_what_is_there(shelf):
    for number in range(100):
        shelf.find(number, lambda: "123")
    assert len(shelf._found) == 3
    shelf.clear()
    assert shelf.find(99, lambda: "new") == "new"


def test_what_cannot_be_made_is_not_there(shelf):
    with pytest.raises(ZeroDivisionError):
        shelf.find(1, lambda: 1 / 0)
    assert shelf.find(1, lambda: "made") == "made"
