"""Windows uncut, and documents as sequences of one launch, by every flash attention there is and by ours, compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import longring as lr
import stacking
from longring.geometry.sequences import Window
from longring.kernels.operations.contract import Rows
from longring.kernels.operations.sequences import How, OfSequences
from longring.kernels.operations.triton import TritonTiles
from longring.kernels.select import KERNELS
from longring.testing import Result, judge
from never_waiting import never_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # flash-attn-4 compiles for seconds, for every kind of call
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of flash-attn-4's compiler, to its authors
]

OF_FLASH = ["flash_attn_4", "flash_attn_3", "flash_attn_2", "flash"]
every_kernel = pytest.mark.parametrize("kernel", [*OF_FLASH, "triton"])
every_flash = pytest.mark.parametrize("kernel", OF_FLASH)

N = 1021
BOUNDS = [0, 1, 2, 129, 257, 258, 386, 513, 900, N]  # lengths of 1, of a block, and of one row less and more
PATTERNS = {
    "window": lr.Dense(window=(200, 0)),
    "narrow window": lr.Dense(window=(1, 0)),
    "both sides": lr.Dense(causal=False, window=(130, 70)),
    "one key": lr.Dense(causal=False, window=(0, 0)),
    "to the left": lr.Dense(causal=False, window=(90, None)),
    "to the right": lr.Dense(causal=False, window=(None, 90)),
    "documents": lr.Dense(documents=BOUNDS),
    "full documents": lr.Dense(causal=False, documents=BOUNDS),
    "window in documents": lr.Dense(window=(100, 0), documents=BOUNDS),
    "both sides in documents": lr.Dense(causal=False, window=(40, 20), documents=BOUNDS),
}


def tensors(heads=4, kv_heads=2, d=128, *, batch=1, n=N, n_q=None):
    shapes = [(batch, n_q or n, heads, d), *[(batch, n, kv_heads, d)] * 2, (batch, n_q or n, heads, d)]
    *qkv, dout = stacking.draw(*shapes, dtype=torch.bfloat16, device="cuda")
    dlse = stacking.draw((batch, heads, n_q or n), dtype=torch.float32, device="cuda", seed=3)[0]
    q, k, v = (x.requires_grad_() for x in qkv)
    return q, k, v, dout, dlse


def willing(kernel, q, k):
    if (reason := KERNELS[kernel].refusal(q, k)) is not None:
        pytest.skip(f"{kernel} {reason}")


def check(kernel, pattern, q, k, v, dout, dlse=None, **options):
    out, lse = lr.attention(q, k, v, pattern=pattern, kernel=kernel, return_lse=True, **options)
    outputs, given = ((out, lse), (dout, dlse)) if dlse is not None else (out, dout)
    got = Result(out.detach(), lse.detach(), *torch.autograd.grad(outputs, (q, k, v), given))
    verdicts = judge(got, q, k, v, pattern, dout, dlse)
    assert all(verdict.ok for verdict in verdicts), verdicts


@pytest.fixture
def launches(monkeypatch):
    """How many packs were computed, by whom."""
    found = []
    for kind in (OfSequences, TritonTiles):
        for name in ("forward_many", "backward_many"):
            plain = getattr(kind, name)

            def counted(self, *args, plain=plain):
                found.append(self.name)
                return plain(self, *args)

            monkeypatch.setattr(kind, name, counted)
    return found


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 4, 64), (4, 2, 128), (8, 1, 64), (2, 2, 256)])
@every_kernel
def test_right_in_one_launch(kernel, heads, kv_heads, d, pattern, launches):
    q, k, v, dout, dlse = tensors(heads, kv_heads, d)
    willing(kernel, q, k)
    check(kernel, PATTERNS[pattern], q, k, v, dout)
    assert launches == [kernel] * 2
    launches.clear()
    check(kernel, PATTERNS[pattern], q, k, v, dout, dlse)
    takes_a_slope = kernel in ("flash_attn_4", "triton")  # others are told of it in columns, stack by stack
    assert launches == [kernel] * (2 if takes_a_slope else 1)


@every_flash
def test_equal_documents(kernel, launches):
    """One stack of many: where sequences are known, nothing of it is merged."""
    q, k, v, dout, _ = tensors(n=1024)
    willing(kernel, q, k)
    check(kernel, lr.Dense(documents=range(0, 1025, 64)), q, k, v, dout)
    assert launches == [kernel] * 2


@every_kernel
def test_batch_rows(kernel, launches):
    q, k, v, dout, _ = tensors(batch=3)
    willing(kernel, q, k)
    own = lr.Dense(documents=[BOUNDS, [0, N], [0, 500, N]])
    patterns = [PATTERNS["documents"], PATTERNS["window"], own, lr.Dense(window=(77, 0), documents=own.documents)]
    for pattern in patterns:
        check(kernel, pattern, q, k, v, dout)
    assert launches == [kernel] * 2 * len(patterns)
    wide = [x.detach() for x in tensors(batch=3, n=N + 7)[:4]]
    some = [x[:, 3 : N + 3] for x in wide]  # batch rows that do not follow each other
    check(kernel, PATTERNS["documents"], *(x.requires_grad_() for x in some[:3]), some[3])


@pytest.mark.parametrize("kernel", [*OF_FLASH, "triton", "auto"])
@pytest.mark.parametrize("n_q", [1, 5, 300])
def test_queries_behind_a_cached_prefix(kernel, n_q):
    q, k, v, dout, dlse = tensors(n_q=n_q)
    if kernel != "auto":
        willing(kernel, q, k)
    for pattern in (lr.Dense(), lr.Dense(window=(200, 0)), lr.Dense(causal=False, window=(100, 50))):
        check(kernel, pattern, q, k, v, dout)
        check(kernel, pattern, q, k, v, dout, dlse)


@pytest.mark.parametrize("schedule", ["ring", "exchange", "gather"])
@pytest.mark.parametrize("pattern", ["window", "documents", "window in documents"])
@every_flash
def test_over_virtual_ranks(kernel, pattern, schedule):
    q, k, v, dout, _ = tensors()
    willing(kernel, q, k)
    for layout in ("contiguous", "zigzag"):
        options = {"kernel": kernel, "schedule": schedule, "layout": layout}
        sim = lr.simulate(q, k, v, ranks=3, pattern=PATTERNS[pattern], **options)
        grads = torch.autograd.grad(sim.out, (q, k, v), dout)
        verdicts = judge(Result(sim.out.detach(), sim.lse.detach(), *grads), q, k, v, PATTERNS[pattern], dout)
        assert all(verdict.ok for verdict in verdicts), verdicts


def both(q, k, v, dout, pattern, **options):
    out = lr.attention(q, k, v, pattern=pattern, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize("pattern", ["window", "documents", "both sides in documents"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("kernel", [name for name in OF_FLASH if name != "flash"])
def test_the_same_bits_where_they_are_asked_for(kernel, pattern, kv_heads):
    *given, _ = tensors(4, kv_heads, 64, n=4 * N)
    willing(kernel, *given[:2])
    whole = PATTERNS[pattern]
    if whole.documents is not None:
        whole = lr.Dense(causal=whole.causal, window=whole.window, documents=[4 * b for b in BOUNDS])
    runs = [both(*given, whole, kernel=kernel, deterministic=True) for _ in range(3)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("pattern", ["window", "documents"])
@every_kernel
def test_a_known_call_never_waits_and_can_be_captured(kernel, pattern):
    q, k, v, dout, _ = tensors()
    willing(kernel, q, k)
    want = both(q, k, v, dout, PATTERNS[pattern], kernel=kernel)[0]
    with never_waiting():
        both(q, k, v, dout, PATTERNS[pattern], kernel=kernel)
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = lr.attention(q, k, v, pattern=PATTERNS[pattern], kernel=kernel)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(out, want)


# -------------------------------------------------------------------------------------- beyond what a launch takes


def large(*shapes):
    """Drawn where they are: a processor takes seconds for them."""
    draw = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=draw) for shape in shapes]


def willing_at(kernel, d):
    """Asked before anything large is made: what a skipped test has made stays."""
    if kernel != "auto":
        willing(kernel, *large((1, 1, 2, d), (1, 1, 2, d)))


def in_pieces(x, length):
    return x.detach().float().unflatten(1, (-1, length)).flatten(0, 1).transpose(1, 2)


@pytest.mark.parametrize("kernel", [*OF_FLASH, "triton", "auto"])
def test_more_sequences_than_an_axis_of_a_grid_has(kernel):
    """And a backward that holds whole blocks for each of them does not hold all of them at once."""
    willing_at(kernel, 64)
    length, many = 16, (1 << 16) + 3
    q, k, v, dout = large(*[(1, many * length, 2, 64)] * 4)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    bounds = [0, 5, *range(2 * length, many * length, length), many * length]  # the first two are others than the rest
    out = lr.attention(q, k, v, pattern=lr.Dense(documents=bounds), kernel=kernel)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
    assert torch.cuda.max_memory_allocated() - before < 8 * q.nbytes + (1 << 29)
    pieces = [in_pieces(x, length).requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):  # the others have a grid with an end, too
        plain = F.scaled_dot_product_attention(*pieces, is_causal=True)
        want = [plain, *torch.autograd.grad(plain, pieces, in_pieces(dout, length))]
    for mine, its in zip(got, want, strict=True):
        mine = in_pieces(mine, length)[2:]
        assert (mine - its[2:]).norm() < 1e-2 * its[2:].norm()


@pytest.mark.parametrize("kernel", ["flash_attn_2", "flash"])
def test_what_one_group_of_stacks_is_refused_for_is_not_left_out(kernel):
    willing_at(kernel, 64)
    q, k, v, dout = large(*[(1, (1 << 18) + more, 2, 64) for more in (90, 50, 50, 90)])
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    results = []
    for name in (kernel, "triton"):
        pattern = lr.Dilated([4, 4, 4, 300], [2, 2, 2, 1])
        out, lse = lr.attention(q, k, v, pattern=pattern, kernel=name, query_offset=0, return_lse=True)
        results.append([lse.detach().exp(), out.detach(), *torch.autograd.grad(out, (q, k, v), dout)])
    for mine, its in zip(*results, strict=True):
        assert (mine - its).float().norm() < 1e-2 * its.float().norm()


@pytest.fixture
def all_memory_back():
    """Others on this GPU need it."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("kernel", ["flash_attn_2", "flash"])
@pytest.mark.parametrize("window", [Window(255, 0), Window(None, 0)])
def test_batch_rows_further_apart_than_32_bits_can_say(kernel, window, all_memory_back):
    willing_at(kernel, 128)
    if torch.cuda.mem_get_info()[0] < 100 << 30:
        pytest.skip("needs 100 GiB of a GPU that nobody uses")
    (operation,) = KERNELS[kernel]._operations
    n, heads = (1 << 20, 16) if window.left else (1 << 15, 512)
    q, k, v, dout = large(*[(2, heads, n, 128)] * 4)
    how = How(128**-0.5, window)
    out, lse = operation._forward(q, k, v, how)
    got = operation._backward(Rows(dout, out, lse, None), q, k, v, how)
    one = [x[1:] for x in (dout, out, lse, q, k, v)]
    want = operation._backward(Rows(*one[:3], None), *one[3:], how)
    for mine, its in zip(got, want, strict=True):
        part = slice(None, None, max(1, n // 4096))
        assert (mine[1:, :, part] - its[:, :, part]).float().norm() < 1e-2 * its[:, :, part].float().norm()


def test_a_large_gradient_of_lse_in_float16():
    """As of a loss that is scaled for it."""
    for kernel in ("flash", "cudnn", "flash_attn_3", "auto"):
        q, k, v, _, dlse = (x.detach() for x in tensors())
        q, k, v = (x.half().requires_grad_() for x in (q, k, v))
        if kernel != "auto" and KERNELS[kernel].refusal(q, k) is not None:
            continue
        grads = []
        for scale in (1.0, 30000.0):
            _, lse = lr.attention(q, k, v, kernel=kernel, return_lse=True)
            grads.append([x.double() / scale for x in torch.autograd.grad(lse, (q, k), scale * dlse)])
        for mine, its in zip(*grads, strict=True):
            assert (mine - its).norm() < 2e-3 * its.norm()
