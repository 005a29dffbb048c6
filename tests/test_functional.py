"""What a user calls: on one process it is simply exact attention, over ranks it is the same numbers."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

import longring as lr
from longring.kernels.operations.cpu import CpuFlash
from longring.testing import Result, judge, run_ranks
from longring.testing.budgets import distance
from longring.transport.alone import Alone

DILATED = {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}


def tensors(n_q=13, n_k=None, heads=4, kv_heads=2, d=4, batch=2, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    n_k = n_q if n_k is None else n_k
    shapes = [(batch, n_q, heads, d), (batch, n_k, kv_heads, d), (batch, n_k, kv_heads, d)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


# ---------------------------------------------------------------------------------------------- one process


def test_it_is_torchs_attention_without_ceremony():
    q, k, v = tensors(kv_heads=4, dtype=torch.float32)
    want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    torch.testing.assert_close(lr.attention(q, k, v), want)
    torch.testing.assert_close(lr.ring_attention(q, k, v), want)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize(
    "pattern",
    [
        lr.Dense(causal=True),
        lr.Dense(causal=False, window=(3, 2)),
        lr.Dense(documents=[0, 2, 7]),
        lr.Dense(lengths=[7, 3]),
        lr.Dilated([3, 7], [1, 2]),
        lr.Dilated([4, 5], [1, 3], causal=False, phase="block"),
    ],
    ids=repr,
)
def test_gradcheck_with_lse(pattern, kernel):
    q, k, v = tensors(n_q=7, d=2)

    def both(q, k, v):
        return lr.attention(q, k, v, pattern=pattern, kernel=kernel, return_lse=True)

    assert torch.autograd.gradcheck(both, (q, k, v))


def test_gradcheck_of_dilated_attention_alone():
    assert torch.autograd.gradcheck(lambda *qkv: lr.dilated_attention(*qkv, **DILATED), tuple(tensors(n_q=9, d=2)))


def test_gradcheck_of_queries_on_a_cached_prefix():
    assert torch.autograd.gradcheck(lambda *qkv: lr.attention(*qkv), tuple(tensors(n_q=3, n_k=8, d=2)))


def test_lse_alone_is_differentiable():
    q, k, v = tensors(n_q=7, d=2)
    assert torch.autograd.gradcheck(lambda q, k: lr.attention(q, k, v.detach(), return_lse=True)[1], (q, k))


def test_out_and_lse_have_the_promised_shapes_and_dtypes():
    for dtype, lse_dtype in [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2]:
        q, k, v = tensors(dtype=dtype)
        out, lse = lr.attention(q, k, v, return_lse=True)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        assert (lse.shape, lse.dtype) == ((2, 4, 13), lse_dtype)
        assert out.is_contiguous()
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert [g.dtype for g in gradients] == [dtype] * 3


def test_scale_and_query_offset_are_honoured():
    q, k, v = tensors(n_q=5, n_k=9)
    dout = torch.randn(q.shape, dtype=torch.float64)
    scales = [{"scale": 0.1}, {"scale": -2.0}, {"scale": 0.0}]  # at 0 and below a causal fused kernel may give nan
    for options in (*scales, {"query_offset": 0}, {"query_offset": -2}, {"query_offset": 7}):
        out, lse = lr.attention(q, k, v, return_lse=True, **options)
        got = Result(out, lse, *torch.autograd.grad(out, (q, k, v), dout))
        assert all(verdict.ok for verdict in judge(got, q, k, v, lr.Dense(), dout, **options)), options


def test_inputs_of_any_stride():
    packed = torch.randn(2, 13, 3, 4, 8, dtype=torch.float64)
    strided = torch.randn(3, 2, 13, 4, 16, dtype=torch.float64)[..., ::2]
    expanded = torch.randn(3, 1, 13, 4, 8, dtype=torch.float64).expand(3, 2, 13, 4, 8)
    for q, k, v in (packed.unbind(2), strided.unbind(0), expanded.unbind(0)):
        want = lr.attention(q.contiguous(), k.contiguous(), v.contiguous())
        torch.testing.assert_close(lr.attention(q, k, v), want)


def test_nothing_is_kept_where_no_gradient_is_asked_for():
    q, k, v = (x.detach() for x in tensors())
    assert not lr.attention(q, k, v).requires_grad
    with torch.no_grad():
        assert not lr.attention(*tensors()).requires_grad
    with torch.inference_mode():
        assert not lr.attention(*tensors()).requires_grad


def test_one_of_three_may_ask_for_its_gradient():
    q, k, v = tensors()
    want = torch.autograd.grad(lr.attention(q, k, v).sum(), k)[0]
    got = torch.autograd.grad(lr.attention(q.detach(), k, v.detach()).sum(), k)[0]
    assert torch.equal(got, want)


def test_large_head_dimensions_fall_to_the_reference_and_are_exact():
    q, k, v = tensors(n_q=5, heads=1, kv_heads=1, d=600)
    assert lr.explain(q, k, v).kernel.name == "reference"
    out, lse = lr.attention(q, k, v, return_lse=True)
    dout = torch.ones_like(out)
    got = Result(out, lse, *torch.autograd.grad(out, (q, k, v), dout))
    assert all(verdict.ok for verdict in judge(got, q, k, v, lr.Dense(), dout))


def test_a_column_is_left_for_the_gradient_of_lse():
    """The fused kernel takes 512 columns, and the gradient of lse needs one."""
    assert lr.explain(*tensors(n_q=3, d=511)).kernel.name == "sdpa"
    wide = tensors(n_q=3, d=512)
    assert lr.explain(*wide).kernel.name == "reference"
    with pytest.raises(lr.KernelRefusal, match="head dimension below 512, got 512"):
        lr.attention(*wide, kernel="sdpa")


def test_deterministic_gives_the_same_bits():
    q, k, v = tensors(n_q=200, dtype=torch.float32)
    runs = [torch.autograd.grad(lr.attention(q, k, v, deterministic=True).sum(), (q, k, v)) for _ in range(2)]
    assert all(map(torch.equal, *runs))


def test_deterministic_never_takes_a_kernel_that_is_not(monkeypatch):
    monkeypatch.setattr(CpuFlash, "is_deterministic", False)
    q, k, v = tensors()
    assert lr.explain(q, k, v).kernel.name == "sdpa"
    chosen = lr.explain(q, k, v, deterministic=True).kernel
    assert chosen.name == "reference"
    assert "other bits from run to run" in chosen.reason
    with pytest.raises(lr.KernelRefusal, match="deterministic=True was asked for"):
        lr.attention(q, k, v, kernel="sdpa", deterministic=True)


@pytest.mark.parametrize(
    "options", [{"causal": False}, {"window": (3, 0)}, {"documents": [0, 5, 13]}, {"lengths": [13, 4]}], ids=str
)
def test_ring_attention_is_dense_attention_of_its_options(options):
    q, k, v = tensors()
    want = lr.attention(q, k, v, pattern=lr.Dense(**options))
    assert not torch.equal(want, lr.attention(q, k, v))
    assert torch.equal(lr.ring_attention(q, k, v, **options), want)


@pytest.mark.parametrize("options", [{"causal": False}, {"phase": "block"}, {"documents": [0, 5, 13]}], ids=str)
def test_dilated_attention_is_attention_of_its_options(options):
    q, k, v = tensors(heads=6, kv_heads=3)
    want = lr.attention(q, k, v, pattern=lr.Dilated([4, 8], [1, 2], **options))
    assert not torch.equal(want, lr.dilated_attention(q, k, v, **DILATED))
    assert torch.equal(lr.dilated_attention(q, k, v, **DILATED, **options), want)


@pytest.mark.parametrize("schedule", ["ring", "exchange", "gather"])
def test_a_schedule_asked_for_by_name_is_taken(schedule):
    q, k, v = tensors()
    assert lr.explain(q, k, v, schedule=schedule).schedule == (schedule, "asked for by name")


def test_rows_left_out_are_warned_about_once():
    from longring.call import _warn_of_rows_left_out

    _warn_of_rows_left_out.cache_clear()
    q, k, v = tensors()
    with pytest.warns(lr.RowsLeftOut, match="see nothing"):
        lr.dilated_attention(q, k, v, segment_lengths=[8], dilation_rates=[2])
    lr.dilated_attention(q, k, v, segment_lengths=[8], dilation_rates=[2])  # a second warning would be an error here


def test_explain_says_what_is_taken_and_why(caplog):
    q, k, v = tensors(dtype=torch.float32)
    explanation = lr.explain(q, k, v, pattern=lr.Dilated([4, 8], [1, 2]))
    assert explanation.kernel.name == "sdpa"
    assert "sdpa" in str(explanation)
    assert "schedule" in str(explanation)
    assert lr.explain(q, k, v, kernel="reference").kernel.reason == "asked for by name"
    with caplog.at_level(logging.DEBUG, logger="longring"):
        lr.attention(q, k, v)
    assert "kernel sdpa" in caplog.text


# ---------------------------------------------------------------------------------------------- over ranks


def over_ranks(p, tensors, attend, layout="zigzag", **options):
    """Whole outputs and whole gradients of `attend(q, k, v, sharding=...)` over p ranks, as rank 0 sees them."""

    def program(group):
        q, k, v = (x.detach().clone().requires_grad_() for x in tensors)
        queries, keys = (lr.Sharding(x.shape[1], group, layout, **options) for x in (q, k))
        dealt = {"sharding": queries} if q.shape[1] == k.shape[1] else {"sharding": queries, "kv_sharding": keys}
        out = queries.unshard(attend(queries.shard(q), keys.shard(k), keys.shard(v), **dealt))
        return out, torch.autograd.grad(out.square().sum(), (q, k, v))

    results = run_ranks(p, program)
    for out, gradients in results[1:]:  # every rank ends with the whole result and the whole gradient
        assert torch.equal(out, results[0][0])
        assert all(map(torch.equal, gradients, results[0][1]))
    return results[0]


@pytest.mark.parametrize("schedule", ["auto", "ring", "exchange", "gather"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_ranks_give_what_one_process_gives(schedule, layout, p):
    for n_q, n_k in [(13, 13), (4, 13)]:
        given = tensors(n_q, n_k)
        q, k, v = given
        want = lr.attention(q, k, v)
        gradients = torch.autograd.grad(want.square().sum(), given)

        def attend(q, k, v, **dealt):
            return lr.attention(q, k, v, schedule=schedule, **dealt)

        got, got_gradients = over_ranks(p, given, attend, layout)
        assert distance(got, want) < 1e-12
        assert max(map(distance, got_gradients, gradients)) < 1e-12


def test_dilated_attention_over_ranks():
    given = tensors(n_q=29)
    want = lr.dilated_attention(*given, **DILATED)
    gradients = torch.autograd.grad(want.square().sum(), given)

    def attend(q, k, v, sharding):
        return lr.dilated_attention(q, k, v, **DILATED, sharding=sharding)

    got, got_gradients = over_ranks(3, given, attend, "contiguous", align=8)
    assert distance(got, want) < 1e-12
    assert max(map(distance, got_gradients, gradients)) < 1e-12


def test_ranges_of_any_shape_over_ranks():
    ranges = [[range(1, 13, 3)], [range(1), range(2, 3), range(5, 13, 3)], [], [range(3, 13, 3)]]
    q, k, v = tensors(n_q=13)
    want = lr.attention(q, k, v)

    def program(group):
        s = lr.Sharding.from_ranges(ranges, group=group)
        return s.unshard(lr.attention(s.shard(q), s.shard(k), s.shard(v), sharding=s)).detach()

    for got in run_ranks(4, program):
        assert distance(got, want) < 1e-12


def test_group_and_layout_instead_of_a_sharding():
    q, k, v = tensors(n_q=12)
    want = lr.attention(q, k, v)

    def program(group):
        s = lr.Sharding(12, group, "striped")
        return s.unshard(lr.attention(s.shard(q), s.shard(k), s.shard(v), group=group, layout="striped")).detach()

    for got in run_ranks(3, program):
        assert distance(got, want) < 1e-12


def test_lse_is_returned_and_differentiable_over_ranks():
    q, k, v = tensors(n_q=11)
    _, lse = lr.attention(q, k, v, return_lse=True)
    want = torch.autograd.grad(lse.square().sum(), (q, k))

    def program(group):
        mine = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        s = lr.Sharding(11, group)
        _, lse = lr.ring_attention(*map(s.shard, mine), sharding=s, return_lse=True)
        return torch.autograd.grad(s.unshard(lse, dim=2).square().sum(), mine[:2])

    for got in run_ranks(3, program):
        assert max(map(distance, got, want)) < 1e-12


def test_ranks_that_disagree_are_told_so_and_do_not_hang():
    q, k, v = tensors(n_q=12)

    def program(group):
        length = 12 if group.rank else 11
        s = lr.Sharding(length, group, "contiguous")
        return lr.ring_attention(*(s.shard(x[:, :length]) for x in (q, k, v)), sharding=s, timeout=20)

    with pytest.raises(lr.TransportError, match="all ranks must"):
        run_ranks(3, program)


def test_a_forgotten_group_never_becomes_local_attention(monkeypatch):
    monkeypatch.setattr("longring.call.world_size", lambda: 4)
    q, k, v = tensors()
    with pytest.raises(lr.ScheduleRefusal, match="world of 4 ranks"):
        lr.ring_attention(q, k, v)
    with pytest.raises(lr.ScheduleRefusal, match="world of 4 ranks"):
        lr.attention(q, k, v, schedule="gather")
    assert lr.attention(q, k, v).shape == q.shape  # a module inside DDP stays local


def test_a_sharding_without_a_group_is_a_forgotten_group_too(monkeypatch):
    q, k, v = tensors(n_q=12)
    s = lr.Sharding(12)
    assert lr.ring_attention(q, k, v, sharding=s).shape == q.shape  # in a world of one it is right
    monkeypatch.setattr("longring.call.world_size", lambda: 4)
    with pytest.raises(lr.ScheduleRefusal, match="world of 4 ranks with a sharding that has no group; make it with"):
        lr.ring_attention(q, k, v, sharding=s)
    assert lr.attention(q, k, v, sharding=s).shape == q.shape
    whole = lr.Sharding(12, Alone())
    assert lr.ring_attention(q, k, v, sharding=whole).shape == q.shape  # named: a group of one is a group


@pytest.mark.parametrize("schedule", ["ring", "exchange", "gather"])
@pytest.mark.parametrize("differs", ["layout", "pattern", "scale", "query_offset"])
def test_ranks_that_ask_for_different_things_are_told_what_differs(schedule, differs):
    q, k, v = tensors(n_q=12)

    def program(group):
        odd = group.rank == 1
        layout = "zigzag" if odd and differs == "layout" else "contiguous"
        options = {
            "pattern": lr.Dense(causal=True, window=(5 if odd and differs == "pattern" else 6, 0)),
            "scale": 0.5 if odd and differs == "scale" else 0.25,
            "query_offset": 1 if odd and differs == "query_offset" else 0,
        }
        s = lr.Sharding(12, group, layout)
        return lr.attention(*map(s.shard, (q, k, v)), sharding=s, schedule=schedule, **options)

    with pytest.raises(lr.TransportError, match=r"rank . and rank . disagree .*; all ranks must make the same call"):
        run_ranks(3, program)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_autocast_does_not_round_what_is_float32(kernel):
    q, k, v = tensors(dtype=torch.float32)
    want = torch.autograd.grad(lr.attention(q, k, v, kernel=kernel).sum(), (q, k, v))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = lr.attention(q, k, v, kernel=kernel)
        got = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.dtype == torch.float32
    assert torch.equal(out, lr.attention(q, k, v, kernel=kernel))
    assert all(map(torch.equal, got, want))


def test_a_second_derivative_is_refused_even_where_the_first_looks_constant():
    q, k, v = tensors()
    out = lr.attention(q, k, v)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(lr.NotBuilt, match="second derivative"):
        gradient.square().sum().backward()


def test_scales_beyond_what_float32_can_hold():
    q, k, v = tensors(dtype=torch.float32)
    assert torch.allclose(lr.attention(q, k, v, scale=1e-46), lr.attention(q, k, v, scale=0.0))
    with pytest.raises(lr.ArgumentError, match="scale must be a finite number"):
        lr.attention(q, k, v, scale=1e300)


def test_errors_over_ranks_name_the_rank():
    q, k, v = tensors(n_q=12)

    def program(group):
        s = lr.Sharding(12, group)
        return lr.attention(*map(s.shard, (q, k, v)), sharding=s, scale="x" if group.rank else None)

    with pytest.raises(lr.ArgumentError, match="rank 1: scale must be a finite number, got 'x'"):
        run_ranks(2, program)
    with pytest.raises(lr.LayoutError, match=r"rank \d: layout must be one of"):
        run_ranks(2, lambda group: lr.Sharding(12, group, "spiral"))


def test_shards_lie_in_memory_as_they_read():
    def program(group):
        s = lr.Sharding(10, group)
        part = s.shard(torch.randn(3, 10, 2, 4))
        return part.is_contiguous(), s.unshard(part).is_contiguous()

    assert run_ranks(2, program) == [(True, True)] * 2


def test_the_world_is_the_one_that_torch_knows(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    with pytest.raises(lr.ScheduleRefusal, match="world of 4 ranks"):
        lr.ring_attention(*tensors())


@pytest.mark.parametrize("schedule", ["ulysses", "hybrid", "double_ring", "bidirectional"])
def test_a_rank_with_rows_and_nothing_to_compute_gets_its_answers(schedule):
    """The last of four ranks holds both rows; their one head is computed elsewhere."""
    x = torch.randn(3, 1, 2, 1, 4, dtype=torch.float64, requires_grad=True)
    want = torch.autograd.grad(lr.attention(*x).sum(), x)[0]

    def program(group):
        s = lr.Sharding.from_ranges([[], [], [], [range(2)]], group=group)
        out = lr.attention(*(s.shard(one) for one in x), sharding=s, schedule=schedule)
        return out, torch.autograd.grad(out.sum() + 0 * x.sum(), x)[0]

    results = run_ranks(4, program, node_ranks=2)
    assert torch.allclose(results[3][0], lr.attention(*x))
    assert all(torch.allclose(gradient, want) for _, gradient in results)


def test_the_output_may_be_written_into():
    q, k, v = (torch.randn(1, 8, 2, 4, requires_grad=True) for _ in range(3))
    for pattern in (lr.Dense(), lr.Dense(causal=False), lr.Dilated([4, 8], [1, 2])):
        for kernel in ("sdpa", "reference"):
            out, lse = lr.attention(q, k, v, pattern=pattern, kernel=kernel, return_lse=True)
            want = out.detach() + 1
            out += 1
            lse.mul_(2)
            assert torch.equal(out, want)


def test_keys_of_another_world_are_refused():
    def program(group):
        mine = lr.Sharding(8, group, "contiguous")

        def other(stranger):
            x = torch.zeros(1, 4, 1, 4)
            return lr.attention(x, x, x, sharding=mine, kv_sharding=lr.Sharding(8, stranger, "contiguous"))

        return run_ranks(2, other)

    with pytest.raises(lr.LayoutError, match="kv_sharding is over"):
        run_ranks(2, program)
