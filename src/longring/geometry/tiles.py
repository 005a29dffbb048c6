"""Tiles: the pieces of the score matrix that a kernel computes.

A tile is a rectangle of local query rows and local key columns in which row a meets column b wherever
lo <= b - a <= hi. Four shapes are worth a name: *full* (no limit), *causal* (a square, b <= a), *flipped*
(a square, b >= a: causal when read from its last row and column) and *band* (the rest). Equal tiles at
equal spacing are one tile with a repeat, so that they can go into a kernel's batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from .layouts import Shard
from .patterns import Group
from .ranges import chain, look, meet, moved


class Repeat(NamedTuple):
    """The tile stands `count` times, each `rows` further down and `cols` further right than the last."""

    count: int
    rows: int
    cols: int


ONCE = Repeat(1, 0, 0)


class _WithHash:
    """A place for a hash, which is no field: in another process it is another."""

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True)
class Tile(_WithHash):
    """Rows of the local queries against columns of the keys at hand, for some batch rows and kv heads."""

    batch: range
    kv_heads: range
    rows: range
    cols: range
    lo: int | None = None
    hi: int | None = None
    repeat: Repeat = ONCE

    def __hash__(self) -> int:
        """Remembered: everything that is made of tiles is looked up by them, call after call."""
        try:
            return self._hash
        except AttributeError:
            mine = self.batch, self.kv_heads, self.rows, self.cols, self.lo, self.hi, self.repeat
            object.__setattr__(self, "_hash", hash(mine))
            return self._hash

    @property
    def shape(self) -> str:
        return shape_of(len(self.rows), len(self.cols), self.lo, self.hi)

    @property
    def pairs(self) -> int:
        """How many (batch row, kv head, query, key) meet here."""
        each = pairs_in_band(len(self.rows), len(self.cols), self.lo, self.hi)
        return each * self.repeat.count * len(self.kv_heads) * len(self.batch)

    def each_repeat(self) -> Iterator[Tile]:
        """The same work as `repeat.count` tiles that stand once."""
        return self.split_repeat(1)

    def split_repeat(self, most: int) -> Iterator[Tile]:
        """The same work as tiles that stand at most so many times."""
        for first in range(0, self.repeat.count, most):
            yield self.repeats(first, min(most, self.repeat.count - first))

    def repeats(self, first: int, count: int) -> Tile:
        """So many of its repeats, from the first-th on."""
        _, down, right = self.repeat
        repeat = Repeat(count, down, right) if count > 1 else ONCE
        return replace(self, rows=moved(self.rows, first * down), cols=moved(self.cols, first * right), repeat=repeat)

    def part(self, batch: range, kv_heads: range) -> Tile:
        return replace(self, batch=batch, kv_heads=kv_heads)

    def block(self, row: int, height: int, col: int, width: int) -> Tile | None:
        """The part in rows row.. and columns col.., trimmed; None if nothing meets there."""
        rows, cols = self.rows[row : row + height], self.cols[col : col + width]
        kept = trim(
            len(rows),
            len(cols),
            None if self.lo is None else self.lo + row - col,
            None if self.hi is None else self.hi + row - col,
        )
        return None if kept is None else self._trimmed(rows, cols, kept)

    def _trimmed(self, rows: range, cols: range, kept: Band) -> Tile:
        return replace(
            self,
            rows=rows[kept.row : kept.row + kept.height],
            cols=cols[kept.col : kept.col + kept.width],
            lo=kept.lo,
            hi=kept.hi,
        )

    def shifted(self, columns: int) -> Tile:
        """The same tile when so many columns stand before those at hand."""
        return replace(self, cols=moved(self.cols, columns))

    def seen_through(self, frame: range) -> Tile:
        """The same tile when the columns at hand are those of `frame` alone, which holds all of its own."""
        if frame.step == 1:
            return replace(self, cols=moved(self.cols, -frame.start)) if frame.start else self
        first, last = frame.index(self.cols[0]), frame.index(self.cols[-1])
        step = max(1, self.cols.step // frame.step)
        repeat = self.repeat._replace(cols=self.repeat.cols // frame.step)
        return replace(self, cols=range(first, last + 1, step), repeat=repeat)


class Band(NamedTuple):
    """Where lo <= b - a <= hi inside a rectangle, after trimming."""

    row: int
    height: int
    col: int
    width: int
    lo: int | None
    hi: int | None


# ------------------------------------------------------------------------------------ counting and trimming


def shape_of(height: int, width: int, lo: int | None, hi: int | None) -> str:
    if lo is None and hi is None:
        return "full"
    if height == width and (lo, hi) == (None, 0):
        return "causal"
    return "flipped" if height == width and (lo, hi) == (0, None) else "band"


def pairs_in_band(height: int, width: int, lo: int | None, hi: int | None) -> int:
    total = height * width if hi is None else _pairs_up_to(height, width, hi)
    return total - (0 if lo is None else _pairs_up_to(height, width, lo - 1))


def _pairs_up_to(height: int, width: int, hi: int) -> int:
    """Pairs with b <= a + hi: row a has clamp(a + hi + 1, 0, width) of them."""
    return _triangle(height + hi) - _triangle(hi) - _triangle(height + hi - width) + _triangle(hi - width)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2 if n > 0 else 0


def trim(height: int, width: int, lo: int | None, hi: int | None) -> Band | None:
    """Without the rows that see nothing and the columns nobody sees; limits that no longer bind become None."""
    if lo is not None and hi is not None and lo > hi:  # a window narrower than the spacing of the keys
        return None
    top = max(0, -hi) if hi is not None else 0
    bottom = min(height, width - lo) if lo is not None else height
    if bottom <= top:
        return None
    left = max(0, top + lo) if lo is not None else 0
    right = min(width, bottom + hi) if hi is not None else width
    if right <= left:
        return None
    height, width, shift = bottom - top, right - left, top - left
    lo = None if lo is None or lo + shift <= 1 - height else lo + shift
    hi = None if hi is None or hi + shift >= width - 1 else hi + shift
    return Band(top, height, left, width, lo, hi)


# ---------------------------------------------------------------------------------------------- the cutter


class Held(NamedTuple):
    """A shard's share of some positions: which they are, and in which local rows they lie."""

    positions: range
    rows: range


def held(shard: Shard, positions: range) -> list[Held]:
    found: list[Held] = []
    base = 0
    for piece in shard:
        if piece.start < positions.stop and positions.start < piece.stop:
            both = meet(piece, positions)
            if both:
                first = base + (both.start - piece.start) // piece.step
                step = both.step // piece.step if len(both) > 1 else 1
                found.append(Held(both, range(first, first + step * (len(both) - 1) + 1, step)))
        base += len(piece)
    return found


def cut_tiles(groups: Iterable[Group], queries: Shard, keys: Shard) -> tuple[Tile, ...]:
    """Tiles that cover every pair of the groups exactly once a group. Shards hold global positions."""
    found: list[Tile] = []
    for group in groups:
        mine, theirs = held(queries, group.queries), held(keys, group.keys)
        if mine and theirs:
            tiles = _group_tiles(group, mine, theirs)
            found += tiles if group.times == 1 else [_standing(tile, group) for tile in tiles]
    return coalesce(found)


def _standing(tile: Tile, group: Group) -> Tile:
    return replace(tile, repeat=Repeat(group.times, group.apart, group.apart))


def _group_tiles(group: Group, mine: list[Held], theirs: list[Held]) -> list[Tile]:
    if square := _own_square(group, mine, theirs):
        return [square]
    tiles = [tile for q in mine for k in theirs for tile in _band_tiles(group, q, k)]
    return fuse(tiles)


def _own_square(group: Group, mine: list[Held], theirs: list[Held]) -> Tile | None:
    """Causal over equal positions is one square even where they have gaps, since both sides rise alike."""
    if (group.lo, group.hi) != (None, 0) or [q.positions for q in mine] != [k.positions for k in theirs]:
        return None
    if any(a.positions[-1] > b.positions[0] for a, b in pairwise(mine)):  # what several striped ranks hold together
        return None
    rows, cols = chain(q.rows for q in mine), chain(k.rows for k in theirs)
    if rows is None or cols is None:
        return None
    hi = 0 if len(rows) > 1 else None  # one pair is a full tile
    return Tile(group.batch, group.kv_heads, rows, cols, None, hi)


def _band_tiles(group: Group, q: Held, k: Held) -> Iterator[Tile]:
    binding = _binding(group, q, k)
    if binding is None:
        return
    if binding == (None, None):
        yield Tile(group.batch, group.kv_heads, q.rows, k.rows)
        return
    step = _common_step(q.positions, k.positions)
    for a in _unravelled(q, step):
        for b in _unravelled(k, step):
            kept = trim(len(a.rows), len(b.rows), *_between(a, b, binding, step))
            if kept is not None:
                yield Tile(group.batch, group.kv_heads, a.rows, b.rows)._trimmed(a.rows, b.rows, kept)


Limits = tuple[int | None, int | None]


def _binding(group: Group, q: Held, k: Held) -> Limits | None:
    """The limits of key - query that leave out some pair; None if they leave out all."""
    nearest, farthest = k.positions[0] - q.positions[-1], k.positions[-1] - q.positions[0]
    if (group.hi is not None and nearest > group.hi) or (group.lo is not None and farthest < group.lo):
        return None
    lo = group.lo if group.lo is not None and nearest < group.lo else None
    return lo, (group.hi if group.hi is not None and farthest > group.hi else None)


def _between(a: Held, b: Held, limits: Limits, step: int) -> Limits:
    """The same limits of column - row, where both sides advance by one step."""
    lo, hi = limits
    gap = a.positions[0] - b.positions[0]  # key - query = step * (column - row) - gap
    return (None if lo is None else -(-(lo + gap) // step)), (None if hi is None else (hi + gap) // step)


def _common_step(a: range, b: range) -> int:
    """A step in which both can be walked: bands need rows and columns to advance alike."""
    if len(a) == 1:
        return b.step
    return a.step if len(b) == 1 else lcm(a.step, b.step)


def _unravelled(part: Held, step: int) -> list[Held]:
    if len(part.positions) == 1 or part.positions.step == step:
        return [part]
    times = step // part.positions.step
    return [_strand(part, number, times) for number in range(min(times, len(part.positions)))]


def count_tiles(group: Group, queries: Shard, keys: Shard) -> list[tuple[Tile, int]] | None:
    """What `cut_tiles` finds, told once for all that follow each other and differ in their columns' start alone.

    A comb of queries over a run of keys makes a tile with every strand of the keys, and there are as many as ranks.
    None where tiles are others than these, or some of them might be joined.
    """
    mine, theirs = held(queries, group.queries), held(keys, group.keys)
    if len(mine) != 1 or len(theirs) != 1 or group.times != 1 or mine[0].positions == theirs[0].positions:
        return None
    q, k = mine[0], theirs[0]
    binding, times = _binding(group, q, k), q.positions.step // k.positions.step
    are_strands = min(len(q.positions), len(k.positions)) > 1 and q.positions.step == times * k.positions.step
    if not are_strands or binding is None or binding == (None, None):
        return None
    found: list[tuple[Tile, int]] = []
    for alike in _alike_strands(q, k, binding, times):
        strand = _strand(k, alike[0], times)
        kept = trim(len(q.rows), len(strand.rows), *_between(q, strand, binding, q.positions.step))
        if kept is not None and kept.lo is None and kept.hi is None:
            return None  # full ones might be joined to others
        if kept is not None:
            tile = Tile(group.batch, group.kv_heads, q.rows, strand.rows)
            found.append((tile._trimmed(q.rows, strand.rows, kept), len(alike)))
    return found


def _alike_strands(q: Held, k: Held, binding: Limits, times: int) -> Iterator[range]:
    """Numbers of strands of the keys that are equally long and to which the same limits apply: both only fall."""

    def likeness_of(number: int) -> tuple[int, Limits]:
        strand = _strand(k, number, times)
        return len(strand.rows), _between(q, strand, binding, q.positions.step)

    strands_of_keys = range(min(times, len(k.positions)))
    while strands_of_keys:
        first = likeness_of(strands_of_keys[0])
        many = bisect_left(strands_of_keys, True, key=lambda number, first=first: likeness_of(number) != first)
        yield strands_of_keys[:many]
        strands_of_keys = strands_of_keys[many:]


def _strand(part: Held, number: int, times: int) -> Held:
    """One of `times` that together are the part."""
    return Held(part.positions[number::times], part.rows[number::times])


# ------------------------------------------------------------------------------------- fewer, larger tiles


def fuse(tiles: Sequence[Tile]) -> list[Tile]:
    """Full rectangles that share an edge joined: local rows may be neighbours though positions are not."""
    found: list[Tile] = []
    for tile in tiles:
        for i in range(len(found) - 1, max(-1, len(found) - 9), -1):  # a neighbour is among the latest
            joined = _joined(found[i], tile)
            if joined is not None:
                found[i] = joined
                break
        else:
            found.append(tile)
    return found


def _joined(a: Tile, b: Tile) -> Tile | None:
    if a.lo is not None or a.hi is not None or b.lo is not None or b.hi is not None:
        return None
    if a.cols == b.cols and (rows := chain([a.rows, b.rows])) is not None:
        return replace(a, rows=rows)
    if a.rows == b.rows and (cols := chain([a.cols, b.cols])) is not None:
        return replace(a, cols=cols)
    return None


def coalesce(tiles: Sequence[Tile]) -> tuple[Tile, ...]:
    """Equal tiles at equal spacing as one tile with a repeat, in the order of their first appearance."""
    if len(tiles) < 2:
        return tuple(tiles)
    found: list[Tile] = []
    latest: dict[tuple[object, ...], int] = {}  # look -> index of the last such tile
    for tile in tiles:
        alike = likeness(tile)
        index = latest.get(alike)
        grown = None if index is None else _repeated(found[index], tile)
        if grown is None or index is None:
            latest[alike] = len(found)
            found.append(tile)
        else:
            found[index] = grown
    return tuple(found)


def likeness(tile: Tile) -> tuple[object, ...]:
    """The same for tiles that could become one with a repeat: all but where they stand."""
    return tile.batch, tile.kv_heads, look(tile.rows), look(tile.cols), tile.lo, tile.hi


def _repeated(earlier: Tile, tile: Tile) -> Tile | None:
    """`earlier` standing also where `tile` does, if the spacing fits and no row or column is in two of them."""
    count, down, right = earlier.repeat
    rows, cols = tile.rows.start - earlier.rows.start, tile.cols.start - earlier.cols.start
    if tile.repeat != ONCE and tile.repeat[1:] != (down, right):
        return None
    if count == 1:
        apart = rows >= earlier.rows[-1] + 1 - earlier.rows[0] and cols >= earlier.cols[-1] + 1 - earlier.cols[0]
        return replace(earlier, repeat=Repeat(2, rows, cols)) if apart else None
    if (rows, cols) != (count * down, count * right):
        return None
    return replace(earlier, repeat=Repeat(count + tile.repeat.count, down, right))


@lru_cache(maxsize=4096)
def without_bands(tile: Tile) -> tuple[Tile, ...]:
    """The same pairs as full, causal and flipped tiles, for kernels that know no window."""
    if tile.shape != "band":
        return (tile,)
    cut = coalesce(list(_pieces(tile)))
    if tile.repeat == ONCE:
        return cut
    if all(one.repeat == ONCE for one in cut):
        return tuple(replace(one, repeat=tile.repeat) for one in cut)
    return _repeated_one_by_one(tile, cut)


def _pieces(tile: Tile) -> Iterator[Tile]:
    """In order; strips that look alike, of which a narrow band has as many as rows, are cut once and repeated."""
    kept = trim(len(tile.rows), len(tile.cols), tile.lo, tile.hi)
    if kept is None:
        return
    rows, cols = _inside(tile, kept)
    tile = replace(tile, rows=rows, cols=cols)
    height, width, lo, hi = kept.height, kept.width, kept.lo, kept.hi
    if lo is None or hi is None:
        yield from _placed(tile, _cut_trimmed(height, width, lo, hi))
        return
    step = hi - lo + 1
    tops = range(0, height, step)
    first = -(-max(0, -lo) // step)
    last = min(height - step, width - step - hi) // step
    alike = range(first, last + 1) if last - first >= 2 else range(0)
    repeat = Repeat(len(alike), step * tile.rows.step, step * tile.cols.step)
    for number in (*range(alike.start), *alike[:1], *range(alike.stop, len(tops))):
        strip = _cut_strip(tops[number], height, width, lo, hi)
        yield from _placed(tile, strip, repeat if number in alike else ONCE)


def _placed(tile: Tile, parts: Iterable[Band], repeat: Repeat = ONCE) -> Iterator[Tile]:
    for part in parts:
        yield Tile(tile.batch, tile.kv_heads, *_inside(tile, part), part.lo, part.hi, repeat)


def _repeated_one_by_one(tile: Tile, cut: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """A tile has one repeat: where the cut brought its own, the tile's is written out."""
    _, down, right = tile.repeat
    return tuple(
        replace(one, rows=moved(one.rows, i * down), cols=moved(one.cols, i * right))
        for i in range(tile.repeat.count)
        for one in cut
    )


def _inside(tile: Tile, part: Band) -> tuple[range, range]:
    return tile.rows[part.row : part.row + part.height], tile.cols[part.col : part.col + part.width]


def _cut_band(height: int, width: int, lo: int | None, hi: int | None) -> Iterator[Band]:
    """Cover lo <= b - a <= hi exactly once by full rectangles, causal squares and flipped squares."""
    kept = trim(height, width, lo, hi)
    if kept is None:
        return
    for part in _cut_trimmed(kept.height, kept.width, kept.lo, kept.hi):
        yield part._replace(row=part.row + kept.row, col=part.col + kept.col)


def _cut_trimmed(height: int, width: int, lo: int | None, hi: int | None) -> Iterator[Band]:
    if lo is None and hi is None:
        yield Band(0, height, 0, width, None, None)
    elif lo is None:
        assert hi is not None
        yield from _cut_upper(height, width, hi)
    elif hi is None:  # the same, read from the last row and column
        for part in _cut_upper(height, width, width - height - lo):
            row, col = height - part.row - part.height, width - part.col - part.width
            yield Band(row, part.height, col, part.width, None if part.hi is None else 0, None)
    else:
        yield from _cut_both(height, width, lo, hi)


def _cut_upper(height: int, width: int, hi: int) -> Iterator[Band]:
    """b <= a + hi with 0 <= hi: columns everyone sees, a square, and rows that see everything."""
    side = min(height, width - hi)
    if hi:
        yield Band(0, side, 0, hi, None, None)
    yield Band(0, side, hi, side, None, 0 if side > 1 else None)
    if height > side:
        yield Band(side, height - side, 0, width, None, None)


def _cut_both(height: int, width: int, lo: int, hi: int) -> Iterator[Band]:
    """As many rows at a time as the band is wide."""
    for top in range(0, height, hi - lo + 1):
        yield from _cut_strip(top, height, width, lo, hi)


def _cut_strip(top: int, height: int, width: int, lo: int, hi: int) -> Iterator[Band]:
    """Left of a line no upper limit binds, right of it no lower."""
    rows = min(hi - lo + 1, height - top)
    middle = min(max(top + hi, 0), width)
    for left, cols in ((0, middle), (middle, width - middle)):
        if cols:
            for part in _cut_band(rows, cols, lo + top - left, hi + top - left):
                yield part._replace(row=part.row + top, col=part.col + left)
