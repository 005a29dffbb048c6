"""Partial results merge exactly, in any order, and nothing seen changes nothing."""

import itertools

import pytest
import torch

from longring.numerics.online_softmax import merge_, nothing_seen


def part(scores, values):
    """Attention over some keys: (out [rows, d], lse [rows])."""
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def merged(parts, shape):
    total = nothing_seen(torch.empty(1, shape[0], 1, shape[1], dtype=torch.float64))
    for out, lse in parts:
        merge_(total.out[0, :, 0], total.lse[0, 0], out.clone(), lse.clone())
    return total.out[0, :, 0], total.lse[0, 0]


@pytest.fixture
def rows():
    torch.manual_seed(0)
    return torch.randn(6, 9, dtype=torch.float64) * 5, torch.randn(9, 4, dtype=torch.float64)


def test_parts_make_the_whole_in_every_order(rows):
    scores, values = rows
    cuts = [slice(0, 2), slice(2, 3), slice(3, 9)]
    want_out, want_lse = part(scores, values)
    for order in itertools.permutations(cuts):
        out, lse = merged([part(scores[:, cut], values[cut]) for cut in order], (6, 4))
        torch.testing.assert_close(out, want_out, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(lse, want_lse, rtol=1e-14, atol=1e-14)


def test_nothing_seen_is_the_identity(rows):
    out, lse = part(*rows)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for parts in ([nothing, (out, lse)], [(out, lse), nothing]):
        got_out, got_lse = merged(parts, (6, 4))
        assert torch.equal(got_out, out)
        assert torch.equal(got_lse, lse)


def test_nothing_and_nothing_is_nothing_not_nan():
    nothing = torch.zeros(3, 2, dtype=torch.float64), torch.full((3,), -torch.inf, dtype=torch.float64)
    out, lse = merged([nothing, nothing], (3, 2))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_large_scores_neither_overflow_nor_vanish(rows, shift):
    scores, values = rows
    out, lse = merged([part(scores[:, c] + shift, values[c]) for c in (slice(0, 4), slice(4, 9))], (6, 4))
    torch.testing.assert_close(out, part(scores, values)[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, scores.logsumexp(-1) + shift, rtol=1e-12, atol=0)
