"""Sampled rows and keys are the definition's, in float64; what rounding explains is allowed, and no more."""

from __future__ import annotations

import pytest
import torch

from longring import Dense, Dilated
from longring.testing import oracle, sampled
from longring.testing.sampled import Given, error_ratios, exact_columns, exact_rows, lse_ratios

SQUARE = {
    "documents": Dense(documents=[0, 1, 20, 61]),
    "documents of each row": Dense(documents=[[0, 1, 20, 61], [0, 61]]),
    "documents, window": Dense(documents=[0, 30, 61], window=(9, 3), causal=False),
    "causal": Dense(causal=True),
    "full": Dense(causal=False),
    "lengths": Dense(causal=False, lengths=[0, 40]),
    "window": Dense(causal=True, window=(7, 0)),
    "window to both sides": Dense(causal=False, window=(7, 3)),
    "dilated": Dilated([8, 16, 64], [1, 2, 4]),
    "dilated, block": Dilated([8, 16, 64], [1, 2, 4], phase="block"),
    "dilated documents": Dilated([8, 16, 64], [1, 2, 4], documents=[[0, 10, 61], [0, 33, 50, 61]]),
    "rows that see nothing": Dilated([8, 16], [2, 4], causal=False),
}


def given(dtype=torch.float64, n_q=61, heads=4, kv_heads=2):
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, n_q, heads, 8), (2, 61, kv_heads, 8), (2, 61, kv_heads, 8), (2, n_q, heads, 8), (2, heads, n_q)]
    q, k, v, dout, dlse = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Given(*(x.to(dtype) for x in (q, k, v, dout)), dlse.to(wide))


def check(x, pattern, some, **where):
    want = oracle(x.q, x.k, x.v, pattern, x.dout, x.dlse, **where)
    at, keys = some[some < x.q.shape[1]], some
    rows = exact_rows(x, pattern, at, **where)
    columns = exact_columns(x, pattern, keys, want.out, want.lse, **where)
    torch.testing.assert_close(rows.out.value, want.out[:, at], atol=1e-12, rtol=0)
    torch.testing.assert_close(rows.lse, want.lse[:, :, at], atol=1e-12, rtol=0)
    torch.testing.assert_close(rows.dq.value, want.dq[:, at], atol=1e-12, rtol=0)
    torch.testing.assert_close(columns.dk.value, want.dk[:, keys], atol=1e-12, rtol=0)
    torch.testing.assert_close(columns.dv.value, want.dv[:, keys], atol=1e-12, rtol=0)


@pytest.mark.parametrize("at_once", [1 << 25, 4000])
@pytest.mark.parametrize("pattern", SQUARE.values(), ids=SQUARE)
def test_rows_and_keys_are_the_definitions(pattern, at_once, monkeypatch):
    monkeypatch.setattr(sampled, "NUMBERS_AT_ONCE", at_once)
    some = torch.tensor([0, 7, 30, 60])
    check(given(), pattern, some)
    check(given()._replace(dlse=None), pattern, some, scale=-0.3)


@pytest.mark.parametrize("offset", [None, -5, 9])
@pytest.mark.parametrize("n_q", [20, 75])
@pytest.mark.parametrize("name", ["causal", "window to both sides", "lengths", "dilated", "dilated documents"])
def test_queries_that_stand_elsewhere(name, n_q, offset):
    check(given(n_q=n_q), SQUARE[name], torch.tensor([0, 7, 30, 60]), query_offset=offset)


def ratios(x, pattern, found):
    """The worst of every quantity, of all rows and keys."""
    rows = exact_rows(x, pattern, torch.arange(x.q.shape[1]))
    columns = exact_columns(x, pattern, torch.arange(61), found.out, found.lse)
    sums = {"out": rows.out, "dq": rows.dq, "dk": columns.dk, "dv": columns.dv}
    worst = {name: float(error_ratios(getattr(found, name), want).max()) for name, want in sums.items()}
    return {**worst, "lse": float(lse_ratios(found.lse, rows).max())}


def rounded(x, pattern):
    want = oracle(x.q, x.k, x.v, pattern, x.dout, x.dlse)
    return want._replace(**{name: getattr(want, name).to(x.q.dtype) for name in ("out", "dq", "dk", "dv")})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("pattern", SQUARE.values(), ids=SQUARE)
def test_a_rounded_answer_is_right(pattern, dtype):
    x = given(dtype)
    assert max(ratios(x, pattern, rounded(x, pattern)).values()) < 1


@pytest.mark.parametrize("quantity", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 1e-2), (torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", ["full", "lengths"])
def test_one_row_a_little_off_is_wrong(name, dtype, error, quantity):
    x = given(dtype)
    found = rounded(x, SQUARE[name])
    wrong = getattr(found, quantity).double()
    wrong.select(2 if quantity == "lse" else 1, 37).mul_(1 + error)
    found = found._replace(**{quantity: wrong})
    worst = ratios(x, SQUARE[name], found)
    assert worst[quantity] > 1, worst


def test_where_nothing_is_seen_only_nothing_is_right():
    x, pattern = given(torch.bfloat16), SQUARE["lengths"]
    found = rounded(x, pattern)
    assert found.out[0].eq(0).all()
    for name, value in (("out", found.out), ("dq", found.dq), ("dk", found.dk), ("dv", found.dv)):
        wrong = value.clone()
        wrong[0, 3] = 1e-30
        assert ratios(x, pattern, found._replace(**{name: wrong}))[name] == torch.inf
    lse = found.lse.clone()
    lse[0, 0, 0] = -1e30
    assert ratios(x, pattern, found._replace(lse=lse))["lse"] == torch.inf


@pytest.mark.parametrize("quantity", ["out", "lse", "dq", "dk", "dv"])
def test_nan_is_infinitely_wrong(quantity):
    x, pattern = given(torch.bfloat16), SQUARE["causal"]
    found = rounded(x, pattern)
    wrong = getattr(found, quantity).clone()
    wrong[-1, -1, -1] = torch.nan
    assert ratios(x, pattern, found._replace(**{quantity: wrong}))[quantity] == torch.inf
