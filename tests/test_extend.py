"""Sharding.extend: more tokens at the end, where they are said to be, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import longring as lr
from longring.testing import run_ranks
from strategies import layouts


def one_of(ranks, make):
    """What rank 0 of so many makes."""
    return run_ranks(ranks, make)[0]


@given(st.data(), st.integers(1, 5), st.integers(1, 40))
def test_it_is_the_assignment_with_so_many_more(data, ranks, length):
    layout = data.draw(layouts(length, ranks))
    grown = data.draw(st.lists(st.tuples(st.integers(0, ranks - 1), st.integers(0, 5)), max_size=12))

    def program(group):
        s = lr.Sharding.from_ranges(layout.shards, group=group)
        for rank, tokens in grown:
            s = s.extend(rank, tokens)
        checked = lr.Sharding.from_ranges(s.shards, group=group)  # each position once, rising
        return s, checked == s, s.positions, s.local_length

    held = [[position for r in shard for position in r] for shard in layout.shards]
    end = length
    for rank, tokens in grown:
        held[rank] += range(end, end + tokens)
        end += tokens
    for rank, (s, is_sound, positions, local_length) in enumerate(run_ranks(ranks, program)):
        assert s.length == end
        assert is_sound
        assert positions.tolist() == held[rank]
        assert local_length == len(held[rank])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "dealt"])
def test_every_layout_and_what_was_there_stays(layout):
    documents = [0, 7, 30] if layout == "dealt" else None

    def program(group):
        before = lr.Sharding(30, group, layout, documents=documents)
        after = before.extend(1, 2).extend(1, 3)
        x = torch.arange(35)
        assert torch.equal(after.unshard(after.shard(x, 0), 0), x)
        return before, after

    before, after = one_of(3, program)
    assert (before.length, after.length) == (30, 35)
    assert after.shards[0] == before.shards[0]
    assert after.shards[2] == before.shards[2]
    assert [p for r in after.shards[1] for p in r] == [*(p for r in before.shards[1] for p in r), *range(30, 35)]


def test_repeated_calls_are_one_range():
    s = one_of(3, lambda group: lr.Sharding(12, group, "contiguous"))
    for _ in range(100):
        s = s.extend(2, 1)
    assert s.shards == ((range(4),), (range(4, 8),), (range(8, 112),))


def test_taking_turns_is_one_range_more_on_each_rank():
    s = one_of(3, lambda group: lr.Sharding(12, group, "zigzag"))
    for token in range(300):
        s = s.extend(token % 3, 1)
    assert [len(shard) for shard in s.shards] == [3, 3, 2]  # the last zigzag rank holds one piece in the middle
    assert s.shards[1][-1] == range(13, 312, 3)


def test_a_striped_layout_goes_on_as_it_was_dealt():
    s = one_of(3, lambda group: lr.Sharding(12, group, "striped"))
    for token in range(30):
        s = s.extend(token % 3, 1)
    assert s.shards == tuple((range(rank, 42, 3),) for rank in range(3))


def test_it_is_frozen_and_the_old_one_is_as_before():
    s = lr.Sharding(5)
    longer = s.extend(0, 3)
    assert (s.length, longer.length, longer.layout) == (5, 8, "ranges")
    assert longer == lr.Sharding.from_ranges([[range(8)]])
    assert hash(longer.dealt) == hash(lr.Sharding.from_ranges([[range(8)]]).dealt)
    with pytest.raises(AttributeError):
        longer.length = 9  # type: ignore[misc]
    assert s.extend(0, 0).length == 5


def test_nothing_is_dealt_or_checked_anew(monkeypatch):
    s = lr.Sharding(1 << 20)

    def never(*args, **options):
        raise AssertionError("dealt anew")

    monkeypatch.setattr("longring.sharding.deal", never)
    monkeypatch.setattr("longring.sharding.from_ranges", never)
    assert s.extend(0, 7).length == (1 << 20) + 7


@pytest.mark.parametrize(
    ("rank", "tokens", "said"),
    [
        (1, 1, r"one of the 1 of the group, 0 to 0; got 1"),
        (-1, 1, r"rank must be a whole number of at least 0, got -1"),
        (0, -2, r"tokens must be a whole number of at least 0, got -2"),
        (0, 1.5, r"tokens must be a whole number of at least 0, got 1\.5"),
        (True, 1, r"rank must be a whole number of at least 0, got True"),
    ],
)
def test_what_is_refused(rank, tokens, said):
    with pytest.raises(lr.ArgumentError, match=said):
        lr.Sharding(5).extend(rank, tokens)
