import re
from functools import lru_cache

import pytest
import torch

from longring.call import pick_schedule
from longring.geometry.layouts import LAYOUTS, deal
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.geometry.task import Task
from longring.plan.choose import choose_layout, choose_schedule


@pytest.mark.parametrize(
    ("pattern", "layout"),
    [
        (Dense(), "zigzag"),
        (Dense(causal=False), "contiguous"),
        (Dense(window=(250, 0)), "contiguous"),  # a quarter of 1,000
        (Dense(window=(251, 0)), "zigzag"),
        (Dense(window=(None, 0)), "zigzag"),
        (Dense(causal=False, window=(100, 100)), "contiguous"),
        (Dense(causal=False, window=(900, 900)), "contiguous"),
        (Dense(documents=[0, 400, 1000]), "dealt"),
        (Dense(lengths=[1000]), "zigzag"),
        (Dilated([64], [2]), "contiguous"),
        (Dilated([64], [2], documents=[0, 400, 1000]), "contiguous"),
    ],
)
def test_layouts_follow_the_pattern(pattern, layout):
    assert choose_layout(pattern, 1000)[0] == layout


def chosen(pattern, ranks, layout="contiguous", length=64):
    dealt = deal(layout, length, ranks, documents=pattern.documents)
    task = Task(pattern, Problem(1, length, length, 1, 0), dealt, dealt)
    return (*choose_schedule(task), task)


@pytest.mark.parametrize(
    ("pattern", "schedule"),
    [
        (Dense(), "ring"),
        (Dense(window=(4, 0)), "ring"),  # neighbours hold it
        (Dense(documents=[0, 30, 64]), "ring"),  # a hull of rows that is as small as what tiles name
        (Dense(causal=False), "ulysses"),  # one look at all keys instead of four
        (Dilated([8, 16], [1, 2]), "ulysses"),  # of which nothing moves, and its backward is one look
    ],
)
def test_tiny_tasks_follow_how_often_a_kernel_is_called(pattern, schedule):
    """By the simulation, too: on a GPU nothing else takes time."""
    assert chosen(pattern, 4)[0] == schedule


def test_one_rank_needs_no_schedule():
    assert chosen(Dense(window=(4, 0)), 1)[:2] == ("ring", "one rank holds everything, and nothing moves")


def dense(length, ranks, *, heads=32, kv_heads=8, layout="zigzag"):
    dealt = deal(layout, length, ranks)
    return Task(Dense(), Problem(1, length, length, kv_heads, 0), dealt, dealt, heads)


def test_where_there_is_time_to_hide_what_moves_it_is_a_ring():
    assert choose_schedule(dense(1 << 20, 64), head_dim=128)[0] == "ring"


def test_where_moving_would_take_longer_heads_change_places():
    assert choose_schedule(dense(512, 8, heads=8), head_dim=128)[0] == "ulysses"
    assert choose_schedule(dense(1 << 12, 16), head_dim=128, node_ranks=8)[0] == "hybrid"


def test_between_nodes_there_are_fewer_and_larger_tiles_in_a_hybrid():
    assert choose_schedule(dense(1 << 24, 4096), head_dim=128, node_ranks=8)[0] == "hybrid"
    assert choose_schedule(dense(1 << 19, 64), head_dim=128, node_ranks=8)[0] == "hybrid"


def test_windows_that_neighbours_hold_and_segments_that_few_share_are_not_rotated():
    layout = deal("contiguous", 1 << 20, 64)
    for pattern, schedule in (
        (Dense(window=(4095, 0)), "ring"),
        (Dilated([2048, 8192, 32768], [1, 4, 16]), "exchange"),
    ):
        task = Task(pattern, Problem(1, 1 << 20, 1 << 20, 8, 0), layout, layout, 32)
        assert choose_schedule(task, head_dim=128, node_ranks=8)[0] == schedule


def test_the_reason_names_every_candidate_with_its_estimate():
    _, reason = choose_schedule(dense(1 << 20, 64), head_dim=128, node_ranks=8)
    for name in ("ring", "double_ring", "exchange", "ulysses", "hybrid"):
        assert f"{name} about" in reason
    told = r"{} about (\d+) ms \(computing \d+ ms while moving "
    ring, hybrid = (re.search(told.format(f"{start}{name}"), reason) for start, name in (("^", "ring"), ("", "hybrid")))
    assert ring is not None
    assert hybrid is not None
    assert int(hybrid[1]) < int(ring[1])  # too little to gain
    assert " and changing places " in reason


@pytest.mark.parametrize("pattern", [Dense(), Dense(window=(3, 0)), Dilated([8], [2]), Dense(documents=[0, 9, 64])])
def test_every_choice_has_a_reason(pattern):
    layout, why_layout = choose_layout(pattern, 64)
    assert layout in LAYOUTS
    assert len(why_layout.split()) > 3
    assert len(chosen(pattern, 4, layout)[1].split()) > 3


def test_one_query_on_a_long_cache_does_not_rotate_it():
    """The rank that holds the query needs the keys; no other rank needs any. One round brings all of them."""
    queries, keys = deal("contiguous", 1, 8), deal("contiguous", 800, 8)
    task = Task(Dense(), Problem(1, 1, 800, 1, 799), queries, keys)
    assert choose_schedule(task)[0] == "ulysses"


def test_choosing_for_thousands_of_ranks_asks_a_few():
    layout = deal("contiguous", 1 << 20, 1024)
    task = Task(Dense(window=(4096, 0)), Problem(1, 1 << 20, 1 << 20, 8, 0), layout, layout, 32)
    assert choose_schedule(task, head_dim=128)[0] == "ring"


def test_a_choice_that_was_made_is_remembered(monkeypatch):
    """By the engine, for every shape: choosing takes milliseconds, looking it up not one."""
    made = []
    counted = lru_cache(maxsize=256)(lambda *args, **told: made.append(1) or choose_schedule(*args, **told))
    monkeypatch.setattr("longring.call._chosen_schedule", counted)
    q = torch.zeros(1, 16, 8, 64)
    for _ in range(3):
        pick_schedule("auto", dense(1 << 16, 8, heads=8), q, 8)
    assert len(made) == 1
