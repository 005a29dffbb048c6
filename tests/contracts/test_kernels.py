"""One suite over every kernel: any list of tiles, forward and backward, is what the definition says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longring.geometry.itinerary import tiles_between
from longring.geometry.patterns import Dense
from longring.geometry.tiles import Repeat, Tile
from longring.kernels.contract import Upstream
from longring.kernels.select import KERNELS
from longring.numerics.online_softmax import accumulator_dtype, nothing_seen
from longring.testing import Result, judge, oracle, relative_error
from longring.testing.budgets import distance
from longring.transport.ledger import Ledger
from strategies import tasks

ON_CPU = ["sdpa", "reference"]
every_kernel = pytest.mark.parametrize("kernel", [KERNELS[name] for name in ON_CPU], ids=ON_CPU)
small_tasks = tasks(lengths=st.integers(1, 30), max_ranks=1)


def tensors(problem, share=1, d=4, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    batch, heads = problem.batch, problem.kv_heads * share
    shapes = [(batch, problem.n_q, heads, d), *[(batch, problem.n_k, problem.kv_heads, d)] * 2]
    q, k, v = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    dout = torch.randn(q.shape, generator=draw, dtype=torch.float64).to(dtype)
    dlse = torch.randn(batch, heads, problem.n_q, generator=draw, dtype=torch.float64).to(accumulator_dtype(dtype))
    return q, k, v, dout, dlse


def run(kernel, q, k, v, tiles, dout, dlse, scale=0.5):
    total = kernel.forward(q, k, v, tiles, scale=scale).result() if tiles else nothing_seen(q)
    out, lse = total.out.to(q.dtype), total.lse.to(accumulator_dtype(q.dtype))
    gradients = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
    if tiles:
        sums = kernel.backward(Upstream(dout, dlse, out, lse), q, k, v, tiles, scale=scale)
        gradients = [one.result() for one in sums]
    return Result(out, lse, *gradients)


def whole(task) -> tuple[Tile, ...]:
    return tiles_between(task, 0, 0)


@every_kernel
@given(task=small_tasks, share=st.integers(1, 3), with_dlse=st.booleans())
def test_every_task_equals_the_definition(kernel, task, share, with_dlse):
    q, k, v, dout, dlse = tensors(task.problem, share)
    dlse = dlse if with_dlse else None
    got = run(kernel, q, k, v, whole(task), dout, dlse)
    want = oracle(q, k, v, task.pattern, dout, dlse, scale=0.5, query_offset=task.problem.offset)
    for name in Result._fields:
        assert distance(getattr(got, name), getattr(want, name)) < 1e-11, name


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(task=small_tasks, share=st.integers(1, 2))
def test_narrow_dtypes_keep_their_budget(kernel, dtype, task, share):
    q, k, v, dout, dlse = tensors(task.problem, share, dtype=dtype)
    got = run(kernel, q, k, v, whole(task), dout, dlse)
    where = {"scale": 0.5, "query_offset": task.problem.offset}
    verdicts = judge(got, q, k, v, task.pattern, dout, dlse, **where)
    assert all(verdict.ok for verdict in verdicts), verdicts


@every_kernel
@given(task=small_tasks, cut=st.integers(0, 30))
def test_tiles_may_come_in_several_lists(kernel, task, cut):
    """A schedule hands over a stop's tiles at a time: totals carry from call to call."""
    q, k, v, dout, dlse = tensors(task.problem)
    tiles = whole(task)
    lists = [part for part in (tiles[:cut], tiles[cut:]) if part]
    total, gradients = None, None
    for part in lists:
        total = kernel.forward(q, k, v, part, scale=0.5, total=total)
    want = run(kernel, q, k, v, tiles, dout, dlse)
    if total is None:
        return
    for part in lists:
        upstream = Upstream(dout, dlse, *total.result())
        gradients = kernel.backward(upstream, q, k, v, part, scale=0.5, total=gradients)
    for name, got in zip(Result._fields, (*total.result(), *(one.result() for one in gradients)), strict=True):
        assert distance(got, getattr(want, name)) < 1e-11, name


@every_kernel
def test_views_of_any_stride_are_read_in_place(kernel):
    """Packed qkv, heads first, and a last dimension with a stride, where a fused kernel goes wrong silently."""
    torch.manual_seed(0)
    square = [Tile(range(2), range(3), range(20), range(20), None, 0)]
    packed = torch.randn(2, 20, 3, 3, 8, dtype=torch.float64)
    heads_first = torch.randn(3, 2, 3, 20, 8, dtype=torch.float64)
    strided = torch.randn(3, 2, 20, 3, 16, dtype=torch.float64)[..., ::2]
    for q, k, v in (packed.unbind(2), heads_first.transpose(2, 3).unbind(0), strided.unbind(0)):
        dout, dlse = torch.randn_like(q), torch.randn(2, 3, 20, dtype=torch.float64)
        got = run(kernel, q, k, v, square, dout, dlse)
        want = run(kernel, *(x.contiguous() for x in (q, k, v)), square, dout.contiguous(), dlse)
        for name in Result._fields:
            assert distance(getattr(got, name), getattr(want, name)) < 1e-12, name


@every_kernel
def test_long_tiles_are_cut_without_a_trace(kernel):
    """Beyond every block size inside a kernel, with a remainder."""
    torch.manual_seed(0)
    n, left = 1300, 700
    tile = Tile(range(1), range(2), range(n), range(n), -left, 0)
    q, k, v, dout = (torch.randn(1, n, 2, 4, dtype=torch.float64) for _ in range(4))
    got = run(kernel, q, k, v, [tile], dout, None)
    want = oracle(q, k, v, Dense(causal=True, window=(left, 0)), dout, scale=0.5)
    for name in Result._fields:
        assert distance(getattr(got, name), getattr(want, name)) < 1e-10, name


@every_kernel
def test_the_same_bits_every_time(kernel):
    torch.manual_seed(0)
    tile = [Tile(range(1), range(4), range(300), range(300), None, 0)]
    q, k, v, dout = (torch.randn(1, 300, 4, 16) for _ in range(4))
    first, second = (run(kernel, q, k, v, tile, dout, None) for _ in range(2))
    for name in Result._fields:
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_the_reference_keeps_poison_to_the_rows_that_see_it(poison, where):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 12, 1, 4, dtype=torch.float64) for _ in range(4))
    tile = [Tile(range(1), range(1), range(12), range(12), None, 0)]
    clean = run(KERNELS["reference"], q, k, v, tile, dout, None)
    {"k": k, "v": v}[where][0, 7] = poison
    got = run(KERNELS["reference"], q, k, v, tile, dout, None)
    assert torch.equal(got.out[:, :7], clean.out[:, :7])
    assert torch.equal(got.dq[:, :7], clean.dq[:, :7])
    assert not got.out[:, 7:].isfinite().all(-1).any()


@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
def test_the_reference_keeps_poison_from_keys_that_its_rows_do_not_see(where):
    """Token 7 and a window of 2: at most rows 7 to 9 are poisoned, and with them the keys 5 to 9, but no others."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 16, 1, 4, dtype=torch.float64) for _ in range(4))
    tile = [Tile(range(1), range(1), range(16), range(16), -2, 0)]
    clean = run(KERNELS["reference"], q, k, v, tile, dout, None)
    {"q": q, "k": k, "v": v, "dout": dout}[where][0, 7] = torch.nan
    got = run(KERNELS["reference"], q, k, v, tile, dout, None)
    for name in ("out", "dq", "dk", "dv"):
        for apart in (slice(5), slice(10, None)):
            assert torch.equal(getattr(got, name)[:, apart], getattr(clean, name)[:, apart]), name


DOCUMENT = Tile(range(2), range(3), range(30), range(30), None, 0)


@every_kernel
@pytest.mark.parametrize(
    "tiles",
    [
        [DOCUMENT, replace(DOCUMENT, rows=range(30, 60), cols=range(30, 60))],
        [replace(DOCUMENT, repeat=Repeat(3, 30, 30))],
    ],
    ids=["two tiles", "a tile that stands three times"],
)
def test_tiles_cut_by_batch_row_repeat_and_head_leave_nothing_out(kernel, tiles, monkeypatch):
    """What large tensors make a kernel do, on small ones: two of three heads at a time, then the third."""
    torch.manual_seed(0)
    monkeypatch.setattr("longring.kernels.reference.SCORES_AT_ONCE", 30 * 30 * 2 * 2)
    monkeypatch.setattr("longring.geometry.portions.SMALLEST_PORTION", 2 * 30 * 2 * 4 * 2)
    n = 30 * sum(tile.repeat.count for tile in tiles)
    q, dout = (torch.randn(2, n, 6, 4, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, n, 3, 4, dtype=torch.float64) for _ in range(2))
    got = run(kernel, q, k, v, tiles, dout, None)
    want = oracle(q, k, v, Dense(documents=range(0, n + 1, 30)), dout, scale=0.5)
    for name in Result._fields:
        assert distance(getattr(got, name), getattr(want, name)) < 1e-11, name


@every_kernel
@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_of_any_size_are_masked(kernel, sign):
    """A mask is no large negative number: all scores may be further from 0 than that."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 12, 1, 4, dtype=torch.float64) for _ in range(4))
    q[..., 0], k[..., 0] = 200, sign * 200  # scores around 20,000: lse alone is rounded by 4e-12, dq by 200 times that
    got = run(kernel, q, k, v, [Tile(range(1), range(1), range(12), range(12), -3, 0)], dout, None)
    want = oracle(q, k, v, Dense(window=(3, 0)), dout, scale=0.5)
    for name in Result._fields:
        assert relative_error(getattr(got, name), getattr(want, name)) < 1e-8, name


def held_by(kernel, q, k, v, tiles):
    """(forward, backward) bytes at the peak, results included."""
    with Ledger() as forward:
        total = kernel.forward(q, k, v, tiles, scale=0.5).result()
    upstream = Upstream(torch.ones_like(q), None, total.out, total.lse.float())
    with Ledger() as backward:
        kernel.backward(upstream, q, k, v, tiles, scale=0.5)
    return forward.peak_bytes, backward.peak_bytes


def test_sdpa_holds_the_results_of_one_piece_at_a_time():
    q, k, v = (torch.randn(1, 256, 4, 16) for _ in range(3))
    quarters = [range(first, first + 64) for first in range(0, 256, 64)]
    forward, backward = held_by(KERNELS["sdpa"], q, k, v, [Tile(range(1), range(4), r, r, None, 0) for r in quarters])
    assert forward < 1.6 * q.nbytes  # out and lse of all, out and lse of one quarter
    assert backward < 4 * q.nbytes  # three gradients of all, three of one quarter


def test_the_reference_holds_few_scores_at_a_time_whatever_the_batch_and_heads(monkeypatch):
    monkeypatch.setattr("longring.kernels.reference.SIDE", 32)
    monkeypatch.setattr("longring.kernels.reference.SCORES_AT_ONCE", 32 * 32)
    q, k, v = (torch.randn(2, 64, 8, 4) for _ in range(3))
    tile = Tile(range(2), range(8), range(64), range(64), None, 0)
    for held in held_by(KERNELS["reference"], q, k, v, [tile]):
        assert held < 3 * q.nbytes + 16 * 32 * 32 * 4  # and not 2 * 8 times as much
