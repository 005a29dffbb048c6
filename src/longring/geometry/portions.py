"""Portions: how much is computed at once, and how much of what was computed may wait, so that memory stays small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

from .slabs import Slab, slabs
from .stacks import Place, Shaped, Stack, stacks
from .tiles import Tile, without_bands

SMALLEST_PORTION = 1 << 18  # elements: below 1 MiB a stack is not cut to save memory
SMALLEST_SLAB = 1 << 28  # elements: 512 MiB of 16 bits keep a large GPU busy for milliseconds
MOST_SLABS = 8
MOST_AT_ONCE = 1 << 15  # repeats and batch rows: some operations put them on an axis that ends at 65,535

SCORES_AT_ONCE = 1 << 21  # elements of the reference kernel: 8 MiB of float32, a few of which are alive at a time
SIDE = 512  # of a block of them

HELD = 4  # parts of the total's size that may wait to be merged
HELD_OF_SUMS = 1  # and in the backward, where memory is short
HELD_UNTIL_DONE = 2  # where one look brings everything: no more than a float32 total of 16-bit parts would take
ALWAYS_HELD = 1 << 26  # bytes that may wait in any case
PACKED = 2  # times the total's size: what one launch of many stacks may leave
PACKED_IN_ANY_CASE = 1 << 26  # bytes
PADDED_IN_ANY_CASE = 1 << 28  # bytes that a backward may hold for sequences shorter than a block; else a float32 total
MERGED_AT_ONCE = 16  # parts that one pass takes; more of them take several, through an accumulator


def stretches(tiles: Sequence[Tile], q: Shaped, k: Shaped, *, can_be_done: bool) -> Sequence[Slab]:
    """Stretches after which rows are done, where that can be used; else everything at once."""
    rows = q.shape[1]
    if not can_be_done or rows != k.shape[1]:
        return [Slab(range(rows), tuple(tiles))]
    row = prod(q.shape) // rows
    return slabs(tuple(tiles), rows, max(rows // MOST_SLABS, SMALLEST_SLAB // row))


def portions(slab: Slab, q: Shaped, k: Shaped, *, is_first: bool, is_lazy: bool) -> Iterator[Stack]:
    """The stacks of a slab: cut, where every part is merged at once, until a part is a fraction of the whole.

    `is_first`: nothing was computed before. `is_lazy`: parts may wait for each other.
    """
    found = _all_stacks(slab.tiles, q.shape[2] // k.shape[2])
    is_everything = is_first and len(found) == 1 and found[0].queries.covers(q) and found[0].keys.covers(k)
    if is_lazy:
        for stack in found:
            yield from stack.in_batches(MOST_AT_ONCE)
        return
    if is_everything:
        yield from found
        return
    limit = max(SMALLEST_PORTION, prod(q.shape) // 4) // q.shape[3]
    for stack in found:
        yield from stack.split(limit)


@lru_cache(maxsize=32)  # of thousands of documents each is megabytes, and recipes are remembered besides
def with_bands(tiles: tuple[Tile, ...], share: int) -> tuple[Stack, ...]:
    """The stacks of tiles as they are, for an operation that knows windows."""
    return tuple(stacks(tiles, share))


def has_most(place: Place, slab: Slab, x: Shaped) -> bool:
    """Whether the place has more than half of a slab's rows: then it pays to write them where they belong."""
    batch, _, heads, _ = x.shape
    return 2 * place.many * place.heads * len(place.rows) > batch * heads * len(slab.rows)


@lru_cache(maxsize=32)  # of thousands of documents each is megabytes, and recipes are remembered besides
def _all_stacks(tiles: tuple[Tile, ...], share: int) -> tuple[Stack, ...]:
    return tuple(stacks([piece for tile in tiles for piece in without_bands(tile)], share))


def are_too_many(sizes: Sequence[int], whole: int, *, most: int, always: int) -> bool:
    """Whether parts of these bytes, of a total of `whole` bytes, may not wait any longer."""
    return len(sizes) > 1 and is_too_much(sum(sizes), whole, most=most, always=always)


def is_too_much(waiting: int, whole: int, *, most: int, always: int) -> bool:
    """The same of the bytes of several parts together."""
    return waiting > max(most * whole, always)
