"""Parcels: rows of one owner's keys (and, alike, values) on their way between two ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from .ranges import as_ranges, moved, united
from .tiles import Tile


class Share(NamedTuple):
    """Local rows of an owner's keys, for some batch rows and kv heads."""

    batch: range
    kv_heads: range
    rows: tuple[range, ...]

    @property
    def vectors(self) -> int:
        return len(self.batch) * len(self.kv_heads) * sum(map(len, self.rows))


class Parcel(NamedTuple):
    """Rows of the owner's keys and as many of its values, or of their gradients, between two ranks."""

    sender: int
    receiver: int
    owner: int
    shares: tuple[Share, ...]
    kind: str = "rows"  # or "gradients"

    @property
    def vectors(self) -> int:
        """Vectors of d numbers, of the keys; the values are as many again."""
        return sum([share.vectors for share in self.shares])

    @property
    def frame(self) -> range:
        """The narrowest range of the owner's local rows that has room for all that is in the parcel."""
        return _frame(self.shares)


@lru_cache(maxsize=1024)
def _frame(shares: tuple[Share, ...]) -> range:
    parts = [r for share in shares for r in share.rows]
    first, last = min(r[0] for r in parts), max(r[-1] for r in parts)
    step = gcd(*(r.step for r in parts if len(r) > 1), *(r[0] - first for r in parts)) or 1
    return range(first, last + 1, step)


class Piece(NamedTuple):
    """Rows of some heads that change places: local rows of the sender, and where they are at the receiver's desk."""

    desk: int
    batch: range
    heads: range
    rows: range
    at: range

    @property
    def vectors(self) -> int:
        return len(self.batch) * len(self.heads) * len(self.rows)


class Delivery(NamedTuple):
    """Rows of queries, keys or results between two ranks, dealt by heads."""

    sender: int
    receiver: int
    pieces: tuple[Piece, ...]
    kind: str

    @property
    def vectors(self) -> int:
        return sum(piece.vectors for piece in self.pieces)

    def back(self, kind: str) -> Delivery:
        """The same rows on their way back."""
        return Delivery(self.receiver, self.sender, self.pieces, kind)


@lru_cache(maxsize=1024)
def needed(tiles: tuple[Tile, ...]) -> tuple[Share, ...]:
    """The key rows that some tile names, each once for all tiles, batch row by batch row and head by head."""
    return _named((tile, {moved(tile.cols, i * tile.repeat.cols) for i in range(tile.repeat.count)}) for tile in tiles)


@lru_cache(maxsize=1024)
def asking(tiles: tuple[Tile, ...]) -> tuple[Share, ...]:
    """The query rows that some tile names, likewise; of every query head of these kv heads."""
    return _named((tile, {moved(tile.rows, i * tile.repeat.rows) for i in range(tile.repeat.count)}) for tile in tiles)


def _named(tiles_and_rows: Iterable[tuple[Tile, set[range]]]) -> tuple[Share, ...]:
    by_place: dict[tuple[int, int], set[range]] = {}
    for tile, named in tiles_and_rows:
        for b in tile.batch:
            for h in tile.kv_heads:
                by_place.setdefault((b, h), set()).update(named)
    by_rows: dict[tuple[range, ...], list[tuple[int, int]]] = {}
    unions: dict[frozenset[range], tuple[range, ...]] = {}
    for place, columns in by_place.items():
        key = frozenset(columns)
        if key not in unions:
            unions[key] = united(key)
        by_rows.setdefault(unions[key], []).append(place)
    return tuple(Share(batch, heads, rows) for rows, places in by_rows.items() for batch, heads in _rectangles(places))


def _rectangles(places: list[tuple[int, int]]) -> Iterator[tuple[range, range]]:
    """(batch rows, heads) as few products of ranges."""
    heads_of: dict[int, list[int]] = {}
    for b, h in places:
        heads_of.setdefault(b, []).append(h)
    batches_of: dict[tuple[int, ...], list[int]] = {}
    for b, heads in heads_of.items():
        batches_of.setdefault(tuple(sorted(heads)), []).append(b)
    for heads, batches in batches_of.items():
        for batch in united(range(b, b + 1) for b in batches):
            for group in as_ranges(heads):
                yield batch, group
