"""Attention over stacks in Triton, interpreted on the CPU: small blocks, so that small stacks have many."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

import longring as lr
import stacking
from longring.errors import KernelRefusal
from longring.geometry.packs import Whole, apart, pack
from longring.geometry.tiles import Tile, trim
from longring.kernels.places import Place, Stack, stacks
from longring.testing import judge, relative_error
from longring.testing.budgets import distance
from watched_memory import watched_memory

pytest.importorskip("triton", reason="needs triton")

import triton

from interpreted import mended_interpreter
from longring.kernels.triton import tiles

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs Triton's interpreter")

BLOCK = tiles.Blocks(16, 16, 4, 1)
SMALL = tiles.Sizes(BLOCK, BLOCK, BLOCK)
UNEVEN = tiles.Sizes(tiles.Blocks(32, 16, 4, 1), tiles.Blocks(16, 32, 4, 1), tiles.Blocks(32, 16, 4, 1))
NEAR = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True, scope="module")
def _within_tensors():
    with watched_memory():
        yield


@pytest.fixture(autouse=True)
def _interpreter():
    with mended_interpreter():
        yield


def one(shape, rows, cols, kv_heads=1, share=1):
    queries = Place(range(1), 1, 0, range(kv_heads), 0, range(rows), share)
    return Stack(queries, Place(range(1), 1, 0, range(kv_heads), 0, range(cols), 1), *stacking.LIMITS[shape])


def tensors(batch, n, kv_heads, share, d, dtype=torch.float32, seed=0):
    wide, narrow = (batch, n, kv_heads * share, d), (batch, n, kv_heads, d)
    return stacking.draw(wide, narrow, narrow, wide, dtype=dtype, seed=seed)


def check(q, k, v, found, scale, dout, dlse=None, sizes=SMALL, dtype=None):
    """Each stack forward, and backward as a part of rows that saw all of the stacks."""
    near = NEAR[dtype or q.dtype]
    want = [stacking.attended(q, k, v, stack, scale) for stack in found]
    pack = apart(found)
    for (out, lse), expected in zip(tiles.forward(q, k, v, pack, scale, sizes=sizes, dtype=dtype), want, strict=True):
        assert (out.dtype, lse.dtype) == (dtype or q.dtype, torch.float32)
        assert relative_error(out, expected[0]) < max(near, NEAR[q.dtype] / 2)
        assert relative_error(lse, expected[1]) < NEAR[torch.float32]
    out, lse = stacking.merged(want, found, q)
    got = tiles.backward(dout, out, lse, dlse, q, k, v, pack, scale, sizes=sizes, dtype=dtype)
    for *grads, stack in zip(*got, found, strict=True):
        for grad, expected in zip(grads, stacking.gradients(dout, out, lse, dlse, q, k, v, stack, scale), strict=True):
            assert grad.dtype == (dtype or q.dtype)
            terms = abs(scale) * expected.numel() ** 0.5  # what a gradient near 0 is the difference of
            assert distance(grad, expected) <= 2 * NEAR[q.dtype] * max(expected.norm(), terms)


@pytest.mark.parametrize("shape", ["full", "causal", "flipped"])
@pytest.mark.parametrize("n", [1, 16, 17, 47])
@pytest.mark.parametrize("sizes", [SMALL, UNEVEN], ids=["square", "uneven"])
def test_every_shape_and_edge(shape, n, sizes):
    q, k, v, dout = tensors(1, n, 1, 1, 16, seed=n)
    check(q, k, v, [one(shape, n, n)], 0.25, dout, sizes=sizes)


@pytest.mark.parametrize("limits", [(-9, 0), (-40, -3), (0, 5), (-1, 1), (-17, 30), (3, 3), (None, 12), (-20, None)])
@pytest.mark.parametrize(("rows", "cols"), [(47, 47), (47, 20), (20, 47)])
def test_bands(rows, cols, limits):
    """Of any width, across any rectangle."""
    q, k, v, dout = tensors(1, 48, 1, 2, 16)
    kept = trim(rows, cols, *limits)
    assert kept is not None
    tile = Tile(range(1), range(1), range(rows), range(cols))._trimmed(range(rows), range(cols), kept)
    (stack,) = stacks([tile], 2)
    check(q, k, v, [stack], 0.25, dout, sizes=UNEVEN)


@pytest.mark.parametrize(("rows", "cols"), [(1, 40), (40, 1), (33, 20), (16, 47)])
def test_rectangles(rows, cols):
    q, k, v, dout = tensors(1, 48, 1, 1, 16)
    check(q, k, v, [one("full", rows, cols)], 0.25, dout)


@pytest.mark.parametrize("share", [1, 2, 3])
@pytest.mark.parametrize("shape", ["full", "causal", "flipped"])
def test_heads_share_keys(shape, share):
    q, k, v, dout = tensors(1, 37, 2, share, 16)
    check(q, k, v, [one(shape, 37, 37, 2, share)], 0.25, dout)


@pytest.mark.parametrize("seed", range(8))
def test_many_stacks_anywhere_in_one_launch(seed):
    rng = random.Random(seed)
    batch, n, kv_heads, share = rng.randint(1, 2), 60, rng.randint(1, 4), rng.choice([1, 1, 2])
    found = [stacking.some_stack(rng, batch, n, kv_heads, share) for _ in range(4)]
    q, k, v, dout = tensors(batch, n, kv_heads, share, 16, seed=seed)
    dlse = stacking.draw((batch, kv_heads * share, n), dtype=torch.float32, seed=seed + 100)[0]
    check(q, k, v, found, 0.3, dout, dlse if seed % 2 else None, sizes=UNEVEN if seed % 3 else SMALL)


@pytest.mark.parametrize("scale", [0.0, -0.4, 1e-30, 3.0])
@pytest.mark.parametrize("shape", ["full", "causal", "flipped"])
def test_any_scale(shape, scale):
    q, k, v, dout = tensors(1, 35, 1, 1, 16)
    check(q, k, v, [one(shape, 35, 35)], scale, dout)


@pytest.mark.parametrize("d", [1, 8, 24, 40])
def test_any_head_dimension(d):
    q, k, v, dout = tensors(1, 20, 1, 2, d)
    check(q, k, v, [one("causal", 20, 20, 1, 2)], d**-0.5, dout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("result", [None, torch.float32], ids=str)
def test_sixteen_bits(dtype, result):
    q, k, v, dout = tensors(1, 40, 1, 2, 32, dtype)
    check(q, k, v, [one("causal", 40, 40, 1, 2), one("full", 20, 33, 1, 2)], 32**-0.5, dout, dtype=result)


def test_negative_scale_in_sixteen_bits():
    q, k, v, dout = tensors(1, 33, 1, 1, 16, torch.bfloat16)
    check(q, k, v, [one("causal", 33, 33)], -0.25, dout)


@pytest.mark.parametrize(
    "pattern",
    [
        lr.Dense(causal=False, window=(9, 4)),
        lr.Dense(causal=True, documents=[0, 7, 8, 40]),
        lr.Dilated([8, 16, 40], [1, 2, 4]),
        lr.Dilated([10, 40], [1, 3], causal=False),
    ],
    ids=repr,
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_a_whole_pattern_by_its_stacks(pattern, heads, kv_heads):
    q, k, v, dout = tensors(1, 40, kv_heads, heads // kv_heads, 16)
    dlse = stacking.draw((1, heads, 40), dtype=torch.float32, seed=5)[0]
    found = stacking.pattern_stacks(pattern, 1, 40, heads, kv_heads)
    forward, backward = partial(tiles.forward, sizes=SMALL), partial(tiles.backward, sizes=SMALL)
    got = stacking.through_stacks(forward, backward, q, k, v, found, 0.25, dout, dlse)
    verdicts = judge(got, q, k, v, pattern, dout, dlse, scale=0.25)
    assert all(verdict.ok for verdict in verdicts), verdicts


def together(found, q, k):
    (batch, n_q, heads, _), (n_k, kv_heads) = q.shape, k.shape[1:3]
    return pack(found, Whole(batch, range(n_q), kv_heads, heads // kv_heads), Whole(batch, range(n_k), kv_heads, 1))


@pytest.mark.parametrize(
    "pattern",
    [
        lr.Dense(documents=[0, 7, 8, 40]),
        lr.Dense(documents=[[0, 10, 15, 25, 30, 40], [0, 33, 40]]),
        lr.Dense(causal=False, lengths=[17, 40]),
        lr.Dense(window=(9, 0)),
        lr.Dilated([8, 16, 40], [1, 2, 4]),
    ],
    ids=repr,
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
def test_results_side_by_side_are_those_apart(pattern, heads, kv_heads):
    """To the bit, and where no stack has anything there is nothing."""
    q, k, v, dout = tensors(2, 40, kv_heads, heads // kv_heads, 16)
    found = stacking.pattern_stacks(pattern, 2, 40, heads, kv_heads)
    shared, own = together(found, q, k), apart(found)
    lse = stacking.draw((2, heads, 40), dtype=torch.float32, seed=5)[0] + 4
    seen = [tiles.forward(q, k, v, some, 0.25, sizes=SMALL) for some in (shared, own)]
    grads = [tiles.backward(dout, q, lse, None, q, k, v, some, 0.25, sizes=SMALL) for some in (shared, own)]
    assert len(shared.queries.trays) < len(found) or isinstance(pattern, lr.Dilated)
    for both, some, like in [
        ([[out for out, _ in one] for one in seen], "queries", q),
        *zip(zip(*grads, strict=True), ("queries", "keys", "keys"), (q, k, k), strict=True),
    ]:
        a, b = (added_up(one, getattr(made, some).trays, like) for one, made in zip(both, (shared, own), strict=True))
        assert torch.equal(a, b)
    logs = [[lse for _, lse in one] for one in seen]
    a, b = (logs_added(one, made.queries.trays, q) for one, made in zip(logs, (shared, own), strict=True))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def added_up(parts, trays, like):
    total = torch.zeros(like.shape)
    for part, tray in zip(parts, trays, strict=True):
        assert part.shape == (*tray.shape, like.shape[3])
        tray.place.view(total).add_(part)
    return total


def logs_added(parts, trays, q):
    total = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    for part, tray in zip(parts, trays, strict=True):
        view = tray.place.row_view(total)
        view.copy_(torch.logaddexp(view, part))
    return total


def test_tensors_are_read_where_they_lie():
    """Views: heads before rows, rows with gaps, an expanded gradient."""
    n, heads, d = 30, 2, 16
    q, k, v, dout = tensors(2, 2 * n, heads, 1, d)
    q = q[:, ::2]
    k = k.transpose(1, 2).contiguous().transpose(1, 2)[:, :n]
    v = torch.cat([v, v], -1)[:, n:, :, d:]
    dout = dout[:1, :1, :1, :1].expand(2, n, heads, d)
    place = Place(range(2), 1, 0, range(2), 0, range(n), 1)
    stack = Stack(place, place, hi=0)
    check(q, k, v, [stack], 0.25, dout)


def test_rows_that_saw_nothing_give_and_get_nothing():
    q, k, v, dout = tensors(1, 20, 1, 1, 16)
    out, lse = torch.zeros_like(q), torch.full((1, 1, 20), -torch.inf)
    pack = apart([one("causal", 20, 20)])
    for (grad,) in tiles.backward(dout, out, lse, None, q, k, v, pack, 0.25, sizes=SMALL):
        assert not grad.any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_what_is_not_a_number_is_not_taken_for_nothing_seen(bad):
    """An lse of -inf would leave it out of every merge, and rows that saw it would look sound."""
    q, k, v, _ = tensors(1, 20, 1, 1, 16)
    k[:, 5] = bad
    ((out, lse),) = tiles.forward(q, k, v, apart([one("causal", 20, 20)]), 0.25, sizes=SMALL)
    assert lse[0, 0, 5:].isnan().all()
    assert out[0, 0, 5:].isnan().all()
    assert lse[0, 0, :5].isfinite().all()


def test_the_same_bits_again():
    q, k, v, _ = tensors(1, 40, 2, 2, 16)
    found = apart(stacking.pattern_stacks(lr.Dilated([8, 40], [1, 2]), 1, 40, 4, 2))
    once, again = (tiles.forward(q, k, v, found, 0.25, sizes=SMALL) for _ in range(2))
    assert all(torch.equal(a, b) for x, y in zip(once, again, strict=True) for a, b in zip(x, y, strict=True))


def test_every_block_is_on_the_list_once():
    found = stacking.pattern_stacks(lr.Dilated([64, 256, 1024], [1, 4, 16]), 1, 1000, 8, 4)
    for side in ("rows", "keys"):
        work = tiles._written(torch.device("cpu"), apart(found), 16, 1 << 18, side)
        places = [stack.queries if side == "rows" else stack.keys for stack in found]
        want = {
            (i, many, head, block)
            for i, place in enumerate(places)
            for many in range(place.many)
            for head in range(place.heads)
            for block in range(-(-len(place.rows) // 16))
        }
        items = [tuple(item) for item in work.tables.read()[0].tolist()]
        assert len(items) == work.count == len(want)
        assert set(items) == want


def test_a_known_call_writes_no_list():
    q, *_ = tensors(1, 20, 1, 1, 16)
    packs = [apart([one("causal", 20, 20)]) for _ in range(2)]
    first, again = (tiles._work(q, pack, BLOCK, "rows") for pack in packs)
    assert first is again
    assert tiles._work(q, packs[0], BLOCK, "keys") is not first


def test_no_stacks_no_results():
    q, k, v, dout = tensors(1, 4, 1, 1, 16)
    assert tiles.forward(q, k, v, apart([]), 1.0) == []
    assert tiles.backward(dout, q, torch.zeros(1, 1, 4), None, q, k, v, apart([]), 1.0) == ([], [], [])


def test_refuses_what_it_cannot_compute():
    q = torch.zeros(1, 4, 1, 16, dtype=torch.float64)
    with pytest.raises(KernelRefusal, match="float64"):
        tiles.forward(q, q, q, apart([one("full", 4, 4)]), 1.0)
    q = torch.zeros(1, 4, 1, 257)
    with pytest.raises(KernelRefusal, match="at most 256, got 257"):
        tiles.forward(q, q, q, apart([one("full", 4, 4)]), 1.0)
