"""Decoding in real processes: bytes as planned, ranks that differ are told, ranks that are lost are named."""

from __future__ import annotations

import pytest
import torch

import longring as lr
from decoding_programs import PROMPT, WORDS, model
from worlds import World, results

pytestmark = pytest.mark.processes


def in_one_process(new_tokens, **words):
    tokens = torch.randint(WORDS, (1, PROMPT), generator=torch.Generator().manual_seed(5))
    return model().generate(tokens, new_tokens=new_tokens, **words).tolist()


@pytest.mark.parametrize(
    "pattern", [lr.Dense(), lr.Dense(window=(6, 0)), lr.Dilated([8, 64], [1, 2])], ids=["dense", "window", "dilated"]
)
def test_bytes_and_bits(pattern):
    found = results(3, "decoding_programs:counted", pattern, 40)
    for sent, planned, answers in found:
        assert sent == planned
        assert answers == found[0][2]  # the same bits
    assert sum(map(sum, (sent for sent, _, _ in found))) > 0


def test_ranks_that_were_asked_for_other_things_are_told():
    for name, ours, theirs in (("seed", 1, 2), ("end", None, 3)):
        outcomes = World(3, "decoding_programs:generate_with_other_words", (1, name, ours, theirs)).run()
        for outcome in outcomes:
            assert outcome.error == "Disagreement", (name, outcome.error, outcome.text, outcome.printed)
            assert f"{name} is {theirs!r} on rank 1, and {ours!r} on ranks 0, 2" in outcome.text


def test_a_rank_that_refuses_tells_the_others():
    outcomes = World(3, "decoding_programs:generate_with_other_words", (1, "top_p", 0.5, 7.0)).run()
    assert outcomes[1].error == "ArgumentError"
    for rank in (0, 2):
        assert outcomes[rank].error == "Disagreement", (outcomes[rank].error, outcomes[rank].text)
        assert "top_p must be above 0" in outcomes[rank].text


def test_ranks_that_came_to_other_tokens_are_told():
    outcomes = World(3, "decoding_programs:generate_with_another_weight", (2,)).run()
    for outcome in outcomes:
        assert outcome.error == "Disagreement", (outcome.error, outcome.text, outcome.printed)
        assert "tokens is " in outcome.text


@pytest.mark.parametrize(("victim", "token", "how"), [(0, PROMPT + 3, "kill"), (2, PROMPT, "kill"), (1, 0, "stop")])
def test_a_rank_lost_while_generating_is_named_by_all_others(victim, token, how):
    args = (victim, token, how, 3.0)
    outcomes = World(3, "decoding_programs:generate_with_a_victim", args).run(limit=30)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error == "PeerLost", (outcome.error, outcome.text, outcome.printed)
            assert outcome.rank_named == victim
            assert outcome.status == 0


def test_a_model_that_fsdp_has_sharded_generates():
    assert results(2, "decoding_programs:generate_sharded_by_fsdp", 8, limit=60.0) == [in_one_process(8)] * 2
