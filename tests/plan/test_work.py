import pytest
from hypothesis import given

from enumeration import expected_pairs
from longring.geometry.layouts import deal
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.geometry.task import Task
from longring.plan.work import balance, pairs
from strategies import tasks


def task_of(pattern, length, layout, ranks, *, batch=1, kv_heads=1):
    dealt = deal(layout, length, ranks, documents=pattern.documents)
    return Task(pattern, Problem(batch, length, length, kv_heads, 0), dealt, dealt)


def work(task):
    return [pairs(task, rank) for rank in range(task.ranks)]


@given(tasks())
def test_the_ranks_work_is_the_sum_of_all_counts(task):
    expected = expected_pairs(task)
    for rank, shard in enumerate(task.queries.shards):
        assert pairs(task, rank) == sum(expected[:, :, list(r)].sum() for r in shard)


def test_causal_work_is_a_triangle_for_each_batch_row_and_head():
    assert sum(work(task_of(Dense(), 10, "zigzag", 4, batch=2, kv_heads=3))) == 2 * 3 * 55


def test_a_rank_of_a_contiguous_causal_task_sees_all_before_it():
    assert work(task_of(Dense(), 8, "contiguous", 2)) == [10, 26]  # 1+2+3+4 and 5+6+7+8


def test_zigzag_balances_causal_work_exactly_where_chunks_are_equal():
    assert balance(task_of(Dense(), 1024, "zigzag", 8)) == 1.0


def test_zigzag_balances_causal_work_nearly_where_they_are_not():
    assert balance(task_of(Dense(), 1_000_003, "zigzag", 8)) == pytest.approx(1, abs=1e-5)


def test_striped_balances_causal_work_nearly():
    """Rank p-1 sees at most a token more for every row than rank 0."""
    assert balance(task_of(Dense(), 1024, "striped", 8)) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_contiguous_causal_work_leaves_the_last_rank_nearly_twice_the_mean(ranks):
    # with c tokens a rank: (p-1) c^2 + c^2/2 against a mean of p c^2/2
    found = balance(task_of(Dense(), ranks << 12, "contiguous", ranks))
    assert found == pytest.approx((2 * ranks - 1) / ranks, rel=1e-3)


def test_work_without_causality_is_equal():
    assert work(task_of(Dense(causal=False), 12, "contiguous", 3)) == [48, 48, 48]


def test_a_window_costs_its_width_a_row():
    # rows 0 and 1 see 1 and 2 keys, all others 3
    assert work(task_of(Dense(window=(2, 0)), 16, "contiguous", 2)) == [1 + 2 + 6 * 3, 8 * 3]


def test_documents_cost_a_triangle_each():
    assert sum(work(task_of(Dense(documents=[0, 3, 10]), 10, "dealt", 2))) == 6 + 28


def test_dilation_divides_the_work_of_a_segment_by_the_rate_twice():
    # two segments of 8, of which 4 are kept
    assert work(task_of(Dilated([8], [2], causal=False), 16, "contiguous", 2)) == [16, 16]


def test_contiguous_balances_longnet():
    segments = [64 << i for i in range(5)]
    task = task_of(Dilated(segments, [segment // 64 for segment in segments]), 1 << 13, "contiguous", 8)
    assert balance(task) <= 1.04


def test_no_work_at_all_is_balanced():
    assert balance(task_of(Dense(lengths=[0]), 8, "contiguous", 2)) == 1.0
