"""Modules by the names of dilated-attention-pytorch: what each name stands for, and what is said about it."""

from __future__ import annotations

import re
import warnings
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
import torch

import defined_modules
import longring as lr
from attending import tensors
from longring import factory
from longring.factory import (
    DilatedAttentionConfig,
    MultiheadDilatedAttentionConfig,
    RingAttentionConfig,
    create_dilated_attention,
    create_multihead_dilated_attention,
    create_ring_attention,
)
from longring.geometry.head_split import HeadSplit
from longring.nn import Attention, DilatedAttention, Multihead, MultiheadDilatedAttention, RingAttention, Rotary
from longring.testing import Result, judge, run_ranks
from made_by_name import differ, learn_over_ranks, learned, modules, tokens

GUIDE = Path(__file__).parents[1] / "docs" / "migration.md"
BRANCHES = {"segment_lengths": [4, 8, 32], "dilation_rates": [1, 2, 4]}
DILATED = lr.Dilated([4, 8, 32], [1, 2, 4], causal=False)
N, HEADS, DIM = 21, 6, 24
SIZES = {"embed_dim": DIM, "num_heads": HEADS, "dtype": torch.float64}

# name: (schedule of the dilated modules, of the ring's, whether a sharding belongs to each call)
NAMES = {
    "auto": ("auto", "auto", False),
    "standard": ("auto", "auto", False),
    "improved": ("auto", "auto", False),
    "ring": ("ring", "ring", True),
    "ring_distributed": ("ring", "ring", True),
    "distributed": ("exchange", "ring", True),
    "improved_distributed": ("exchange", "ring", True),
    "collective": ("gather", "gather", True),
    "production": ("exchange", "ring", True),
    "robust": ("exchange", "ring", True),
    "deepspeed": ("exchange", "ring", True),
    "fairscale": ("exchange", "ring", True),
}
MAKERS = {
    create_dilated_attention: BRANCHES,
    create_multihead_dilated_attention: {**BRANCHES, **SIZES},
    create_ring_attention: {},
}


def made(maker, name, **words):
    """The module, and what was said while it was made."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module = maker(name, **{**MAKERS[maker], **words})
    return module, said


def silently(maker, *args, **words):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return maker(*args, **words)


# ------------------------------------------------------------------------------------------------- every name


def test_these_are_the_names():
    assert list(factory.DILATED) == list(factory.DENSE) == list(NAMES)
    for name, (dilated, dense, of_group) in NAMES.items():
        transport = "group" if of_group else "any"
        assert factory.DILATED[name][:3] == ("dilated", dilated, transport)
        assert factory.DENSE[name][:3] == ("dense", dense, transport)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_a_name_says_what_to_write_instead(maker, name):
    dilated, dense, of_group = NAMES[name]
    module, said = made(maker, name)
    attention = module.attention if isinstance(module, Multihead) else module
    schedule = dense if maker is create_ring_attention else dilated
    assert attention.schedule == ("ring" if isinstance(module, RingAttention) else schedule)
    if name == "auto":
        assert not said
        return
    (warning,) = said
    assert warning.category is DeprecationWarning
    assert warning.filename == __file__  # the caller's line, not ours
    text = str(warning.message)
    assert f"type={name!r} is a name of dilated-attention-pytorch" in text
    assert f"longring.nn.{type(module).__name__}(" in text
    assert (f"schedule={schedule!r})" in text) == (schedule != "auto" and not isinstance(module, RingAttention))
    assert ("sharding=" in text) == of_group
    assert ("fully_shard" in text) == (name == "fairscale")
    assert ("DeepSpeed's groups" in text) == (name == "deepspeed")
    assert ("head_split=True" in text) == (name == "standard" and maker is not create_ring_attention)


def test_kinds_of_modules():
    assert type(create_dilated_attention(**BRANCHES)) is DilatedAttention
    assert type(create_dilated_attention(**BRANCHES, head_split=True)) is Attention
    assert type(create_multihead_dilated_attention(**BRANCHES, **SIZES)) is MultiheadDilatedAttention
    assert type(create_multihead_dilated_attention(**BRANCHES, **SIZES, head_split=True)) is Multihead
    assert type(create_ring_attention()) is RingAttention
    assert type(silently(create_ring_attention, "collective")) is Attention


@pytest.mark.parametrize("name", NAMES)
def test_alone_every_name_is_the_definition(name):
    q, k, v, dout, _ = tensors(2, N, N, HEADS, 3, 4, torch.float32)
    for maker, words, pattern in (
        (create_dilated_attention, BRANCHES, DILATED),
        (create_dilated_attention, {**BRANCHES, "causal": True}, replace(DILATED, causal=True)),
        (create_dilated_attention, {**BRANCHES, "head_split": True}, HeadSplit([4, 8, 32], [1, 2, 4], causal=False)),
        (create_ring_attention, {"window": (5, 2)}, lr.Dense(causal=False, window=(5, 2))),
    ):
        out, lse = silently(maker, name, **words)(q, k, v, return_lse=True)
        got = Result(out, lse, *torch.autograd.grad(out, (q, k, v), dout))
        for verdict in judge(got, q, k, v, pattern, dout):
            assert verdict.ok, verdict


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_are_one(name):
    q, k, v, dout, _ = (x.detach() for x in tensors(2, N, N, HEADS, 3, 4))
    with warnings.catch_warnings():  # ranks are threads, which share the filters of warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        modules = [
            create_dilated_attention(name, **BRANCHES),
            create_dilated_attention(name, **BRANCHES, head_split=True, causal=True),
            create_ring_attention(name, causal=True),
        ]

    def program(group):
        s = lr.Sharding(N, group, "zigzag")
        found = []
        for module in modules:
            mine = [s.shard(x).requires_grad_() for x in (q, k, v)]
            out = module(*mine, sharding=s)
            gradients = torch.autograd.grad(out, mine, s.shard(dout))
            found.append([s.unshard(x.detach()) for x in (out, *gradients)])
        return found

    inputs = [x.requires_grad_() for x in (q, k, v)]
    for module, *parts in zip(modules, *run_ranks(2, program), strict=True):
        out = module(*inputs)
        want = [out, *torch.autograd.grad(out, inputs, dout)]
        for part in parts:
            torch.testing.assert_close(part, want)


@pytest.mark.parametrize("name", [name for name, (*_, of_group) in NAMES.items() if of_group])
def test_a_name_of_several_ranks_is_refused_without_a_sharding(name, monkeypatch):
    monkeypatch.setattr("longring.call.world_size", lambda: 2)
    q, k, v, *_ = tensors(1, N, N, HEADS, HEADS, 4)
    for maker in (create_dilated_attention, create_ring_attention):
        with pytest.raises(lr.ScheduleRefusal, match="neither sharding nor group"):
            silently(maker, name, **MAKERS[maker])(q, k, v)


@pytest.mark.processes
def test_two_processes_are_one():
    """Every name with projections, over Gloo: outputs, and the gradient of every parameter."""
    want = [learned(module, tokens()) for module in modules(list(NAMES))]
    for got in lr.launch(learn_over_ranks, list(NAMES), ranks=2, timeout=100):
        torch.testing.assert_close(got, want)


def test_a_rank_that_shares_heads_out_alone_is_named():
    with pytest.raises(lr.Disagreement, match="pattern"):
        run_ranks(2, differ)


# -------------------------------------------------------------------------------------- heads, a branch for each


def one_branch_each(q, k, v, *, segment_lengths, dilation_rates, causal):
    """In float64, head by head and row by row. Branch b has a run of the heads, the first ones those that remain."""
    m, heads = len(dilation_rates), k.shape[2]
    share, out = q.shape[2] // heads, torch.zeros_like(q)
    runs = [heads // m + (b < heads % m) for b in range(m)]
    branch = [b for b in range(m) for _ in range(runs[b])]
    for h in range(q.shape[2]):
        b = branch[h // share]
        w, r = segment_lengths[b], dilation_rates[b]
        for i in range(q.shape[1]):
            if i % w % r != b % r:
                continue
            last = i + 1 if causal else q.shape[1]
            seen = [j for j in range(i // w * w, min((i // w + 1) * w, last)) if j % w % r == b % r]
            scores = (k[:, seen, h // share] * q[:, i, None, h]).sum(-1) / q.shape[3] ** 0.5
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            out[:, i, h] = (weights.unsqueeze(-1) * v[:, seen, h // share]).sum(1)
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("branches", "heads", "kv_heads"),
    [
        (BRANCHES, 6, 6),
        (BRANCHES, 8, 8),
        (BRANCHES, 10, 5),
        ({"segment_lengths": [5, 9], "dilation_rates": [3, 1]}, 4, 2),
    ],
    ids=str,
)
def test_head_split_is_its_definition(branches, heads, kv_heads, causal):
    q, k, v, *_ = (x.detach() for x in tensors(2, N, N, heads, kv_heads, 4))
    module = create_dilated_attention(**branches, head_split=True, causal=causal)
    want = one_branch_each(q, k, v, **branches, causal=causal)
    torch.testing.assert_close(module(q, k, v), want)
    torch.testing.assert_close(module(q, k, v, causal=True), one_branch_each(q, k, v, **branches, causal=True))

    def program(group):
        s = lr.Sharding(N, group, "contiguous")
        return s.unshard(module(*(s.shard(x) for x in (q, k, v)), sharding=s))

    for out in run_ranks(2, program):
        torch.testing.assert_close(out, want)


def test_head_split_takes_lengths_and_documents():
    q, k, v, *_ = (x.detach() for x in tensors(2, N, N, 3, 3, 4))
    module = create_dilated_attention(**BRANCHES, head_split=True)
    out = module(q, k, v, lengths=[N, 9])
    cut = [x[1:, :9] for x in (q, k, v)]
    torch.testing.assert_close(out[1:, :9], module(*cut))
    out = module(q, k, v, documents=[0, 9, N])
    torch.testing.assert_close(out[:, 9:], module(*(x[:, 9:] for x in (q, k, v))))


def test_head_split_is_compiled_without_a_break():
    q, k, v, *_ = (x.detach() for x in tensors(1, N, N, 3, 3, 4))
    module = create_dilated_attention(**BRANCHES, head_split=True)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), module(q, k, v))


def test_no_other_branch_reaches_a_head():
    """What a head gives does not change with the branches of others."""
    q, k, v, *_ = (x.detach() for x in tensors(1, N, N, 3, 3, 4))
    one = create_dilated_attention(segment_lengths=[4, 8, 32], dilation_rates=[1, 2, 4], head_split=True)(q, k, v)
    other = create_dilated_attention(segment_lengths=[6, 8, 16], dilation_rates=[1, 2, 1], head_split=True)(q, k, v)
    assert torch.equal(one[:, :, 1], other[:, :, 1])
    assert not torch.equal(one[:, :, 2], other[:, :, 2])


# ------------------------------------------------------------------------------------------------- projections


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"causal": True, "kv_heads": 3, "positions": Rotary(4), "sub_layernorm": False, "gain": None, "bias": False},
        {"head_split": True},
        {"head_split": True, "kv_heads": 3, "causal": True, "scale": 0.3},
    ],
    ids=str,
)
def test_multihead_is_the_definition_alone_and_over_ranks(words):
    module = create_multihead_dilated_attention(**BRANCHES, **SIZES, **words)
    x = torch.randn(2, N, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kind = HeadSplit if words.get("head_split") else lr.Dilated
    pattern = kind([4, 8, 32], [1, 2, 4], causal=words.get("causal", False))
    want = defined_modules.multihead(module, x, pattern=pattern, scale=words.get("scale"))
    torch.testing.assert_close(module(x)[0], want)

    def program(group):
        s = lr.Sharding(N, group, "contiguous")
        return s.unshard(module(s.shard(x), sharding=s)[0])

    for out in run_ranks(2, program):
        torch.testing.assert_close(out.detach(), want.detach())


def test_multihead_is_what_nn_has_of_the_same_words():
    torch.manual_seed(3)
    ours = create_multihead_dilated_attention(**BRANCHES, **SIZES)
    torch.manual_seed(3)  # a config draws no random numbers
    theirs = MultiheadDilatedAttention(
        DIM, HEADS, **BRANCHES, sub_layernorm=True, gain=1.0, dtype=torch.float64, causal=False
    )
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name])


def test_defaults_are_what_they_were():
    config = MultiheadDilatedAttentionConfig()
    assert (config.embed_dim, config.num_heads) == (768, 12)
    assert (config.segment_lengths, config.dilation_rates) == ((2048, 4096, 8192), (1, 2, 4))
    assert (config.bias, config.sub_layernorm, config.eps, config.gain) == (True, True, 1e-5, 1.0)
    assert not any((config.causal, config.head_split, config.dropout, RingAttentionConfig().causal))


# ------------------------------------------------------------------------------------------------------ configs


@pytest.mark.parametrize(
    ("maker", "config"),
    [
        (create_dilated_attention, DilatedAttentionConfig(**BRANCHES, causal=True, kernel="reference", scale=0.5)),
        (create_dilated_attention, DilatedAttentionConfig(**BRANCHES, compat="torchscale", schedule="gather")),
        (create_multihead_dilated_attention, MultiheadDilatedAttentionConfig(**BRANCHES, **SIZES, timeout=9.0)),
        (create_ring_attention, RingAttentionConfig(window=[3, -1], deterministic=True)),
        (create_ring_attention, RingAttentionConfig(schedule="ulysses")),
    ],
    ids=repr,
)
def test_a_config_says_what_its_words_say(maker, config):
    words = {field.name: getattr(config, field.name) for field in fields(config)}
    assert repr(maker(config=config)) == repr(maker(**words))
    assert type(config)(**words) == config
    assert hash(config) == hash(type(config)(**words))
    with pytest.raises(FrozenInstanceError):
        config.causal = True


def test_lists_and_tensors_are_one_value():
    assert DilatedAttentionConfig(**BRANCHES) == DilatedAttentionConfig(
        segment_lengths=torch.tensor([4, 8, 32]), dilation_rates=(1, 2, 4)
    )


def test_a_name_sets_the_schedule_that_the_config_left_open():
    for schedule in ("auto", "exchange"):
        config = DilatedAttentionConfig(**BRANCHES, schedule=schedule)
        assert silently(create_dilated_attention, "distributed", config=config).schedule == "exchange"
        assert config.schedule == schedule


# ------------------------------------------------------------------------------------------------- words of old


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"softmax_scale": 0.25}, {"scale": 0.25}),
        ({"attention_scale": 0.25}, {"scale": 0.25}),
        ({"is_causal": True}, {"causal": True}),
        ({"attention_dropout": 0.0}, {"dropout": 0.0}),
        ({"attention_type": "auto"}, {"type": "auto"}),
        ({"implementation": "auto"}, {"type": "auto"}),
        ({"layer_norm": False}, {"sub_layernorm": False}),
        ({"layer_norm_eps": 1e-3}, {"eps": 1e-3}),
        ({"gamma_init": 2.0}, {"gain": 2.0}),
    ],
    ids=str,
)
def test_words_that_have_another_name(old, new):
    (value,) = old.values()
    with pytest.warns(DeprecationWarning, match=re.escape(f"write {next(iter(new))}={value!r}")) as said:
        module = create_multihead_dilated_attention(**BRANCHES, **SIZES, **old)
    assert [warning.filename for warning in said] == [__file__]
    assert repr(module) == repr(create_multihead_dilated_attention(**BRANCHES, **SIZES, **new))


def test_the_old_word_for_type_is_one():
    with pytest.warns(DeprecationWarning, match="collective") as said:
        module = create_dilated_attention(attention_type="collective", **BRANCHES)
    assert len(said) == 2
    assert module.schedule == "gather"


OLD_WORDS = [word for words in factory.SAID_ELSEWHERE.values() for word in words.split()]


@pytest.mark.parametrize("word", OLD_WORDS)
def test_words_that_are_said_elsewhere(word):
    for maker, words in MAKERS.items():
        with pytest.raises(lr.ArgumentError, match=f"^{word}=7 is not said here: "):
            maker(**words, **{word: 7})


# ----------------------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (
            lambda: create_dilated_attention("fast"),
            lr.ArgumentError,
            "type must be one of auto, .*; got 'fast'",
        ),
        (lambda: create_ring_attention(None), lr.ArgumentError, "type must be one of auto, .*; got None"),
        (lambda: create_multihead_dilated_attention(64), lr.ArgumentError, "type must be one of auto, .*; got 64"),
        (lambda: create_dilated_attention(["ring"]), lr.ArgumentError, "type must be one of"),
        (lambda: create_dilated_attention("block_sparse_ring"), lr.NotBuilt, "attention is exact here; known are auto"),
        (lambda: create_ring_attention("hilbert"), lr.NotBuilt, "another order, is not built"),
        (
            lambda: create_dilated_attention("auto", [8], [1]),
            lr.ArgumentError,
            "got 2 more by position.*swaps",
        ),
        (
            lambda: create_multihead_dilated_attention("auto", 64, 8, [1], [8]),
            lr.ArgumentError,
            "got 4 more by position",
        ),
        (lambda: create_ring_attention("auto", RingAttentionConfig()), lr.ArgumentError, "got 1 more by position"),
        (
            lambda: create_ring_attention(segment_lengths=[4]),
            lr.ArgumentError,
            "segment_lengths: ring .* is dense",
        ),
        (lambda: create_dilated_attention(config=RingAttentionConfig()), lr.ArgumentError, "longring.factory.Dilated"),
        (
            lambda: create_dilated_attention(config=MultiheadDilatedAttentionConfig()),
            lr.ArgumentError,
            "config must be a longring.factory.DilatedAttentionConfig",
        ),
        (lambda: create_ring_attention(config={"causal": True}), lr.ArgumentError, "config must be"),
        (
            lambda: create_dilated_attention(config=DilatedAttentionConfig(), causal=True, scale=1.0),
            lr.ArgumentError,
            "causal, scale beside config=",
        ),
        (
            lambda: silently(create_dilated_attention, "ring", schedule="exchange"),
            lr.ArgumentError,
            "schedule='exchange' contradicts type='ring', which is schedule='ring'",
        ),
        (
            lambda: silently(create_ring_attention, "robust", schedule="gather"),
            lr.ArgumentError,
            "schedule='gather' contradicts type='robust'",
        ),
        (lambda: create_dilated_attention("ring", attention_type="ring"), lr.ArgumentError, "type was said twice"),
        (lambda: create_dilated_attention(scale=1.0, softmax_scale=1.0), lr.ArgumentError, "scale was said twice"),
        (lambda: create_dilated_attention(softmax_scale=1.0, scale=1.0), lr.ArgumentError, "scale was said twice"),
        (lambda: create_dilated_attention(dropout=0.1), lr.NotBuilt, "dropout=0.1: dropout is not built"),
        (lambda: create_ring_attention(dropout=0.1), lr.NotBuilt, "dropout=0.1"),
        (lambda: create_multihead_dilated_attention(dropout=0.1), lr.NotBuilt, "dropout=0.1"),
        (lambda: create_dilated_attention(sparsity_ratio=0.9), lr.NotBuilt, "sparsity_ratio=0.9: sparsity"),
        (lambda: create_dilated_attention(device="cpu"), lr.ArgumentError, "without parameters has none"),
        (lambda: create_ring_attention(dtype=torch.float16), lr.ArgumentError, "without parameters has none"),
        (lambda: create_dilated_attention(layer_norm=True), TypeError, "layer_norm"),
        (lambda: create_dilated_attention(nonsense=1), TypeError, "nonsense"),
        (lambda: create_dilated_attention(segment_lengths=[4], dilation_rates=[1, 2]), lr.PatternError, "pair up"),
        (lambda: create_dilated_attention(segment_lengths=[4]), lr.PatternError, "pair up, got 1 and 3"),
        (lambda: create_dilated_attention(head_split=1), lr.ArgumentError, "head_split must be True or False, got 1"),
        (
            lambda: create_dilated_attention(head_split=True, phase="mod"),
            lr.ArgumentError,
            "phase='mod' is about",
        ),
        (
            lambda: create_dilated_attention(head_split=True, compat="torchscale"),
            lr.ArgumentError,
            "compat='torchscale'",
        ),
        (
            lambda: create_dilated_attention(head_split=True, mixing_gradient=False),
            lr.ArgumentError,
            "mixing_grad",
        ),
        (lambda: create_dilated_attention(phase="random"), lr.PatternError, "phase must be"),
        (lambda: create_dilated_attention(schedule="fast"), lr.ArgumentError, "schedule must be one of"),
        (lambda: create_ring_attention(schedule="fast"), lr.ArgumentError, "schedule must be one of"),
        (lambda: create_ring_attention(window=3), lr.PatternError, "window must be"),
        (lambda: create_ring_attention(causal=None), lr.PatternError, "causal must be True or False"),
        (lambda: create_ring_attention(timeout=-1), lr.ArgumentError, "timeout"),
        (lambda: MultiheadDilatedAttentionConfig(embed_dim=10, num_heads=3), lr.ArgumentError, "multiple of num_heads"),
        (lambda: MultiheadDilatedAttentionConfig(positions=Rotary(4)), lr.ArgumentError, "positions are of head_dim 4"),
        (
            lambda: MultiheadDilatedAttentionConfig(head_split=True, kv_heads=2),
            lr.PatternError,
            "each of 3 branches is needed to share heads out, got 2 kv heads",
        ),
    ],
)
def test_misuse(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_too_few_heads_are_refused_when_they_come():
    q, k, v, *_ = tensors(1, N, N, 4, 2, 4)
    with pytest.raises(lr.PatternError, match="got 2 kv heads"):
        create_dilated_attention(**BRANCHES, head_split=True)(q, k, v)


# -------------------------------------------------------------------------------------------------- the guide


def test_the_guide_has_every_name_and_word():
    text = GUIDE.read_text()
    for name in (*NAMES, *factory.NOT_BUILT):
        assert f'`"{name}"`' in text, name
    for word in (*factory.WITH_PARAMETERS, *OLD_WORDS, *factory.SPARSE):
        assert f"`{word}`" in text, word
    for config in (DilatedAttentionConfig, MultiheadDilatedAttentionConfig, RingAttentionConfig):
        assert config.__name__ in text
