from itertools import pairwise
from random import Random

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from longring.geometry.ranges import as_ranges, chain, cut, meet, moved, united
from strategies import ranges

rising = st.sets(st.integers(-20, 60)).map(sorted)


@given(st.integers(0, 100), st.integers(1, 20))
def test_cut_makes_consecutive_pieces_of_which_the_first_are_one_longer(length, parts):
    pieces = cut(length, parts)
    size, longer = divmod(length, parts)
    assert [position for piece in pieces for position in piece] == list(range(length))
    assert [len(piece) for piece in pieces] == [size + 1] * longer + [size] * (parts - longer)


@given(ranges(), ranges())
@example(range(0, 50, 6), range(20, 50, 4))  # both progressions meet before the second begins
def test_meet_is_the_intersection(a, b):
    assert list(meet(a, b)) == sorted(set(a) & set(b))


@given(ranges(), st.integers(-30, 30))
def test_moved_moves_every_position(r, by):
    assert list(moved(r, by)) == [position + by for position in r]


@given(st.lists(ranges(), max_size=4))
def test_chain_runs_through_its_parts_or_is_none(parts):
    flat = [position for part in parts for position in part]
    found = chain(parts)
    if found is not None:
        assert list(found) == flat
    else:
        assert not flat or len({b - a for a, b in pairwise(flat)}) != 1 or flat[1] < flat[0] + 1


@given(ranges().filter(len), st.lists(st.integers(0, 30), max_size=3))
def test_chain_joins_what_was_cut(r, places):
    places = sorted({place for place in places if place < len(r)} | {0})
    parts = [r[a:b] for a, b in pairwise([*places, len(r)])]
    assert list(chain(parts) or []) == list(r)


@given(rising)
def test_as_ranges_loses_and_invents_nothing(positions):
    assert [position for r in as_ranges(positions) for position in r] == positions


def test_as_ranges_sees_a_progression_behind_a_lone_position():
    assert as_ranges([0, 5, 6, 7, 8]) == (range(1), range(5, 9))
    assert as_ranges([1, 3, 5, 7]) == (range(1, 8, 2),)


@given(st.lists(ranges(), max_size=5))
def test_united_has_each_position_once_and_rises(parts):
    assert [position for r in united(parts) for position in r] == sorted(set().union(*parts))


combs = st.builds(
    lambda first, many, step: range(first, first + many * step, step),
    st.integers(0, 20),
    st.integers(0, 9),
    st.sampled_from([1, 2, 2, 4, 4, 8, 3]),
)


@st.composite
def branches(draw):
    """As LongNet's: every rate has stretches of its own, and what a wider comb has there a finer one may have too."""
    found = []
    for rate in draw(st.lists(st.sampled_from([1, 2, 4, 6, 8, 12]), min_size=1, max_size=4, unique=True)):
        phase, length = draw(st.integers(0, 1)) * draw(st.integers(0, rate - 1)), draw(st.integers(1, 40))
        stretches = draw(st.sets(st.integers(0, 160 // length), max_size=12))
        starts = [number * length for number in stretches]
        found += [range(start + (phase - start) % rate, start + length, rate) for start in starts]
    singles = draw(st.sets(st.integers(0, 170), max_size=8))
    return draw(st.permutations([*found, *(range(at, at + 1, 9) for at in singles)]))


@given(st.lists(combs, max_size=6) | st.lists(combs, max_size=40) | branches())
@example([range(0, 90, 2), range(1, 90, 30), range(0, 90, 6)])  # woven
@example([range(0, 90, 6), range(12, 31, 2), range(36, 61, 3), range(18, 31, 4)])  # nested
@example([range(0, 90, 10), range(4, 8, 2), range(15, 16), range(22, 26, 2)])  # others lie where it has nothing
@example([range(0, 90, 10), range(0, 41, 10), range(40, 121, 10), range(30, 32)])  # of one kind, end in each other
def test_united_combs_are_the_progressions_of_their_positions(parts):
    """Though positions need not be named where finer combs have those of wider ones."""
    assume(len({r for r in parts if r}) > 1)
    assume(any(r.step > 1 and len(r) > 1 for r in parts))
    assert united(parts) == as_ranges(sorted(set().union(*parts)))


def test_combs_of_more_positions_than_can_be_named_are_united():
    """LongNet's: of a stretch the finest has all, and what lies before it are the wider ones of longer segments."""
    far = 1 << 50
    parts = [range(3, far, 1 << 20), range(far // 2 + 3, far, 1 << 10), range(far // 4 * 3 + 3, far, 4)]
    assert united(parts) == (
        range(3, far // 2 + 4, 1 << 20),
        range(far // 2 + 3 + (1 << 10), far // 4 * 3 + 4, 1 << 10),
        range(far // 4 * 3 + 3 + 4, far, 4),
    )


MANY = 20_000
ACROSS = {
    "each over half of the others": [range(at, 100 * MANY, 50 * MANY) for at in range(0, 50 * MANY, 50)],
    "one through all": [range(0, 100 * MANY, 4)],
    "between the others": [range(100 * at + 90, 100 * at + 97, 3) for at in range(MANY)],
    "single": [range(at, at + 1) for at in range(0, 100 * MANY, 98)],
    "woven": [range(100 * MANY - 100, 100 * MANY, 3)],
}


@pytest.mark.parametrize("across", ACROSS)
def test_thousands_of_combs_are_united(across):
    """Comparing each with each would take minutes."""
    random = Random(across)
    fine = [range(100 * at + 2 * random.randrange(9), 100 * at + 2 * random.randrange(30, 45), 2) for at in range(MANY)]
    parts = random.sample(fine + ACROSS[across], k=MANY + len(ACROSS[across]))
    assert united(parts) == as_ranges(sorted(set().union(*parts)))


def test_united_intervals_stay_intervals():
    assert united([range(4, 9), range(2), range(2, 5)]) == (range(9),)
    assert united([range(4, 6), range(2)]) == (range(2), range(4, 6))
