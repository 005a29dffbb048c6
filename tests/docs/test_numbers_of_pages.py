"""Numbers that pages say in passing are so."""

from __future__ import annotations

from documents import ROOT
from longring.geometry.layouts import deal, replicated
from longring.geometry.patterns import Dense, Problem
from longring.geometry.task import Task
from longring.nn import XPos
from longring.plan.traffic import forward_bytes
from longring.train.retrieval import passkey


def said_in(name):
    return (ROOT / "docs" / name).read_text()


def test_the_key_that_is_shown():
    assert bytes(passkey(4096, 0.25, 1).tokens[-5:].tolist()) == b"20695"
    assert "The pass key is 20695" in said_in("data.md")


def test_what_xpos_holds():
    page = said_in("modules.md")
    assert "at most 32,695 tokens" in page
    assert XPos(64, length=32_695).scale_base == 512
    assert XPos(64, length=32_696).scale_base > 512
    assert "16,421 at a million tokens" in page
    assert 16_420 < XPos(64, length=1 << 20).scale_base < 16_421


def test_what_a_message_of_decoding_weighs():
    assert "16,640 for 32 heads of d = 128" in said_in("inference.md")
    task = Task(Dense(), Problem(1, 1, 100, 8, 99), replicated(1, 5), deal("zigzag", 100, 5), 32)
    assert forward_bytes(task, "replicated", 2, head_dim=128, itemsize=2) == 4 * 16_640


def test_what_a_token_takes_in_a_cache():
    assert "128 KiB a token" in said_in("inference.md")
    assert 2 * 32 * 8 * 128 * 2 == 128 << 10
    assert (1 << 20) // 8 * (128 << 10) == 16 << 30
