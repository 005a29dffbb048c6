"""Dilated attention whose branches share the heads out: each head has one branch, and sees nothing of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..errors import PatternError
from .patterns import Dilated, Problem


@dataclass(frozen=True)
class HeadSplit(Dilated):
    """Branch b of m has a run of the kv heads, in order; of the H mod m that remain the first branches have one each.

    Its heads keep position i if (i % w) % r == b % r, all alike; kept positions of one segment meet. Query heads are
    where their kv head is. A row that its head's branch does not keep sees nothing.

    numbers, of:  which branches these are and of how many, where some have been left out; heads are dealt over all.
    """

    phase: str = field(default="mod", init=False)
    numbers: tuple[int, ...] | None = None
    of: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "phase", "branch")  # one for all heads of a branch, as `Dilated` has none

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.kv_heads < len(self.branches):
            raise PatternError(
                f"a head for each of {len(self.branches)} branches is needed to share heads out, got "
                f"{problem.kv_heads} kv heads"
            )

    def some(self, numbers: Sequence[int]) -> HeadSplit:
        """Its branches of these numbers, each with the heads it had."""
        segments, rates = zip(*(self.branches[number] for number in numbers), strict=True)
        kept = tuple(self._numbers[number] for number in numbers)
        return replace(self, segment_lengths=segments, dilation_rates=rates, numbers=kept, of=self._of)

    @property
    def _numbers(self) -> Sequence[int]:
        return range(len(self.branches)) if self.numbers is None else self.numbers

    @property
    def _of(self) -> int:
        return len(self.branches) if self.of is None else self.of

    def _phases(self, kv_heads: int, number: int) -> dict[int, range]:
        place, rate = self._numbers[number], self.dilation_rates[number]
        heads = run_of_heads(kv_heads, self._of, place)
        return {place % rate: heads} if heads else {}


def run_of_heads(kv_heads: int, branches: int, place: int) -> range:
    """The kv heads of one of these branches."""
    each, more = divmod(kv_heads, branches)
    start = place * each + min(place, more)
    return range(start, start + each + (place < more))
