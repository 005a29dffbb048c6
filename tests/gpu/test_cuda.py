"""The same numbers on a GPU: kernels, virtual ranks as threads on one device, and no deadlock in the backward."""

from __future__ import annotations

import pytest
import torch

import longring as lr
from longring.testing import Result, judge

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PATTERNS = [
    lr.Dense(causal=True),
    lr.Dense(causal=False, window=(9, 4)),
    lr.Dense(documents=[0, 7, 8, 61]),
    lr.Dilated([8, 16, 61], [1, 2, 4]),
]


def tensors(dtype, heads=4, kv_heads=2, n=61, d=16):
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, n, heads, d), (2, n, kv_heads, d), (2, n, kv_heads, d), (2, n, heads, d)]
    q, k, v, dout = (torch.randn(shape, generator=draw, dtype=torch.float64).to("cuda", dtype) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_one_device_keeps_the_budget(pattern, dtype):
    q, k, v, dout = tensors(dtype)
    out, lse = lr.attention(q, k, v, pattern=pattern, return_lse=True)
    got = Result(out, lse, *torch.autograd.grad(out, (q, k, v), dout))
    assert all(verdict.ok for verdict in judge(got, q, k, v, pattern, dout))


@pytest.mark.timeout(100)
@pytest.mark.parametrize("schedule", ["ring", "exchange", "gather"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_virtual_ranks_on_one_device(pattern, schedule):
    q, k, v, dout = tensors(torch.float32)
    sim = lr.simulate(q, k, v, ranks=5, pattern=pattern, schedule=schedule)
    got = Result(sim.out, sim.lse, *torch.autograd.grad(sim.out, (q, k, v), dout))
    assert all(verdict.ok for verdict in judge(got, q, k, v, pattern, dout))
    assert sim.bytes_sent == tuple(
        f + b for f, b in zip(sim.forward.predicted_bytes, sim.backward.predicted_bytes, strict=True)
    )
