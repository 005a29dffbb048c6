"""A wrong result is caught before it is timed, and told by name."""

import pytest
import torch

from longring import Dense, Dilated
from longring.bench.gpu.check import Result, Wrong, check, errors_of, sampled
from longring.bench.gpu.given import Place, Shape, given
from longring.testing import oracle

CPU = torch.device("cpu")
PATTERNS = {"causal": Dense(causal=True), "dilated": Dilated([8, 16, 64], [1, 2, 4])}


def inputs(dtype=torch.float64, n=61, heads=4, kv_heads=2):
    return given(Shape(n, heads, kv_heads, 8), Place(CPU, dtype))


def answer(x, pattern):
    return oracle(x.q, x.k, x.v, pattern, x.dout)


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
