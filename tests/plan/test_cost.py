"""What estimates count, by hand."""

import pytest

from longring.geometry.layouts import deal
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.geometry.task import Task
from longring.plan.cost import Estimate, Machine, estimates


def estimated(task, machine, *, node_ranks):
    found = estimates(task, head_dim=1, itemsize=1, node_ranks=node_ranks, machine=machine)
    return {one.schedule: (one.computing, one.moving, one.volume) for one in found}


def test_only_what_a_relay_moves_is_hidden():
    assert Estimate("ring", 2.0, 3.0, True, 0).seconds == 3.0
    assert Estimate("ulysses", 2.0, 3.0, False, 0).seconds == 5.0


def test_estimates_by_hand():
    """Four rows of four query and two kv heads on each of 2 x 2 ranks; a second is 128 flops, 2 bytes inside, 1 out.

    Every rank computes 4 x 16 pairs of four heads, 4 flops each: 8 seconds. Three blocks of 4 rows, K and V of two kv
    heads, are 48 bytes; in a ring of rings one of the three crosses. By heads over all ranks 3/4 of q and out go,
    2 x 12 vectors, and k and v to the two ranks each that read a kv head, 2 x 12. Inside nodes half of q and out go,
    2 x 8, and half of k and v, 2 x 4; then the other node's 8 rows of one head, k and v: 16 seconds, 8 of them hidden.
    """
    dealt = deal("contiguous", 16, 4)
    task = Task(Dense(causal=False), Problem(1, 16, 16, 2, 0), dealt, dealt, 4)
    assert estimated(task, Machine(128.0, 2.0, 1.0), node_ranks=2) == {
        "ring": (8.0, 48.0, 48.0),
        "double_ring": (8.0, pytest.approx(16.0), 48.0),
        "exchange": (8.0, 48.0, 48.0),
        "ulysses": (8.0, 48.0, 48.0),
        "hybrid": (8.0, 12.0 + 16.0 - 8.0, 24.0 + 16.0),
    }
    within = estimated(task, Machine(128.0, 2.0, 1.0), node_ranks=4)
    assert within == dict.fromkeys(("ring", "exchange", "ulysses"), (8.0, 24.0, 48.0))


def test_the_busiest_rank_of_a_relay_counts_and_by_heads_the_mean():
    """Causal rows of two ranks: 10 and 26 pairs, 4 flops each."""
    dealt = deal("contiguous", 8, 2)
    found = estimated(Task(Dense(), Problem(1, 8, 8, 1, 0), dealt, dealt), Machine(4.0, 1.0, 1.0), node_ranks=2)
    assert found["ring"][0] == found["exchange"][0] == 26.0
    assert found["ulysses"][0] == 18.0


def test_of_longnet_only_kept_rows_of_wide_branches_change_places():
    dealt = deal("contiguous", 64, 4)
    machine = Machine(1.0, 1.0, 1.0)
    dense, dilated = (
        estimated(Task(pattern, Problem(1, 64, 64, 4, 0), dealt, dealt), machine, node_ranks=4)["ulysses"][2]
        for pattern in (Dense(), Dilated([16, 64], [1, 4]))
    )
    assert dilated == dense / 4
