"""Heads shared out among branches: which run each has, and that every schedule computes the definition of it."""

from __future__ import annotations

import warnings

import pytest
import torch

import longring as lr
from attending import tensors
from longring.geometry.head_split import HeadSplit, run_of_heads
from longring.geometry.patterns import Problem
from longring.geometry.plans import PLANS
from longring.numerics.definition import defined_attention, pair_counts


def counted(segments, rates, kv_heads, n, causal, boundaries=None):
    """[kv_heads, n, n], head by head and pair by pair: the head's one branch, a segment, and one phase for all."""
    boundaries = boundaries or [0, n]
    start = [max(b for b in boundaries if b <= i) for i in range(n)]
    sizes = [kv_heads // len(rates) + (b < kv_heads % len(rates)) for b in range(len(rates))]
    branch = [b for b, size in enumerate(sizes) for _ in range(size)]
    counts = torch.zeros(kv_heads, n, n, dtype=torch.long)
    for h, b in enumerate(branch):
        w, r = segments[b], rates[b]
        for i in range(n):
            for j in range(i + 1 if causal else n):
                x, y = i - start[i], j - start[j]
                same = start[i] == start[j] and x // w == y // w
                counts[h, i, j] = same and x % w % r == y % w % r == b % r
    return counts


CASES = [
    ([8, 16, 64], [1, 2, 4], 3),
    ([8, 16, 64], [1, 2, 4], 5),
    ([4, 4], [2, 2], 3),  # branches alike: their numbers tell them apart
    ([7, 45], [3, 1], 2),
    ([6], [4], 1),
]


@pytest.mark.parametrize("kv_heads", range(1, 14))
@pytest.mark.parametrize("branches", range(1, 6))
def test_every_head_has_one_branch_and_the_first_branches_those_that_remain(kv_heads, branches):
    runs = [run_of_heads(kv_heads, branches, place) for place in range(branches)]
    assert [head for run in runs for head in run] == list(range(kv_heads))
    sizes = [len(run) for run in runs]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("boundaries", [None, [0, 11, 12, 30]])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_definition_counts_the_same_pairs(case, boundaries, causal):
    segments, rates, kv_heads = case
    pattern = HeadSplit(segments, rates, causal=causal, documents=boundaries)
    got = pair_counts(pattern, Problem(1, 30, 30, kv_heads, 0))[0]
    assert torch.equal(got, counted(segments, rates, kv_heads, 30, causal, boundaries))


@pytest.mark.parametrize("schedule", PLANS)
@pytest.mark.parametrize(
    ("case", "n", "layout"),
    [(CASES[0], 45, "zigzag"), (CASES[1], 64, "contiguous"), (CASES[2], 21, "striped"), (CASES[3], 90, "contiguous")],
    ids=str,
)
@pytest.mark.parametrize("causal", [True, False])
def test_every_schedule_computes_it(case, n, layout, causal, schedule):
    """Four ranks in nodes of two; in some cases a branch fits a rank, and in some none does."""
    segments, rates, kv_heads = case
    pattern = HeadSplit(segments, rates, causal=causal)
    q, k, v, dout, dlse = tensors(1, n, n, 2 * kv_heads, kv_heads, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lr.RowsLeftOut)
        sim = lr.simulate(q, k, v, ranks=4, pattern=pattern, layout=layout, schedule=schedule, node_ranks=2)
    counts = counted(segments, rates, kv_heads, n, causal).unsqueeze(0)
    want = defined_attention(q, k, v, counts, 0.5)
    torch.testing.assert_close((sim.out, sim.lse), tuple(want))
    seen = counts.sum(-1).repeat_interleave(2, 1).bool()
    assert not sim.out.transpose(1, 2)[~seen].any()
    ours, theirs = (
        torch.autograd.grad((out, torch.where(seen, lse, 0.0)), (q, k, v), (dout, dlse))
        for out, lse in ((sim.out, sim.lse), want)
    )
    torch.testing.assert_close(ours, theirs)
    assert sim.forward.bytes_sent == sim.forward.predicted_bytes
