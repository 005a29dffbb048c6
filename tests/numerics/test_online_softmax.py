"""Partial results merge exactly, in any order, and nothing seen changes nothing."""

import itertools

import pytest
import torch

import longring as lr
from longring.numerics.online_softmax import Partial, merge_, nothing_seen


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


def test_merges_in_float32_round_as_derived():
    """Three roundings of the total in each merge; those of merge k count k / p in the end (docs/numerics.md)."""
    p, rounding = 64, 2.0**-24 / 3**0.5  # of one number in float32, at most: the root of its mean square
    torch.manual_seed(0)
    parts = 1 + torch.rand(p, 1, 200, 1, 64) / 16
    lse = 5 + torch.randn(p, 1, 1, 200, dtype=torch.float64) / 100
    total = Partial(torch.zeros(1, 200, 1, 64), torch.full((1, 1, 200), -torch.inf, dtype=torch.float64))
    for part, its_lse in zip(parts, lse, strict=True):
        merge_(total.out.transpose(1, 2), total.lse, part.transpose(1, 2).clone(), its_lse.clone())
    want = (parts.double() * lse.softmax(0).transpose(2, 3).unsqueeze(-1)).sum(0)
    error = (total.out - want).norm() / want.norm()
    assert error < p**0.5 * rounding


@pytest.mark.parametrize("ranks", [7, 64])
def test_a_weight_is_as_exact_as_its_score(ranks):
    """Where one key takes all weight, what is left of the error is the score's, which no sum makes smaller.

    The backward computes it again, in tiles of another shape, and rounds it otherwise: by two roundings of either.
    """
    n, d = 256, 64
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, n, 2, d) for _ in range(4))
    k[:, 5] = 4 * torch.randn(d).sign()
    q, k, v = ((q + k[:, 5:6] / 2).requires_grad_(), k.requires_grad_(), v.requires_grad_())
    scores = torch.einsum("bhd,bihd->bih", k[:, 5].detach().double(), q.detach().double()) * d**-0.5
    found = torch.autograd.grad(lr.simulate(q, k, v, ranks=ranks, pattern=lr.Dense(causal=False)).out, v, dout)[0]
    want = dout.double().sum(1)
    error = (found[:, 5].double() - want).norm() / want.norm()
    assert error < 4 * 2.0**-24 * scores.abs().max()
