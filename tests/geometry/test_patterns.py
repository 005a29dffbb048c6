import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enumeration import positions
from longring.geometry.patterns import Dense, Dilated, Problem, phases
from longring.geometry.ranges import moved
from longring.numerics.definition import pair_counts
from strategies import layouts, patterns, problems


def counted(pattern, problem, near) -> np.ndarray:
    """How often the groups near some query positions count each pair."""
    counts = np.zeros((problem.batch, problem.kv_heads, problem.n_q, problem.n_k), dtype=np.int64)
    for group in pattern.groups(problem, near):
        queries, keys = (np.array(r, dtype=np.int64) for r in (group.queries, group.keys))
        queries = queries[(queries >= problem.offset) & (queries < problem.offset + problem.n_q)]
        distance = keys[None, :] - queries[:, None]
        met = np.ones(distance.shape, dtype=bool)
        if group.lo is not None:
            met &= group.lo <= distance
        if group.hi is not None:
            met &= distance <= group.hi
        counts[np.ix_(group.batch, group.kv_heads, queries - problem.offset, keys)] += met
    return counts


@given(problems(), st.data())
def test_groups_count_every_pair_as_the_definition_does(problem, data):
    pattern = data.draw(patterns(problem))
    assert (counted(pattern, problem, (problem.query_positions,)) == pair_counts(pattern, problem).numpy()).all()


@given(problems(), st.integers(1, 9), st.data())
def test_groups_near_a_shard_are_all_that_its_queries_need(problem, ranks, data):
    pattern = data.draw(patterns(problem))
    expected = pair_counts(pattern, problem).numpy()
    for shard in data.draw(layouts(problem.n_q, ranks)).shards:
        rows = positions(shard)
        near = tuple(moved(r, problem.offset) for r in shard)
        assert (counted(pattern, problem, near)[:, :, rows] == expected[:, :, rows]).all()


@given(st.integers(1, 12), st.integers(1, 15), st.sampled_from(["mod", "block"]))
def test_every_kv_head_has_one_phase_and_it_is_the_contracts(kv_heads, rate, phase):
    found = {head: f for f, heads in phases(kv_heads, rate, phase).items() for head in heads}
    size = -(-kv_heads // rate)
    assert found == {g: g % rate if phase == "mod" else g // size for g in range(kv_heads)}
    assert sum(len(heads) for heads in phases(kv_heads, rate, phase).values()) == kv_heads


def matrix(pattern, n_q, n_k=None, kv_heads=1, head=0, offset=None):
    n_k = n_q if n_k is None else n_k
    problem = Problem(1, n_q, n_k, kv_heads, n_k - n_q if offset is None else offset)
    found = counted(pattern, problem, (problem.query_positions,))
    assert (found == pair_counts(pattern, problem).numpy()).all()
    return found[0, head].tolist()


def test_causal_by_hand():
    assert matrix(Dense(), 3) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_the_last_query_meets_the_last_key():
    assert matrix(Dense(), 2, 4) == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_queries_before_position_0_see_nothing_when_causal():
    assert matrix(Dense(), 4, 2) == [[0, 0], [0, 0], [1, 0], [1, 1]]


def test_query_offset_moves_the_queries():
    assert matrix(Dense(), 2, 4, offset=0) == [[1, 0, 0, 0], [1, 1, 0, 0]]


def test_a_window_by_hand():
    assert matrix(Dense(causal=False, window=(1, 0)), 3) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert matrix(Dense(causal=False, window=(0, 1)), 3) == [[1, 1, 0], [0, 1, 1], [0, 0, 1]]
    assert matrix(Dense(causal=True, window=(1, 5)), 3) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_documents_and_lengths_by_hand():
    assert matrix(Dense(documents=[0, 2, 3]), 3) == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    assert matrix(Dense(causal=False, lengths=[2]), 3) == [[1, 1, 0]] * 3


def test_dilated_counts_a_pair_once_for_every_branch():
    # branch (4, 2) keeps 0 and 2, branch (2, 1) keeps all
    assert matrix(Dilated([4, 2], [2, 1]), 4) == [[2, 0, 0, 0], [1, 1, 0, 0], [1, 0, 2, 0], [0, 0, 1, 1]]


def test_dilated_heads_keep_different_positions():
    assert matrix(Dilated([4], [2]), 4, kv_heads=2, head=1) == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]]


def test_dilated_positions_restart_at_each_document():
    assert matrix(Dilated([4], [2], documents=[0, 1, 4]), 4) == [
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 0, 0, 0],
        [0, 1, 0, 1],
    ]


@pytest.mark.parametrize(
    ("pattern", "limits"),
    [
        (Dense(), (None, 0)),
        (Dense(causal=False), (None, None)),
        (Dense(window=(3, 7)), (-3, 0)),
        (Dense(causal=False, window=(3, 7)), (-3, 7)),
        (Dense(causal=False, window=(-1, 7)), (None, 7)),
        (Dense(causal=False, window=(3, None)), (-3, None)),
    ],
)
def test_limits_of_window_and_causality_together(pattern, limits):
    assert pattern.limits == limits == pattern.only_limits


def test_only_limits_is_for_patterns_without_documents_and_lengths():
    assert Dense(documents=[0, 4]).only_limits is None
    assert Dense(lengths=[4]).only_limits is None
    assert Dilated([4], [1]).only_limits is None


def test_an_open_window_is_no_window():
    assert Dense(window=(-1, None)) == Dense()


def test_equal_patterns_are_equal_values_however_their_numbers_were_given():
    one = Dense(documents=[0, 3, 8])
    others = [
        Dense(documents=torch.tensor([0, 3, 8])),
        Dense(documents=np.array([0, 3, 8])),
        Dense(documents=(0, 3, 8)),
        Dense(documents=[[0, 3, 8]]),
        Dense(documents=[torch.tensor([0, 3, 8])]),
        Dense(documents=[np.int32(0), np.int64(3), 8]),
    ]
    assert all(other == one and hash(other) == hash(one) for other in others)
    assert Dense(lengths=torch.tensor([3, 4])) == Dense(lengths=[3, 4])
    assert Dilated(torch.tensor([4, 8]), np.array([1, 2])) == Dilated([4, 8], (1, 2))


def test_a_pattern_knows_whether_it_leaves_rows_out():
    assert Dilated([4, 8], [2, 3]).leaves_rows_out
    assert not Dilated([4, 8], [1, 3]).leaves_rows_out
