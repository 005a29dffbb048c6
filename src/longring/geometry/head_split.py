"""Dilated attention whose branches share the heads out: each head has one branch, and sees nothing of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..errors import PatternError
from .patterns import Dilated, Problem


@dataclass(frozen=True)
class HeadSplit(Dilated):
    """Branch b of m has a run of the kv heads, in order; of the H mod m that remain the first branches have one each.

    Its heads keep position i if (i % w) % r == b % r, all alike; kept positions of one segment meet. Query heads are
    where their kv head is. A row that its head's branch does not keep sees nothing.

    numbers, of:  which branches these are, of how many: heads are dealt over all of them.
    """

    phase: str = field(default="mod", init=False, repr=False)  # of `Dilated`; here a branch has one for all its heads
    numbers: tuple[int, ...] = ()
    of: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.of:
            object.__setattr__(self, "of", len(self.branches))
            object.__setattr__(self, "numbers", tuple(range(self.of)))

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.kv_heads < self.of:
            raise PatternError(
                f"a head for each of {self.of} branches is needed to share heads out, got {problem.kv_heads} kv heads"
            )

    def only(self, keep: Callable[[int], bool]) -> HeadSplit | None:
        """The branches whose segment length is kept, each with the heads it had."""
        every = zip(self.numbers, self.segment_lengths, self.dilation_rates, strict=True)
        kept = [(number, w, r) for number, w, r in every if keep(w)]
        if not kept:
            return None
        numbers, segments, rates = zip(*kept, strict=True)
        return replace(self, segment_lengths=segments, dilation_rates=rates, numbers=numbers)

    def _phases(self, kv_heads: int, number: int) -> dict[int, range]:
        place, rate = self.numbers[number], self.dilation_rates[number]
        heads = run_of_heads(kv_heads, self.of, place)
        return {place % rate: heads} if heads else {}


def run_of_heads(kv_heads: int, branches: int, place: int) -> range:
    """The kv heads of one of these branches."""
    each, more = divmod(kv_heads, branches)
    start = place * each + min(place, more)
    return range(start, start + each + (place < more))
