"""How large everything is: as the goals ask for, or small, to see that all of it runs."""

from __future__ import annotations

from dataclasses import dataclass

from .given import Shape

K, M = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Sizes:
    repeats: int
    dense_repeats: int  # more: two calls of one kernel are told apart to a hundredth
    dense: tuple[tuple[Shape, bool], ...]  # with or without a causal mask
    rings: tuple[tuple[Shape, int], ...]  # and how many ranks
    simulated: tuple[tuple[Shape, int], ...]
    far: tuple[tuple[Shape, int, tuple[int, ...]], ...]  # and which of the ranks are played
    far_repeats: int
    dilated: tuple[Shape, ...]
    longest_dilated: Shape
    longest_backward: Shape
    longest_dense: Shape
    branches: tuple[tuple[int, int], ...]  # LongNet's (segment length, dilation rate)
    documents: tuple[tuple[Shape, int], ...]  # and how many
    windows: tuple[tuple[Shape, int], ...]  # and how many keys each query sees
    error: tuple[Shape, int]
    seeds: tuple[int, ...]
    peers: tuple[Shape, int]

    @property
    def segment_lengths(self) -> list[int]:
        return [w for w, _ in self.branches]

    @property
    def dilation_rates(self) -> list[int]:
        return [r for _, r in self.branches]


def _usual(n: int) -> Shape:
    return Shape(n, 16, 16, 128)


def _shared(n: int) -> Shape:
    return Shape(n, 32, 8, 128)


def _narrow(n: int) -> Shape:
    return Shape(n, 16, 16, 64)


FULL = Sizes(
    repeats=5,
    dense_repeats=10,
    dense=(
        *((_usual(n), causal) for n in (8 * K, 32 * K, 128 * K) for causal in (True, False)),
        *((_narrow(n), causal) for n in (8 * K, 32 * K) for causal in (True, False)),
        (_narrow(128 * K), True),
        *((_shared(n), True) for n in (8 * K, 32 * K, 128 * K)),
    ),
    rings=tuple((shape, ranks) for shape in (_usual(128 * K), _shared(128 * K)) for ranks in (4, 8, 16)),
    simulated=tuple((_usual(128 * K), ranks) for ranks in (4, 8)),
    far=((_usual(M), 64, (0, 21, 42, 63)),),
    far_repeats=2,
    dilated=(_usual(M), Shape(M, 12, 12, 64), _usual(64 * K), Shape(64 * K, 12, 12, 64)),
    longest_dilated=_usual(6 * M),
    longest_backward=_usual(5 * M // 2),
    longest_dense=_usual(2 * M),
    branches=tuple((2 * K << i, 1 << i) for i in range(5)),
    documents=((_usual(64 * K), 100), (_usual(64 * K), 16), (_shared(64 * K), 100), (_narrow(64 * K), 100)),
    windows=((_usual(128 * K), 4096), (_usual(128 * K), 512), (_narrow(128 * K), 4096)),
    error=(Shape(16 * K, 4, 4, 128), 64),
    seeds=(0, 1, 2),
    peers=(_usual(128 * K), 8),
)

QUICK = Sizes(
    repeats=3,
    dense_repeats=3,
    dense=((_usual(2 * K), True), (_usual(2 * K), False), (_narrow(2 * K), True), (_shared(2 * K), True)),
    rings=((_usual(8 * K), 4), (_shared(8 * K), 4)),
    simulated=((_usual(8 * K), 4),),
    far=((_usual(16 * K), 16, (0, 5, 10, 15)),),
    far_repeats=1,
    dilated=(_usual(32 * K), Shape(32 * K, 12, 12, 64)),
    longest_dilated=_usual(96 * K),
    longest_backward=_usual(64 * K),
    longest_dense=_usual(32 * K),
    branches=tuple((2 * K << i, 1 << i) for i in range(5)),
    documents=((_usual(8 * K), 20),),
    windows=((_usual(8 * K), 512),),
    error=(Shape(2 * K, 4, 4, 128), 64),
    seeds=(0,),
    peers=(_usual(8 * K), 8),
)
