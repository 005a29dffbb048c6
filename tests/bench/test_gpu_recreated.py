"""Rings re-created from what others published compute attention, in the precision that they are known for."""

import pytest
import torch

from longring import Dense, LayoutError
from longring.bench.gpu.direct import FlashForCpu, direct_kernels
from longring.bench.gpu.error import relative_errors, whole
from longring.bench.gpu.given import Place, Shape, given
from longring.bench.gpu.recreated import RingFlashAttention, TransformerEngine, Ulysses, Yunchang
from longring.bench.gpu.virtual_ring import VirtualRing
from longring.testing import oracle

CAUSAL = Dense(causal=True)
CPU = torch.device("cpu")


def inputs(dtype, kv_heads=4):
    return given(Shape(96, 8, kv_heads, 8), Place(CPU, dtype))


def assert_right(found, x, tolerance):
    want = oracle(x.q, x.k, x.v, CAUSAL, x.dout)
    for name in ("out", "lse", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(found, name), getattr(want, name), atol=tolerance, rtol=0, check_dtype=False)


@pytest.mark.parametrize("kv_heads", [4, 8])
@pytest.mark.parametrize("ring", [RingFlashAttention, TransformerEngine, Ulysses])
def test_they_are_exact_but_for_rounding(ring, kv_heads):
    x = inputs(torch.float32, kv_heads)
    assert_right(ring(x, 4, FlashForCpu()).result(), x, 1e-5)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_our_ring_played_alone_is_exact(ranks):
    x = inputs(torch.float64)
    assert_right(VirtualRing(x, CAUSAL, ranks).result(), x, 1e-12)


@pytest.mark.parametrize("only", [(0,), (2, 5), (7,)])
def test_some_ranks_of_our_ring(only):
    x = inputs(torch.float64)
    ring = VirtualRing(x, CAUSAL, 8, only=only)
    found, want = ring.result(), oracle(x.q, x.k, x.v, CAUSAL, x.dout)
    torch.testing.assert_close(found.out, want.out[:, ring.rows], atol=1e-12, rtol=0)
    torch.testing.assert_close(found.dq, want.dq[:, ring.rows], atol=1e-12, rtol=0)
    assert found.dk is None
    assert ring.share == pytest.approx(len(only) / 8, rel=0.02)  # a causal zigzag is balanced


def test_what_is_timed_is_what_was_checked_without_messages():
    ring = VirtualRing(inputs(torch.float32), CAUSAL, 4)
    ring.result()
    assert [out.shape for out, _ in ring.forward()] == [(1, 24, 8, 8)] * 4
    assert all(torch.stack([g.isfinite().all() for g in rank]).all() for rank in ring.backward())


def test_sums_in_16_bits_are_worse():
    x = inputs(torch.bfloat16, kv_heads=8)
    want, kernel = whole(x), FlashForCpu()
    theirs = relative_errors(TransformerEngine(x, 16, kernel).result(), want)
    others = relative_errors(RingFlashAttention(x, 16, kernel).result(), want)
    assert theirs["out"] > 1.3 * others["out"]
    assert theirs["dq"] > others["dq"]


def test_an_lse_in_16_bits_is_worse_and_has_no_backward():
    x = inputs(torch.bfloat16)
    ring = Yunchang(x, 4, FlashForCpu())
    theirs = relative_errors(ring.result(), whole(x))
    assert set(theirs) == {"out", "lse"}
    assert theirs["lse"] > 1e-4
    assert not ring.has_backward


def test_lengths_and_heads_that_they_cannot_deal():
    with pytest.raises(LayoutError, match="multiple of 10 tokens, got 96"):
        RingFlashAttention(inputs(torch.float32), 5, FlashForCpu())
    with pytest.raises(LayoutError, match="8 ranks"):
        Ulysses(inputs(torch.float32, kv_heads=4), 8, FlashForCpu())


def test_on_the_cpu_there_is_one_kernel():
    assert list(direct_kernels(CPU)) == ["cpu"]
