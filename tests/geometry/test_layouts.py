from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enumeration import held_once, positions
from longring.errors import LayoutError
from longring.geometry.layouts import LAYOUTS, deal, from_ranges
from longring.geometry.patterns import Dense, Problem
from longring.geometry.task import Task
from longring.plan.work import balance
from strategies import assignments, boundaries, layouts, sequence_lengths

EQUAL = ["contiguous", "zigzag", "striped"]
ranks_up_to_9 = st.integers(1, 9)


@given(sequence_lengths, ranks_up_to_9, st.none() | st.integers(1, 40), st.data())
def test_every_position_is_on_exactly_one_rank_and_every_rank_rises(length, ranks, align, data):
    bounds = (tuple(data.draw(boundaries(length))),)
    for name in LAYOUTS:
        layout = deal(name, length, ranks, documents=bounds, align=None if name == "striped" else align)
        assert (layout.length, layout.ranks) == (length, ranks)
        assert held_once(layout.shards, length)
        assert layout.sizes == tuple(len(positions(shard)) for shard in layout.shards)


@given(sequence_lengths, ranks_up_to_9, st.sampled_from(EQUAL))
def test_ranks_differ_by_at_most_one_token(length, ranks, name):
    sizes = deal(name, length, ranks).sizes
    assert max(sizes) - min(sizes) <= 1


def test_the_first_chunks_are_the_longer_ones():
    assert deal("contiguous", 11, 4).shards == ((range(3),), (range(3, 6),), (range(6, 9),), (range(9, 11),))
    # six chunks of 11: five of 2 and one of 1, the early ones dealt up and the late ones down
    assert deal("zigzag", 11, 3).shards == ((range(2), range(10, 11)), (range(2, 4), range(8, 10)), (range(4, 8),))
    assert deal("striped", 5, 2).shards == ((range(0, 5, 2),), (range(1, 5, 2),))


def test_a_rank_may_hold_nothing():
    for name in EQUAL:
        assert sorted(deal(name, 2, 4).sizes) == [0, 0, 1, 1]
    assert deal("zigzag", 1, 3).shards == ((range(1),), (), ())


@given(sequence_lengths, ranks_up_to_9, st.integers(2, 40), st.data())
def test_align_cuts_only_at_multiples(length, ranks, align, data):
    bounds = (tuple(data.draw(boundaries(length))),)
    for name in ("contiguous", "zigzag", "dealt"):
        pieces = [r for shard in deal(name, length, ranks, documents=bounds, align=align).shards for r in shard]
        assert all(r.start % align == 0 and (r.stop % align == 0 or r.stop == length) for r in pieces)


def test_aligned_blocks_are_dealt_like_tokens():
    assert deal("contiguous", 100, 3, align=16).shards == ((range(48),), (range(48, 80),), (range(80, 100),))


def random_documents(seed: int, length: int, count: int) -> tuple[int, ...]:
    return (0, *sorted(Random(seed).sample(range(1, length), count - 1)), length)


@pytest.mark.parametrize("count", [8, 20, 100])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dealt_balances_documents_where_zigzag_does_not(seed, count):
    length, ranks = 65536, 8
    documents = random_documents(seed, length, count)
    pattern, problem = Dense(causal=True, documents=documents), Problem(1, length, length, 1, 0)

    def busiest_over_mean(name: str) -> float:
        layout = deal(name, length, ranks, documents=pattern.documents)
        return balance(Task(pattern, problem, layout, layout))

    assert busiest_over_mean("dealt") <= 1.1
    assert busiest_over_mean("dealt") < busiest_over_mean("zigzag")


def test_dealt_gives_every_rank_as_many_chunks():
    """One long document and many short ones: without a limit, the light chunks would heap up on a few ranks."""
    layout = deal("dealt", 6400, 8, documents=((0, *range(1200, 6401, 10)),))
    assert set(layout.sizes) == {800}


def test_dealt_weighs_the_documents_of_every_batch_row():
    rows = ((0, 60, 64), (0, 4, 64))
    assert deal("dealt", 64, 2, documents=rows) != deal("dealt", 64, 2, documents=rows[:1])


# --------------------------------------------------------------------------------------------- from_ranges


@given(sequence_lengths, ranks_up_to_9, st.data())
def test_from_ranges_accepts_any_assignment(length, ranks, data):
    layout = data.draw(assignments(length, ranks))
    assert (layout.length, layout.ranks) == (length, ranks)
    assert held_once(layout.shards, length)


@given(sequence_lengths, ranks_up_to_9, st.sampled_from(EQUAL))
def test_from_ranges_gives_back_what_a_layout_dealt(length, ranks, name):
    assert from_ranges(deal(name, length, ranks).shards) == deal(name, length, ranks)


@pytest.mark.parametrize(
    ("shards", "complaint"),
    [
        ([[range(3)], [range(4, 8)]], r"rank 1 holds range\(4, 8\), but the 7 positions dealt are 0..6"),  # a gap
        ([[range(5)], [range(3, 6)]], r"rank 1 holds a position of range\(3, 6\) that it or an earlier rank holds"),
        ([[range(0, 6, 2)], [range(0, 3, 2), range(3, 4)]], "rank 1 holds a position"),
        ([[range(4, 8), range(4)]], r"rising order, got range\(4, 8\) before range\(0, 4\)"),
        ([[range(0, 5, 2), range(3, 4)]], "rank 0 must hold its positions in rising order"),
        ([[range(3, -1, -1)]], "positive step, got range"),
        ([[range(-1, 3)]], r"rank 0 holds range\(-1, 3\)"),
        ([[[0, 1, 2]]], r"rank 0 must hold ranges with a positive step, got \[0, 1, 2\]"),
        ([], "at least one rank"),
        ([[], [range(0)]], "no position at all"),
    ],
)
def test_from_ranges_refuses_what_is_no_assignment(shards, complaint):
    with pytest.raises(LayoutError, match=complaint):
        from_ranges(shards)


def test_from_ranges_drops_empty_pieces():
    assert from_ranges([[range(0), range(2)], [range(5, 5)]]).shards == ((range(2),), ())


# ------------------------------------------------------------------------------------------------ families


def spelled(layout, rank):
    return [(len(r), r.step) for r in layout.shards[rank]]


def shifts(layout, a, b):
    return [y.start - x.start for x, y in zip(layout.shards[a], layout.shards[b], strict=True)]


@given(sequence_lengths, st.integers(1, 40), st.data())
def test_families_are_all_ranks_in_turn_of_one_shape_and_evenly_shifted(length, ranks, data):
    layout = data.draw(layouts(length, ranks))
    assert [rank for family in layout.families for rank in family] == list(range(ranks))
    for family in layout.families:
        assert all(spelled(layout, rank) == spelled(layout, family[0]) for rank in family)
        moves = [shifts(layout, a, b) for a, b in pairwise(family)]
        assert all(move == moves[0] for move in moves)


def test_thousands_of_equal_ranks_are_few_families():
    """What makes planning cheap: not a family per rank."""
    for name in EQUAL:
        assert len(deal(name, 1_000_000, 4096).families) <= 4
