"""Conformance passes what is exact and fails what is not, the ways of being wrong seen in the field among them."""

from __future__ import annotations

import pytest
import torch

import longring as lr
from longring.testing import Case, conformance
from longring.testing.budgets import distance, relative_error

CAUSAL = [Case("causal", lr.Dense(causal=True)), Case("grouped", lr.Dense(causal=True), kv_heads=2)]


def longring_attention(q, k, v, *, group, pattern, layout, length):
    sharding = lr.Sharding(length, group, layout, pattern=pattern)
    return lr.attention(q, k, v, pattern=pattern, sharding=sharding, return_lse=True)


def test_longring_conforms():
    report = conformance(longring_attention, ranks=(1, 2, 4))
    assert report.ok, str(report)
    assert not report.refused, str(report)


def test_sixteen_bits_conform():
    report = conformance(longring_attention, ranks=(1, 3), dtype=torch.bfloat16, layouts=("zigzag",))
    assert report.ok, str(report)


def local_instead_of_global(q, k, v, *, group, pattern, layout, length):
    return lr.attention(q, k, v, pattern=pattern)


def causal_by_local_rows(q, k, v, *, group, pattern, layout, length):
    sharding = lr.Sharding(length, group, "contiguous")
    return lr.attention(q, k, v, pattern=pattern, sharding=sharding)


def window_ignored(q, k, v, *, group, pattern, layout, length):
    sharding = lr.Sharding(length, group, layout)
    return lr.attention(q, k, v, pattern=lr.Dense(causal=pattern.causal), sharding=sharding)


def lse_set_to_zero(q, k, v, **options):
    out, lse = longring_attention(q, k, v, **options)
    return out, torch.zeros_like(lse)


class WrongKeyGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k):
        return k.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


def gradients_one_percent_off(q, k, v, **options):
    return longring_attention(q, WrongKeyGradients.apply(k), v, **options)


def detached_lse(q, k, v, **options):
    out, lse = longring_attention(q, k, v, **options)
    return out + 0 * lse.detach().mT.unsqueeze(-1), lse * 1.0001


WRONG = {
    local_instead_of_global: "out",
    causal_by_local_rows: "out",
    lse_set_to_zero: "lse",
    gradients_one_percent_off: "dk",
    detached_lse: "lse",
}


@pytest.mark.parametrize(("wrong", "quantity"), WRONG.items(), ids=[fn.__name__ for fn in WRONG])
def test_what_is_wrong_is_found(wrong, quantity):
    report = conformance(wrong, ranks=(2,), layouts=("zigzag",), cases=CAUSAL)
    assert quantity in {finding.quantity for finding in report.wrong}
    assert not report.ok
    assert "wrong" in str(report)


def test_a_window_that_is_ignored_is_found():
    cases = [Case("window", lr.Dense(causal=True, window=(7, 0)))]
    report = conformance(window_ignored, ranks=(1, 2), layouts=("contiguous",), cases=cases)
    assert "probe: one token edited" in {finding.quantity for finding in report.wrong}


def test_a_refusal_is_not_an_error_but_not_a_pass_either():
    def refuses(*args, **options):
        raise NotImplementedError("only on Tuesdays")

    report = conformance(refuses, ranks=(2,), cases=CAUSAL)
    assert len(report.refused) == 6
    assert not report.ok
    assert "only on Tuesdays" in str(report)


def test_errors_see_nan_and_infinities():
    ones = torch.ones(3)
    assert distance(torch.tensor([1.0, torch.nan, 1.0]), ones) == float("inf")
    assert distance(torch.tensor([1.0, -torch.inf, 1.0]), ones) == float("inf")
    assert distance(torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, -torch.inf])) == 0
    assert relative_error(2 * ones, ones) == pytest.approx(1.0)
