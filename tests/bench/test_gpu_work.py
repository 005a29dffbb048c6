"""Useful work is what the definition counts."""

import pytest

from longring import Dense, Dilated
from longring.bench.gpu.given import Shape, tokens
from longring.bench.gpu.work import flops, pairs_of
from longring.geometry.patterns import Problem
from longring.numerics.definition import pair_counts

PATTERNS = [Dense(causal=True), Dense(causal=False), Dilated([8, 16, 32], [1, 2, 4])]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_pairs_are_those_that_count(pattern):
    counted = int(pair_counts(pattern, Problem(1, 61, 61, 2, 0)).sum())
    assert pairs_of(Shape(61, 6, 2, 8), pattern) == 3 * counted


def test_a_backward_is_two_and_a_half_forwards():
    shape = Shape(64, 2, 2, 8)
    forward, backward = (flops(shape, Dense(causal=False), phase) for phase in ("forward", "backward"))
    assert forward == 4 * 64 * 64 * 2 * 8
    assert backward == 2.5 * forward


def test_the_case_of_the_longnet_paper_is_17_tflop():
    pattern = Dilated([2048 << i for i in range(5)], [1 << i for i in range(5)])
    assert flops(Shape(1 << 20, 16, 16, 128), pattern, "forward") == pytest.approx(17.05e12, rel=1e-3)


def test_lengths_are_told_shortly():
    assert [tokens(n) for n in (8192, 1 << 20, 100, 184 << 15)] == ["8K", "1M", "100", "5888K"]
