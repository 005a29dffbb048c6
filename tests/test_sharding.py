"""Data is dealt in one place: shard, unshard and positions, and their gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import longring as lr
from longring.testing import run_ranks

LAYOUTS = ["contiguous", "zigzag", "striped", "dealt"]


def sharding(group, length, layout):
    documents = [0, max(1, length // 3), length] if length > 1 else [0, 1]
    return lr.Sharding(length, group, layout, documents=documents if layout == "dealt" else None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("length", "p"), [(1, 3), (2, 2), (10, 3), (17, 4), (64, 5)])
def test_unshard_brings_back_what_was_sharded(layout, length, p):
    x = torch.randn(2, length, 3)

    def program(group):
        s = sharding(group, length, layout)
        part = s.shard(x)
        assert part.shape == (2, s.local_length, 3)
        assert torch.equal(part, x[:, s.positions])
        return s.unshard(part)

    assert all(torch.equal(got, x) for got in run_ranks(p, program))


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_any_dimension_can_be_the_sequence(dim):
    x = torch.randn(7, 7, 7)

    def program(group):
        s = lr.Sharding(7, group)
        part = s.shard(x, dim=dim)
        assert torch.equal(part, x.index_select(dim, s.positions))
        return s.unshard(part, dim=dim)

    assert all(torch.equal(got, x) for got in run_ranks(3, program))


def test_gradients_are_whole_and_never_multiplied_by_the_ranks():
    """Whole tensors are replicated: shard gathers gradients, unshard takes its part, neither counts p times."""
    x = torch.randn(2, 9, 3, dtype=torch.float64)
    weights = torch.randn(2, 9, 3, dtype=torch.float64)

    def program(group):
        s = lr.Sharding(9, group, "zigzag")
        whole = x.clone().requires_grad_()
        loss = (s.unshard(s.shard(whole).square()) * weights).sum()  # every rank computes the same loss
        return torch.autograd.grad(loss, whole)[0]

    for gradient in run_ranks(4, program):
        assert torch.allclose(gradient, 2 * x * weights)


def test_positions_are_global_and_rising():
    def program(group):
        return lr.Sharding(10, group, "zigzag").positions.tolist()

    # 10 tokens in 6 chunks: 2 2 2 2 1 1
    assert run_ranks(3, program) == [[0, 1, 9], [2, 3, 8], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("pattern", "layout"),
    [
        (lr.Dense(causal=True), "zigzag"),
        (lr.Dense(causal=False), "contiguous"),
        (lr.Dense(causal=True, window=(100, 0)), "contiguous"),
        (lr.Dense(causal=True, window=(600, 0)), "zigzag"),
        (lr.Dense(causal=True, documents=[0, 5, 1000]), "dealt"),
        (lr.Dilated([64], [1]), "contiguous"),
    ],
)
def test_auto_looks_at_the_pattern(pattern, layout):
    def program(group):
        return lr.Sharding(1000, group, "auto", pattern=pattern).layout

    assert run_ranks(2, program) == [layout, layout]


def test_a_sharding_is_a_value():
    one, other = lr.Sharding(10), lr.Sharding(10)
    assert one == other
    assert hash(one) == hash(other)
    with pytest.raises(AttributeError):
        one.length = 11  # type: ignore[misc]


def test_alone_nothing_is_cut():
    s = lr.Sharding(5)
    x = torch.randn(1, 5, 2)
    assert (s.rank, s.ranks, s.local_length) == (0, 1, 5)
    assert torch.equal(s.shard(x), x)
    assert torch.equal(s.unshard(x), x)


def test_what_is_sharded_and_unsharded_is_a_tensor_of_its_own():
    x = torch.randn(1, 5, 2)
    s = lr.Sharding(5)
    for mine in (s.shard(x), s.unshard(x)):
        mine.zero_()
    assert x.all()


@pytest.mark.parametrize(
    "s",
    [
        lr.Sharding(10),
        lr.Sharding(10, layout="dealt", documents=[0, 3, 10]),
        lr.Sharding(10, layout="auto", pattern=lr.Dense(documents=[[0, 3, 10], [0, 10]])),
        lr.Sharding(10, layout="contiguous", align=4),
        lr.Sharding.from_ranges([[range(10)]]),
    ],
    ids=lambda s: s.layout,
)
def test_a_copy_of_every_field_is_the_same(s):
    assert dataclasses.replace(s) == s
