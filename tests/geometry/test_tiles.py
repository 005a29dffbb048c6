"""Every pair is covered exactly as often as it counts, however tasks are dealt and tiles are cut further."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enumeration import (
    add_tile,
    covered_pairs,
    every_tile,
    expected_pairs,
    meetings,
    no_pairs,
    positions,
    standings,
)
from longring.geometry.itinerary import exchange
from longring.geometry.layouts import deal, from_ranges
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.geometry.ranges import as_ranges
from longring.geometry.task import Task, counted_tiles_of, tiles_between, tiles_of, tiles_over_all_keys
from longring.geometry.tiles import ONCE, Repeat, Tile, cut_tiles, likeness, pairs_in_band, trim, without_bands
from strategies import limits_only, tasks

sides = st.integers(1, 12)
limits = st.none() | st.integers(-15, 15)


@given(tasks())
def test_tiles_cover_every_pair_as_often_as_it_counts(task):
    assert (covered_pairs(task) == expected_pairs(task)).all()


@st.composite
def two_pieces(draw, length):
    """Mostly of neighbours, now and then with gaps."""
    ends = sorted(draw(st.lists(st.integers(0, length), min_size=4, max_size=4)))
    steps = draw(st.sampled_from([(1, 1), (1, 1), (1, 1), (2, 1), (3, 3)]))
    pieces = (range(a, b, step) for a, b, step in zip(ends[::2], ends[1::2], steps, strict=True))
    return tuple(piece for piece in pieces if piece) or (range(length),)


@given(st.data())
def test_segments_cut_as_a_run_make_the_tiles_of_segments_cut_one_by_one(data):
    """Small segments of a long shard, so that runs are long; at any offset, since the first may join what is before."""
    length, kv_heads, offset = (data.draw(st.integers(*span)) for span in ((40, 200), (1, 4), (-9, 9)))
    branches = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=3))
    pattern = Dilated(*zip(*branches, strict=True), causal=data.draw(st.booleans()))
    mine, theirs = (data.draw(two_pieces(length)) for _ in range(2))
    whole = deal("contiguous", length, 1)
    task = Task(pattern, Problem(2, length, length, kv_heads, offset), whole, whole)
    seen = tuple(range(r.start + offset, r.stop + offset, r.step) for r in mine)
    assert tiles_of(task, mine, theirs) == cut_tiles(pattern.groups(task.problem, seen), seen, theirs)


@given(tasks(patterns=limits_only, max_ranks=40), st.data())
def test_tiles_that_are_counted_are_the_tiles_that_are_cut(task, data):
    """One after the other, but for the columns in which they begin."""
    rank = data.draw(st.integers(0, task.ranks - 1))
    queries, keys = task.queries.shards[rank], (range(task.problem.n_k),)
    counted = counted_tiles_of(task, queries, keys)
    if counted is not None:
        told = [likeness(tile) for tile, times in counted for _ in range(times)]
        assert told == [likeness(tile) for tile in tiles_of(task, queries, keys)]


def test_the_tiles_of_a_comb_with_thousands_of_strands_are_two():
    layout = deal("striped", 4096 * 8, 4096)
    task = Task(Dense(), Problem(1, layout.length, layout.length, 1, 0), layout, layout)
    counted = counted_tiles_of(task, layout.shards[1000], (range(layout.length),))
    assert [(len(tile.rows), len(tile.cols), tile.shape, times) for tile, times in counted] == [
        (8, 8, "causal", 1001),
        (7, 7, "causal", 3095),
    ]


@given(tasks())
def test_so_do_tiles_over_all_keys(task):
    counts, keys = no_pairs(task), positions([range(task.problem.n_k)])
    for target, mine in enumerate(map(positions, task.queries.shards)):
        for tile in tiles_over_all_keys(task, target):
            add_tile(counts, tile, mine, keys)
    assert (counts == expected_pairs(task)).all()


@given(tasks())
def test_so_do_tiles_without_bands(task):
    def cut(tile):
        parts = without_bands(tile)
        assert all(part.shape in ("full", "causal", "flipped") for part in parts)
        assert sum(part.pairs for part in parts) == tile.pairs
        return parts

    assert (covered_pairs(task, cut) == expected_pairs(task)).all()


@given(tasks(), sides, sides)
def test_so_do_blocks_of_tiles(task, height, width):
    def cut(tile):
        corners = [(a, b) for a in range(0, len(tile.rows), height) for b in range(0, len(tile.cols), width)]
        blocks = [tile.block(a, height, b, width) for a, b in corners]
        assert all(max(len(block.rows) - height, len(block.cols) - width) <= 0 for block in blocks if block)
        return [block for block in blocks if block is not None]

    assert (covered_pairs(task, cut) == expected_pairs(task)).all()


@given(tasks(), st.integers(1, 4))
def test_so_do_tiles_of_split_repeats(task, most):
    def cut(tile):
        parts = list(tile.split_repeat(most))
        assert all(part.repeat.count <= most for part in parts)
        return parts

    assert (covered_pairs(task, cut) == expected_pairs(task)).all()


@given(tasks())
def test_so_do_tiles_one_repeat_at_a_time(task):
    def cut(tile):
        parts = list(tile.each_repeat())
        assert all(part.repeat == ONCE for part in parts)
        return parts

    assert (covered_pairs(task, cut) == expected_pairs(task)).all()


@given(tasks())
def test_so_do_tiles_seen_through_the_frames_in_which_their_keys_arrive(task):
    counts = no_pairs(task)
    for rank, mine in enumerate(map(positions, task.queries.shards)):
        for tile in tiles_between(task, rank, rank):
            add_tile(counts, tile, mine, positions(task.keys.shards[rank]))
        for visit in (visit for step in exchange(task, rank) for visit in step.visits):
            for tile in visit.tiles[0]:
                add_tile(counts, tile, mine, positions(task.keys.shards[visit.owner])[visit.arrived.frame])
    assert (counts == expected_pairs(task)).all()


@given(tasks())
def test_pairs_are_what_enumeration_counts(task):
    for tile in every_tile(task):
        places = len(tile.batch) * len(tile.kv_heads) * tile.repeat.count
        assert tile.pairs == meetings(tile).sum() * places


@given(tasks())
def test_every_row_and_column_of_a_tile_takes_part(task):
    for tile in every_tile(task):
        assert meetings(tile).any(0).all()
        assert meetings(tile).any(1).all()


@given(tasks())
def test_limits_that_bind_nothing_are_none(task):
    """So that shape "band" is said only of tiles that need it."""
    for tile in every_tile(task):
        assert (tile.shape == "full") == meetings(tile).all()


@given(tasks())
def test_repeats_share_neither_rows_nor_columns(task):
    """A kernel puts them into its batch, and writes each row of the result once."""
    for tile in every_tile(task):
        for axis in range(2):
            named = [position for standing in standings(tile) for position in standing[axis]]
            assert len(set(named)) == len(named)


def assigned(held, length):
    """Rank 0 holds these positions, rank 1 all others."""
    return from_ranges([as_ranges(held), as_ranges([i for i in range(length) if i not in held])])


@pytest.mark.parametrize("swapped", [False, True], ids=["rows", "columns"])
def test_equal_tiles_that_overlap_on_one_side_are_no_repeat(swapped):
    """Segments [4, 8) and [6, 9): three positions of which two are in each, against two of which one is in each."""
    three, two = (assigned(held, 10) for held in ([5, 6, 8], [4, 8]))
    queries, keys = (two, three) if swapped else (three, two)
    tiles = tiles_between(Task(Dilated([4, 3], [1, 1], causal=False), Problem(1, 10, 10, 1, 0), queries, keys), 0, 0)
    assert {tile.repeat for tile in tiles} == {ONCE}


@given(sides, sides, limits, limits)
def test_pairs_in_band_and_trim_agree_with_enumeration(height, width, lo, hi):
    if lo is not None and hi is not None and lo > hi:
        assert trim(height, width, lo, hi) is None
        return
    met = meetings(Tile(range(1), range(1), range(height), range(width), lo, hi))
    assert pairs_in_band(height, width, lo, hi) == met.sum()
    kept = trim(height, width, lo, hi)
    assert (kept is None) == (not met.any())
    if kept is not None:
        inner = met[kept.row : kept.row + kept.height, kept.col : kept.col + kept.width]
        assert inner.sum() == met.sum()
        assert (inner == meetings(Tile(range(1), range(1), range(kept.height), range(kept.width), *kept[4:]))).all()


@given(sides, sides, limits, limits, st.integers(1, 3))
def test_any_band_can_be_cut_without_bands_repeats_included(height, width, lo, hi, count):
    kept = trim(height, width, lo, hi)
    if kept is None:
        return
    repeat = Repeat(count, kept.height + 1, kept.width + 2) if count > 1 else ONCE
    tile = Tile(range(2), range(1), range(kept.height), range(kept.width), *kept[4:], repeat)
    problem = Problem(2, 60, 60, 1, 0)
    layout = deal("contiguous", 60, 1)
    task, places = Task(Dense(), problem, layout, layout), positions([range(60)])
    whole, parts = no_pairs(task), no_pairs(task)
    add_tile(whole, tile, places, places)
    for part in without_bands(tile):
        assert part.shape != "band"
        add_tile(parts, part, places, places)
    assert (whole == parts).all()


@pytest.mark.parametrize(("lo", "hi"), [(0, 0), (-1, 0), (-5, 7), (3, 9), (-9, -3), (-700_000, 2)])
@pytest.mark.parametrize("step", [1, 3])
def test_a_narrow_band_of_a_million_rows_is_a_few_tiles(lo, hi, step):
    n = 1_000_003
    band = Tile(range(1), range(2), range(5, 5 + step * n, step), range(0, step * n, step), lo, hi)
    parts = without_bands(band)
    assert len(parts) < 30
    assert sum(part.pairs for part in parts) == band.pairs
    assert all(part.shape != "band" for part in parts)


# -------------------------------------------------------------------------------------------- by hand


def only_tiles(pattern, n, layout, ranks, target, source, kv_heads=1):
    dealt = deal(layout, n, ranks)
    return tiles_between(Task(pattern, Problem(1, n, n, kv_heads, 0), dealt, dealt), target, source)


def test_a_rank_meets_its_own_keys_in_one_causal_square():
    """Even where its positions have gaps."""
    for layout in ("contiguous", "zigzag", "striped"):
        (tile,) = only_tiles(Dense(), 32, layout, 4, target=1, source=1)
        assert (tile.shape, tile.rows, tile.cols) == ("causal", range(8), range(8))


def test_zigzag_meets_others_in_one_full_rectangle():
    (tile,) = only_tiles(Dense(), 32, "zigzag", 4, target=2, source=1)  # all my rows, their early chunk
    assert (tile.shape, tile.rows, tile.cols) == ("full", range(8), range(4))
    (tile,) = only_tiles(Dense(), 32, "zigzag", 4, target=1, source=2)  # my late chunk, all their columns
    assert (tile.shape, tile.rows, tile.cols) == ("full", range(4, 8), range(8))


def test_contiguous_sees_nothing_of_later_ranks():
    assert only_tiles(Dense(), 32, "contiguous", 4, target=1, source=2) == ()


def test_equal_segments_are_one_tile_with_a_repeat():
    """A loop in Python over LongNet's segments would be slow: they go into the kernel's batch."""
    (tile,) = only_tiles(Dilated([8], [1]), 64, "contiguous", 2, target=0, source=0)
    assert (tile.shape, tile.rows, tile.cols, tile.repeat) == ("causal", range(8), range(8), Repeat(4, 8, 8))


def test_a_left_window_is_a_band():
    (tile,) = only_tiles(Dense(window=(2, 0)), 16, "contiguous", 2, target=0, source=0)
    assert (tile.shape, tile.lo, tile.hi) == ("band", -2, 0)
    (edge,) = only_tiles(Dense(window=(2, 0)), 16, "contiguous", 2, target=1, source=0)
    assert (edge.shape, edge.rows, edge.cols) == ("flipped", range(2), range(6, 8))


@pytest.mark.parametrize(
    ("tile", "shape"),
    [
        (Tile(range(1), range(1), range(4), range(6)), "full"),
        (Tile(range(1), range(1), range(4), range(4), None, 0), "causal"),
        (Tile(range(1), range(1), range(4), range(4), 0, None), "flipped"),
        (Tile(range(1), range(1), range(4), range(6), None, 0), "band"),
        (Tile(range(1), range(1), range(4), range(4), -1, 0), "band"),
    ],
)
def test_shapes_have_names(tile, shape):
    assert tile.shape == shape
