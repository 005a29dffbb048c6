"""The float64 answers for sampled rows and columns are the definition's, and a wrong result is caught."""

import pytest
import torch

from longring import Dense, Dilated
from longring.bench.gpu import exact
from longring.bench.gpu.check import Result, Wrong, check, errors_of, sampled
from longring.bench.gpu.exact import exact_columns, exact_rows, pair_counts_at
from longring.bench.gpu.given import Place, Shape, given
from longring.errors import PatternError
from longring.geometry.patterns import Problem
from longring.numerics.definition import pair_counts
from longring.testing import oracle

CPU = torch.device("cpu")
PATTERNS = {
    "documents": Dense(documents=[0, 1, 20, 61]),
    "documents, window": Dense(documents=[0, 30, 61], window=(9, 3), causal=False),
    "causal": Dense(causal=True),
    "full": Dense(causal=False),
    "window": Dense(causal=True, window=(7, 0)),
    "window to both sides": Dense(causal=False, window=(7, 3)),
    "dilated": Dilated([8, 16, 64], [1, 2, 4]),
    "dilated, block": Dilated([8, 16, 64], [1, 2, 4], phase="block"),
    "rows that see nothing": Dilated([8, 16], [2, 4], causal=False),
}


def inputs(dtype=torch.float64, n=61, heads=4, kv_heads=2):
    return given(Shape(n, heads, kv_heads, 8), Place(CPU, dtype))


def answer(x, pattern):
    return oracle(x.q, x.k, x.v, pattern, x.dout)


@pytest.mark.parametrize("at_once", [1 << 25, 2000])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_rows_and_columns_are_the_definitions(pattern, at_once, monkeypatch):
    monkeypatch.setattr(exact, "NUMBERS_AT_ONCE", at_once)
    x = inputs()
    want = answer(x, pattern)
    some = torch.tensor([0, 7, 30, 60])
    rows = exact_rows(x, pattern, some)
    columns = exact_columns(x, pattern, some, want.out, want.lse)
    torch.testing.assert_close(rows.out.value, want.out[:, some], atol=1e-12, rtol=0)
    torch.testing.assert_close(rows.lse, want.lse[:, :, some], atol=1e-12, rtol=0)
    torch.testing.assert_close(rows.dq.value, want.dq[:, some], atol=1e-12, rtol=0)
    torch.testing.assert_close(columns.dk.value, want.dk[:, some], atol=1e-12, rtol=0)
    torch.testing.assert_close(columns.dv.value, want.dv[:, some], atol=1e-12, rtol=0)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_counts_are_the_definitions(pattern):
    positions = torch.arange(61)
    got = pair_counts_at(pattern, positions, positions, 4).expand(4, 61, 61)
    assert torch.equal(got, pair_counts(pattern, Problem(1, 61, 61, 4, 0))[0])


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (Dense(documents=[[0, 2, 4], [0, 4]]), "one list of documents"),
        (Dense(lengths=[4]), "without lengths"),
        (Dilated([2, 4], [1, 2], documents=[0, 2, 4]), "without documents"),
    ],
    ids=repr,
)
def test_other_patterns_are_refused(pattern, why):
    with pytest.raises(PatternError, match=why):
        pair_counts_at(pattern, torch.arange(4), torch.arange(4), 1)


@pytest.mark.parametrize("pattern", [PATTERNS["causal"], PATTERNS["dilated"]], ids=["causal", "dilated"])
def test_a_rounded_answer_is_right(pattern):
    x = inputs(torch.bfloat16)
    want = answer(x, pattern)
    found = Result(*(part.to(torch.bfloat16) for part in want))._replace(lse=want.lse.float())
    errors = check(x, pattern, found)
    assert set(errors) == {"out", "lse", "dq", "dk", "dv"}


def test_a_forgotten_block_is_wrong():
    """Of sixty-four equal ones, one that only the last rows would have seen."""
    n, pattern = 512, Dense(causal=True)
    x = inputs(torch.bfloat16, n=n)
    want, start = answer(x, pattern), 440
    without = answer(x._replace(v=x.v.clone().index_fill_(1, torch.arange(start, start + 8), 0.0)), pattern)
    with pytest.raises(Wrong, match="out"):
        check(x, pattern, Result(without.out))
    check(x, pattern, Result(want.out))


@pytest.mark.parametrize("quantity", ["dq", "dk", "dv"])
def test_a_wrong_gradient_is_told_by_name(quantity):
    x, pattern = inputs(torch.bfloat16), Dense(causal=True)
    found = Result(*answer(x, pattern))
    wrong = found._replace(**{quantity: getattr(found, quantity) * 1.05})
    with pytest.raises(Wrong, match=quantity):
        check(x, pattern, wrong)


def test_nan_is_infinitely_wrong():
    x, pattern = inputs(torch.bfloat16), Dense(causal=True)
    out = answer(x, pattern).out
    out[:, -1] = torch.nan
    assert errors_of(x, pattern, Result(out))["out"] == torch.inf


def test_some_rows_alone():
    x, pattern = inputs(torch.bfloat16), Dense(causal=True)
    want, rows = answer(x, pattern), torch.arange(20, 40)
    check(x, pattern, Result(want.out[:, rows], want.lse[:, :, rows], want.dq[:, rows]), rows=rows)


def test_samples_have_both_ends():
    assert {0, 49, 50, 99} <= set(sampled(100, CPU).tolist())
    assert sampled(1, CPU).tolist() == [0]
    assert set(sampled(9, CPU, within=torch.tensor([3, 5])).tolist()) == {3, 5}
