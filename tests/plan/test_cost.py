"""What estimates count, by hand."""

from dataclasses import replace

import pytest

from longring.geometry.layouts import deal
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.geometry.task import Task
from longring.plan.cost import estimate, few, some_ranks, some_steps
from longring.plan.event_pace import Pace
from longring.plan.hardware import Link, hardware

INSIDE, OUTSIDE = Link("inside", 2.0, 0.5, "here"), Link("outside", 1.0, 1.0, "here")
PLAIN = replace(
    hardware("cpu"),
    forward_flops={"fp16": 2.0**24},
    backward_flops={"fp16": 2.0**24},
    half_rate_rows=0,
    memory_bytes_per_second=2.0**60,
    launch_seconds=0.0,
    inside=INSIDE,
    outside=OUTSIDE,
    links_out=2,
)
"""No tile is small and copying is free; lines carry 2 bytes a second inside of a node, 1 outside."""


def estimated(task, schedule, *, node_ranks, phase="forward", machine=PLAIN):
    found = estimate(schedule, Pace(machine, task, phase, 128, 2), node_ranks=node_ranks)
    return found.computing, found.moving, found.unhidden, found.seconds


def full(heads=4, kv_heads=2, ranks=4):
    dealt = deal("contiguous", 4 * ranks, ranks)
    return Task(Dense(causal=False), Problem(1, 4 * ranks, 4 * ranks, kv_heads, 0), dealt, dealt, heads)


BLOCK = 2 * 4 * 2 * 128 * 2  # bytes: k and v of four rows and two kv heads of 128 numbers of two bytes
PAIRS = 4 * 128 * 4 * 4 * 4 / 2.0**24  # seconds for four rows, four keys and four heads


def test_a_step_takes_as_long_as_computing_or_moving():
    """Three blocks follow each other out of the node, each a second of latency; the last look moves nothing."""
    computing, moving, unhidden, seconds = estimated(full(), "ring", node_ranks=2)
    assert computing == pytest.approx(4 * PAIRS)
    assert moving == pytest.approx(3 * (BLOCK + 1.0))
    assert unhidden == 0.0
    assert seconds == pytest.approx(moving + PAIRS)


def test_computing_hides_what_moves():
    slow = replace(PLAIN, forward_flops={"fp16": 0.25})
    computing, moving, _, seconds = estimated(full(), "ring", node_ranks=2, machine=slow)
    assert moving < seconds == computing


def test_a_ring_of_rings_has_a_round_of_time_for_what_leaves_the_node():
    """Two blocks go round inside in one step each; the one that leaves has the two steps of a round."""
    _, moving, _, seconds = estimated(full(), "double_ring", node_ranks=2)
    inside, outside = BLOCK / 2 + 0.5, (BLOCK + 1.0) / 2
    assert moving == pytest.approx(2 * max(inside, outside) + inside, rel=1e-3)
    assert seconds == pytest.approx(moving + PAIRS, rel=1e-3)


def test_an_exchange_shares_its_nodes_lines():
    """With one line for two ranks blocks take twice as long, where both send out at a time."""
    alone, shared = (estimated(full(), "exchange", node_ranks=2, machine=replace(PLAIN, links_out=n)) for n in (2, 1))
    assert alone[1] == pytest.approx(3 * (BLOCK + 1.0))
    assert shared[1] == pytest.approx(3 * (BLOCK + 1.0) + BLOCK)  # in the second of three steps


def test_by_heads_everything_changes_places_before_and_after():
    """A rank keeps a quarter of q, k, v and out; k and v go to the two ranks each that read them."""
    computing, moving, unhidden, seconds = estimated(full(), "ulysses", node_ranks=4)
    row = 128 * 2
    there, back = 3 * (4 * row + 4 * 2 * row), 3 * 4 * (row + 4)  # with a float32 of lse
    assert computing == pytest.approx(4 * PAIRS)
    assert moving == 0.0
    assert unhidden == pytest.approx((there + back) / 2 + 2 * 0.5)
    assert seconds == pytest.approx(computing + unhidden)


def test_latency_is_waited_for_once_not_for_every_message():
    far = replace(PLAIN, inside=replace(INSIDE, latency_seconds=1000.0))
    near = estimated(full(ranks=16), "ulysses", node_ranks=16)[3]
    assert estimated(full(ranks=16), "ulysses", node_ranks=16, machine=far)[3] == pytest.approx(near + 2 * 999.5)


def test_the_busiest_of_the_ranks_counts():
    """Causal rows of two ranks: 10 and 26 pairs."""
    dealt = deal("contiguous", 8, 2)
    task = Task(Dense(), Problem(1, 8, 8, 1, 0), dealt, dealt)
    assert estimated(task, "exchange", node_ranks=2)[0] == pytest.approx(4 * 128 * 26 / 2.0**24)


def test_gradients_travel_behind_rows():
    """Backward blocks of float32 come on top of the rows, but for the first step's."""
    _, moving, _, _ = estimated(full(), "exchange", node_ranks=4, phase="backward")
    assert moving == pytest.approx(3 * (BLOCK / 2 + 0.5) + 3 * BLOCK, rel=0.3)


def test_of_longnet_only_kept_rows_of_wide_branches_change_places():
    dealt = deal("contiguous", 64, 4)
    machine = replace(PLAIN, inside=replace(INSIDE, latency_seconds=0.0))
    dense, dilated = (
        estimated(Task(pattern, Problem(1, 64, 64, 4, 0), dealt, dealt), "ulysses", node_ranks=4, machine=machine)[2]
        for pattern in (Dense(causal=False), Dilated([16, 64], [1, 4], causal=False))
    )
    assert dilated < dense / 2  # a quarter of the rows, whose partial answers go back in float32


@pytest.mark.parametrize("count", [1, 2, 5, 33, 34, 100, 4096])
def test_some_steps_speak_for_all(count):
    found = list(some_steps(count, 32))
    assert sum(often for _, often in found) == pytest.approx(count - 1)
    assert len({step for step, _ in found}) == len(found) <= 32
    assert all(1 <= step < count for step, _ in found)


def test_few_are_evenly_spaced():
    assert few(3, 8) == [0, 1, 2]
    assert few(64, 2) == [16, 48]


def test_ranks_that_are_asked_are_the_ends_of_nodes():
    assert some_ranks(full(ranks=16), 4) == [8, 15]
    assert some_ranks(full(ranks=5), 5) == [2, 4]
    assert some_ranks(full(ranks=1), 1) == [0]
    dealt = deal("contiguous", 64, 16)
    assert some_ranks(Task(Dilated([8], [2]), Problem(1, 64, 64, 1, 0), dealt, dealt), 4) == [0, 8, 11, 15]
