"""Runs: the tiles of a rank with thousands of others, told in a few lines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longring.geometry.layouts import deal, from_ranges
from longring.geometry.patterns import Dense, Problem
from longring.geometry.task import Task, at_rank, runs_over_sources, runs_over_targets, tiles_between
from strategies import limits_only, tasks


def long_dense_task(name="zigzag"):
    layout = deal(name, 1_000_000, 4096)
    return Task(Dense(), Problem(1, layout.length, layout.length, 8, 0), layout, layout)


@given(tasks(patterns=limits_only, max_ranks=40), st.data())
def test_runs_are_exactly_the_tiles_of_every_pair(task, data):
    """Limits alone are compressed into runs: the compression must not be seen, number for number."""
    own = data.draw(st.integers(0, task.ranks - 1))
    sources, targets = runs_over_sources(task, own), runs_over_targets(task, own)
    for other in range(task.ranks):
        assert at_rank(sources, other) == tiles_between(task, own, other)
        assert at_rank(targets, other) == tiles_between(task, other, own)


@given(tasks())
def test_runs_of_any_pattern_are_the_tiles_of_every_pair(task):
    for target in range(task.ranks):
        for source in range(task.ranks):
            tiles = tiles_between(task, target, source)
            assert at_rank(runs_over_sources(task, target), source) == tiles
            assert at_rank(runs_over_targets(task, source), target) == tiles


@given(tasks(patterns=limits_only, max_ranks=40), st.data())
def test_runs_are_all_ranks_in_turn(task, data):
    own = data.draw(st.integers(0, task.ranks - 1))
    for runs in (runs_over_sources(task, own), runs_over_targets(task, own)):
        assert [rank for run in runs for rank in run.ranks] == list(range(task.ranks))


@pytest.mark.parametrize("names", [("striped", "striped"), ("zigzag", "striped"), ("striped", "contiguous")])
@pytest.mark.parametrize("window", [None, (9, 0), (5, 3), (0, 0)])
@pytest.mark.parametrize("lengths", [(160, 160), (123, 160), (160, 90)])
def test_runs_of_mixed_layouts_are_exact_over_40_ranks(names, window, lengths):
    (n_q, n_k), causal = lengths, window != (5, 3)
    queries, keys = (deal(name, n, 40) for name, n in zip(names, lengths, strict=True))
    task = Task(Dense(causal=causal, window=window), Problem(1, n_q, n_k, 1, n_k - n_q), queries, keys)
    for target in range(0, 40, 3):
        runs = runs_over_sources(task, target)
        assert [at_rank(runs, source) for source in range(40)] == [tiles_between(task, target, s) for s in range(40)]


@pytest.mark.parametrize("offset", [0, 2])
def test_runs_tell_the_square_of_equal_positions_from_tiles_that_look_like_it(offset):
    """Each half of the sequence striped: over earlier ranks' keys the pieces have the limits of one's own."""
    halves = from_ranges([[range(rank, 8, 4), range(8 + rank, 16, 4)] for rank in range(4)])
    task = Task(Dense(), Problem(1, 16, 16, 1, offset), halves, halves)
    for target in range(4):
        runs = runs_over_sources(task, target)
        assert [at_rank(runs, source) for source in range(4)] == [tiles_between(task, target, s) for s in range(4)]


def test_a_dense_plan_over_thousands_of_ranks_is_a_handful_of_runs():
    for name in ("contiguous", "zigzag", "striped"):
        assert len(runs_over_sources(long_dense_task(name), 1234)) < 40
