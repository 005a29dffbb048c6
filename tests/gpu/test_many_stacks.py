"""Many stacks in one launch, compiled, as `auto` takes them: right, never waiting, the same again, and in graphs."""

from __future__ import annotations

import random

import pytest
import torch

import longring as lr
import stacking
from longring.kernels.fused import FusedKernel
from longring.kernels.recipes import Together
from longring.kernels.select import select_kernel
from longring.testing import Result, judge
from never_waiting import never_waiting

tiles = pytest.importorskip("longring.kernels.triton.tiles", reason="needs triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of flash-attn-4's compiler, to its authors
]

N = 4096


def documents(count: int, n: int = N) -> list[int]:
    return [0, *sorted(random.Random(0).sample(range(1, n), count - 1)), n]


PATTERNS = {
    "documents": lr.Dense(documents=documents(60)),
    "documents of each batch row": lr.Dense(documents=[documents(30), documents(40)]),
    "window": lr.Dense(window=(200, 0)),
    "longnet": lr.Dilated([256, 512, 1024, 4096], [1, 2, 4, 8]),
}


def tensors(heads: int, kv_heads: int, d: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16):
    shapes = [(batch, N, some, d) for some in (heads, kv_heads, kv_heads, heads)]
    *qkv, dout = stacking.draw(*shapes, dtype=dtype, device="cuda")
    q, k, v = (x.requires_grad_() for x in qkv)
    return q, k, v, dout


def packed(q, k, pattern, which) -> int:
    """How many stacks go together, by `auto`."""
    kernel, _ = select_kernel("auto", q, k)
    assert isinstance(kernel, FusedKernel)
    tiles = stacking.pattern_tiles(pattern, q.shape[0], N, q.shape[2], k.shape[2])
    legs = kernel.recipe(which, tiles, q, k, is_first=True, can_be_done=True)
    return sum(len(step.stacks) for leg in legs for step in leg.steps if isinstance(step, Together))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 4, 128), (8, 2, 64)])
def test_what_auto_packs_is_right(pattern, heads, kv_heads, d):
    whole = PATTERNS[pattern]
    q, k, v, dout = tensors(heads, kv_heads, d, batch=2 if "batch" in pattern else 1)
    assert packed(q, k, whole, "forward")
    assert packed(q, k, whole, "backward")
    out, lse = lr.attention(q, k, v, pattern=whole, return_lse=True)
    dlse = stacking.draw(tuple(lse.shape), dtype=torch.float32, device="cuda", seed=3)[0]
    got = Result(out.detach(), lse.detach(), *torch.autograd.grad((out, lse), (q, k, v), (dout, dlse)))
    verdicts = judge(got, q, k, v, whole, dout, dlse)
    assert all(verdict.ok for verdict in verdicts), verdicts


@pytest.mark.parametrize("pattern", ["documents", "longnet"])
def test_virtual_ranks(pattern):
    q, k, v, dout = tensors(4, 2, 64)
    layout = "dealt" if pattern == "documents" else "contiguous"
    sim = lr.simulate(q, k, v, ranks=3, pattern=PATTERNS[pattern], layout=layout)
    got = Result(sim.out.detach(), sim.lse.detach(), *torch.autograd.grad(sim.out, (q, k, v), dout))
    verdicts = judge(got, q, k, v, PATTERNS[pattern], dout)
    assert all(verdict.ok for verdict in verdicts), verdicts


def both(q, k, v, dout, **options):
    out = lr.attention(q, k, v, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_bits_again(pattern):
    whole = PATTERNS[pattern]
    given = tensors(4, 4, 64, batch=2 if "batch" in pattern else 1)
    once, again = (both(*given, pattern=whole, kernel="triton", deterministic=True) for _ in range(2))
    assert all(map(torch.equal, once, again))


def test_a_known_call_never_waits():
    given = tensors(4, 4, 64)
    both(*given, pattern=PATTERNS["documents"])
    with never_waiting():
        both(*given, pattern=PATTERNS["documents"])


def test_a_captured_call_outlives_what_is_remembered_of_it():
    q, k, v, _ = tensors(4, 4, 64)
    pattern = PATTERNS["documents"]
    with torch.no_grad():
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            want = lr.attention(q, k, v, pattern=pattern)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = lr.attention(q, k, v, pattern=pattern)
        tiles._shelf.clear()
        torch.cuda.synchronize()
        rubbish = [torch.full((size,), -1, dtype=torch.int64, device="cuda") for size in range(1, 4000, 3)]
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(out, want)
    del rubbish
