"""Attention over stacks in Triton, compiled, with the block sizes it runs with."""

from __future__ import annotations

import random

import pytest
import torch

import longring as lr
import stacking
from longring.geometry.packs import apart
from longring.kernels.places import Place, Stack
from longring.testing import judge
from longring.testing.budgets import distance
from never_waiting import never_waiting

pytest.importorskip("triton", reason="needs triton")

from longring.kernels.triton import tiles

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NEAR = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def tensors(batch, n, kv_heads, share, d, dtype, seed=0):
    wide, narrow = (batch, n, kv_heads * share, d), (batch, n, kv_heads, d)
    return stacking.draw(wide, narrow, narrow, wide, dtype=dtype, device="cuda", seed=seed)


def check(q, k, v, found, scale, dout, dlse=None):
    want = [stacking.attended(q, k, v, stack, scale) for stack in found]
    for (out, lse), expected in zip(tiles.forward(q, k, v, apart(found), scale), want, strict=True):
        assert distance(out, expected[0]) <= NEAR[q.dtype] * expected[0].norm()
        assert distance(lse, expected[1]) <= NEAR[torch.float32] * expected[1].norm().clamp(min=1)
    out, lse = stacking.merged(want, found, q)
    got = tiles.backward(dout, out, lse, dlse, q, k, v, apart(found), scale)
    for *grads, stack in zip(*got, found, strict=True):
        for grad, expected in zip(grads, stacking.gradients(dout, out, lse, dlse, q, k, v, stack, scale), strict=True):
            terms = abs(scale) * expected.numel() ** 0.5  # what a gradient near 0 is the difference of
            assert distance(grad, expected) <= 2 * NEAR[q.dtype] * max(expected.norm(), terms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [16, 40, 64, 96, 128, 192, 256])
def test_many_stacks_anywhere(d, dtype):
    rng = random.Random(d)
    for share in (1, 3):
        found = [stacking.some_stack(rng, 2, 1000, 3, share) for _ in range(8)]
        q, k, v, dout = tensors(2, 1000, 3, share, d, dtype)
        dlse = stacking.draw((2, 3 * share, 1000), dtype=torch.float32, device="cuda", seed=1)[0]
        check(q, k, v, found, d**-0.5, dout, dlse)


@pytest.mark.parametrize("scale", [0.0, -0.1, 0.1])
def test_any_scale(scale):
    rng = random.Random(7)
    q, k, v, dout = tensors(1, 900, 2, 1, 128, torch.bfloat16)
    check(q, k, v, [stacking.some_stack(rng, 1, 900, 2, 1) for _ in range(6)], scale, dout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 16), (8, 2)])
@pytest.mark.parametrize(
    "pattern",
    [
        lr.Dense(causal=True),
        lr.Dense(causal=True, window=(300, 0)),
        lr.Dense(causal=True, documents=[0, 7, 8, 700, 1021]),
        lr.Dilated([64, 256, 1024], [1, 4, 16]),
    ],
    ids=repr,
)
def test_a_whole_pattern_by_its_stacks(pattern, heads, kv_heads, dtype):
    q, k, v, dout = tensors(1, 1021, kv_heads, heads // kv_heads, 64, dtype)
    dlse = stacking.draw((1, heads, 1021), dtype=torch.float32, device="cuda", seed=5)[0]
    found = stacking.pattern_stacks(pattern, 1, 1021, heads, kv_heads)
    got = stacking.through_stacks(tiles.forward, tiles.backward, q, k, v, found, 0.125, dout, dlse)
    verdicts = judge(got, q, k, v, pattern, dout, dlse, scale=0.125)
    assert all(verdict.ok for verdict in verdicts), verdicts


def test_rows_beyond_two_to_the_31_elements():
    n, heads, d, few = 1_200_000, 16, 128, 700
    q, k, v, dout = (torch.randn(1, n, heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    assert q.numel() > 1 << 31
    places = [Place(range(1), 1, 0, range(heads), 0, range(start, start + few), 1) for start in (n - few, 0)]
    far, near = (apart([Stack(place, place, hi=0)]) for place in places)
    tail = [x[:, -few:].contiguous() for x in (q, k, v, dout)]
    out, lse = torch.zeros_like(q), torch.full((1, heads, n), 9.0, device="cuda")
    for there, here in zip(tiles.forward(q, k, v, far, 0.09)[0], tiles.forward(*tail[:3], near, 0.09)[0], strict=True):
        assert torch.equal(there, here)
    there = tiles.backward(dout, out, lse, None, q, k, v, far, 0.09)
    here = tiles.backward(tail[3], out[:, -few:], lse[:, :, -few:], None, *tail[:3], near, 0.09)
    assert all(torch.equal(a, b) for (a,), (b,) in zip(there, here, strict=True))


def longnet(n=8192, heads=16):
    found = stacking.pattern_stacks(lr.Dilated([512, 1024, 2048], [1, 2, 4]), 1, n, heads, heads)
    return *tensors(1, n, heads, 1, 128, torch.bfloat16), apart(found)


def test_the_same_bits_again():
    q, k, v, dout, found = longnet()
    lse = torch.full((1, 16, 8192), 7.0, device="cuda")
    once, again = (
        [tiles.forward(q, k, v, found, 0.09), tiles.backward(dout, q, lse, None, q, k, v, found, 0.09)]
        for _ in range(2)
    )
    for first, second in zip(once, again, strict=True):
        for a, b in zip(first, second, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_known_call_never_waits_for_the_device():
    q, k, v, dout, found = longnet()
    lse = torch.full((1, 16, 8192), 7.0, device="cuda")

    def both():
        tiles.forward(q, k, v, found, 0.09)
        tiles.backward(dout, q, lse, None, q, k, v, found, 0.09)

    both()
    with never_waiting():
        both()


def test_a_list_written_on_one_stream_serves_another():
    q, k, v, _, found = longnet(n=4096)
    want = tiles.forward(q, k, v, found, 0.09)
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        got = tiles.forward(q, k, v, found, 0.09)
    other.synchronize()
    for a, b in zip(want, got, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
