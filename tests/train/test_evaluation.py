"""Evaluation: every number by its definition, token by token, on any number of ranks; and weights of another run."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from evaluations import first_seen, judged, losses_by_seen, model_of, refused, right_digits
from hypothesis import given
from hypothesis import strategies as st
from training_curves import launched, losses, refusals, settings, write_corpus

import longring as lr
from longring.train.batches import NOTHING, Sequence_
from longring.train.evaluation import by_depth, by_position
from longring.train.evaluation.cutting import cut
from longring.train.retrieval import Passkeys, is_held_out, passkey

EXACT = 1e-9
TINY = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1}


# ---------------------------------------------------------------------------------------------------------- cutting


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6), window=st.integers(2, 30))
def test_every_token_is_predicted_once_and_from_no_more_than_a_window(lengths, window):
    bounds = (0, *torch.tensor(lengths).cumsum(0).tolist())
    tokens = torch.arange(bounds[-1])
    targets = tokens + 1000
    targets[[end - 1 for end in bounds[1:]]] = NOTHING
    found = cut(Sequence_(tokens, targets, bounds), window)
    predicting = [place for place, target in enumerate(found.targets.tolist()) if target != NOTHING]
    where = found.origins[predicting].tolist()
    assert sorted(where) == [place for place in tokens.tolist() if targets[place] != NOTHING]
    assert found.targets[predicting].tolist() == [place + 1000 for place in where]
    assert torch.equal(found.tokens, found.origins)
    for begin, end in pairwise(found.documents):
        assert found.origins[begin:end].tolist() == list(
            range(int(found.origins[begin]), int(found.origins[end - 1]) + 1)
        )
    for place in predicting:
        begin = max(bound for bound in found.documents if bound <= place)
        document = max(bound for bound in bounds if bound <= found.origins[place])
        seen, offset = place - begin + 1, int(found.origins[place]) - document
        assert seen == offset - first_seen(offset, window) + 1
        assert min(offset + 1, window - window // 2 + 1) <= seen <= window


def test_a_window_of_one_token_is_refused():
    with pytest.raises(lr.ArgumentError, match="at least 2 tokens"):
        cut(Sequence_(torch.arange(3), torch.arange(3), (0, 3)), 1)


# ------------------------------------------------------------------------------------------------------ perplexity


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture(scope="module")
def language(words, tmp_path_factory):
    """A run on words, on two ranks."""
    out = tmp_path_factory.mktemp("language")
    launched([settings(2, out, data=str(words), steps=12, **TINY)])
    return out


def want(by_seen, least, most):
    return [loss for seen, many in by_seen.items() if least <= seen <= most for loss in many]


def check_buckets(told, whole, cut_):
    assert sum(bucket["tokens"] for bucket in told["buckets"]) == sum(map(len, whole.values()))
    for bucket in [*told["buckets"], told["everything"], *([told["beyond"]] if cut_ else [])]:
        mine = want(whole, bucket["least"], bucket["most"])
        assert bucket["tokens"] == len(mine)
        assert bucket["loss"] == pytest.approx(sum(mine) / len(mine), abs=EXACT)
        if cut_:
            other = want(cut_, bucket["least"], bucket["most"])
            assert bucket["window_loss"] == pytest.approx(sum(other) / len(other), abs=EXACT)
            assert bucket["gain"] == pytest.approx((sum(other) - sum(mine)) / len(mine), abs=EXACT)


def same(found, expected):
    """Two reports, but for rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == (pytest.approx(expected, abs=EXACT) if isinstance(expected, float) else expected)


@pytest.mark.processes
def test_perplexity_is_that_of_every_token_read_on_its_own_on_any_ranks(language, words):
    asked = by_position.Asked(sequences=None, window=7)
    (alone,) = lr.launch(judged, language, [({}, asked)], ranks=1, timeout=100)
    assert alone[0]["sequences"] < by_position.USUAL, "so that it is all of them"
    assert [bucket["least"] for bucket in alone[0]["buckets"]] == [1, 2, 3, 5, 9, 17, 33]
    check_buckets(alone[0], losses_by_seen(language, words, 61, None), losses_by_seen(language, words, 61, 7))
    questions = [({"layout": "zigzag"}, asked), ({"context_ranks": 1}, asked), ({"context": 40}, asked)]
    for ring, apart, shorter in lr.launch(judged, language, questions, ranks=3, timeout=100):
        same(ring, alone[0])
        same(apart, alone[0])
        check_buckets(shorter, losses_by_seen(language, words, 40, None), losses_by_seen(language, words, 40, 7))


def test_buckets_end_at_powers_of_two():
    seen = torch.arange(1, 1001)
    ends = by_position._bucket_ends(1000)
    assert ends == [
        (1, 1),
        (2, 2),
        (3, 4),
        (5, 8),
        (9, 16),
        (17, 32),
        (33, 64),
        (65, 128),
        (129, 256),
        (257, 512),
        (513, 1000),
    ]
    for i, (least, most) in enumerate(ends):
        assert seen[by_position._bucket_of(seen) == i].tolist() == list(range(least, most + 1))


def test_the_standard_error_is_that_of_sequences_not_of_tokens():
    """Ten thousand tokens of two sequences tell no more than two numbers."""
    counts = torch.tensor([5000.0, 5000.0, 0.0]).double()
    mean, error = by_position._mean(torch.tensor([5000.0, 15000.0, 0.0]).double(), counts)
    assert (mean, error) == (2.0, pytest.approx(2**0.5 / 2**0.5))  # of 1 and 3: a deviation of sqrt(2), over sqrt(2)
    assert by_position._mean(torch.tensor([4.0]), torch.tensor([2.0])) == (2.0, None)


# ------------------------------------------------------------------------------------------------------------- keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A run on passkeys that has just learned that digits are asked for."""
    out = tmp_path_factory.mktemp("keys")
    words = {"task": "passkey", "context": 90, "steps": 60, "batch": 8, "micro_batch": 4, "context_ranks": 1}
    words |= {"learning_rate": 1e-2}
    launched([settings(2, out, **words, **TINY)])
    return out


@pytest.mark.processes
def test_keys_are_found_as_often_as_their_digits_are_the_likeliest_on_any_ranks(keys):
    asked = by_depth.Asked(depths=(0.0, 0.6, 1.0), trials=30, digits=2, batch=7)
    (alone,) = lr.launch(judged, keys, [({}, asked)], ranks=1, timeout=100)
    for told in alone[0]["depths"]:
        right = right_digits(keys, 90, told["depth"], trials=30, digits=2)
        assert told["trials"] == 30
        assert told["found"] == sum(map(all, right))
        assert told["share"] == sum(map(all, right)) / 30
        assert told["digits"] == pytest.approx(sum(map(sum, right)) / 60)
    assert sum(told["digits"] for told in alone[0]["depths"]) > 0, "or nothing is compared"
    assert [told["tokens_back"] for told in alone[0]["depths"]] == [71, 62, 56]
    questions = [({"layout": "zigzag"}, asked), ({"context_ranks": 1}, asked)]
    for ring, apart in lr.launch(judged, keys, questions, ranks=3, timeout=100):
        assert ring == alone[0]
        assert apart == alone[0]


def test_keys_of_training_and_of_evaluation_are_never_the_same():
    task = Passkeys(context=120, seed=3)
    rows = [task.sequence(number) for number in range(300)]
    trained = [bytes(row.tokens[-5:].tolist()) for row in rows]
    held = [bytes(passkey(120, 0.5, seed, split="held-out").tokens[-5:].tolist()) for seed in range(300)]
    assert not any(map(is_held_out, trained))
    assert all(map(is_held_out, held))
    assert len(set(trained)) > 290
    assert len(set(held)) > 280
    share = sum(is_held_out(str(key).zfill(5).encode()) for key in range(10**5)) / 10**5
    assert share == pytest.approx(1 / 20, abs=0.005)
    with pytest.raises(lr.ArgumentError, match="split must be 'train' or 'held-out', got 'test'"):
        passkey(120, 0.5, 0, split="test")


def test_the_task_asks_for_digits_alone_at_any_depth():
    task = Passkeys(context=500, seed=1)
    places = []
    for number in range(200):
        tokens, targets, documents = task.sequence(number)
        assert documents == (0, 500)
        assert (targets != NOTHING).nonzero().flatten().tolist() == list(range(494, 499))
        assert torch.equal(targets[494:499], tokens[495:])
        text = bytes(tokens.tolist())
        places.append(text.index(b" The pass key is " + text[-5:] + b"."))
    assert min(places) < 20
    assert max(places) > 400
    assert 180 < sum(places) / len(places) < 240
    assert torch.equal(task.sequence(7).tokens, Passkeys(context=500, seed=1).sequence(7).tokens)
    assert not torch.equal(task.sequence(7).tokens, Passkeys(context=500, seed=2).sequence(7).tokens)
    with pytest.raises(lr.ArgumentError, match="take 81 tokens, got a context of 80"):
        Passkeys(context=80, seed=1)


# -------------------------------------------------------------------------------------------- weights of another run


@pytest.mark.processes
def test_a_run_begins_with_the_weights_of_another_at_another_context_and_pattern(keys, tmp_path):
    task = {"task": "passkey", "steps": 2, **TINY}
    begun = settings(2, tmp_path / "a", context=120, weights=str(keys), window=100, **task)
    other = settings(2, tmp_path / "b", context=120, weights=str(tmp_path / "nowhere"), **task)
    shape = settings(2, tmp_path / "c", context=120, weights=str(keys), **{**task, "dim": 32})
    launched([begun, settings(2, tmp_path / "d", context=120, weights=str(keys), **task)])
    model, rows = model_of(keys), [Passkeys(120, 0).sequence(number) for number in range(2)]
    with torch.no_grad():
        logits = model(torch.stack([row.tokens for row in rows]))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.cat([row.targets for row in rows]))
    assert losses(tmp_path / "a")[0] != pytest.approx(expected.item(), abs=1e-6), "a window changes something"
    assert losses(tmp_path / "d")[0] == pytest.approx(expected.item(), abs=EXACT)
    missing, wide = lr.launch(refusals, [other, shape], ranks=2, timeout=100)[0]
    assert f"--weights {tmp_path / 'nowhere'} does not exist" in missing
    assert "was saved as" in wide


@pytest.mark.processes
def test_what_cannot_be_judged_is_refused(language, keys):
    text, key = by_position.Asked, by_depth.Asked
    refusals_ = {
        "--sequences 1000, but the held-out part of text has ": (language, text(sequences=1000)),
        "--window 61 leaves nothing out of a context of 61": (language, text(window=61)),
        "this run learned the task passkey, not text: say --passkey, or --data PATH": (keys, text()),
        "a key of 5 digits and its question take 81 tokens, got a context of 61": (language, key()),
        "nowhere does not exist. It is to be the folder that longring train --out names": (language / "nowhere", key()),
    }
    (told,) = lr.launch(refused, list(refusals_.values()), ranks=1, timeout=100)
    for said, text_ in zip(refusals_, told, strict=True):
        assert said in text_
