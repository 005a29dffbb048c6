"""Conformance passes what is exact and fails what is not, the ways of being wrong seen in the field among them."""

from __future__ import annotations

import pytest
import torch

import longring as lr
from longring.numerics.online_softmax import accumulator_dtype
from longring.testing import Case, Result, budgets, conformance, judge, oracle
from longring.testing.budgets import Verdict, distance, relative_error

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


class WrongLseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, lse):
        return lse.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)


def lse_without_a_gradient(q, k, v, **options):
    out, lse = longring_attention(q, k, v, **options)
    return out, WrongLseGradient.apply(lse)


WRONG = {
    lse_without_a_gradient: "dq",
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


def weights_that_do_not_sum_to_one(q, k, v, **options):
    out, lse = longring_attention(q, k, v, **options)
    return 1.001 * out, lse


def result_that_depends_on_the_ranks(q, k, v, *, group, **options):
    out, lse = longring_attention(q, k, v, group=group, **options)
    return (1 + 1e-3 * group.size) * out, lse


PROBES = {
    weights_that_do_not_sum_to_one: "probe: v = 1",
    result_that_depends_on_the_ranks: "probe: any number of ranks",
    window_ignored: "probe: one token edited",
}


@pytest.mark.parametrize(("wrong", "probe"), PROBES.items(), ids=[fn.__name__ for fn in PROBES])
def test_each_probe_finds_what_it_is_for(wrong, probe):
    cases = [Case("window", lr.Dense(causal=True, window=(7, 0)))]
    for run in (wrong, longring_attention):
        report = conformance(run, ranks=(1, 2), layouts=("contiguous",), cases=cases)
        assert (probe in {finding.quantity for finding in report.wrong}) == (run is wrong)


@pytest.mark.parametrize(
    ("dtype", "roundings"),
    [(torch.float64, 40), (torch.float32, 40), (torch.bfloat16, 4), (torch.float16, 4)],
    ids=str,
)
def test_budgets_are_a_few_roundings(dtype, roundings):
    """A yardstick that grew would let everything pass: here are its orders of magnitude."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 61, 2, 16, generator=draw, dtype=torch.float64).to(dtype) for _ in range(4))
    dlse = torch.randn(1, 2, 61, generator=draw, dtype=torch.float64)
    _, allowed = budgets(q, k, v, lr.Dense(), dout, dlse)
    assert allowed.pop("lse") < 4 * torch.finfo(accumulator_dtype(dtype)).eps
    for name, budget in allowed.items():
        assert torch.finfo(dtype).eps < budget < roundings * torch.finfo(dtype).eps, name


def test_every_quantity_is_judged_on_all_ranks_and_layouts():
    report = conformance(longring_attention, ranks=(1, 2), layouts=("zigzag", "striped"), cases=CAUSAL)
    asked = {(finding.case, finding.layout, finding.ranks) for finding in report.findings}
    assert asked == {(case.name, layout, p) for case in CAUSAL for layout in ("zigzag", "striped") for p in (1, 2)}
    probes = ["probe: any number of ranks", "probe: v = 1", "probe: one token edited"]
    assert [finding.quantity for finding in report.findings] == [*Result._fields, *probes] * len(asked)


def test_judge_judges_every_quantity():
    q, k, v, dout = (torch.randn(1, 5, 2, 4) for _ in range(4))
    got = oracle(q, k, v, lr.Dense(), dout)
    assert [verdict.quantity for verdict in judge(got, q, k, v, lr.Dense(), dout)] == list(Result._fields)


@pytest.mark.parametrize(
    "answer", [lambda out, lse: out, lambda out, lse: (out, lse.detach())], ids=["no lse", "detached lse"]
)
def test_lse_and_its_gradient_are_asked_of_those_who_give_them(answer):
    def fn(q, k, v, **options):
        return answer(*longring_attention(q, k, v, **options))

    report = conformance(fn, ranks=(2,), layouts=("zigzag",), cases=CAUSAL)
    assert report.ok, str(report)
    assert not report.refused, str(report)


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
    assert distance(ones[:1], ones) == distance(ones.unsqueeze(0), ones) == float("inf")


def test_nan_is_right_by_no_budget():
    """In float16 the yardstick itself may overflow, and then allows everything."""
    assert not Verdict("dq", error=float("inf"), allowed=float("inf")).ok
    assert Verdict("dq", error=0.1, allowed=0.1).ok
