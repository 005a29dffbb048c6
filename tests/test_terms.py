"""What ranks must share is compared, all of it, and timeouts are handed on."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch

import longring as lr
from disagreeing import KINDS, LOCAL, PASSED_ON, differing, usual_calls
from longring.models import generation
from longring.testing import run_ranks
from longring.train import checkpoints
from worlds import results


class Noting:
    """A rank's transport that remembers with which timeouts it conversed."""

    def __init__(self, transport):
        self.transport, self.rank, self.size = transport, transport.rank, transport.size
        self.timeouts = []
        self.node_ranks, self.members, self.decline = transport.node_ranks, transport.members, transport.decline

    def converse(self, terms, *, timeout=None):
        self.timeouts.append(timeout)
        return self.transport.converse(terms, timeout=timeout)


def test_other_ranks_are_waited_for_as_long_as_was_asked():
    """In `unshard`, and in the backward of `shard`."""

    def program(transport):
        group = Noting(transport)
        s = lr.Sharding(9, group)
        part = s.shard(torch.randn(1, 9, 2).requires_grad_(), timeout=7.0)
        s.unshard(part.detach(), timeout=8.0)
        assert group.timeouts == [8.0]
        part.sum().backward()
        return group.timeouts

    assert run_ranks(3, program) == [[8.0, 7.0]] * 3


# ------------------------------------------------------------------------- every term and every argument has a case


def terms_with_a_case(name):
    kind = KINDS[name]
    before = terms_with_a_case(kind.after) if kind.after else set()
    return {"call", *before, *(case.term for case in kind.cases)}


def assert_every_term_has_a_case(compared):
    """Of calls that are compared by more than their name; `compared` are the terms of every call."""
    for call, terms in compared.items():
        missing = terms - (terms_with_a_case(call) if call in KINDS else {"call"})
        assert not missing, f"ranks compare {missing} of {call!r}, and no case in disagreeing.py has ranks differ in it"


@pytest.mark.parametrize("name", KINDS)
def test_every_term_has_a_case(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compared = run_ranks(2, lambda group: usual_calls(name, group))[1]
    assert_every_term_has_a_case(compared)
    if name != "loss":  # which is an unshard
        assert name in compared
        assert {"call", *(case.term for case in KINDS[name].cases)} <= compared[name]  # no case of what is no term


def test_no_call_is_made_anywhere_else():
    """Where ranks begin to talk: each of these places is a kind of call above."""
    source = Path(lr.__file__).parent
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "converse"
    }
    schedules = {f"schedules/{name}.py" for name in ("contract", "relay", "replicated", "by_heads", "gather")}
    others = {"autograd.py", "train/checkpoints/meeting.py", "models/generation.py", "integrations/same_batch.py"}
    assert found == schedules | others


PUBLIC = {
    "attention": lr.attention,
    "ring_attention": lr.ring_attention,
    "dilated_attention": lr.dilated_attention,
    "Attention.forward": lr.nn.Attention.forward,
    "Sharding.shard": lr.Sharding.shard,
    "Sharding.unshard": lr.Sharding.unshard,
    "cross_entropy": lr.nn.cross_entropy,
    "generate": generation.generate,
    "save": checkpoints.save,
    "find": checkpoints.find,
}
if "shard_batch" in KINDS:  # transformers is installed
    from longring.integrations.transformers import shard_batch

    PUBLIC["shard_batch"] = shard_batch


def arguments(function):
    found = inspect.signature(function).parameters.values()
    named = [each.name for each in found if each.kind is not each.VAR_KEYWORD]
    words = generation.Words.__annotations__ if function is generation.generate else {}
    return {*named, *words} - {"self", "model"}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_has_a_case_or_a_reason(name):
    cases = {case.argument for kind in KINDS.values() for case in kind.cases}
    assert not cases & LOCAL.keys()
    shared = {f"{name}.{word}" for word in arguments(lr.attention)} if name in PASSED_ON else set()
    missing = {f"{name}.{word}" for word in arguments(PUBLIC[name])} - cases - LOCAL.keys() - shared
    assert not missing, f"no case in disagreeing.py has ranks differ in {missing}, and LOCAL does not say why they may"


# ----------------------------------------------------------------------------------------- and every case is noticed


def every_case(name):
    return pytest.mark.parametrize(
        ("name", "number"),
        [pytest.param(n, i, id=f"{n}: {c.argument}, {c.term}") for n in name for i, c in enumerate(KINDS[n].cases)],
    )


def assert_heard(case, found, *, odd):
    for rank, (kind, text, seconds) in enumerate(found):
        assert kind == "Disagreement", f"rank {rank} heard {kind} of {case}: {text}"
        assert f"{case.term}: " in text or f"{case.term} is " in text, f"rank {rank} heard: {text}"
        assert text.endswith("; all ranks must make the same call")
        assert seconds < 15.0


@every_case(KINDS)
def test_two_virtual_ranks_that_differ_both_hear_it(name, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run_ranks(2, lambda group: differing(name, number, group, odd=1))
    assert_heard(KINDS[name].cases[number], found, odd=1)


@pytest.mark.processes
@pytest.mark.parametrize("name", KINDS)
def test_processes_that_differ_all_hear_it(name, tmp_path):
    outcomes = results(
        3, "disagreeing:differing_in_processes", name, str(tmp_path), limit=120.0, loads=("disagreeing",)
    )
    for number, case in enumerate(KINDS[name].cases):
        assert_heard(case, [rank[number] for rank in outcomes], odd=1)


@pytest.mark.processes
def test_processes_compare_no_term_that_has_no_case(tmp_path):
    """What is compared besides the terms of the call itself."""
    for compared in results(2, "disagreeing:compared_in_processes", str(tmp_path), limit=120.0, loads=("disagreeing",)):
        for terms in compared.values():
            terms -= {"longring's version", "ranks of a node"}  # processes/test_mismatches.py, and a case of attention
        assert set(compared) >= KINDS.keys() - {"loss"}
        assert_every_term_has_a_case(compared)
