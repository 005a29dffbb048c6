"""The Trainer over ranks: train, evaluate and predict give the numbers of the stock Trainer with sdpa."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import longring as lr
import trainer_runs
from trainer_runs import CASES, REFUSED, RESUMES, SEVERAL_ROWS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]  # a start is expensive: each rank loads the Trainer


@pytest.fixture(scope="module")
def stock():
    """In one process of its own, which torch.distributed does not know."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        names = list(CASES)
        return dict(zip(names, pool.submit(trainer_runs.of_stock, names).result(timeout=200), strict=True))


@pytest.fixture(scope="module")
def two_ranks():
    return lr.launch(trainer_runs.of_two_ranks, ranks=2, timeout=250)


@pytest.fixture(scope="module")
def four_ranks():
    return lr.launch(trainer_runs.of_four_ranks, ranks=4, timeout=280)


def check(got, want, about):
    """float32, in which the logits of transformers enter its loss."""
    assert got.losses == pytest.approx(want.losses, rel=2e-5), about
    assert len(got.metrics) >= 6
    assert got.metrics == pytest.approx(want.metrics, rel=2e-5, abs=1e-5), about
    for a, b in ((got.predictions, want.predictions), (got.unlabelled, want.unlabelled)):
        np.testing.assert_allclose(a, b, atol=1e-4, err_msg=about)
    np.testing.assert_array_equal(got.label_ids, want.label_ids, err_msg=about)
    torch.testing.assert_close(got.weights, want.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_numbers_of_one_process(name, stock, two_ranks):
    """In order and of whole length, with a last batch that is not full."""
    for rank, outcome in enumerate(two_ranks):
        check(outcome["sharded"][name], stock[name], f"rank {rank}")


def test_four_ranks_give_the_numbers_of_one_process(stock, four_ranks):
    for rank, outcome in enumerate(four_ranks):
        for name, got in outcome["sharded"].items():
            check(got, stock[name], f"{name}, rank {rank}")


@pytest.mark.parametrize("name", SEVERAL_ROWS)
def test_two_rows_of_two_ranks_give_the_numbers_of_two_data_parallel_processes(name, two_ranks, four_ranks):
    want = two_ranks[0]["data parallel"][name]
    for rank, outcome in enumerate(four_ranks):
        check(outcome["data and context parallel"][name], want, f"rank {rank}")


@pytest.mark.skipif(not RESUMES, reason="this Trainer cannot load its optimizer over several processes on CPUs")
def test_training_goes_on_where_it_was_saved(two_ranks):
    """To the bit, in the midst of an epoch."""
    for outcome in two_ranks:
        whole, rest = outcome["resumed"]
        assert len(whole) == 6
        assert rest == whole
        assert two_ranks[0]["resumed"] == outcome["resumed"]


def test_processes_that_load_data_draw_the_same_on_all_ranks(two_ranks):
    assert [outcome["rank of workers"] for outcome in two_ranks] == [0, 0]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_not_built_is_refused(number, two_ranks):
    for outcome in two_ranks:
        assert REFUSED[number][0] in outcome["refused"][number]
