"""Packs: every line of every stack lies where its tray says, and no two share one."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from dataclasses import astuple, replace

import pytest

import longring as lr
import stacking
from longring.geometry.packs import Berth, Whole, apart, pack
from longring.geometry.stacks import Place, Stack
from longring.geometry.tiles import Tile


def lines_of(place, berth):
    """{(batch row, row, head, which of the many): line} of everything in a place."""
    found = {}
    for many in range(place.many):
        batch = place.batch[0] if place.repeats > 1 else place.batch[many]
        down = many * place.spacing if place.repeats > 1 else 0
        for head in range(place.heads):
            kv_head, of_it = divmod(head, place.share)
            for number, row in enumerate(place.rows):
                whole = batch, row + down + place.skew * kv_head, place.kv_heads[kv_head] * place.share + of_it
                line = berth.first + many * berth.by_many + head * berth.by_head + number * berth.by_row
                found[(*whole, many)] = line
    return found


def lines_on(tray, *, by_head):
    """The same of a tray, as somebody reads it who knows its shape alone."""
    _, heads, rows = tray.shape
    by_both = (1, heads) if tray.is_shared and not by_head else (rows, 1)
    return lines_of(tray.place, Berth(tray.first, heads * rows, *by_both))


def check(trays, places):
    for berths, by_head in ((trays.berths, False), (trays.berths_by_head, True)):
        read = [lines_on(tray, by_head=by_head) for tray in trays.trays]
        assert sorted(line for tray in read for line in tray.values()) == list(range(trays.lines))
        written = [lines_of(place, berth) for place, berth in zip(places, berths, strict=True)]
        every = [line for some in written for line in some.values()]
        assert len(set(every)) == len(every)
        left = {line: whole for tray in read for whole, line in tray.items()}
        for some in written:
            assert all(left[line][:3] == whole[:3] for whole, line in some.items())
        for tray, lines in zip(trays.trays, read, strict=True):
            assert tray.is_full == set(lines.values()).issubset(every)


def check_pack(stacks, batch, n_q, n_k, kv_heads, share):
    wholes = Whole(batch, range(n_q), kv_heads, share), Whole(batch, range(n_k), kv_heads, 1)
    for made in (pack(stacks, *wholes), apart(stacks)):
        assert made.stacks == tuple(stacks)
        check(made.queries, [stack.queries for stack in stacks])
        check(made.keys, [stack.keys for stack in stacks])
    return pack(stacks, *wholes)


@pytest.mark.parametrize("seed", range(30))
def test_stacks_anywhere(seed):
    rng = random.Random(seed)
    batch, n, kv_heads, share = rng.randint(1, 2), rng.choice([12, 30]), rng.randint(1, 3), rng.choice([1, 2])
    found = [stacking.some_stack(rng, batch, n, kv_heads, share) for _ in range(rng.randint(1, 8))]
    check_pack(found, batch, n, n, kv_heads, share)


PATTERNS = {
    "documents": lr.Dense(documents=[0, 7, 8, 20, 33, 40]),
    "equal documents between others": lr.Dense(documents=[0, 10, 15, 25, 30, 40]),
    "documents of each batch row": lr.Dense(documents=[[0, 7, 8, 20, 40], [0, 33, 40]]),
    "lengths": lr.Dense(lengths=[17, 40], causal=False),
    "window": lr.Dense(window=(4, 0)),
    "dilated": lr.Dilated([8, 16, 40], [1, 2, 4]),
}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_patterns(pattern, heads, kv_heads):
    found = stacking.pattern_stacks(pattern, 2, 40, heads, kv_heads)
    check_pack(found, 2, 40, 40, kv_heads, heads // kv_heads)


@pytest.mark.parametrize("name", [name for name in PATTERNS if "documents" in name])
def test_documents_lie_side_by_side(name):
    found = stacking.pattern_stacks(PATTERNS[name], 2, 40, 4, 2)
    made = check_pack(found, 2, 40, 40, 2, 2)
    assert len(found) > 2
    for trays in (made.queries, made.keys):
        (tray,) = trays.trays
        assert tray.is_full
        assert (tray.is_shared, tray.place.rows, tray.place.batch) == (True, range(40), range(2))


def test_rows_that_nobody_has_are_known():
    found = stacking.pattern_stacks(lr.Dense(lengths=[17, 40], causal=False), 2, 40, 4, 4)
    made = check_pack(found, 2, 40, 40, 4, 1)
    assert [tray.is_full for tray in made.queries.trays] == [True]
    assert [tray.is_full for tray in made.keys.trays] == [False]  # of the first, 23 keys do not exist


def square(first, length, kv_heads=2):
    place = Place(range(1), 1, 0, range(kv_heads), 0, range(first, first + length), 1)
    return Stack(place, place, hi=0)


def test_a_tray_that_would_be_half_empty_is_not_shared():
    made = check_pack([square(0, 10), square(30, 10)], 1, 40, 40, 2, 1)
    assert [tray.is_shared for tray in made.queries.trays] == [False, False]
    made = check_pack([square(0, 10), square(29, 11)], 1, 40, 40, 2, 1)
    assert [tray.is_shared for tray in made.queries.trays] == [True]


def test_what_is_everything_lies_as_the_whole_does():
    made = check_pack([square(0, 40)], 1, 40, 40, 2, 1)
    assert [(tray.is_shared, tray.is_full) for tray in made.queries.trays] == [(True, True)]
    made = check_pack([square(0, 39)], 1, 40, 40, 2, 1)
    assert [(tray.is_shared, tray.is_full) for tray in made.queries.trays] == [(False, True)]


def test_of_rows_that_several_have_each_takes_a_layer():
    made = check_pack([square(0, 25), square(5, 30), square(25, 15), square(35, 5)], 1, 40, 40, 2, 1)
    assert [tray.is_shared for tray in made.queries.trays] == [True, True]
    assert [tray.is_full for tray in made.queries.trays] == [True, False]


def place(rows, *, kv_heads=2, repeats=1, spacing=0, skew=0):
    return Place(range(1), repeats, spacing, range(kv_heads), skew, rows, 1)


@pytest.mark.parametrize(
    "places",
    [
        [place(range(1), skew=1), place(range(1, 2))],  # the second head's row is the other's too
        [place(range(10), kv_heads=1), place(range(10, 20))],  # half of ten rows are nobody's
        [place(range(4), repeats=3, spacing=2), place(range(8, 20))],  # repeats that overlap
    ],
    ids=["skewed", "of one head", "overlapping"],
)
def test_what_has_a_shape_of_its_own_has_a_tray_of_its_own(places):
    n = places[1].rows.stop
    made = check_pack([Stack(one, one, "full") for one in places], 1, n, n, 2, 1)
    assert not any(tray.is_shared for tray in made.queries.trays)


def test_a_window_of_the_rows():
    places = [Place(range(2), 1, 0, range(2), 0, range(first, first + 5), 2) for first in (20, 25)]
    found = [Stack(place, place._replace(share=1)) for place in places]
    made = pack(found, Whole(2, range(20, 30), 2, 2), Whole(2, range(20, 30), 2, 1))
    check(made.queries, places)
    assert made.queries.lines == 2 * 10 * 4
    assert made.queries.trays[0].place.rows == range(20, 30)


def test_equal_packs_are_one_key():
    made = [pack([square(0, 30), square(30, 10)], *(Whole(1, range(40), 2, 1),) * 2) for _ in range(2)]
    assert made[0] is not made[1]
    assert len(set(made)) == 1
    assert made[0] != apart([square(0, 30), square(30, 10)])


FOUND_ELSEWHERE = """
import pickle, sys
for found, like in pickle.load(sys.stdin.buffer):
    assert found == like and hash(found) == hash(like) and found in {like}, found
"""


def test_what_remembers_its_hash_is_found_in_another_process():
    """There it is another: of None, of single rows, of strings."""
    tile = Tile(range(1), range(2), range(1), range(5), None, 3)
    made = pack([square(0, 30), square(30, 10)], *(Whole(1, range(40), 2, 1),) * 2)
    hash(tile), hash(made)
    fresh = replace(tile), pack([square(0, 30), square(30, 10)], *(Whole(1, range(40), 2, 1),) * 2)
    told = pickle.dumps([(tile, fresh[0]), (made, fresh[1])])
    command = [sys.executable, "-c", FOUND_ELSEWHERE]
    ended = subprocess.run(
        command, input=told, capture_output=True, timeout=60, env={**os.environ, "PYTHONHASHSEED": "1"}
    )
    assert ended.returncode == 0, ended.stderr.decode()
    assert astuple(tile) == astuple(fresh[0])
