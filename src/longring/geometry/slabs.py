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
    """From 0 to the length: where no tile lies on both sides."""
    cuts = [0]
    reach = 0
    for first, stop in sorted(_stretch(one) for tile in tiles for one in tile.each_repeat()):
        if first >= reach and first - cuts[-1] >= least and length - first >= least // 2:
            cuts.append(first)
        reach = max(reach, stop)
    return [*cuts, length]


def _stretch(tile: Tile) -> tuple[int, int]:
    """What the tile spans of the sequence, its rows and its columns alike."""
    rows, cols = tile.rows, tile.cols
    return min(rows[0], cols[0]), max(rows[-1], cols[-1]) + 1


def _dealt(tile: Tile, cuts: Sequence[int]) -> Iterator[tuple[int, Tile]]:
    """The tile's repeats, by the stretch they lie in."""
    first, count, down = 0, tile.repeat.count, max(1, tile.repeat.rows)
    while first < count:
        number = bisect_right(cuts, tile.rows[0] + first * down) - 1
        fitting = (cuts[number + 1] - 1 - tile.rows[-1]) // down + 1 - first
        some = min(fitting, count - first)
        yield number, tile.repeats(first, some)
        first += some
