import pytest
from hypothesis import given

from longring.geometry.itinerary import direction, exchange
from longring.geometry.layouts import deal
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.geometry.task import Task
from longring.plan.traffic import backward_bytes, forward_bytes
from strategies import tasks

BF16 = {"head_dim": 64, "itemsize": 2}


def task_of(pattern, length, layout, ranks, *, batch=1, kv_heads=1, align=None):
    dealt = deal(layout, length, ranks, align=align)
    return Task(pattern, Problem(batch, length, length, kv_heads, 0), dealt, dealt)


def rows_sent(task, schedule, send=forward_bytes, itemsize=1):
    """Keys and as many values of each rank, as single rows of one head."""
    return [send(task, schedule, rank, head_dim=1, itemsize=itemsize) // 2 for rank in range(task.ranks)]


@given(tasks())
def test_a_ring_sends_at_most_every_block_but_the_next_ranks_own(task):
    """It starts with its own and ends with that of the rank after the next: n_k rows less one block."""
    sizes, places, way = task.keys.sizes, task.problem.batch * task.problem.kv_heads, direction(task)
    for rank in range(task.ranks):
        rows = sum(sizes) - sizes[(rank + way) % task.ranks]
        assert forward_bytes(task, "ring", rank, **BF16) <= 2 * rows * places * 64 * 2
        gradients = 2 * (sum(sizes) - sizes[rank]) * places * 64 * 4
        again = forward_bytes(task, "ring", rank, **BF16)
        assert backward_bytes(task, "ring", rank, **BF16) <= again + gradients


def test_without_causality_a_ring_sends_all_of_it():
    task = task_of(Dense(causal=False), 11, "contiguous", 3)  # blocks of 4, 4 and 3 rows
    assert rows_sent(task, "ring") == [4 + 3, 4 + 4, 3 + 4]
    assert rows_sent(task, "ring", backward_bytes, itemsize=4) == [4 * (7 + 7), 4 * (8 + 7), 4 * (7 + 8)]


@given(tasks())
def test_a_gather_sends_ones_own_to_everybody(task):
    places = task.problem.batch * task.problem.kv_heads
    for rank in range(task.ranks):
        rows = task.keys.sizes[rank] * (task.ranks - 1)
        assert forward_bytes(task, "gather", rank, **BF16) == 2 * rows * places * 64 * 2


@given(tasks())
def test_an_exchange_never_moves_more_than_a_gather(task):
    for rank in range(task.ranks):
        assert forward_bytes(task, "exchange", rank, **BF16) <= forward_bytes(task, "gather", rank, **BF16)


def test_one_rank_sends_nothing():
    task = task_of(Dense(), 10, "zigzag", 1)
    for schedule in ("ring", "exchange", "gather"):
        assert rows_sent(task, schedule) == rows_sent(task, schedule, backward_bytes) == [0]


def test_ring_by_hand():
    task = task_of(Dense(), 10, "contiguous", 3, batch=2, kv_heads=3)  # blocks of 4, 3 and 3 rows, 6 times over
    # causal: the first block goes to both others, the second to the last, the last nowhere
    assert rows_sent(task, "ring") == [4 * 6, (3 + 4) * 6, 0]
    # the same again; rank 1 hands the gradients of the first block on, and rank 2 sends both home
    assert rows_sent(task, "ring", backward_bytes, itemsize=4) == [4 * 6 * rows for rows in (4, 7 + 4, 4 + 3)]


def test_gradients_of_float64_travel_in_float64():
    task = task_of(Dense(causal=False), 10, "contiguous", 2)
    assert backward_bytes(task, "ring", 0, head_dim=1, itemsize=8) == 2 * (5 + 5) * 8


def test_a_contiguous_causal_exchange_sends_only_to_later_ranks():
    assert rows_sent(task_of(Dense(), 12, "contiguous", 3), "exchange") == [8, 4, 0]


def test_a_window_moves_only_its_halo():
    # the last 10 keys of a rank are seen by the first queries of the next
    assert rows_sent(task_of(Dense(window=(10, 0)), 400, "contiguous", 4), "exchange") == [10, 10, 10, 0]
    both = task_of(Dense(causal=False, window=(10, 3)), 400, "contiguous", 4)
    assert rows_sent(both, "exchange") == [10, 13, 13, 3]


def test_a_window_over_two_ranks_moves_all_of_the_nearer():
    assert rows_sent(task_of(Dense(window=(10, 0)), 32, "contiguous", 4), "exchange") == [8 + 2, 8 + 2, 8, 0]


def test_documents_that_end_where_ranks_end_move_nothing():
    assert rows_sent(task_of(Dense(documents=[0, 4, 8, 16]), 16, "contiguous", 2), "exchange") == [0, 0]
    assert rows_sent(task_of(Dense(documents=[0, 4, 11, 16]), 16, "contiguous", 2), "exchange") == [4, 0]


# ---------------------------------------------------------------------------------------------- LongNet


def test_dilated_segments_inside_a_rank_move_nothing():
    assert rows_sent(task_of(Dilated([8, 16], [1, 3]), 128, "contiguous", 8), "exchange") == [0] * 8


def test_align_keeps_segments_whole():
    pattern = Dilated([16], [1], causal=False)
    # 25 tokens a rank cut the segments 16..32, 48..64 and 64..80
    assert rows_sent(task_of(pattern, 100, "contiguous", 4), "exchange") == [9, 7 + 2, 14 + 11, 5]
    assert rows_sent(task_of(pattern, 100, "contiguous", 4, align=16), "exchange") == [0] * 4


def test_a_segment_over_several_ranks_moves_its_kept_rows():
    # a segment over four ranks of 16 with rate 4: each sends its 4 kept rows to the three others
    assert rows_sent(task_of(Dilated([64], [4], causal=False), 128, "contiguous", 8), "exchange") == [12] * 8
    causal = task_of(Dilated([64], [4]), 128, "contiguous", 8)
    assert rows_sent(causal, "exchange") == [12, 8, 4, 0] * 2


def test_branches_with_equal_keys_share_what_moves():
    """Every row travels once for all branches."""
    one = task_of(Dilated([64], [4], causal=False), 128, "contiguous", 8)
    two = task_of(Dilated([64, 32], [4, 8], causal=False), 128, "contiguous", 8)
    assert rows_sent(one, "exchange") == rows_sent(two, "exchange")


@pytest.mark.parametrize(
    ("branches", "rows"),
    [
        # the widest segment is two ranks of 16,384 wide: (32,768 - 16,384) / 16
        (5, 1024),
        # up to one segment over everything: in each doubling twice the ranks send half the rows, since a key that a
        # wide branch keeps is kept by all narrower ones; (w - c) / r summed over the branches would be 10,272
        (10, 6 * 1024),
    ],
)
def test_longnet_over_a_million_tokens_moves_thousands_of_rows(branches, rows):
    segments = [2048 << i for i in range(branches)]
    pattern = Dilated(segments, [segment // 2048 for segment in segments], causal=False)
    task = task_of(pattern, 1 << 20, "contiguous", 64, kv_heads=2)
    received = [visit.arrived.vectors for step in exchange(task, 33) for visit in step.visits]
    assert sum(received) == 2 * rows
    assert sum(received) < 2 * (task.problem.n_k - task.keys.sizes[33]) / 100  # of what a ring brings
