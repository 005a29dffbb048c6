"""Queries that every rank has: as the definition says, the same bits on every rank, and as many bytes as planned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import longring as lr
from longring.geometry.layouts import replicated
from longring.geometry.patterns import Problem
from longring.geometry.replicated import Answers
from longring.geometry.task import Task
from longring.plan.traffic import backward_bytes, forward_bytes
from longring.testing import Result, judge, run_ranks
from strategies import dense_patterns, dilated_patterns, layouts

pytestmark = pytest.mark.filterwarnings("ignore::longring.RowsLeftOut")

D = 8


def tensors(problem, share, dtype=torch.float32):
    draw = torch.Generator().manual_seed(problem.n_q + 7 * problem.n_k)
    heads = problem.kv_heads * share

    def one(n, heads):
        return torch.randn(problem.batch, n, heads, D, generator=draw, dtype=torch.float64).to(dtype)

    q, dout = one(problem.n_q, heads), one(problem.n_q, heads)
    k, v = one(problem.n_k, problem.kv_heads), one(problem.n_k, problem.kv_heads)
    return q, k, v, dout, torch.randn(problem.batch, heads, problem.n_q, generator=draw)


def attend(group, shards, pattern, offset, whole):
    """(out, lse, dq whole; dk, dv of this rank; bytes sent forward and backward)."""
    q, k, v, dout, dlse = whole
    s = lr.Sharding.from_ranges(shards, group=group)
    q = q.clone().requires_grad_()
    k, v = (s.shard(x).requires_grad_() for x in (k, v))
    out, lse = lr.attention(
        q, k, v, pattern=pattern, sharding="replicated", kv_sharding=s, query_offset=offset, return_lse=True
    )
    forward = group.bytes_sent
    seen = torch.where(lse.detach() > -torch.inf, lse, 0.0)
    dq, dk, dv = torch.autograd.grad((out * dout).sum() + (seen * dlse).sum(), (q, k, v))
    return out.detach(), lse.detach(), dq, dk, dv, forward, group.bytes_sent - forward


def in_place(parts, shards, like):
    whole = torch.full_like(like, torch.nan)
    for part, shard in zip(parts, shards, strict=True):
        whole[:, [position for r in shard for position in r]] = part
    return whole


@st.composite
def cases(draw):
    n_k = draw(st.integers(1, 60))
    n_q = draw(st.just(1) | st.integers(1, 9))
    offset = draw(st.just(n_k - n_q) | st.integers(-2, n_k + 2))
    problem = Problem(draw(st.integers(1, 2)), n_q, n_k, draw(st.integers(1, 3)), offset)
    pattern = draw(dense_patterns(problem) | dilated_patterns(problem))
    ranks = draw(st.integers(1, 5))
    return problem, pattern, draw(layouts(n_k, ranks, pattern.documents)), draw(st.integers(1, 3))


@given(cases())
def test_it_is_the_definition_on_every_rank(case):
    problem, pattern, keys, share = case
    whole = tensors(problem, share)
    found = run_ranks(keys.ranks, lambda group: attend(group, keys.shards, pattern, problem.offset, whole))
    for mine in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(mine[:3], found[0][:3], strict=True))  # the same bits
    q, k, v, dout, dlse = whole
    dk, dv = (in_place([mine[i] for mine in found], keys.shards, x) for i, x in ((3, k), (4, v)))
    got = Result(*found[0][:3], dk, dv)
    for verdict in judge(got, q, k, v, pattern, dout, dlse, query_offset=problem.offset):
        assert verdict.ok, (case, verdict)
    task = Task(pattern, problem, replicated(problem.n_q, keys.ranks), keys, q.shape[2])
    for rank, mine in enumerate(found):  # what the plan says is what was sent
        assert mine[5] == forward_bytes(task, "replicated", rank, head_dim=D, itemsize=4)
        assert mine[6] == backward_bytes(task, "replicated", rank, head_dim=D, itemsize=4)


@given(cases())
def test_who_speaks_and_who_has_nothing_to_tell(case):
    """Never too few: a rank with a tile speaks. And nobody who holds no key at all."""
    problem, pattern, keys, _ = case
    task = Task(pattern, problem, replicated(problem.n_q, keys.ranks), keys)
    plans = [Answers(task, rank) for rank in range(keys.ranks)]
    assert len({one.speakers for one in plans}) == 1
    for rank, one in enumerate(plans):
        assert rank in one.speakers or not one.tiles
        assert keys.sizes[rank] or rank not in one.speakers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    whole = tensors(Problem(2, 1, 45, 2, 44), 2, dtype)
    q, k, v, dout, dlse = whole
    for pattern in (lr.Dense(), lr.Dilated([8, 16, 64], [1, 2, 4])):
        for ranks in (1, 3):
            shards = [[range(45)]] if ranks == 1 else [[range(5)], [range(5, 40)], [range(40, 45)]]
            found = run_ranks(ranks, lambda g, s=shards, p=pattern: attend(g, s, p, None, whole))
            dk, dv = (in_place([mine[i] for mine in found], shards, x) for i, x in ((3, k), (4, v)))
            for verdict in judge(Result(*found[0][:3], dk, dv), q, k, v, pattern, dout, dlse):
                assert verdict.ok, (dtype, ranks, verdict)


def test_by_hand_how_much_is_sent():
    """An answer is d numbers and an lse of 8 bytes for each head and batch row, once to each other rank."""

    def program(group, pattern):
        s = lr.Sharding(100, group, "contiguous")
        q, k = torch.randn(2, 1, 6, D), torch.randn(2, 25, 3, D)
        lr.attention(q, k, k, pattern=pattern, sharding="replicated", kv_sharding=s)
        return group.bytes_sent

    answer = 2 * 6 * (D * 4 + 8)
    assert run_ranks(4, lambda g: program(g, lr.Dense())) == [3 * answer] * 4
    assert run_ranks(4, lambda g: program(g, lr.Dense(window=(30, 0)))) == [0, 0, 3 * answer, 3 * answer]
    assert run_ranks(4, lambda g: program(g, lr.Dilated([8], [1]))) == [0, 0, 0, 3 * answer]


def test_on_a_cpu_query_heads_of_one_kv_head_read_its_keys_once(monkeypatch):
    from longring.kernels.operations import cpu

    honest, shapes = cpu._forward, []

    def looked_at(q, *args, **options):
        shapes.append(list(q.shape))
        return honest(q, *args, **options)

    monkeypatch.setattr(cpu, "_forward", looked_at)
    q, k, v = torch.randn(2, 1, 6, D), torch.randn(2, 50, 2, D), torch.randn(2, 50, 2, D)
    out = lr.attention(q, k, v, sharding="replicated", kv_sharding=lr.Sharding(50))
    assert shapes == [[2, 2, 3, D]]
    torch.testing.assert_close(out, lr.attention(q, k, v, kernel="reference"), atol=1e-6, rtol=1e-5)


def test_explain_says_so():
    q, k = torch.randn(1, 1, 4, D), torch.randn(1, 50, 2, D)
    said = lr.explain(q, k, k, sharding="replicated", kv_sharding=lr.Sharding(50))
    assert (said.schedule.name, said.pairs, said.stops) == ("replicated", 50 * 4, 1)
    assert "each asks its own keys" in str(said)


def misuse():
    s = lr.Sharding(5)
    q, k = torch.randn(1, 1, 2, D), torch.randn(1, 5, 2, D)
    few = torch.randn(1, 4, 2, D)
    dilated = {"segment_lengths": [4], "dilation_rates": [1]}
    return {
        "no keys": (lr.attention, q, k, {"sharding": "replicated"}, "pass kv_sharding"),
        "another word": (lr.attention, q, k, {"sharding": "zigzag"}, "or 'replicated', for queries that every rank"),
        "forgotten": (lr.attention, q, k, {"kv_sharding": s}, "kv_sharding was given without sharding"),
        "not said": (lr.attention, q, k, {"sharding": s}, "q holds 1 tokens"),
        "a schedule": (
            lr.attention, q, k, {"sharding": "replicated", "kv_sharding": s, "schedule": "ring"}, "no key moves"
        ),
        "the ring": (lr.ring_attention, q, k, {"sharding": "replicated", "kv_sharding": s}, "use attention"),
        "a group": (
            lr.attention, q, k, {"sharding": "replicated", "kv_sharding": s, "layout": "zigzag"}, "not both"
        ),
        "grown": (lr.attention, q, few, {"sharding": "replicated", "kv_sharding": s}, "Sharding.extend"),
        "nothing asked": (lr.attention, q[:, :0], k, {"sharding": "replicated", "kv_sharding": s}, "at least one"),
        "torchscale": (
            lr.dilated_attention,
            q,
            k,
            {"sharding": "replicated", "kv_sharding": s, "compat": "torchscale", **dilated},
            "depends on the whole length",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("what", misuse())
def test_what_is_refused(what):
    function, q, k, options, said = misuse()[what]
    with pytest.raises(lr.ArgumentError, match=said):
        function(q, k, k, **options)


def test_ranks_that_disagree_are_told():
    def program(group):
        s = lr.Sharding(30, group, "contiguous").extend(2 if group.rank else 1, 1)
        q, k = torch.randn(1, 1, 2, D), torch.randn(1, s.local_length, 2, D)
        lr.attention(q, k, k, sharding="replicated", kv_sharding=s, timeout=20)

    with pytest.raises(lr.LongringError, match="disagree"):
        run_ranks(3, program)


def test_dilated_attention_and_branches_apart():
    q, k, v = torch.randn(1, 1, 4, D), torch.randn(1, 45, 4, D), torch.randn(1, 45, 4, D)
    words = {"segment_lengths": [8, 16, 64], "dilation_rates": [1, 2, 4]}
    want = lr.dilated_attention(q, k, v, **words)

    def program(group, **more):
        s = lr.Sharding(45, group, "striped")
        return lr.dilated_attention(
            q, s.shard(k), s.shard(v), **words, **more, sharding="replicated", kv_sharding=s
        )  # fmt: skip

    for more in ({}, {"mixing_gradient": False}):
        for out in run_ranks(3, lambda g, more=more: program(g, **more)):
            torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-5)


def test_every_wait_is_bounded_as_was_asked():
    """A rank that never makes the call is an error on the others, with the time and the step."""

    def program(group):
        s = lr.Sharding(30, group, "contiguous")
        q, k = torch.randn(1, 1, 2, D), torch.randn(1, 10, 2, D)
        if group.rank != 1:
            return lr.attention(q, k, k, sharding="replicated", kv_sharding=s, timeout=0.2)
        return None

    with pytest.raises(lr.PeerLost, match=r"rank 1 \(forward, answers\)"):
        run_ranks(3, program)
