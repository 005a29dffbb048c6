"""Slabs hold every tile exactly once, and none crosses from one to the next."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from enumeration import add_tile, no_pairs, positions, standings
from longring.geometry.layouts import deal
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.geometry.slabs import slabs
from longring.geometry.task import Task, tiles_between
from longring.geometry.tiles import Repeat, Tile
from strategies import tasks

lengths = st.integers(1, 40)
leasts = st.integers(1, 12)


def whole(pattern, n, kv_heads=1):
    shards = deal("contiguous", n, 1)
    return tiles_between(Task(pattern, Problem(1, n, n, kv_heads, 0), shards, shards), 0, 0)


def every_standing(tiles):
    """Each tile, repeat by repeat, as what can be compared."""
    return sorted(
        (repr((tile.batch, tile.kv_heads, tile.lo, tile.hi)), *map(tuple, where))
        for tile in tiles
        for where in standings(tile)
    )


@st.composite
def square_tiles(draw):
    """(tiles of a problem with as many queries as keys, the problem's task)."""
    task = draw(tasks(lengths=lengths, max_ranks=1))
    assume(task.problem.n_q == task.problem.n_k)
    return tiles_between(task, 0, 0), task


@given(square_tiles(), leasts)
def test_every_tile_stands_in_one_slab_as_often_as_before(made, least):
    tiles, task = made
    found = slabs(tiles, task.problem.n_q, least)
    assert every_standing(tile for slab in found for tile in slab.tiles) == every_standing(tiles)


@given(square_tiles(), leasts)
def test_pairs_are_those_of_the_tiles(made, least):
    tiles, task = made
    local = positions([range(task.problem.n_q)])
    want, got = no_pairs(task), no_pairs(task)
    for tile in tiles:
        add_tile(want, tile, local, local)
    for slab in slabs(tiles, task.problem.n_q, least):
        for tile in slab.tiles:
            add_tile(got, tile, local, local)
    assert (got == want).all()


@given(square_tiles(), leasts)
def test_windows_follow_each_other_and_no_tile_crosses(made, least):
    tiles, task = made
    found = slabs(tiles, task.problem.n_q, least)
    assert [row for slab in found for row in slab.rows] == list(range(task.problem.n_q))
    for slab in found:
        for tile in slab.tiles:
            for rows, cols in standings(tile):
                assert rows[0] in slab.rows
                assert rows[-1] in slab.rows
                assert cols[0] in slab.rows
                assert cols[-1] in slab.rows


@given(square_tiles(), leasts)
def test_slabs_are_as_long_as_was_asked_but_for_the_last(made, least):
    tiles, task = made
    *others, last = slabs(tiles, task.problem.n_q, least)
    assert all(len(slab.rows) >= least for slab in others)
    assert not others or len(last.rows) >= least // 2


@given(square_tiles(), leasts)
def test_no_slab_could_end_earlier(made, least):
    """Wherever no tile stands on both sides, and both are long enough, there is a cut."""
    tiles, task = made
    found = slabs(tiles, task.problem.n_q, least)
    stretches = [(min(r[0], c[0]), max(r[-1], c[-1])) for tile in tiles for r, c in standings(tile)]
    for slab in found:
        for row, _ in stretches:
            is_long = row - slab.rows.start >= least and task.problem.n_q - row >= least // 2
            if row in slab.rows and is_long:
                assert any(first < row <= last for first, last in stretches), f"rows {slab.rows} could be cut at {row}"


@pytest.mark.parametrize(
    ("pattern", "least", "want"),
    [
        (Dense(), 1, [64]),
        (Dense(documents=[0, 10, 30, 64]), 1, [10, 20, 34]),
        (Dense(documents=[0, 10, 30, 64]), 11, [30, 34]),
        (Dense(documents=[0, 10, 30, 60, 64]), 10, [10, 20, 34]),  # four rows are not worth a slab
        (Dense(documents=[0, 10, 30, 59, 64]), 10, [10, 20, 29, 5]),
        (Dilated([8, 16], [1, 2]), 1, [16, 16, 16, 16]),
        (Dilated([8, 16], [1, 2]), 17, [32, 32]),
        (Dilated([8, 64], [1, 2]), 1, [64]),
    ],
    ids=str,
)
def test_where_known_patterns_are_cut(pattern, least, want):
    assert [len(slab.rows) for slab in slabs(whole(pattern, 64), 64, least)] == want


def test_a_repeat_stays_one_tile_within_a_slab():
    """Segments go into a kernel's batch: written out one by one they would be launches."""
    tile = Tile(range(1), range(1), range(0, 8, 2), range(0, 8, 2), None, 0, Repeat(8, 8, 8))
    found = slabs((tile,), 64, 24)
    assert [len(slab.rows) for slab in found] == [24, 24, 16]
    assert [[one.repeat.count for one in slab.tiles] for slab in found] == [[3], [3], [2]]


def test_rows_without_tiles_belong_to_a_slab_too():
    tiles = tuple(Tile(range(1), range(1), r, r, None, 0) for r in (range(5, 10), range(20, 25)))
    found = slabs(tiles, 40, 1)
    assert [slab.rows for slab in found] == [range(5), range(5, 20), range(20, 40)]
    assert [slab.tiles for slab in found] == [(), tiles[:1], tiles[1:]]


def test_no_tiles_are_one_slab():
    assert [(slab.rows, slab.tiles) for slab in slabs((), 7, 1)] == [(range(7), ())]


def test_few_answers_are_kept():
    bound = slabs.cache_info().maxsize
    assert bound is not None
    tile = Tile(range(1), range(1), range(4), range(4), None, 0)
    for length in range(4, 4 + 2 * bound):
        slabs((tile,), length, 1)
    assert slabs.cache_info().currsize <= bound
    assert slabs((tile,), 4, 1)[-1].rows.stop == 4  # found anew, and the same


def test_windows_touch():
    found = slabs(whole(Dilated([4, 12], [1, 3]), 48), 48, 5)
    assert all(a.rows.stop == b.rows.start for a, b in pairwise(found))
    assert len(found) == 4
