"""Views: from where to where ranks see, and who holds something there. Never too little; tiles say it exactly."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

from ..geometry.patterns import Span
from ..geometry.task import Task


class Views:
    def __init__(self, task: Task) -> None:
        self._task = task

    def of(self, rank: int) -> Iterator[Span]:
        """Of every piece of the rank's queries that sees something."""
        task, shift = self._task, self._task.problem.offset
        for piece in task.queries.shards[rank]:
            view = task.pattern.sees(task.problem, piece[0] + shift, piece[-1] + shift)
            if view.first <= view.last:
                yield view

    def horizon(self, rank: int) -> int:
        """The last key that one of the rank's queries sees, or -1."""
        return max((view.last for view in self.of(rank)), default=-1)

    def owners(self, rank: int) -> set[int]:
        """Who holds a position between the first and the last that a piece of the rank's queries sees."""
        pieces, firsts, lasts = self._pieces
        found: set[int] = set()
        for view in self.of(rank):
            some = pieces[bisect_left(lasts, view.first) : bisect_right(firsts, view.last)]
            found.update(owner for _, _, owner in some)
        return found

    @cached_property
    def _pieces(self) -> tuple[list[tuple[int, int, int]], list[int], list[int]]:
        """(first, last, owner) of pieces of keys, and both ends in order."""
        shards = enumerate(self._task.keys.shards)
        pieces = sorted((piece[0], piece[-1], owner) for owner, shard in shards for piece in shard)
        firsts, lasts = [piece[0] for piece in pieces], [piece[1] for piece in pieces]
        if any(a > b for a, b in pairwise(lasts)):  # combs: any of them may reach far
            lasts = [max(lasts)] * len(lasts)
        return pieces, firsts, lasts
