"""Slabs: stretches of the sequence that no tile crosses, so that their rows are done before the next is begun."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from .tiles import Tile


class Slab(NamedTuple):
    """Rows and columns of one stretch, and the tiles that lie in it."""

    rows: range
    tiles: tuple[Tile, ...]


@lru_cache(maxsize=256)
def slabs(tiles: tuple[Tile, ...], length: int, least: int) -> tuple[Slab, ...]:
    """The tiles of a square problem, cut where they can be: in at least `least` rows at a time, at the end in half."""
    cuts = _cuts(tiles, length, least)
    if len(cuts) < 3:
        return (Slab(range(length), tiles),)
    found: list[list[Tile]] = [[] for _ in cuts[1:]]
    for tile in tiles:
        for number, part in _dealt(tile, cuts):
            found[number].append(part)
    return tuple(Slab(range(*window), tuple(some)) for window, some in zip(pairwise(cuts), found, strict=True))


def _cuts(tiles: Sequence[Tile], length: int, least: int) -> list[int]:
    """From 0 to the length: where no tile lies on both sides and one begins, as early as may be."""
    series = {one for tile in tiles for one in _series(tile)}
    cuts = [0]
    while True:
        cut = cuts[-1] + max(1, least)
        while (later := max((one.end_of_what_lies_across(cut) for one in series), default=cut)) > cut:
            cut = later
        starts = [start for one in series if (start := one.next_start(cut)) is not None]
        if not starts or length - min(starts) < least // 2:
            return [*cuts, length]
        cuts.append(min(starts))


class _Series(NamedTuple):
    """What a tile spans of the sequence, and its repeats, each `step` further on."""

    first: int
    stop: int
    count: int
    step: int

    def end_of_what_lies_across(self, cut: int) -> int:
        """Of the last that begins before the cut; the cut itself where all those end before."""
        before = min(self.count - 1, -(-(cut - self.first) // self.step) - 1)
        return max(cut, self.stop + before * self.step) if before >= 0 else cut

    def next_start(self, cut: int) -> int | None:
        """Of the first that does not begin before the cut."""
        number = max(0, -(-(cut - self.first) // self.step))
        return self.first + number * self.step if number < self.count else None


def _series(tile: Tile) -> Iterator[_Series]:
    """Rows and columns alike; one by one where repeats move rows and columns apart, since they do not span alike."""
    count, down, right = tile.repeat
    for one in [tile] if count == 1 or down == right else tile.each_repeat():
        rows, cols = one.rows, one.cols
        yield _Series(min(rows[0], cols[0]), max(rows[-1], cols[-1]) + 1, one.repeat.count, max(1, down))


def _dealt(tile: Tile, cuts: Sequence[int]) -> Iterator[tuple[int, Tile]]:
    """The tile's repeats, by the stretch they lie in."""
    first, count, down = 0, tile.repeat.count, max(1, tile.repeat.rows)
    while first < count:
        number = bisect_right(cuts, tile.rows[0] + first * down) - 1
        fitting = (cuts[number + 1] - 1 - tile.rows[-1]) // down + 1 - first
        some = min(fitting, count - first)
        yield number, tile.repeats(first, some)
        first += some
