"""Stacks cover the pairs that their tiles do, and a place's view holds the very rows it names."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import random_parts
import stacking
from enumeration import expected_pairs, meetings
from longring.geometry.itinerary import tiles_between
from longring.geometry.patterns import Dense, Dilated
from longring.geometry.ranges import moved
from longring.geometry.tiles import Tile, coalesce, without_bands
from longring.kernels.places import Place, Stack, stacks
from strategies import tasks

N, BATCH, D = 30, 3, 2
MEETINGS = {"full": (None, None), "causal": (None, 0), "flipped": (0, None)}


def where(place: Place, head: int, turn: int) -> tuple[int, int, range]:
    """(batch row, head of the tensor, rows) of one head of one of its many, written out from what the fields say."""
    number, within = divmod(head, place.share)
    batch = place.batch[0] if place.repeats > 1 else place.batch[turn]
    down = place.skew * number + (place.spacing * turn if place.repeats > 1 else 0)
    return batch, place.kv_heads[number] * place.share + within, moved(place.rows, down)


def add_stack(counts: np.ndarray, stack: Stack) -> None:
    """Add the stack's pairs to counts [batch, heads, n_q, n_k]."""
    queries, keys = stack.queries, stack.keys
    assert keys.share == 1
    assert (queries.many, len(queries.kv_heads)) == (keys.many, keys.heads)
    lo, hi = MEETINGS[stack.shape]
    met = meetings(Tile(range(1), range(1), queries.rows, keys.rows, lo, hi))
    assert stack.shape == "full" or met.shape[0] == met.shape[1]
    for turn, head in itertools.product(range(queries.many), range(queries.heads)):
        batch, at, rows = where(queries, head, turn)
        same_batch, kv_head, cols = where(keys, head // queries.share, turn)
        assert (same_batch, kv_head) == (batch, at // queries.share)
        counts[batch, at][np.ix_(rows, cols)] += met


def covered(found: list[Stack], task, share: int) -> np.ndarray:
    problem = task.problem
    counts = np.zeros((problem.batch, problem.kv_heads * share, problem.n_q, problem.n_k), dtype=np.int64)
    for stack in found:
        add_stack(counts, stack)
    return counts


def stacks_of(task, share: int) -> list[Stack]:
    tiles = tiles_between(task, 0, 0)
    return stacks([piece for tile in tiles for piece in without_bands(tile)], share)


small_tasks = tasks(lengths=st.integers(1, N), max_ranks=1)


@given(small_tasks, st.integers(1, 3))
def test_stacks_cover_every_pair_as_often_as_it_counts(task, share):
    want = expected_pairs(task).repeat(share, axis=1)
    assert (covered(stacks_of(task, share), task, share) == want).all()


def pairs(stack):
    """Of a query head and a key, the masked ones of a square included."""
    return stack.queries.many * stack.queries.heads * len(stack.queries.rows) * len(stack.keys.rows)


@given(small_tasks, st.integers(1, 3), st.integers(1, 200))
def test_so_do_stacks_that_were_split(task, share, most):
    found = stacks_of(task, share)
    split = [part for stack in found for part in stack.split(most)]
    assert (covered(split, task, share) == covered(found, task, share)).all()
    assert sum(map(pairs, split)) == sum(map(pairs, found))
    for part in split:
        head = max(len(part.queries.rows) * share, len(part.keys.rows))
        size = head * part.queries.many * len(part.queries.kv_heads)
        assert size <= max(most, head), "more than was asked for, though heads could be parted"


@given(small_tasks, st.integers(1, 3), st.integers(1, 6))
def test_so_do_stacks_in_batches(task, share, most):
    found = stacks_of(task, share)
    batches = [part for stack in found for part in stack.in_batches(most)]
    assert (covered(batches, task, share) == covered(found, task, share)).all()
    assert all(part.queries.many <= most for part in batches)
    assert len(batches) == sum(-(-stack.queries.many // most) for stack in found)


@pytest.mark.parametrize("phase", ["mod", "block"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_dilated_branch_is_few_stacks(phase, causal):
    """Eight heads in r phases: a stack a phase, or one of a head of every phase, whichever are fewer."""
    pattern = Dilated([8, 16, 32, 64], [1, 2, 4, 8], causal=causal, phase=phase)
    assert len(stacking.pattern_stacks(pattern, 1, 64, 8, 8)) == 1 + 2 + 2 + 1


def test_skewed_heads_become_one_stack():
    rows = [range(h, 40 + h, 4) for h in range(4)]
    tiles = [Tile(range(1), range(h, h + 1), r, r, None, 0) for h, r in enumerate(rows)]
    (stack,) = stacks(tiles, 1)
    assert (stack.queries.kv_heads, stack.queries.skew, stack.keys.skew) == (range(4), 1, 1)
    assert len(stacks(tiles, 2)) == 4  # heads that share a kv head do not lie a row apart


@pytest.mark.parametrize("starts", [(3, 2, 1), (0, 1, 3)], ids=["upwards", "uneven"])
def test_what_is_not_evenly_skewed_stays_apart(starts):
    tiles = [Tile(range(1), range(h, h + 1), range(s, s + 8), range(s, s + 8)) for h, s in enumerate(starts)]
    assert len(stacks(tiles, 1)) == 3


def test_the_step_of_a_single_row_changes_nothing():
    """Equal ranges may be spelled differently, and which of them a cache holds must not decide the order of work."""
    sides = [(range(1), range(1)), (range(4), range(4)), (range(2, 3), range(2, 3))]
    spelled = [tuple(range(r.start, r.stop, 5) if len(r) == 1 else r for r in pair) for pair in sides]
    plain, other = ([Tile(range(1), range(1), *pair) for pair in some] for some in (sides, [*sides[:2], spelled[2]]))
    assert plain == other
    assert stacks(plain, 1) == stacks(other, 1)
    assert coalesce(plain) == coalesce(other)


def test_documents_of_equal_length_are_one_stack_for_each_batch_row():
    found = stacking.pattern_stacks(Dense(documents=[0, 10, 20, 30]), 2, 30, 2, 2)
    assert [(stack.queries.batch, stack.queries.repeats) for stack in found] == [(range(1), 3), (range(1, 2), 3)]


# --------------------------------------------------------------------------------------------- views of a tensor


@st.composite
def some_places(draw):
    """(a place, the kv heads of the tensor it is of)."""
    kv_heads, share = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return draw(random_parts.places(N, BATCH, kv_heads, share)), kv_heads


def numbered(shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """Every element another number, the dimensions in any order of memory, and not from its start."""
    turned = [shape[i] for i in order]
    spare = torch.arange(3.0 + prod(shape))[3:]
    return spare.view(turned).permute([order.index(i) for i in range(len(shape))])


@given(some_places(), st.permutations(range(3)))
def test_a_view_is_what_plain_indexing_finds(made, order):
    place, kv_heads = made
    x = numbered((BATCH, N, kv_heads * place.share, D), (*order, 3))
    view = place.view(x)
    assert view.shape == (place.many, place.heads, len(place.rows), D)
    assert view.data_ptr() >= x.data_ptr()
    for turn, head in itertools.product(range(place.many), range(place.heads)):
        batch, at, rows = where(place, head, turn)
        assert view[turn, head].equal(x[batch, list(rows), at])


@given(some_places(), st.permutations(range(3)))
def test_a_view_of_rows_is_too(made, order):
    place, kv_heads = made
    lse = numbered((BATCH, kv_heads * place.share, N), tuple(order))
    view = place.row_view(lse)
    assert view.shape == (place.many, place.heads, len(place.rows))
    for turn, head in itertools.product(range(place.many), range(place.heads)):
        batch, at, rows = where(place, head, turn)
        assert view[turn, head].equal(lse[batch, at, list(rows)])


@given(some_places())
def test_what_is_written_to_a_view_is_in_the_tensor(made):
    place, kv_heads = made
    x = torch.zeros(BATCH, N, kv_heads * place.share, D)
    place.view(x).add_(1)
    assert x.sum() == place.many * place.heads * len(place.rows) * D  # no row is there twice
    assert x.max() == 1


@given(some_places())
def test_the_extent_reaches_from_the_first_row_to_the_last(made):
    place, kv_heads = made
    x = torch.zeros(BATCH, N, kv_heads * place.share, 1)
    place.view(x).fill_(1)
    rows = x.amax((0, 2, 3)).nonzero().flatten().tolist()
    assert (place.extent.start, place.extent.stop) == (rows[0], rows[-1] + 1)


def test_batch_rows_may_lie_apart():
    x = numbered((3, 6, 2, D), (0, 1, 2, 3))
    place = Place(range(0, 3, 2), 1, 0, range(2), 0, range(1, 6, 2), 1)
    assert place.view(x).equal(x[0:3:2, 1:6:2].transpose(1, 2))


def test_a_view_of_a_view_starts_where_that_does():
    packed = torch.arange(2.0 * 6 * 3 * 4 * D).view(2, 6, 3, 4, D)
    k = packed[:, :, 1]
    place = Place(range(1, 2), 2, 3, range(1, 4, 2), 0, range(2), 1)
    assert place.view(k)[1, 1].equal(k[1, 3:5, 3])


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_only_a_place_of_all_rows_covers_a_tensor(batch, n, kv_heads, share):
    x = torch.zeros(batch, n, kv_heads * share, 1)
    everything = Place(range(batch), 1, 0, range(kv_heads), 0, range(n), share)
    assert everything.covers(x)
    assert everything.view(x).shape[:3] == (batch, kv_heads * share, n)
    for less in (
        everything._replace(batch=range(1, batch)),
        everything._replace(batch=range(batch - 1)),
        everything._replace(kv_heads=range(1, kv_heads)),
        everything._replace(kv_heads=range(kv_heads - 1)),
        everything._replace(rows=range(1, n)),
        everything._replace(rows=range(n - 1)),
        everything._replace(rows=range(0, 2 * n, 2)),
    ):
        assert less.covers(x) == (less.rows == range(n) and less.batch == range(batch) and less.heads == x.shape[2])


@given(some_places())
def test_a_place_that_covers_has_as_many_rows_as_the_tensor(made):
    place, kv_heads = made
    x = torch.zeros(BATCH, N, kv_heads * place.share, 1)
    place.view(x).fill_(1)
    assert place.covers(x) == bool(x.all())
