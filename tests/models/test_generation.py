"""Generation over ranks gives the tokens of one process, and those of computing everything anew for each token."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from generation_cases import (
    CONFIGS,
    NEW,
    PROMPT,
    WORDS,
    generated,
    generated_in_a_process,
    greedy_without_cache,
    made,
    prompt,
)

import longring as lr
from longring.models import Decoder, DecoderConfig, LongNetConfig, LongNetLM
from longring.models.generation import likely
from longring.nn import Cache, LayerCache
from longring.testing import run_ranks

NAMES = list(CONFIGS)
UNEVEN = [[range(3), range(20, 22)], [], [range(3, 20), range(22, 23)]]  # one rank has nothing of the prompt


@cache
def in_one_process(name):
    return made(name).generate(prompt(), new_tokens=NEW)


@pytest.mark.parametrize("name", NAMES)
def test_one_process_gives_what_the_model_says_without_a_cache(name):
    """No token sees what comes behind it, so that one look at all of them says what each was followed by."""
    found = in_one_process(name)
    assert found.shape == (2, NEW)
    assert found.unique().numel() > 5  # or equal tokens would say little
    with torch.no_grad():
        logits = made(name)(torch.cat([prompt(), found], 1)[:, :-1])
    assert torch.equal(found, logits[:, PROMPT - 1 :].argmax(-1))


@pytest.mark.parametrize("name", ["dense", "longnet"])
def test_it_is_computing_everything_anew_for_each_token(name):
    assert torch.equal(greedy_without_cache(made(name), prompt(), 20), in_one_process(name)[:, :20])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("ranks", "layout", "new_tokens"), [(1, "zigzag", 60), (2, "striped", 60), (3, UNEVEN, NEW), (4, "contiguous", 60)]
)
def test_ranks_give_what_one_process_gives(name, ranks, layout, new_tokens):
    found = run_ranks(ranks, lambda group: generated(group, name, layout=layout, new_tokens=new_tokens))
    for tokens in found:
        assert torch.equal(tokens, in_one_process(name)[:, :new_tokens])


def test_more_ranks_than_tokens():
    for tokens in run_ranks(25, lambda group: generated(group, "dense", new_tokens=5)):
        assert torch.equal(tokens, in_one_process("dense")[:, :5])


@pytest.mark.processes
def test_three_processes_give_what_one_gives():
    names = ["dense", "longnet"]
    for found in lr.launch(generated_in_a_process, names, ranks=3, timeout=110):
        for name, tokens in zip(names, found, strict=True):
            assert torch.equal(tokens, in_one_process(name)), name


def test_room_is_made_once_and_for_no_token_more(monkeypatch):
    rooms = []
    monkeypatch.setattr("longring.nn.cache._moved", None)  # which nobody then calls
    honest = LayerCache.take

    def take(self, k, v):
        honest(self, k, v)
        rooms.append((self.sharding.rank, self.sharding.length, self.keys.shape[1], self._room))

    monkeypatch.setattr(LayerCache, "take", take)
    made("dense").generate(prompt(), new_tokens=30)
    assert rooms[-1] == (0, PROMPT + 29, PROMPT + 29, PROMPT + 29)
    rooms.clear()
    run_ranks(3, lambda group: generated(group, "dense", layout=UNEVEN, new_tokens=30))
    last = {rank: (held, room) for rank, length, held, room in rooms if length == PROMPT + 29}
    assert all(held == room for held, room in last.values())
    assert sum(held for held, _ in last.values()) == PROMPT + 29


# ----------------------------------------------------------------------------------------------------- logits


@torch.no_grad()
def read(model, tokens, sharding, steps):
    """Logits of the prompt's last token and of those that follow it, which are read so many at a time."""
    cache, at = Cache(), PROMPT
    found = [model(tokens[:, :PROMPT] if sharding is None else sharding.shard(tokens[:, :PROMPT]),
                   sharding=sharding, cache=cache)]  # fmt: skip
    for step in steps:
        found.append(model(tokens[:, at : at + step], sharding="replicated", cache=cache))
        at += step
    assert cache.length == at
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [(1,) * 17, (5, 1, 8, 3)])
def test_logits_are_as_close_to_float64_as_without_a_cache(name, steps):
    model, tokens = made(name), prompt(length=PROMPT + 17)
    with torch.no_grad():
        rough = model(tokens)[:, PROMPT - 1 :]
        exact = made(name).double()(tokens)[:, PROMPT - 1 :]
    allowed = 2 * float((rough - exact).norm()) + 1e-6 * float(exact.norm())
    for ranks in (1, 3):
        found = run_ranks(ranks, lambda g: read(model, tokens, lr.Sharding(PROMPT, g, "zigzag"), steps))
        assert all(torch.equal(mine, found[0]) for mine in found)
        assert float((found[0] - exact).norm()) <= allowed
    assert float((read(model, tokens, None, steps) - exact).norm()) <= allowed


# ---------------------------------------------------------------------------------------------------- drawing


def test_a_seed_draws_the_same_on_any_number_of_ranks():
    words = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "new_tokens": 40}
    model = made("dense")
    want = model.generate(prompt(), seed=7, **words)
    assert not torch.equal(model.generate(prompt(), seed=8, **words), want)
    assert torch.equal(model.generate(prompt(), seed=7, **words), want)
    for ranks in (2, 3):
        for tokens in run_ranks(ranks, lambda group: generated(group, "dense", seed=7, **words)):
            assert torch.equal(tokens, want)


@pytest.mark.parametrize("words", [{"seed": (7, 8)}, {"temperature": (1.0, 1.1)}, {"new_tokens": (4, 5)}])
def test_ranks_that_ask_for_different_things_are_told(words):
    """Also where ranks are threads, which are handed nothing before somebody sends a message."""
    ((name, values),) = words.items()

    def program(group):
        return generated(group, "dense", **{"temperature": 1.0, "seed": 7, "new_tokens": 4, name: values[group.rank]})

    with pytest.raises(lr.LongringError, match=f"disagree.*{name}"):
        run_ranks(2, program)


def test_drawing_among_one_is_greedy():
    model, want = made("dense"), in_one_process("dense")[:, :20]
    for words in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-9}):
        words = {"temperature": 1.0, "seed": 1, **words}
        assert torch.equal(model.generate(prompt(), new_tokens=20, **words), want)


def test_what_is_likely_by_hand():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()

    def left(**words):
        return [
            [round(chance, 9) for chance in row]
            for row in likely(logits, **{"top_k": None, "top_p": None, **words}).tolist()
        ]

    assert left() == [[0.1, 0.4, 0.2, 0.3], [0.4, 0.3, 0.2, 0.1]]
    assert left(top_k=2) == [[0, 0.4, 0, 0.3], [0.4, 0.3, 0, 0]]
    assert left(top_p=0.75) == [[0, 0.4, 0.2, 0.3], [0.4, 0.3, 0.2, 0]]
    assert left(top_p=0.65) == [[0, 0.4, 0, 0.3], [0.4, 0.3, 0, 0]]
    assert left(top_k=2, top_p=0.5) == [[0, 0.4, 0, 0], [0.4, 0, 0, 0]]  # 0.4 of 0.7 is more than half
    assert left(top_p=1.0) == left()


def test_draws_follow_the_probabilities():
    model = made("dense")
    tokens = prompt(batch=1).expand(4000, -1)
    drawn = model.generate(tokens, new_tokens=1, temperature=2.0, seed=3)
    with torch.no_grad():
        want = (model(tokens[:1])[0, -1] / 2.0).softmax(-1)
    share = torch.bincount(drawn[:, 0], minlength=WORDS) / 4000
    assert float((share - want).abs().max()) < 5 * (0.25 / 4000) ** 0.5


def test_an_end_ends_rows_and_then_everything():
    model, plain = made("dense"), in_one_process("dense")
    end = next(  # which both rows come to, one before the other
        word
        for word in plain[0].unique().tolist()
        if word in plain[1] and plain[0].tolist().index(word) != plain[1].tolist().index(word)
    )
    at = [row.index(end) for row in plain.tolist()]
    for found in (
        model.generate(prompt(), new_tokens=NEW, end=end),
        *run_ranks(3, lambda group: generated(group, "dense", end=end)),
    ):
        assert found.shape == (2, max(at) + 1)
        for row, want, stop in zip(found, plain, at, strict=True):
            assert torch.equal(row[: stop + 1], want[: stop + 1])
            assert bool((row[stop:] == end).all())
    early = model.generate(prompt()[:1], new_tokens=5, end=int(plain[0, 0]))
    assert early.tolist() == [[int(plain[0, 0])]]


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"new_tokens": 0}, "new_tokens must be a whole number of at least 1"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": 1.0}, "seed must be a whole number"),
        ({"seed": 3}, "seed for tokens that are drawn"),
        ({"top_k": 3, "top_p": 0.5}, "top_k and top_p for tokens that are drawn"),
        ({"temperature": 1.0, "seed": 1, "top_k": 0}, "top_k must be a whole number of at least 1"),
        ({"temperature": 1.0, "seed": 1, "top_k": 62}, "top_k is 62, but there are 61 tokens"),
        ({"temperature": 1.0, "seed": 1, "top_p": 0.0}, "top_p must be above 0"),
        ({"temperature": 1.0, "seed": 1, "top_p": 1.1}, "top_p must be above 0 and at most 1"),
        ({"end": 61}, "end must be a token, 0 to 60; got 61"),
        ({"sharding": "replicated"}, "sharding must be a longring.Sharding, or None"),
    ],
)
def test_what_is_refused(words, said):
    with pytest.raises(lr.ArgumentError, match=said):
        made("dense").generate(prompt(), **{"new_tokens": 3, **words})


def test_words_of_others_are_told_ours():
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_new_tokens'; it is new_tokens= here"):
        made("dense").generate(prompt(), max_new_tokens=3)
    with pytest.raises(TypeError, match="new_tokens"):
        made("dense").generate(prompt())


def test_prompts_that_are_no_prompts():
    model = made("dense")
    for tokens, said in (
        (prompt()[0], "tokens must be whole numbers"),
        (prompt().float(), "tokens must be whole numbers"),
        (prompt()[:, :0], "at least"),
        ([[1, 2]], "tokens must be whole numbers"),
        (prompt().clamp(min=61), "the prompt has token 61, but there are 61, from 0"),
        (-prompt() - 1, "the prompt has token -"),
    ):
        with pytest.raises(lr.ArgumentError, match=said):
            model.generate(tokens, new_tokens=3)
    with pytest.raises(lr.ArgumentError, match="22 tokens"):
        model.generate(prompt()[:, 1:], new_tokens=3, sharding=lr.Sharding(PROMPT))


def test_beyond_what_xpos_was_made_for():
    with pytest.raises(lr.ArgumentError, match="a prompt of 23 tokens and 201 that are read behind it, but xPos"):
        made("longnet").generate(prompt(), new_tokens=NEW + 2)
    cache, model = Cache(), made("longnet")
    tokens = prompt(length=PROMPT + NEW + 1)
    with torch.no_grad():
        model(tokens[:, :-1], cache=cache)
        with pytest.raises(lr.ArgumentError, match="224 tokens, but xPos was made for a length of 223"):
            model(tokens[:, -1:], sharding="replicated", cache=cache)


def test_torchscale_has_no_cache():
    config = LongNetConfig(
        vocab_size=WORDS, dim=32, layers=1, heads=4, segment_lengths=(8,), dilation_rates=(1,), compat="torchscale"
    )
    with pytest.raises(lr.NotBuilt, match="depends on the whole length"):
        LongNetLM(config).generate(prompt(), new_tokens=3)


def test_words_that_do_not_go_with_a_cache():
    model, tokens = made("dense"), prompt()
    with torch.no_grad():
        for words, said in (
            ({"documents": [0, 5, PROMPT]}, "documents=.* with a cache"),
            ({"lengths": [PROMPT, 5]}, "lengths=.* with a cache"),
            ({"positions": torch.arange(PROMPT)}, "positions were given with a cache"),
            ({"sharding": "replicated"}, "read a prompt first"),
        ):
            with pytest.raises(lr.ArgumentError, match=said):
                model(tokens, cache=Cache(), **words)
        with pytest.raises(lr.ArgumentError, match=r"pass a longring\.nn\.Cache"):
            model(tokens, sharding="replicated")
        with pytest.raises(lr.ArgumentError, match=r"cache must be a longring\.nn\.Cache"):
            model(tokens, cache=[])
        full = Cache()
        model(tokens, cache=full)
        with pytest.raises(lr.ArgumentError, match="holds 23 tokens already"):
            model(tokens, cache=full)
    with pytest.raises(lr.ArgumentError, match=r"under torch\.no_grad"):
        model(tokens, cache=Cache())


def test_options_of_the_model_hold_while_it_generates():
    """A schedule by name is for the prompt: further tokens are on all ranks, and no schedule brings keys to them."""
    want = in_one_process("dense")[:, :9]
    for schedule in ("ring", "ulysses", "exchange"):

        def program(group, schedule=schedule):
            s = lr.Sharding(PROMPT, group, "zigzag")
            model = made("dense", schedule=schedule, kernel="reference", deterministic=True, timeout=50.0)
            return model.generate(s.shard(prompt()), sharding=s, new_tokens=9)

        for tokens in run_ranks(3, program):
            assert torch.equal(tokens, want)


def test_it_generates_in_16_bits():
    config = DecoderConfig(vocab_size=WORDS, dim=32, layers=2, heads=4)
    torch.manual_seed(0)
    model = Decoder(config, dtype=torch.bfloat16)
    found = model.generate(prompt(), new_tokens=5)
    assert found.shape == (2, 5)
    assert found.dtype == torch.int64
