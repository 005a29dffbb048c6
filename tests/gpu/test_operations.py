"""Every operation of a GPU, by name and by `auto`: whatever is asked, within the budget of its dtype."""

from __future__ import annotations

import pytest
import torch

import longring as lr
from longring.kernels.operations.flash_attn import FlashAttn4
from longring.kernels.select import KERNELS, ON_GPU
from longring.testing import Result, judge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of flash-attn-4's compiler, to its authors
]

PATTERNS = [
    lr.Dense(causal=True),
    lr.Dense(causal=False),
    lr.Dense(causal=False, window=(9, 4)),
    lr.Dense(documents=[0, 7, 8, 61, 97]),
    lr.Dilated([8, 16, 97], [1, 2, 4]),
    lr.Dilated([12, 48], [1, 3], causal=False, phase="block"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def tensors(dtype, *, heads=4, kv_heads=4, n=97, d=16, batch=2):
    draw = torch.Generator().manual_seed(0)
    shapes = [(batch, n, heads, d), (batch, n, kv_heads, d), (batch, n, kv_heads, d), (batch, n, heads, d)]
    q, k, v, dout = (torch.randn(shape, generator=draw, dtype=torch.float64).to("cuda", dtype) for shape in shapes)
    dlse = torch.randn(batch, heads, n, generator=draw, dtype=torch.float64).to("cuda", torch.float32)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout, dlse


def check(kernel, pattern, q, k, v, dout, dlse=None, **options):
    out, lse = lr.attention(q, k, v, pattern=pattern, kernel=kernel, return_lse=True, **options)
    outputs, given = ((out, lse), (dout, dlse)) if dlse is not None else (out, dout)
    got = Result(out, lse, *torch.autograd.grad(outputs, (q, k, v), given))
    verdicts = judge(got, q, k, v, pattern, dout, dlse, **({"scale": options["scale"]} if "scale" in options else {}))
    assert all(verdict.ok for verdict in verdicts), verdicts


def willing(kernel, q, k):
    reason = KERNELS[kernel].refusal(q, k) if kernel in KERNELS else None
    if reason is not None:
        pytest.skip(f"{kernel} {reason}")


@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", ["auto", *(operation.name for operation in ON_GPU)])
def test_every_pattern(kernel, dtype, kv_heads, with_dlse):
    q, k, v, dout, dlse = tensors(dtype, kv_heads=kv_heads)
    willing(kernel, q, k)
    for pattern in PATTERNS:
        check(kernel, pattern, q, k, v, dout, dlse if with_dlse else None)


@pytest.mark.parametrize("d", [1, 8, 20, 64, 72, 128, 200, 256, 300])
@pytest.mark.parametrize("kernel", ["auto", *(operation.name for operation in ON_GPU)])
def test_every_head_dimension(kernel, d):
    q, k, v, dout, dlse = tensors(torch.bfloat16, d=d)
    willing(kernel, q, k)
    check(kernel, lr.Dense(), q, k, v, dout)
    check(kernel, lr.Dense(), q, k, v, dout, dlse)


@pytest.mark.parametrize(("dtype", "d"), [*((dtype, 520) for dtype in DTYPES), (torch.float32, 1024)], ids=str)
def test_wide_heads_of_every_pattern(dtype, d):
    q, k, v, dout, dlse = tensors(dtype, d=d, kv_heads=2)
    for pattern in PATTERNS:
        check("auto", pattern, q, k, v, dout, dlse)


@pytest.mark.parametrize("n", [1, 2, 31, 33, 128, 257])
@pytest.mark.parametrize("kernel", ["auto", *(operation.name for operation in ON_GPU)])
def test_every_length(kernel, n):
    q, k, v, dout, dlse = tensors(torch.bfloat16, n=n, d=64)
    willing(kernel, q, k)
    check(kernel, lr.Dense(), q, k, v, dout)
    check(kernel, lr.Dense(causal=False), q, k, v, dout, dlse)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-3])
def test_every_scale(scale):
    q, k, v, dout, _ = tensors(torch.bfloat16)
    check("auto", lr.Dense(), q, k, v, dout, scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", ["auto", *(operation.name for operation in ON_GPU)])
def test_a_scale_below_zero_in_every_pattern(kernel, dtype):
    """Whose sign goes into q, and comes back out of dq: one stack at a time, many at once, and written at home."""
    q, k, v, dout, dlse = tensors(dtype, d=64, kv_heads=2)
    willing(kernel, q, k)
    for pattern in PATTERNS:
        check(kernel, pattern, q, k, v, dout, dlse, scale=-0.11)


def test_views_and_expanded_gradients():
    packed = torch.randn(2, 50, 3, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = packed.unbind(2)
    out = lr.attention(q, k, v)
    (got,) = torch.autograd.grad(out.sum(), packed)  # whose dout is one number, expanded
    plain = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(lr.attention(*plain), plain, torch.ones_like(out))
    assert torch.equal(got, torch.stack(want, dim=2))
    odd = torch.randn(3, 2, 50, 4, 65, device="cuda", dtype=torch.bfloat16)[..., 1:]  # not a multiple of 16 bytes
    out = lr.attention(*odd)
    assert torch.equal(out, lr.attention(*(x.contiguous() for x in odd)))


@pytest.mark.parametrize("pattern", [lr.Dense(), lr.Dilated([64, 128], [1, 2])], ids=["dense", "dilated"])
def test_the_same_bits_where_they_are_asked_for(pattern):
    q, k, v, dout, _ = tensors(torch.bfloat16, n=1024, d=64)
    runs = []
    for _ in range(3):
        out = lr.attention(q, k, v, pattern=pattern, deterministic=True)
        runs.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


@pytest.fixture
def only_the_same_bits(monkeypatch):
    """Operations that may give other bits raise where they are called; their strict kin are other objects."""

    def forbidden(*args, **options):
        raise AssertionError("an operation that may give other bits from run to run")

    for operation in ON_GPU:
        if not operation.is_deterministic:
            for name in ("forward", "backward", "forward_many", "backward_many", "forward_into", "backward_into"):
                if hasattr(operation, name):
                    monkeypatch.setattr(operation, name, forbidden)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_deterministic_calls_nothing_that_is_not(dtype, only_the_same_bits):
    """Equal bits in three runs prove little: what sums in any order may do so alike for hours."""
    q, k, v, dout, dlse = tensors(dtype, n=300, d=64)
    for pattern in [lr.Dense(), lr.Dense(causal=False, window=(9, 4)), lr.Dilated([64, 300], [1, 2])]:
        check("auto", pattern, q, k, v, dout, dlse, deterministic=True)
        for operation in ON_GPU:
            strict = operation.with_the_same_bits()
            if strict is None:
                with pytest.raises(lr.KernelRefusal, match="deterministic=True was asked for"):
                    lr.attention(q, k, v, pattern=pattern, kernel=operation.name, deterministic=True)
            elif strict.refusal(q, 64) is None:
                check(operation.name, pattern, q, k, v, dout, deterministic=True)
    cudnn_or_efficient = "cudnn" if dtype == torch.bfloat16 else "efficient"
    with pytest.raises(AssertionError, match="may give other bits"):  # the guard is awake
        lr.attention(q, k, v, kernel=cudnn_or_efficient)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_slabs_and_lazy_parts(kv_heads, ranks, monkeypatch):
    """What long sequences make the kernel do, on short ones: rows done slab by slab, and totals merged early."""
    monkeypatch.setattr("longring.geometry.portions.SMALLEST_SLAB", 1)
    monkeypatch.setattr("longring.kernels.totals.ALWAYS_HELD", 1)
    pattern = lr.Dilated([16, 32, 64], [1, 2, 4])
    q, k, v, dout, dlse = tensors(torch.bfloat16, n=512, d=64, kv_heads=kv_heads)
    sim = lr.simulate(q, k, v, ranks=ranks, pattern=pattern)
    got = Result(sim.out, sim.lse, *torch.autograd.grad((sim.out, sim.lse), (q, k, v), (dout, dlse)))
    verdicts = judge(got, q, k, v, pattern, dout, dlse)
    assert all(verdict.ok for verdict in verdicts), verdicts


@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize(("kv_heads", "d"), [(4, 64), (4, 128), (2, 64)])
@pytest.mark.parametrize("n", [512, 500])
def test_results_are_written_where_they_belong(n, kv_heads, d, with_dlse, monkeypatch):
    """By flash-attn-4, the branch that has every row; the others are merged into it, slab by slab."""
    monkeypatch.setattr("longring.geometry.portions.SMALLEST_SLAB", 1)
    q, k, v, dout, dlse = tensors(torch.bfloat16, n=n, d=d, kv_heads=kv_heads, batch=1)
    willing("flash_attn_4", q, k)
    written = []
    for name in ("forward_into", "backward_into"):
        plain = getattr(FlashAttn4, name)

        def counted(*args, plain=plain, name=name):
            written.append(name)
            return plain(*args)

        monkeypatch.setattr(FlashAttn4, name, counted)
    for pattern in (lr.Dilated([16, 32, 64], [1, 2, 4]), lr.Dilated([64, 512], [1, 4])):
        check("flash_attn_4", pattern, q, k, v, dout, dlse if with_dlse else None)
    assert written.count("forward_into") > 2
