"""Packed sequences: one window for many stacks leaves every one as it is, and rows follow each other without a gap."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longring.geometry.packs import Whole
from longring.geometry.sequences import Window, bounds, common_window, in_sequence, window_of
from longring.geometry.stacks import Place, Stack
from longring.geometry.tiles import trim

N, HEADS = 40, 2
WHOLE = Whole(1, range(N), HEADS, 1)


def place(first: int, length: int, **other) -> Place:
    return Place(range(1), 1, 0, range(HEADS), 0, range(first, first + length), 1)._replace(**other)


def square(first: int, length: int, lo: int | None = None, hi: int | None = 0) -> Stack:
    return Stack(place(first, length), place(first, length), lo, hi)


def seen(rows: int, cols: int, window: Window) -> set[tuple[int, int]]:
    """Pairs that a kernel computes which aligns its window at the last row and the last column."""
    left, right = window
    found = set()
    for a in range(rows):
        own = a + cols - rows
        found |= {
            (a, b) for b in range(cols) if (left is None or b >= own - left) and (right is None or b <= own + right)
        }
    return found


def pairs(stack: Stack) -> set[tuple[int, int]]:
    lo, hi = stack.limits
    every = ((a, b) for a in range(len(stack.queries.rows)) for b in range(len(stack.keys.rows)))
    return {(a, b) for a, b in every if (lo is None or b - a >= lo) and (hi is None or b - a <= hi)}


sides = st.none() | st.integers(-12, 12)


@given(st.integers(1, 12), st.integers(1, 12), sides, sides)
def test_a_window_has_the_pairs_of_its_stack(rows, cols, lo, hi):
    band = trim(rows, cols, lo, hi)
    if band is None:
        return
    trimmed = Stack(place(0, band.height), place(0, band.width), band.lo, band.hi)
    window = window_of(trimmed)
    assert all(side is None or side >= 0 for side in window)
    assert seen(band.height, band.width, window) == pairs(trimmed)


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([(None, 0), (None, None), (-3, 0), (-3, 2), (-8, 0), (0, None)])),
        min_size=1,
        max_size=8,
    )
)
def test_who_goes_together_computes_what_each_would(drawn):
    stacks, first = [], 0
    for length, (lo, hi) in drawn:
        stacks.append(square(first, length, lo, hi))
        first += length
    whole = Whole(1, range(first), HEADS, 1)
    packs = in_sequence(stacks, whole, whole)
    assert {stack for pack in packs for stack in pack.stacks} == set(stacks)
    assert sum(len(pack.stacks) for pack in packs) == len(stacks)
    for pack in packs:
        window = common_window(pack.stacks)
        for stack in pack.stacks:
            rows = len(stack.queries.rows)
            assert seen(rows, rows, window) == pairs(stack)
        if len(pack.stacks) > 1:
            (tray,) = pack.queries.trays
            assert tray.is_shared
            assert tray.is_full


def test_documents_of_one_row_and_short_ones_in_a_window_go_with_the_others():
    stacks = [square(0, 1, hi=None), square(1, 3), square(4, 20, lo=-5), square(24, 16, lo=-5)]
    (pack,) = in_sequence(stacks, WHOLE, WHOLE)
    assert common_window(pack.stacks) == (5, 0)
    assert bounds(pack.stacks, WHOLE, WHOLE) == ((0, 1, 4, 24, N), (0, 1, 4, 24, N))


def test_a_rectangle_and_squares_have_windows_of_their_own():
    rectangle = Stack(place(20, 20), place(0, 20))
    packs = in_sequence([square(0, 20), square(20, 20), rectangle], WHOLE, WHOLE)
    assert sorted(len(pack.stacks) for pack in packs) == [1, 2]


def oblong(first: int, rows: int, col: int, cols: int, lo: int | None = None, hi: int | None = None) -> Stack:
    return Stack(place(first, rows), place(col, cols), lo, hi)


@pytest.mark.parametrize(("rows", "cols"), [(3, 12), (12, 3)])
@pytest.mark.parametrize("given", [(5, None), (None, 5), (2, None), (None, 2), (11, 11)])
def test_how_far_an_oblong_sees_decides_which_window_suits_it(rows, cols, given):
    """One that sees everything, beside a square with the window: together where that hides nothing of it."""
    left, right = given
    limited = square(rows, 15, None if left is None else -left, right)
    limited = limited._replace(keys=place(cols, 15))
    free = oblong(0, rows, 0, cols)
    wholes = Whole(1, range(rows + 15), HEADS, 1), Whole(1, range(cols + 15), HEADS, 1)
    packs = in_sequence([free, limited], *wholes)
    hides_nothing = seen(rows, cols, Window(*given)) == pairs(free)
    assert len(packs) == (1 if hides_nothing else 2)


@pytest.mark.parametrize(
    ("rows", "is_one"), [([(0, 4), (4, 10)], True), ([(1, 4), (4, 10)], False), ([(0, 4), (4, 9)], False)]
)
def test_of_the_last_of_several_batch_rows_too(rows, is_one):
    """Rows that follow each other from one batch row to the next, and leave out only the very first or last."""
    whole = Whole(2, range(10), HEADS, 1)
    spans = [(0, first, end) for first, end in rows] + [(1, 0, 10)]
    if rows[-1][1] == 9:
        spans = [(0, 0, 10)] + [(1, first, end) for first, end in rows]
    found = [place(first, end - first, batch=range(row, row + 1)) for row, first, end in spans]
    assert (bounds([Stack(one, one, None, 0) for one in found], whole, whole) is not None) == is_one


@pytest.mark.parametrize(
    "stacks",
    [
        [square(0, 20), square(21, 19)],  # a gap
        [square(0, 20), square(19, 21)],  # a row twice
        [square(0, 20), Stack(*[place(20, 20, kv_heads=range(1))] * 2, None, 0)],  # not of every head
        [square(0, 20), Stack(*[place(20, 20, skew=1)] * 2, None, 0)],
        [square(0, 20), Stack(place(20, 20), place(20, 20, skew=1), None, 0)],  # of the keys neither
        [square(0, 20), Stack(*[place(20, 10, rows=range(20, 40, 2))] * 2, None, 0)],
        [Stack(place(0, 20), place(20, 20)), Stack(place(20, 20), place(0, 20))],  # keys in another order
    ],
)
def test_what_is_no_sequence_goes_one_by_one(stacks):
    assert bounds(stacks, WHOLE, WHOLE) is None
    packs = in_sequence(stacks, WHOLE, WHOLE)
    assert [pack.stacks for pack in packs] == [(stack,) for stack in stacks]
    assert all(pack.queries.trays[0].place == pack.stacks[0].queries for pack in packs)


def test_batch_rows_follow_each_other():
    whole = Whole(3, range(10), HEADS, 1)
    every = place(0, 4, batch=range(3)), place(4, 6, batch=range(3))
    want = (*(row * 10 + first for row in range(3) for first in (0, 4)), 30)
    assert bounds([Stack(one, one, None, 0) for one in every], whole, whole) == (want, want)
    own = [
        place(0, 10),
        place(0, 3, batch=range(1, 2)),
        place(3, 7, batch=range(1, 2)),
        place(0, 10, batch=range(2, 3)),
    ]
    want = (0, 10, 13, 20, 30)
    assert bounds([Stack(one, one, None, 0) for one in own], whole, whole) == (want, want)


def test_equal_documents_are_one_stack_and_yet_many_sequences():
    equal = place(0, 8, repeats=5, spacing=8)
    (pack,) = in_sequence([Stack(equal, equal, None, 0)], WHOLE, WHOLE)
    assert pack.queries.trays[0].is_shared
    found = bounds(pack.stacks, WHOLE, WHOLE)
    assert found is not None
    assert [b - a for a, b in pairwise(found.queries)] == [8] * 5


def test_a_stretch_of_the_rows():
    """As of the keys that some ranks' documents have."""
    stacks = [Stack(place(0, 5), place(3, 9), None, 4), square(5, 3), square(8, 2)]
    stacks[1:] = [one._replace(keys=place(one.queries.rows.start + 7, len(one.queries.rows))) for one in stacks[1:]]
    (pack,) = in_sequence(stacks, Whole(1, range(10), HEADS, 1), WHOLE)
    assert [tray.place.rows for tray in pack.queries.trays + pack.keys.trays] == [range(10), range(3, 17)]
    assert all(tray.is_shared and tray.is_full for tray in pack.queries.trays + pack.keys.trays)
    two = Whole(2, range(N), HEADS, 1)  # of two batch rows, what is left out would lie between
    both = [
        one._replace(queries=one.queries._replace(batch=range(2)), keys=one.keys._replace(batch=range(2)))
        for one in stacks
    ]
    assert len(in_sequence(both, Whole(2, range(10), HEADS, 1), two)) == 3


def test_chunks_of_keys_that_are_apart_make_a_run_each():
    """As of a rank that has two chunks, and all keys at hand: its rows follow each other, and their keys do not."""
    first = [Stack(place(0, 3), place(4, 3), None, 0), Stack(place(3, 5), place(7, 5), None, 0)]
    second = [Stack(place(8, 4), place(20, 4), None, 0), Stack(place(12, 8), place(24, 8), None, 0)]
    alone = Stack(place(20, 2), place(38, 2), None, 0)
    packs = in_sequence([second[1], first[0], alone, *first[1:], second[0]], Whole(1, range(22), HEADS, 1), WHOLE)
    assert [list(pack.stacks) for pack in packs] == [first, second, [alone]]
    assert [pack.queries.trays[0].place.rows for pack in packs] == [range(8), range(8, 20), range(20, 22)]
    assert [tray.is_shared and tray.is_full for pack in packs for tray in pack.keys.trays] == [True, True, False]


def test_equal_ones_of_one_stack_may_be_in_several_runs():
    equal = Stack(place(0, 4, repeats=2, spacing=9), place(0, 4, repeats=2, spacing=20), None, 0)
    others = [Stack(place(4, 5), place(4, 5), None, 0), Stack(place(13, 3), place(24, 3), None, 0)]
    packs = in_sequence([equal, *others], Whole(1, range(16), HEADS, 1), WHOLE)
    found = [[(stack.queries.rows, stack.keys.rows) for stack in pack.stacks] for pack in packs]
    assert found == [
        [(range(4), range(4)), (range(4, 9), range(4, 9))],
        [(range(9, 13), range(20, 24)), (range(13, 16), range(24, 27))],
    ]
    half = in_sequence([equal, others[0]], Whole(1, range(16), HEADS, 1), WHOLE)
    assert [stack.queries.many for pack in half for stack in pack.stacks] == [1, 1, 1]


def test_equal_ones_that_are_apart_stay_one_stack():
    equal = Stack(place(0, 4, repeats=3, spacing=9), place(0, 4, repeats=3, spacing=9), None, 0)
    (pack,) = in_sequence([equal], WHOLE, WHOLE)
    assert pack.stacks == (equal,)
    assert not pack.queries.trays[0].is_shared


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=12))
def test_whatever_lies_between_every_row_is_there_once(drawn):
    """Rows of queries and keys are left out here and there: what goes together has none of them between."""
    stacks, row, col = [], 0, 0
    for length, skipped, unseen in drawn:
        row, col = row + skipped, col + unseen
        stacks.append(Stack(place(row, length), place(col, length), None, 0))
        row, col = row + length, col + length
    wholes = Whole(1, range(row), HEADS, 1), Whole(1, range(col), HEADS, 1)
    packs = in_sequence(stacks, *wholes)
    assert sorted(stack.queries.rows.start for pack in packs for stack in pack.stacks) == [
        stack.queries.rows.start for stack in stacks
    ]
    gaps = sum(skipped + unseen > 0 for _, skipped, unseen in drawn[1:])
    assert len(packs) == 1 + gaps
    for pack in packs:
        assert len(pack.stacks) == 1 or (pack.queries.trays[0].is_full and pack.keys.trays[0].is_full)


def test_rows_of_a_slab():
    whole = Whole(1, range(16, N), HEADS, 1)
    assert bounds([square(16, 4), square(20, 20)], whole, whole) == ((0, 4, 24), (0, 4, 24))


def test_no_more_repeats_at_once_than_operations_take():
    """Some put them on an axis of the grid that ends at 65,535."""
    many = place(0, 1, repeats=100_000, spacing=2, rows=range(0, 3, 2))
    packs = in_sequence(
        [Stack(many, many, None, 0)], Whole(1, range(200_003), HEADS, 1), Whole(1, range(200_003), HEADS, 1)
    )
    assert sum(stack.queries.many for pack in packs for stack in pack.stacks) == 100_000
    assert max(stack.queries.many for pack in packs for stack in pack.stacks) <= 1 << 15


def test_the_order_of_packs_is_that_of_their_windows():
    """Not that of a set, which is another in every process: merged in another order, results have other bits."""
    stacks = [square(i, 9, -left, right) for i, (left, right) in enumerate([(3, 0), (1, 4), (2, 0), (5, 1), (1, 1)])]
    packs = in_sequence(stacks, WHOLE, WHOLE)
    found = [common_window(pack.stacks) for pack in packs]
    assert found == sorted(found)
