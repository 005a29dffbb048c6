"""Layouts: how a sequence of tokens is dealt out to ranks.

A shard is a tuple of `range`s: the global positions a rank holds, in rising order. A layout deals any
number of tokens to any number of ranks without padding. Nothing else in the library knows the word
"zigzag".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise

from ..errors import LayoutError
from .ranges import chain, cut

Shard = tuple[range, ...]
Documents = tuple[tuple[int, ...], ...]  # boundaries 0, b1, ..., n; one list for the batch, or one per row

CHUNKS_A_RANK = 8  # of "dealt": more balance better and make smaller tiles; 8 stays within 1.03 of the mean


def size(shard: Shard) -> int:
    return sum(map(len, shard))


@dataclass(frozen=True)
class Layout:
    """Who holds which positions: one shard per rank."""

    length: int
    shards: tuple[Shard, ...]

    @property
    def ranks(self) -> int:
        return len(self.shards)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(size, self.shards))

    @cached_property
    def families(self) -> tuple[range, ...]:
        """Runs of ranks whose shards have one shape and shift evenly, so that a few of them speak for all."""
        found: list[range] = []
        for rank in range(self.ranks):
            if found and self._continues(found[-1], rank):
                found[-1] = range(found[-1].start, rank + 1)
            else:
                found.append(range(rank, rank + 1))
        return tuple(found)

    @cached_property
    def rank_starting_at(self) -> dict[int, int]:
        """By its first position, the rank that holds it."""
        return {shard[0].start: rank for rank, shard in enumerate(self.shards) if shard}

    def _continues(self, family: range, rank: int) -> bool:
        before, here = self.shards[rank - 1], self.shards[rank]
        if len(before) != len(here):
            return False
        if any(a.step != b.step or len(a) != len(b) for a, b in zip(before, here, strict=True)):
            return False
        if len(family) < 2:
            return True
        earlier = self.shards[rank - 2]
        return all(a.start + c.start == 2 * b.start for a, b, c in zip(earlier, before, here, strict=True))

    def __hash__(self) -> int:  # thousands of ranges: hash them once
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.length, self.shards))


def deal(name: str, length: int, ranks: int, *, documents: Documents | None = None, align: int | None = None) -> Layout:
    """The layout called `name` for `length` tokens over `ranks` ranks."""
    if not isinstance(name, str) or name not in LAYOUTS:
        raise LayoutError(f"layout must be one of {', '.join(LAYOUTS)}, got {name!r}")
    _check_counts(length, ranks, align)
    if align is not None and name == "striped":
        raise LayoutError(f"align={align} cannot be kept by layout 'striped', which deals single tokens; use another")
    if name == "dealt" and documents is None:
        raise LayoutError("layout 'dealt' balances documents and needs documents=[0, ..., length]; got None")
    return _deal(name, length, ranks, documents if name == "dealt" else None, align or 1)


@lru_cache(maxsize=256)
def _deal(name: str, length: int, ranks: int, documents: Documents | None, align: int) -> Layout:
    if name == "dealt":
        assert documents is not None
        return Layout(length, _dealt(length, ranks, documents, align))
    return Layout(length, LAYOUTS[name](length, ranks, align))


def from_ranges(shards: Iterable[Iterable[range]]) -> Layout:
    """Any assignment at all, checked: every position of 0..n-1 on exactly one rank, each rank's rising."""
    if not isinstance(shards, Iterable):
        raise LayoutError(f"shards must be a list of ranges for every rank, got {shards!r}")
    given = [list(shard) if isinstance(shard, Iterable) else [shard] for shard in shards]
    if not given:
        raise LayoutError("shards must name at least one rank, got none")
    for rank, shard in enumerate(given):
        for r in shard:
            if not isinstance(r, range) or r.step < 1:
                raise LayoutError(f"rank {rank} must hold ranges with a positive step, got {r!r}")
    clean = tuple(tuple(r for r in shard if r) for shard in given)
    for rank, shard in enumerate(clean):
        _check_rising(rank, shard)
    length = sum(map(size, clean))
    if length == 0:
        raise LayoutError("shards hold no position at all; a sequence has at least one token")
    owners = bytearray(length)
    for rank, shard in enumerate(clean):
        for r in shard:
            if r.start < 0 or r[-1] >= length:
                raise LayoutError(f"rank {rank} holds {r}, but the {length} positions dealt are 0..{length - 1}")
            if any(owners[r.start : r.stop : r.step]):
                raise LayoutError(f"rank {rank} holds a position of {r} that it or an earlier rank holds too")
            owners[r.start : r.stop : r.step] = b"\1" * len(r)
    return Layout(length, clean)


def extended(shard: Shard, new: range) -> Shard:
    """The shard with further positions, all behind those it holds; one range more only where none can be continued."""
    if not new:
        return shard
    longer = chain((shard[-1], new)) if shard else None
    return (*shard, new) if longer is None else (*shard[:-1], longer)


@lru_cache(maxsize=256)
def replicated(length: int, ranks: int) -> Layout:
    """Every rank has all of it, which no name of a layout says: a rank's queries must not pass for everybody's."""
    return Layout(length, ((range(length),),) * ranks)


def _check_rising(rank: int, shard: Shard) -> None:
    for a, b in pairwise(shard):
        if a[-1] >= b.start:
            raise LayoutError(f"rank {rank} must hold its positions in rising order, got {a} before {b}")


def _check_counts(length: int, ranks: int, align: int | None) -> None:
    for name, value in (("length", length), ("ranks", ranks), ("align", align)):
        if value is None and name == "align":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LayoutError(f"{name} must be a whole number of at least 1, got {value!r}")


# ------------------------------------------------------------------------------------------ the layouts


def _contiguous(length: int, ranks: int, align: int) -> tuple[Shard, ...]:
    return tuple(_tidy([chunk]) for chunk in _chunks(length, ranks, align))


def _zigzag(length: int, ranks: int, align: int) -> tuple[Shard, ...]:
    """One early and one late chunk each, so that causal work is equal."""
    chunks = _chunks(length, 2 * ranks, align)
    return tuple(_tidy([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks))


def _striped(length: int, ranks: int, align: int) -> tuple[Shard, ...]:
    return tuple(_tidy([range(rank, length, ranks)]) for rank in range(ranks))


def _dealt(length: int, ranks: int, documents: Documents, align: int) -> tuple[Shard, ...]:
    """Equal chunks, heaviest first, each to the least loaded rank that still has room."""
    chunks = _chunks(length, CHUNKS_A_RANK * ranks, align)
    work = [sum(_causal_pairs(chunk, row) for row in documents) for chunk in chunks]
    hands: list[list[range]] = [[] for _ in range(ranks)]
    least_loaded = [(0, rank) for rank in range(ranks)]
    heapify(least_loaded)
    for index in sorted(range(len(chunks)), key=lambda i: (-work[i], i)):
        load, rank = heappop(least_loaded)
        hands[rank].append(chunks[index])
        if len(hands[rank]) < CHUNKS_A_RANK:
            heappush(least_loaded, (load + work[index], rank))
    return tuple(_tidy(hand) for hand in hands)


LAYOUTS: dict[str, Callable[..., tuple[Shard, ...]]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "striped": _striped,
    "dealt": _dealt,
}


def _chunks(length: int, parts: int, align: int) -> list[range]:
    """Consecutive pieces that begin at multiples of `align`."""
    blocks = -(-length // align)
    return [range(min(c.start * align, length), min(c.stop * align, length)) for c in cut(blocks, parts)]


def _tidy(chunks: Sequence[range]) -> Shard:
    """Rising, no empties, neighbours fused."""
    fused: list[range] = []
    for chunk in sorted((c for c in chunks if len(c)), key=lambda c: c.start):
        if fused and fused[-1].step == chunk.step == 1 and fused[-1].stop == chunk.start:
            fused[-1] = range(fused[-1].start, chunk.stop)
        else:
            fused.append(chunk)
    return tuple(fused)


def _causal_pairs(chunk: range, boundaries: tuple[int, ...]) -> int:
    """Pairs (i, j <= i) of one document with i in the chunk: what the chunk's queries cost."""
    total = 0
    for start, stop in pairwise(boundaries[bisect_right(boundaries, chunk.start) - 1 :]):
        if start >= chunk.stop:
            break
        first, last = max(start, chunk.start), min(stop, chunk.stop)
        total += (last - first) * (first - start + 1 + last - start) // 2
    return total
