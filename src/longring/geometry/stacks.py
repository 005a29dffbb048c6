"""Stacks: tiles gathered into as few strided pieces as memory allows, each for one call of a fused operation.

A stack is [many, heads, rows], each axis at equal spacing. Its heads may be *skewed*: in LongNet every head starts a
row later than the one before, so that all heads of a branch, though no two keep the same rows, are still one strided
view.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from .ranges import look, moved
from .tiles import Tile, pairs_in_band, shape_of


class Shaped(Protocol):
    """A tensor [batch, n, heads, d], or what only has its sizes."""

    @property
    def shape(self) -> Sequence[int]: ...


class Strided(Shaped, Protocol):
    """What can be seen otherwise without being copied, as a tensor can."""

    def stride(self) -> tuple[int, ...]: ...

    def storage_offset(self) -> Any: ...

    def as_strided(self, size: tuple[int, ...], stride: tuple[int, ...], storage_offset: int) -> Self: ...


T = TypeVar("T", bound=Strided)


class Place(NamedTuple):
    """Rows of a tensor [batch, n, kv_heads * share, d]: those of a kv head, further heads, repeats or batch rows."""

    batch: range
    repeats: int  # 1 where batch is longer than that
    spacing: int  # rows from one repeat to the next
    kv_heads: range
    skew: int  # rows by which each further kv head starts later; 0 where a kv head has several query heads
    rows: range  # of the first kv head and repeat
    share: int  # heads to a kv head

    @property
    def many(self) -> int:
        return len(self.batch) * self.repeats

    @property
    def heads(self) -> int:
        return len(self.kv_heads) * self.share

    @property
    def lines(self) -> int:
        """How many rows of how many heads."""
        return self.many * self.heads * len(self.rows)

    @property
    def extent(self) -> range:
        """From the first row to the last."""
        last = self.rows[-1] + self.spacing * (self.repeats - 1) + self.skew * (len(self.kv_heads) - 1)
        return range(self.rows[0], last + 1)

    def covers(self, x: Shaped) -> bool:
        """Whether every row of x [batch, n, heads, d] is here, in order."""
        batch, n, heads, _ = x.shape
        return (self.batch, self.kv_heads, self.rows) == (range(batch), range(heads // self.share), range(n))

    def view(self, x: T) -> T:
        """[many, heads, rows, d] of x [batch, n, heads, d]."""
        b, n, h, d = x.stride()
        size, stride, start = self.strided(b, n, h)
        return x.as_strided((*size, x.shape[3]), (*stride, d), x.storage_offset() + start)

    def row_view(self, x: T) -> T:
        """[many, heads, rows] of x [batch, heads, n], such as an lse."""
        b, h, n = x.stride()
        size, stride, start = self.strided(b, n, h)
        return x.as_strided(size, stride, x.storage_offset() + start)

    def strided(self, b: int, n: int, h: int) -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
        """Size, stride and start of it, where batch rows, rows and heads are so far from each other."""
        between = h * (self.kv_heads.step if self.share == 1 else 1) + n * self.skew
        far = n * self.spacing if self.repeats > 1 else b * self.batch.step
        start = b * self.batch.start + n * self.rows.start + h * self.share * self.kv_heads.start
        return (self.many, self.heads, len(self.rows)), (far, between, n * self.rows.step), start


class Stack(NamedTuple):
    """Equal pieces of the score matrix, computed by one call."""

    queries: Place
    keys: Place
    lo: int | None = None  # column - row, at least
    hi: int | None = None  # and at most

    @property
    def shape(self) -> str:
        """As of a tile; "band" for operations that know them alone."""
        return shape_of(len(self.queries.rows), len(self.keys.rows), self.lo, self.hi)

    @property
    def limits(self) -> tuple[int | None, int | None]:
        return self.lo, self.hi

    @property
    def pairs(self) -> int:
        """Of a query and a key, by kv head, as a tile counts them."""
        each = pairs_in_band(len(self.queries.rows), len(self.keys.rows), self.lo, self.hi)
        return each * self.queries.many * len(self.queries.kv_heads)

    def in_batches(self, most: int) -> Iterator[Stack]:
        """The same work in stacks of at most so many repeats or batch rows."""
        return self._cut(len(self.queries.kv_heads), most) if self.queries.many > most else iter((self,))

    def split(self, most: int) -> Iterator[Stack]:
        """The same work in stacks of at most so many numbers of [many, heads, rows], as far as whole heads go."""
        each = max(len(self.queries.rows) * self.queries.share, len(self.keys.rows))
        at_once = max(1, most // each)
        heads = min(at_once, len(self.queries.kv_heads))
        return self._cut(heads, max(1, at_once // heads))

    def _cut(self, heads: int, many: int) -> Iterator[Stack]:
        for first in range(0, len(self.queries.kv_heads), heads):
            for start in range(0, self.queries.many, many):
                queries, keys = (_part(place, first, heads, start, many) for place in (self.queries, self.keys))
                yield self._replace(queries=queries, keys=keys)


def _part(place: Place, first: int, heads: int, start: int, many: int) -> Place:
    down = place.skew * first + (place.spacing * start if place.repeats > 1 else 0)
    is_repeated = place.repeats > 1
    return place._replace(
        batch=place.batch if is_repeated else place.batch[start : start + many],
        repeats=min(many, place.repeats - start) if is_repeated else 1,
        kv_heads=place.kv_heads[first : first + heads],
        rows=moved(place.rows, down),
    )


def stacks(tiles: Sequence[Tile], share: int) -> list[Stack]:
    """Tiles as stacks; `share` query heads have a kv head in common."""
    found: list[Stack] = []
    for group in alike(tiles, share).values():
        together = _skewed(group) if share == 1 and len(group) > len(group[0].kv_heads) else None
        found += together or [_stack(tile, share, tile.kv_heads) for tile in group]
    return found


def alike(tiles: Iterable[Tile], share: int) -> dict[tuple[object, ...], list[Tile]]:
    """Tiles, cut where need be, by their look: those that could go into one stack, and are next to each other."""
    groups: dict[tuple[object, ...], list[Tile]] = {}
    for tile in tiles:
        for part in _evenly_spaced(tile, share):
            groups.setdefault(_look(part), []).append(part)
    return groups


def count_stacks(tiles: Iterable[tuple[Tile, int]], share: int) -> list[tuple[Stack, int]]:
    """The same for tiles of the same heads that each stand for so many: stacks, and how many look like each."""
    found: dict[tuple[object, ...], tuple[Stack, int]] = {}
    for tile, times in tiles:
        for part in _evenly_spaced(tile, share):
            stack, before = found.get(_look(part)) or (_stack(part, share, part.kv_heads), 0)
            found[_look(part)] = stack, before + times
    return list(found.values())


def _look(tile: Tile) -> tuple[object, ...]:
    return tile.shape, tile.lo, tile.hi, tile.batch, tile.repeat, *map(look, (tile.kv_heads, tile.rows, tile.cols))


def _evenly_spaced(tile: Tile, share: int) -> Iterator[Tile]:
    """The tile in parts whose batch rows and repeats, and whose heads, are each at equal spacing in memory."""
    apart = tile.repeat.count > 1 and len(tile.batch) > 1
    batches = [range(b, b + 1) for b in tile.batch] if apart else [tile.batch]
    gaps = share > 1 and tile.kv_heads.step > 1
    heads = [range(h, h + 1) for h in tile.kv_heads] if gaps else [tile.kv_heads]
    if len(batches) == len(heads) == 1:
        yield tile
        return
    for batch in batches:
        for some in heads:
            yield tile.part(batch, some)


def _stack(tile: Tile, share: int, kv_heads: range, down: int = 0, right: int = 0) -> Stack:
    count, rows, cols = tile.repeat
    queries = Place(tile.batch, count, rows, kv_heads, down, tile.rows, share)
    keys = Place(tile.batch, count, cols, kv_heads, right, tile.cols, 1)
    return Stack(queries, keys, tile.lo, tile.hi)


def _skewed(group: Sequence[Tile]) -> list[Stack] | None:
    """Tiles that differ by their heads and their first row alone, taken a head of each at a time."""
    group = sorted(group, key=lambda tile: tile.kv_heads.start)
    starts = [(tile.kv_heads.start, tile.rows.start, tile.cols.start) for tile in group]
    steps = {tuple(b - a for a, b in zip(one, two, strict=True)) for one, two in pairwise(starts)}
    if len(steps) != 1:
        return None
    apart, down, right = steps.pop()
    if apart < 1 or down < 0 or right < 0:
        return None
    heads = (range(h, h + apart * (len(group) - 1) + 1, apart) for h in group[0].kv_heads)
    return [_stack(group[0], 1, some, down, right) for some in heads]
