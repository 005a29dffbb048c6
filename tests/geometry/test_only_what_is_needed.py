"""No row and no gradient travels that nobody needs, and heads share work."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longring.geometry.itinerary import HOME
from longring.geometry.layouts import deal, from_ranges
from longring.geometry.looks import looks
from longring.geometry.needs import rows_seen
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.geometry.plans import plan
from longring.geometry.task import Task
from strategies import tasks


def test_rows_seen_of_a_striped_shard_begin_with_the_first_that_is_seen():
    """Queries 10..19 see back to key 7; of the even keys the first is 8, their row 4."""
    task = Task(Dense(window=(3, 0)), Problem(1, 20, 20, 1, 0), deal("contiguous", 20, 2), deal("striped", 20, 2))
    assert rows_seen(task, 0, [range(1, 2)]) == (range(4, 10),)
    assert rows_seen(task, 1, [range(1, 2)]) == (range(3, 10),)


def test_rows_between_what_two_ranks_see_are_not_seen():
    queries, keys = from_ranges([[range(2)], [range(10, 12)], [range(2, 10)]]), from_ranges([[range(12)], [], []])
    task = Task(Dense(window=(0, 0)), Problem(1, 12, 12, 1, 0), queries, keys)
    assert rows_seen(task, 0, [range(2)]) == (range(2), range(10, 12))
    assert rows_seen(task, 0, [range(3)]) == (range(12),)


@given(tasks(max_ranks=12), st.data())
def test_rows_seen_are_those_between_the_ends_of_what_each_rank_could_see(task, data):
    """Of any ranks, in as few intervals as there are."""
    owner = data.draw(st.integers(0, task.ranks - 1))
    cuts = sorted(data.draw(st.sets(st.integers(0, task.ranks), min_size=1)))
    asked = [range(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    offset = task.problem.offset
    views = [
        task.pattern.sees(task.problem, piece[0] + offset, piece[-1] + offset)
        for ranks in asked
        for rank in ranks
        for piece in task.queries.shards[rank]
    ]
    held = [position for piece in task.keys.shards[owner] for position in piece]
    seen = [row for row, position in enumerate(held) if any(v.first <= position <= v.last for v in views)]
    told = rows_seen(task, owner, asked)
    assert [row for rows in told for row in rows] == seen
    assert all(rows.step == 1 for rows in told)
    assert all(a.stop < b.start for a, b in pairwise(told))


@pytest.mark.parametrize("schedule", ["ring", "bidirectional"])
def test_gradients_that_nobody_added_to_do_not_travel(schedule):
    """The halos of a rank's two chunks are seen by one neighbour each: what it finds goes home at once."""
    layout = deal("zigzag", 80, 4)
    task = Task(Dense(window=(5, 0)), Problem(1, 80, 80, 1, 0), layout, layout)
    for rank in range(4):
        for post in plan(schedule, task, rank).backward():
            for _, parcel in post.sends:
                assert parcel.kind == "rows" or parcel.receiver == parcel.owner


def test_the_rows_of_a_shared_head_cost_every_rank_the_same():
    """One causal head on four ranks: each computes an early and a late part of its rows."""
    layout = deal("contiguous", 64, 4)
    task = Task(Dense(), Problem(1, 64, 64, 1, 0), layout, layout)
    work = [
        sum(tile.pairs for step in looks(plan("ulysses", task, rank)) for look in step for tile in look.tiles)
        for rank in range(4)
    ]
    assert len(set(work)) == 1


def test_a_short_last_segment_fits_its_rank():
    layout = deal("contiguous", 40, 3, align=16)  # 16, 16 and 8
    task = Task(Dilated([16], [1]), Problem(1, 40, 40, 3, 0), layout, layout)
    assert [list(plan("ulysses", task, rank).forward()) for rank in range(3)] == [[]] * 3


def test_the_ring_between_nodes_goes_the_way_on_which_less_travels():
    layout = deal("zigzag", 64, 8)
    task = Task(Dense(), Problem(1, 64, 64, 2, 0), layout, layout)
    assert plan("hybrid", task, 0, 2).between.lanes[0].route.direction == -1


def test_ulysses_moves_only_queries_that_see_something():
    """Of a branch of rate 4 alone, every head sends a quarter of its rows."""
    layout = deal("contiguous", 64, 4)
    task = Task(Dilated([64], [4]), Problem(1, 64, 64, 4, 0), layout, layout)
    for rank in range(4):
        kinds = Counter()
        for post in plan("ulysses", task, rank).forward():
            for lane, delivery in post.sends:
                assert lane == HOME
                kinds[delivery.kind] += delivery.vectors
        assert kinds == {"queries": 3 * 4, "keys": 3 * 4, "answers": 3 * 4}
