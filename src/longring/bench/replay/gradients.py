"""Gradients that the other ranks would have found: made up, so that a rank must add its own to them to be right.

About as large as what the rank itself finds for the same keys. Much smaller ones could be forgotten without anybody
seeing it; beside much larger ones the rank's own would drown in the rounding of the sum.

What comes home to a rank's own rows comes to about every second of them. The others show its own part alone, to the
last bit that the result has, and a row that is added to its neighbour shows at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ...geometry.parcels import Parcel
from ...geometry.patterns import Dilated
from ...geometry.task import Task
from .numbers import GOLDEN, Numbers, signed
from .pairs import keys_of
from .places import Stretch, Vector, own_queries, stretches

KINDS = ("dk", "dv")
SPREAD_OF_WEIGHTS = math.e  # mean square of exp(score) by the square of its mean, for scores of variance 1
SECTIONS = 8  # of rows that lie behind one another, each with a size of its own
ROWS_AT_ONCE = 1 << 12


class Gradients:
    """What one rank is brought of them."""

    def __init__(self, task: Task, rank: int, numbers: Numbers) -> None:
        self._task, self._rank, self._numbers = task, rank, numbers
        self._known: dict[tuple[range, range], list[tuple[range, float]]] = {}

    def draw(self, parcel: Parcel, kind: str, flat: Tensor) -> None:
        """Fill the parcel's dk or dv."""
        at = 0
        for stretch in stretches(self._task, parcel):
            part = flat[at : at + stretch.vectors * self._numbers.d]
            at += part.numel()
            batch, heads, positions = stretch
            self._numbers.fill(part, kind, batch, positions, heads, sender=parcel.sender)
            rows = part.view(len(positions), -1)
            for section, size in self._sizes(stretch):
                rows[section.start : section.stop].mul_(size)
            if parcel.owner == self._rank:
                self._silence(rows, positions)
        assert at == flat.numel()

    def brought(self, parcels: Iterable[Parcel], vectors: Sequence[Vector]) -> dict[str, Tensor]:
        """The sums of what some parcels bring for each of the vectors, [vectors, d] in float64."""
        device = self._numbers.device
        found = {kind: torch.zeros(len(vectors), self._numbers.d, dtype=torch.float64, device=device) for kind in KINDS}
        for parcel in parcels:
            for stretch in stretches(self._task, parcel):
                self._add(found, parcel, stretch, [i for i, one in enumerate(vectors) if stretch.has(one)], vectors)
        return found

    def _add(
        self,
        found: dict[str, Tensor],
        parcel: Parcel,
        stretch: Stretch,
        which: list[int],
        vectors: Sequence[Vector],
    ) -> None:
        if parcel.owner == self._rank:
            which = [i for i in which if is_loud(vectors[i].position)]
        for head in sorted({vectors[i].kv_head for i in which}):
            some = [i for i in which if vectors[i].kv_head == head]
            at = [vectors[i].position for i in some]
            positions = torch.tensor(at, device=self._numbers.device)
            sizes = torch.tensor([self._size_at(stretch, position) for position in at], device=positions.device)
            for kind, total in found.items():
                drawn = self._numbers.at(kind, stretch.batch, positions, head, torch.float64, sender=parcel.sender)
                total[some] += drawn * sizes.unsqueeze(1)

    def _silence(self, rows: Tensor, positions: range) -> None:
        """A few at a time: what this takes counts as the rank's own memory."""
        for first in range(0, len(positions), ROWS_AT_ONCE):
            some = positions[first : first + ROWS_AT_ONCE]
            loud = torch.arange(some.start, some.stop, some.step, device=rows.device).mul_(signed(GOLDEN)).lt(0)
            rows[first : first + len(some)].mul_(loud.unsqueeze(1))

    # ---- how large they are

    def _size_at(self, stretch: Stretch, position: int) -> float:
        row = stretch.positions.index(position)
        return next(size for section, size in self._sizes(stretch) if row in section)

    def _sizes(self, stretch: Stretch) -> list[tuple[range, float]]:
        """(some rows of the stretch, how large their gradients are), section by section."""
        place = stretch.positions, stretch.kv_heads
        if place not in self._known:
            rows = range(len(stretch.positions))
            each = -(-len(rows) // SECTIONS)
            cut = [rows[first : first + each] for first in range(0, len(rows), each)]
            self._known[place] = [(section, self._size(stretch, section)) for section in cut]
        return self._known[place]

    def _size(self, stretch: Stretch, rows: range) -> float:
        """A power of two, by which multiplication is exact; that of the vector to which this rank gives most."""
        every_head = isinstance(self._task.pattern, Dilated)
        heads = _some_of(stretch.kv_heads) if every_head else {stretch.kv_heads[0]}
        likely = max(self._estimate(stretch.positions[row], head) for row in _some_of(rows) for head in heads)
        return 2.0 ** round(math.log2(likely or self._usual))

    @cached_property
    def _usual(self) -> float:
        """For keys that this rank does not see: those of its own, or of the world's least."""
        own = self._task.keys.shards[self._rank]
        heads = range(self._task.problem.kv_heads)
        found = max(
            (self._estimate(p, h) for piece in own for p in _some_of(piece) for h in _some_of(heads)), default=0
        )
        return found or 1.0

    def _estimate(self, position: int, kv_head: int) -> float:
        """The standard deviation of what this rank's queries add to a key's gradients, in each dimension.

        A query that sees n keys gives each of them a weight of about 1 / n. From the first to the last of a range n
        changes steadily, and the squares of all weights come to its length over the product of the two ends.
        """
        pattern, problem = self._task.pattern, self._task.problem

        def seen(query: int) -> int:
            return sum(map(len, keys_of(pattern, problem.n_k, query, kv_head, problem.kv_heads)))

        met = own_queries(self._task, self._rank, position, kv_head)
        weights = sum(len(r) / (seen(r[0]) * seen(r[-1])) for r in met)
        return math.sqrt(SPREAD_OF_WEIGHTS * self._task.share * weights)


def is_loud(position: int) -> bool:
    """Whether something comes home for it: about every second, at whatever stride one looks."""
    return signed(position * GOLDEN % (1 << 64)) < 0


def _some_of(r: range) -> set[int]:
    return {r[0], r[len(r) // 2], r[-1]}
