"""The judge, judged: against torch's own attention where that computes the same, and by hand where it does not."""

import math

import pytest
import torch
import torch.nn.functional as F

from longring.errors import PatternError
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.numerics.definition import defined_attention, pair_counts


def ask(pattern, n_q=5, n_k=5, kv_heads=1, batch=1, offset=None):
    problem = Problem(batch, n_q, n_k, kv_heads, n_k - n_q if offset is None else offset)
    return pair_counts(pattern, problem)[0, 0].tolist()


def test_dense_is_torchs_attention():
    q, k, v = (torch.randn(2, 7, 4, 3, dtype=torch.float64) for _ in range(3))
    for causal in (False, True):
        counts = pair_counts(Dense(causal=causal), Problem(2, 7, 7, 4, 0))
        out, _ = defined_attention(q, k, v, counts, 3**-0.5)
        want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
        torch.testing.assert_close(out, want.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_a_pair_that_counts_twice_weighs_twice():
    q, k, v = torch.zeros(1, 1, 1, 1), torch.zeros(1, 2, 1, 1), torch.tensor([0.0, 3.0]).view(1, 2, 1, 1)
    out, lse = defined_attention(q, k, v, torch.tensor([1, 2]).view(1, 1, 1, 2), 1.0)
    assert out.item() == pytest.approx(2.0)
    assert lse.item() == pytest.approx(math.log(3))


def test_a_row_that_sees_nothing_is_zero_with_zero_gradients():
    q, k, v = (torch.randn(1, 2, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    counts = torch.tensor([[0, 0], [1, 1]]).view(1, 1, 2, 2)
    out, lse = defined_attention(q, k, v, counts, 1.0)
    assert out[0, 0].abs().max() == 0
    assert lse[0, 0, 0] == -torch.inf
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[0][0, 0].abs().max() == 0


def test_window_documents_and_lengths_by_hand():
    assert ask(Dense(causal=True, window=(1, -1)), 3, 3) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert ask(Dense(causal=False, window=(0, 1)), 3, 3) == [[1, 1, 0], [0, 1, 1], [0, 0, 1]]
    assert ask(Dense(causal=False, documents=[0, 1, 3]), 3, 3) == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    assert ask(Dense(causal=True, lengths=[1]), 3, 3) == [[1, 0, 0]] * 3


def test_queries_stand_at_the_end_of_longer_keys():
    assert ask(Dense(causal=True), 2, 4) == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert ask(Dense(causal=True), 4, 2) == [[0, 0], [0, 0], [1, 0], [1, 1]]  # queries before position 0 see nothing
    assert ask(Dense(causal=True), 2, 4, offset=0) == [[1, 0, 0, 0], [1, 1, 0, 0]]


def test_dilated_by_hand():
    assert ask(Dilated([4], [2], causal=False), 6, 6) == [
        [1, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert ask(Dilated([2, 4], [1, 2], causal=True), 4, 4) == [[2, 0, 0, 0], [1, 1, 0, 0], [1, 0, 2, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize(("phase", "want"), [("mod", [0, 1, 0, 1]), ("block", [0, 0, 1, 1])])
def test_phases_come_from_kv_heads(phase, want):
    counts = pair_counts(Dilated([4], [2], causal=False, phase=phase), Problem(1, 4, 4, 4, 0))
    assert [0 if counts[0, head, 0, 0] else 1 for head in range(4)] == want


def test_positions_restart_at_each_document():
    plain = ask(Dilated([3], [2], causal=False), 3, 3)
    packed = ask(Dilated([3], [2], causal=False, documents=[0, 2, 5]), 5, 5)
    assert [row[2:] for row in packed[2:]] == plain


def test_an_unknown_pattern_is_refused():
    with pytest.raises(PatternError, match="pattern must be"):
        pair_counts("causal", Problem(1, 2, 2, 1, 0))  # type: ignore[arg-type]
