"""When `auto` builds cuDNN plans on a GPU: for what comes again, never for documents or lengths that come once."""

from __future__ import annotations

import random

import pytest
import torch

import longring as lr
from longring.kernels import recipes
from longring.kernels.built_plans import ALLOWANCE, SECONDS, BuiltPlans
from longring.kernels.fused import FusedKernel
from longring.kernels.operations.cuda import Cudnn, Efficient, Flash
from longring.kernels.operations.triton import TritonTiles
from on_meta import hopper_without_memory
from stacking import pattern_tiles

KERNEL = FusedKernel("several", [Cudnn(), Flash(), Efficient(), TritonTiles()])


@pytest.fixture(autouse=True)
def _hopper():
    with hopper_without_memory():
        yield


def steps(n: int, pattern, which="forward", kernel=KERNEL, heads=16, kv_heads=4, d=128):
    q, k = (torch.empty(1, n, h, d, device="meta", dtype=torch.bfloat16) for h in (heads, kv_heads))
    tiles = pattern_tiles(pattern, 1, n, heads, kv_heads)
    legs = kernel.recipe(which, tiles, q, k, is_first=True, can_be_done=True)
    return [step for leg in legs for step in leg.steps]


def names(*args, **options) -> list[str]:
    return [step.operation.name for step in steps(*args, **options)]


def documents(rng: random.Random, n: int, count: int) -> lr.Dense:
    return lr.Dense(documents=[0, *sorted(rng.sample(range(1, n), count - 1)), n])


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_call_that_comes_again_gets_a_plan(which):
    assert "cudnn" not in names(8192, lr.Dense(), which)
    assert names(8192, lr.Dense(), which) == ["cudnn"]
    assert names(8192, lr.Dense(), which) == ["cudnn"]


def test_a_plan_that_there_is_serves_at_once():
    for _ in range(2):
        names(8192, lr.Dense(causal=False))
    other = lr.Dense(window=(-1, -1), causal=False)  # another pattern, the same tile
    assert names(8192, other) == ["cudnn"]


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_lengths_that_come_once_build_nothing(which):
    for n in random.Random(1).sample(range(4000, 9000), 60):
        assert "cudnn" not in names(n, lr.Dense(), which)


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("layers", [1, 8])
def test_documents_that_change_at_each_step_are_few_launches_and_cost_no_more_than_the_allowance(which, layers):
    rng = random.Random(2)
    for _ in range(12):
        pattern = documents(rng, 32768, rng.randint(4, 100))
        for _ in range(layers):
            found = steps(32768, pattern, which)
            if layers == 1:
                assert len(found) == 1, f"{len(found)} launches"
                assert found[0].operation.name != "cudnn"
    assert len(recipes._plans._built) <= ALLOWANCE / SECONDS


def test_what_has_no_other_operation_takes_it_at_once():
    assert names(8192, lr.Dense(), kernel=FusedKernel("cudnn", [Cudnn()])) == ["cudnn"]


def test_beyond_the_allowance_a_plan_is_built_once_calls_have_lost_as_much():
    plans = BuiltPlans()
    many = {(i,) for i in range(round(ALLOWANCE / SECONDS))}
    assert plans.bought(many, lost=0.0) == pytest.approx(ALLOWANCE)
    assert plans.bought({"one more"}, lost=0.5 * SECONDS) is None
    assert plans.bought({"one more"}, lost=1.01 * SECONDS) == 0
    assert "one more" in plans
    plans.paid_back(0.5 * SECONDS)
    assert plans.bought({"another"}, lost=0.0) is None
    plans.paid_back(SECONDS)
    assert plans.bought({"another"}, lost=0.0) == pytest.approx(SECONDS)


def test_plans_that_are_used_earn_the_allowance_back():
    before = recipes._plans._allowance
    for _ in range(2):
        names(8192, lr.Dense())
    assert recipes._plans._allowance < before
    for _ in range(2000):
        names(8192, lr.Dense())
    assert recipes._plans._allowance == pytest.approx(before)
