"""Segments: of LongNet over runs of consecutive positions, which pairs of ranks make the same tiles.

What two ranks make together depends on where segments cut both, and on where both begin within a dilation rate; how far
from each other they are does not matter. So a few looks speak for millions of pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import gcd, lcm

from .layouts import Layout, Shard
from .patterns import Dilated, Pattern, Problem


class Segments:
    """Every rank's queries, and the keys of all."""

    def __init__(self, pattern: Dilated, queries: Layout, keys: Layout) -> None:
        self._branches, self._queries, self._keys = pattern.branches, queries, keys

    @classmethod
    def of(cls, pattern: Pattern, problem: Problem, queries: Layout, keys: Layout) -> Segments | None:
        """None where looks do not say everything."""
        if not isinstance(pattern, Dilated) or pattern.documents is not None or problem.offset:
            return None
        pieces = [piece for layout in (queries, keys) for shard in layout.shards for piece in shard]
        are_runs = all(piece.step == 1 for piece in pieces)
        return cls(pattern, queries, keys) if are_runs and _are_apart(queries, keys) else None

    # ---- which ranks

    def runs(self, rank: int) -> Iterator[range]:
        """All ranks in turn, those together with whose keys the rank's queries make the same tiles."""
        for run, period in self._runs(rank):
            yield from [run] if period == 1 else (range(one, one + 1) for one in run)

    def combs(self, rank: int, turn: int) -> Iterator[range]:
        """The same, where every second or third rank may look alike: at steps that divide the turn."""
        for run, period in self._runs(rank):
            step = period if turn % period == 0 else len(run)
            for first in range(min(step, len(run))):
                comb = run[first::step]
                yield comb if len(comb) > 1 else range(comb[0], comb[0] + 1)

    def _runs(self, rank: int) -> Iterator[tuple[range, int]]:
        """(ranks, after how many of them the first look comes again).

        Cut where a segment of the rank's begins or ends, at either end of a family, and at the rank itself.
        """
        queries, keys = self._queries.shards[rank], self._keys
        cuts = {0, rank, rank + 1, keys.ranks}
        edges = {edge for w, _ in self._branches for q in queries for edge in (q[0] // w * w, (q[-1] // w + 1) * w)}
        for family in keys.families:
            cuts |= {family.start, family.stop}
            if len(family) > 1:
                cuts.update(self._holders(family, edges))
        for first, stop in pairwise(sorted(cuts)):
            run = range(first, stop)
            yield run, self._period(run, queries) if len(run) > 1 else 1

    def _holders(self, family: range, edges: Iterable[int]) -> Iterator[int]:
        """Where to cut a family so that nobody's piece has an edge within it, or not on the side of its neighbours'.

        Pieces of the same number move evenly: before which of them an edge lies is a division.
        """
        for piece, following in zip(*(self._keys.shards[rank] for rank in family[:2]), strict=True):
            shift = following.start - piece.start
            for edge in edges:
                number = (edge - piece.start) // shift if shift > 0 else -((edge - piece.start) // -shift)
                for cut in (family.start + number, family.start + number + 1):
                    if family.start < cut < family.stop:
                        yield cut

    def _period(self, sources: range, queries: Shard) -> int:
        """After how many one begins at the same place of the rate of each branch that they share with the queries."""
        first, second = (self._keys.shards[source] for source in sources[:2])
        return lcm(
            *(
                r // gcd(r, b.start - a.start)
                for w, r in self._branches
                for a, b in zip(first, second, strict=True)
                if (b.start - a.start) % r and any(_share(q, a, w) for q in queries)
            )
        )

    # ---- which tiles

    def look(self, rank: int, source: int) -> object:
        """The same for pairs that make the same tiles, number for number."""
        if rank == source:
            return self.own_look(rank)
        queries, keys = self._queries.shards[rank], self._keys.shards[source]
        pieces = sorted(
            (piece.start, piece[-1], are_keys, number)
            for are_keys, shard in ((False, queries), (True, keys))
            for number, piece in enumerate(shard)
        )
        apart = [(a[1], b[0]) for a, b in pairwise(pieces) if a[2] != b[2]]  # a query's piece next to one of keys
        found: list[object] = [_sizes(queries), _sizes(keys)]
        for w, r in self._branches:
            for last, first in apart:
                if last // w == first // w:
                    found.append(tuple(_met(pieces, w, r)))
                    break
            else:
                found.append(())
        return tuple(found)

    def own_look(self, rank: int) -> object:
        """The same for ranks that make the same tiles with their own keys, or with the same half of them."""
        queries, keys = self._queries.shards[rank], self._keys.shards[rank]
        inside = tuple(tuple((q.start - k.start, len(q)) for q in queries if q[0] in k and q[-1] in k) for k in keys)
        if sum(map(len, inside)) != len(queries):
            return rank
        return _sizes(keys), inside, tuple(tuple(_own_places(keys, w, r)) for w, r in self._branches)


Piece = tuple[int, int, bool, int]  # first and last position; whether they are keys; number among those of its side


def _met(pieces: Sequence[Piece], w: int, r: int) -> Iterator[tuple[object, ...]]:
    """For every segment in which queries and keys are: which parts of which pieces, in order, and their residues."""
    together: list[tuple[bool, int, int, int, int]] = []
    at, sides = -1, set[bool]()
    for first, last, are_keys, number in pieces:
        segment, last_segment = first // w, last // w
        if segment != at:
            if len(sides) == 2:
                yield tuple(together)
            at, together, sides = segment, [], set()
        begin = segment * w
        together.append((are_keys, number, 0, min(last + 1, begin + w) - first, (first - begin) % r))
        sides.add(are_keys)
        if segment != last_segment:
            if len(sides) == 2:
                yield tuple(together)
            begin = last_segment * w
            at, together, sides = last_segment, [(are_keys, number, begin - first, last + 1 - begin, 0)], {are_keys}
    if len(sides) == 2:
        yield tuple(together)


def _share(a: range, b: range, w: int) -> bool:
    """Whether two runs that do not meet have parts in one segment."""
    return a[-1] // w == b[0] // w if a[0] < b[0] else b[-1] // w == a[0] // w


def _sizes(shard: Shard) -> tuple[int, ...]:
    return tuple(map(len, shard))


def _own_places(shard: Shard, w: int, r: int) -> Iterator[object]:
    """Where segments cut its pieces, and whether they cut between them."""
    for piece in shard:
        first = piece[0] % w
        yield (-1, first % r) if piece[-1] // w == piece[0] // w else (first, 0)
    yield from (_share(a, b, w) for a, b in pairwise(shard))


def _are_apart(queries: Layout, keys: Layout) -> bool:
    """Whether nobody's queries are among another's keys."""
    pieces = [
        (piece, rank) for layout in (queries, keys) for rank, shard in enumerate(layout.shards) for piece in shard
    ]
    reach, of = -1, 0
    for piece, rank in sorted(pieces, key=lambda one: one[0].start):
        if piece.start < reach and rank != of:
            return False
        if piece.stop > reach:
            reach, of = piece.stop, rank
    return True
