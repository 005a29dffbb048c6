"""Every schedule in one process: exact, LongNet's near branches beside far ones, and rounded once."""

from __future__ import annotations

import warnings

import pytest
import torch

import longring as lr
from attending import tensors
from longring.errors import RowsLeftOut
from longring.schedules.select import SCHEDULES
from longring.testing import Result, oracle
from longring.testing.budgets import distance

PATTERNS = {
    "full": lr.Dense(causal=False),
    "causal": lr.Dense(causal=True),
    "window": lr.Dense(causal=True, window=(9, 0)),
    "documents": lr.Dense(causal=True, documents=[0, 7, 8, 40, 64]),
    "near and far": lr.Dilated([8, 16, 64], [1, 2, 4]),
    "rows left out": lr.Dilated([16, 64], [2, 4], phase="block"),
}


def play(q, k, v, dout, dlse, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RowsLeftOut)
        sim = lr.simulate(q, k, v, **options)
    gradients = torch.autograd.grad((sim.out, sim.lse), (q, k, v), (dout, dlse))
    return Result(sim.out.detach(), sim.lse.detach(), *gradients), sim


@pytest.fixture
def poisoned():
    """Memory that nobody wrote is nan."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("schedule", ["ring", "exchange", "ulysses"])
@pytest.mark.parametrize("layout", ["contiguous", "striped"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_rows_that_did_not_come_are_not_read(schedule, layout, pattern, poisoned):
    q, k, v, dout, dlse = tensors(2, 64, 64, 6, 3, 4)
    got, _ = play(q, k, v, dout, dlse, ranks=3, pattern=pattern, layout=layout, schedule=schedule)
    assert all(x.isfinite().all() for x in got[2:])
    assert got.out.isfinite().all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_every_schedule_is_exact_and_sends_what_was_predicted(schedule, layout, pattern):
    """Four ranks in nodes of two; six heads of three kv heads, which neither two nor four divides."""
    q, k, v, dout, dlse = tensors(2, 64, 64, 6, 3, 4)
    got, sim = play(q, k, v, dout, dlse, ranks=4, node_ranks=2, pattern=pattern, layout=layout, schedule=schedule)
    want = oracle(q, k, v, pattern, dout, dlse)
    for name in Result._fields:
        assert distance(getattr(got, name), getattr(want, name)) < 1e-11, name
    for phase in (sim.forward, sim.backward):
        assert phase.bytes_sent == phase.predicted_bytes


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("n", "ranks"), [(263, 3), (170, 2)])
def test_long_shards_of_odd_and_unequal_lengths(schedule, layout, n, ranks):
    """Of 88, 88 and 87 tokens, and of 85 each: no number that rows are handled by divides them."""
    q, k, v, dout, dlse = tensors(1, n, n, 4, 2, 4)
    pattern = lr.Dense(causal=True)
    got, _ = play(q, k, v, dout, dlse, ranks=ranks, pattern=pattern, layout=layout, schedule=schedule)
    want = oracle(q, k, v, pattern, dout, dlse)
    for name in Result._fields:
        assert distance(getattr(got, name), getattr(want, name)) < 1e-11, name


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["causal", "near and far"])
def test_sixteen_bits_are_rounded_once(schedule, name):
    """Almost every number is the exact one rounded; a second rounding would move one of several."""
    q, k, v, dout, dlse = tensors(1, 64, 64, 6, 3, 16, torch.bfloat16)
    options = {"ranks": 4, "node_ranks": 2, "pattern": PATTERNS[name], "layout": "contiguous", "schedule": schedule}
    got, _ = play(q, k, v, dout, dlse, **options)
    want = oracle(q, k, v, PATTERNS[name], dout, dlse)
    assert (got.out == want.out.to(torch.bfloat16)).double().mean() > 0.98
    assert distance(got.lse, want.lse) < 1e-5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sums_of_sixteen_bits_are_kept_in_more(schedule):
    """The gradient of lse alone, over many keys that are alike: dq is a sum that 16 bits would lose."""
    q, k, v, dout, dlse = tensors(1, 256, 256, 4, 2, 8, torch.bfloat16)
    options = {"ranks": 4, "node_ranks": 2, "pattern": lr.Dense(causal=False), "layout": "contiguous"}
    got, _ = play(q, k, v, torch.zeros_like(dout), dlse, schedule=schedule, **options)
    want = oracle(q, k, v, lr.Dense(causal=False), torch.zeros_like(dout), dlse)
    for name in ("dq", "dk"):
        assert (getattr(got, name) == getattr(want, name).to(torch.bfloat16)).double().mean() > 0.98, name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_offset_moves_queries_out_of_the_segments_of_their_rank(schedule):
    """As many queries as keys, dealt alike, and yet a query's segment is another rank's."""
    pattern = lr.Dilated([8, 16, 64], [1, 2, 4])
    q, k, v, dout, dlse = tensors(1, 64, 64, 4, 2, 4)
    options = {"ranks": 4, "node_ranks": 2, "layout": "contiguous", "query_offset": 5}
    got, _ = play(q, k, v, dout, dlse, pattern=pattern, schedule=schedule, **options)
    want = oracle(q, k, v, pattern, dout, dlse, query_offset=5)
    for name in Result._fields:
        assert distance(getattr(got, name), getattr(want, name)) < 1e-11, name
