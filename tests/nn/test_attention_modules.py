"""Attention as a module: what the function gives, kept words, and refusals where the module is made."""

from __future__ import annotations

import copy

import pytest
import torch

import longring as lr
from longring.nn import Attention, DilatedAttention, RingAttention
from longring.testing import Result, judge, run_ranks

N, BRANCHES = 13, {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}


def qkv(n=N, n_k=None, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = [(2, n, 4, 4), (2, n_k or n, 2, 4), (2, n_k or n, 2, 4)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("module", "pattern", "told"),
    [
        (RingAttention(), lr.Dense(), {}),
        (RingAttention(causal=False, window=(3, 1)), lr.Dense(causal=False, window=(3, 1)), {}),
        (RingAttention(), lr.Dense(documents=[0, 4, N]), {"documents": [0, 4, N]}),
        (RingAttention(causal=False), lr.Dense(causal=False, lengths=[N, 6]), {"lengths": [N, 6]}),
        (RingAttention(causal=False), lr.Dense(), {"causal": True}),
        (Attention(lr.Dense(window=(2, 0))), lr.Dense(window=(2, 0)), {}),
        (DilatedAttention(**BRANCHES), lr.Dilated([4, 8], [1, 2]), {}),
        (
            DilatedAttention(**BRANCHES, causal=False, phase="block"),
            lr.Dilated([4, 8], [1, 2], causal=False, phase="block"),
            {},
        ),
        (DilatedAttention(**BRANCHES), lr.Dilated([4, 8], [1, 2], documents=[0, 4, N]), {"documents": [0, 4, N]}),
        (
            DilatedAttention(**BRANCHES, causal=False),
            lr.Dilated([4, 8], [1, 2], causal=False, documents=[[0, 3, N], [0, 3, 6, N]]),
            {"documents": [[0, 3, N], [0, 3, 8, N]], "lengths": torch.tensor([N, 6])},
        ),
    ],
    ids=repr,
)
def test_it_is_the_definition(module, pattern, told, dtype):
    q, k, v = qkv(dtype=dtype)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    out, lse = module(q, k, v, return_lse=True, **told)
    got = Result(out, lse, *torch.autograd.grad(out, (q, k, v), dout))
    for verdict in judge(got, q, k, v, pattern, dout):
        assert verdict.ok, verdict
    assert torch.equal(module(q, k, v, **told), out)


def test_rows_that_are_not_padding_know_nothing_of_it():
    """Each row by itself, cut to its length, has the same outputs: for dilated attention as for dense."""
    q, k, v = (x.detach() for x in qkv())
    for module in (
        RingAttention(causal=False),
        DilatedAttention(**BRANCHES, causal=False),
        DilatedAttention(**BRANCHES),
    ):
        for lengths in ([N, 7], [1, N - 1], [5, 4]):
            out = module(q, k, v, lengths=lengths)
            for row, length in enumerate(lengths):
                cut = [x[row : row + 1, :length] for x in (q, k, v)]
                torch.testing.assert_close(out[row : row + 1, :length], module(*cut))


def test_options_are_kept_and_told():
    module = DilatedAttention(**BRANCHES, phase="block", kernel="reference", scale=0.5, deterministic=True, timeout=9)
    assert repr(module) == (
        "DilatedAttention(segment_lengths=[4, 8], dilation_rates=[1, 2], causal=True, phase='block', "
        "kernel='reference', scale=0.5, deterministic=True, timeout=9)"
    )
    assert repr(RingAttention(window=(5, 0))) == "RingAttention(causal=True, window=[5, 0], schedule='ring')"
    q, k, v = qkv()
    want = lr.dilated_attention(q, k, v, **BRANCHES, phase="block", kernel="reference", scale=0.5, deterministic=True)
    assert torch.equal(module(q, k, v), want)
    assert torch.equal(copy.deepcopy(module)(q, k, v), want)
    assert not list(module.parameters())
    assert not module.state_dict()


def test_mixing_gradient_and_compat_are_those_of_the_function():
    q, k, v = qkv(n_k=N)
    k, v = (x.detach().repeat_interleave(2, 2).requires_grad_() for x in (k, v))
    for words in ({"mixing_gradient": False}, {"compat": "torchscale"}):
        module = DilatedAttention(**BRANCHES, **words)
        out, want = module(q, k, v), lr.dilated_attention(q, k, v, **BRANCHES, **words)
        assert torch.equal(out, want)
        for ours, theirs in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, want)), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        ({"causal": 1}, lr.PatternError, "causal"),
        ({"window": 5}, lr.PatternError, "window"),
        ({"kernel": "fast"}, lr.KernelRefusal, "kernel must be one of"),
        ({"kernel": None}, lr.KernelRefusal, "kernel must be one of"),
        ({"scale": float("nan")}, lr.ArgumentError, "scale"),
        ({"scale": "1"}, lr.ArgumentError, "scale"),
        ({"deterministic": 1}, lr.ArgumentError, "deterministic"),
        ({"timeout": 0}, lr.ArgumentError, "timeout"),
    ],
    ids=str,
)
def test_refused_where_it_is_made(words, error, says):
    with pytest.raises(error, match=says):
        RingAttention(**words)


def test_more_that_is_refused_where_it_is_made():
    with pytest.raises(lr.PatternError, match="pair up"):
        DilatedAttention(segment_lengths=[4, 8], dilation_rates=[1])
    with pytest.raises(lr.PatternError, match="phase"):
        DilatedAttention(**BRANCHES, phase="other")
    with pytest.raises(lr.ArgumentError, match="contradicts"):
        DilatedAttention(**BRANCHES, phase="mod", compat="torchscale")
    with pytest.raises(lr.ScheduleRefusal, match="schedule"):
        DilatedAttention(**BRANCHES, schedule="fastest")
    with pytest.raises(lr.PatternError, match="pattern"):
        Attention("causal")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="schedule"):
        RingAttention(schedule="gather")  # type: ignore[call-arg]


def test_refused_where_it_is_called():
    q, k, v = qkv()
    with pytest.raises(lr.PatternError, match="to the module already"):
        Attention(lr.Dense(documents=[0, N]))(q, k, v, documents=[0, 4, N])
    with pytest.raises(lr.PatternError, match="to the module already"):
        Attention(lr.Dense(lengths=[N, N]))(q, k, v, lengths=[4, N])
    with pytest.raises(lr.PatternError, match="exceed the 13"):
        DilatedAttention(**BRANCHES)(q, k, v, lengths=[4, N + 1])
    with pytest.raises(lr.PatternError, match="one number for each of 2 rows"):
        DilatedAttention(**BRANCHES)(q, k, v, lengths=[4, 5, 6], documents=[[0, N], [0, N]])
    with pytest.raises(lr.PatternError, match="the same tokens"):
        DilatedAttention(**BRANCHES)(q[:, :4], k, v, lengths=[4, N])
    with pytest.raises(lr.PatternError, match="one number for each of 2 rows"):
        DilatedAttention(**BRANCHES)(q, k, v, lengths=[4])


@pytest.mark.parametrize("words", [{"sharding": True}, {"group": True, "layout": "contiguous"}], ids=str)
def test_ranks_of_threads(words):
    q, k, v = (x.detach() for x in qkv(n=12))
    modules = [RingAttention(causal=False), DilatedAttention(**BRANCHES, causal=False)]
    wants = [module(q, k, v, lengths=[12, 7]) for module in modules]

    def program(group):
        s = lr.Sharding(12, group, "contiguous")
        told = {"sharding": s} if "sharding" in words else {**words, "group": group}
        return [s.unshard(module(*(s.shard(x) for x in (q, k, v)), lengths=[12, 7], **told)) for module in modules]

    for found in run_ranks(3, program):
        for got, want in zip(found, wants, strict=True):
            torch.testing.assert_close(got, want)
