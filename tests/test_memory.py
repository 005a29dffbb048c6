"""Memory, read off the allocator's events, workspaces included: no score matrix, and a ring that holds 1/p."""

from __future__ import annotations

import pytest
import torch

import longring as lr
from longring.bench.memory import measured_peak
from longring.testing import run_ranks

N, HEADS, D = 16384, 8, 64
Q_BYTES = N * HEADS * D * 4


@pytest.fixture(autouse=True)
def _all_cores():
    """These tensors are large; no more than two, since every thread of a kernel has a workspace."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tensors(n):
    return [torch.randn(1, n, HEADS, D).requires_grad_() for _ in range(3)]


def test_forward_and_backward_hold_a_few_times_the_queries():
    """A score matrix alone would be 256 times the bytes of q."""
    with measured_peak() as peak:
        q, k, v = tensors(N)
        out = lr.attention(q, k, v)
        out.backward(torch.ones_like(out))
    assert peak.bytes < 12 * Q_BYTES


@pytest.mark.parametrize(
    "pattern",
    [lr.Dilated([512, 1024, 4096], [1, 2, 4]), lr.Dense(causal=True, window=(300, 0))],
    ids=["dilated", "window"],
)
def test_branches_and_bands_hold_no_more(pattern):
    n = 4096
    with measured_peak() as peak:
        q, k, v = tensors(n)
        out = lr.attention(q, k, v, pattern=pattern)
        out.backward(torch.ones_like(out))
    assert peak.bytes < 12 * q.nbytes


def test_the_reference_kernel_never_holds_a_score_matrix():
    n = 4096
    with measured_peak() as peak:
        q, k, v = (torch.randn(1, n, 2, 16).requires_grad_() for _ in range(3))
        out = lr.attention(q, k, v, kernel="reference")
        out.backward(torch.ones_like(out))
    assert peak.bytes < n * n * 4  # of one head, and there are two


def ring_state(p, watched):
    """(forward, backward) bytes that one rank of a ring holds, its own shards included."""

    def program(group):
        s = lr.Sharding(N, group, "zigzag")
        if group.rank != watched:
            out = lr.ring_attention(*tensors(s.local_length), sharding=s)
            out.backward(torch.ones_like(out))
            return None
        with measured_peak() as forward:
            q, k, v = tensors(s.local_length)
            out, lse = lr.ring_attention(q, k, v, sharding=s, return_lse=True)
        dout = torch.ones_like(out)
        with measured_peak() as backward:
            out.backward(dout)
        held = sum(x.nbytes for x in (q, k, v, out, lse, dout))
        return forward.bytes, held + backward.bytes

    return run_ranks(p, program)[watched]


@pytest.mark.filterwarnings("ignore:.*External init callback.*")
def test_a_ring_holds_its_share_and_two_blocks():
    """At p = 8: below 1.3 / 8 of one rank's state, plus two K/V blocks, and two of float32 dK/dV in the backward."""
    alone = ring_state(1, 0)
    block = 2 * Q_BYTES // 8
    for watched in (0, 5):
        forward, backward = ring_state(8, watched)
        assert forward < 1.3 / 8 * alone[0] + 2 * block
        assert backward < 1.3 / 8 * alone[1] + 2 * block + 2 * block


def test_the_ledger_agrees_with_the_allocator():
    """What `simulate` reports is what the allocator saw, but for workspaces inside a kernel."""
    q, k, v = (x.detach() for x in tensors(2048))
    sim = lr.simulate(q, k, v, ranks=1)
    with measured_peak() as peak:
        keep = [x.clone() for x in (q, k, v)]
        out, lse = lr.attention(*keep, return_lse=True)
        del out, lse
    assert sim.peak_bytes[0] == pytest.approx(peak.bytes, rel=0.15)


@pytest.mark.parametrize("schedule", ["ring", "bidirectional"])
def test_what_a_rank_of_a_ring_holds_falls_as_one_over_p(schedule):
    """Its own rows, two visiting blocks, and in the backward their gradients: the same number of shards for any p.

    With one head a tile's gradients, before they are added up, are as large as a shard's: up to three more.
    """
    x = [torch.randn(1, 2048, 1, 64, requires_grad=True) for _ in range(3)]
    shares = {ranks: shards_held(x, schedule, ranks) for ranks in (2, 4, 8, 16)}
    for forward, backward in shares.values():
        assert forward < 10
        assert backward < 22
    for at_4, at_16 in zip(shares[4], shares[16], strict=True):
        assert at_16 < 1.1 * at_4


def test_what_a_rank_of_a_gather_holds_does_not():
    x = [torch.randn(1, 2048, 1, 64, requires_grad=True) for _ in range(3)]
    forward, backward = shards_held(x, "gather", 16)
    assert forward > 2 * 16  # K and V of everybody
    assert backward > 4 * 16  # and their gradients


def shards_held(x, schedule, ranks):
    """(forward, backward): the most bytes of a rank, in units of its part of q."""
    sim = lr.simulate(*x, ranks=ranks, schedule=schedule, layout="zigzag")
    sim.out.backward(torch.ones_like(sim.out))
    return tuple(max(costs.peak_bytes) / (x[0].nbytes / ranks) for costs in (sim.forward, sim.backward))
