"""Pace: how long a rank computes with the tiles at hand, by what its hardware attains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import NamedTuple

from ..geometry.stacks import Stack, count_stacks, stacks
from ..geometry.task import Task
from ..geometry.tiles import Tile, pairs_in_band, without_bands
from .hardware import Hardware, Phase
from .links import ticked
from .traffic import BYTES

FLOPS_OF_A_PAIR = {"forward": 4, "backward": 10}  # for each of the head's dimensions
Tiles = tuple[Tile, ...]


class Launch(NamedTuple):
    """Stacks that follow each other and take equally long: how many, and the seconds of each."""

    times: int
    computing: float
    bringing: float  # to what others found


@dataclass(frozen=True)
class Pace:
    """Of one phase of a task, on one kind of rank."""

    hardware: Hardware
    task: Task
    phase: Phase
    head_dim: int
    itemsize: int
    _known: dict[tuple[Tiles, int, bool], float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def accumulator(self) -> int:
        return max(4, self.itemsize)

    def bytes_of(self, kind: str, vectors: int) -> int:
        """What so many vectors of a kind of parcel are on a line."""
        return vectors * BYTES[kind](self.head_dim, self.itemsize, self.accumulator)

    def looking(self, tiles: Tiles, share: int | None = None, *, is_first: bool = False) -> float:
        """Seconds of one look: every stack is launched and computed, and what it found brought to the rest.

        share: query heads to a kv head, where a desk has not all of them.
        is_first: nothing was found before, so that there is nothing to bring the first stack to.
        """
        key = tiles, self.task.share if share is None else share, is_first
        if key not in self._known:
            self._known[key] = self.taking(self.launches(*key[:2]), is_first=is_first)
        return self._known[key]

    def at_best(self, pairs: int) -> float:
        """Seconds that so many pairs take in tiles as large as can be: nothing is faster."""
        flops = FLOPS_OF_A_PAIR[self.phase] * self.head_dim * pairs
        return flops / self.hardware.flops(self.phase, itemsize=self.itemsize, head_dim=self.head_dim)

    def launches(self, tiles: Tiles, share: int) -> list[Launch]:
        """What a look launches, in order."""
        cut = [piece for tile in tiles for piece in without_bands(tile)]
        return [self._launch(stack, 1) for stack in stacks(cut, share)]

    def many_launches(self, tiles: Iterable[tuple[Tile, int]], share: int) -> list[Launch]:
        """The same for tiles of the same heads that each stand for so many."""
        cut = [(piece, times) for tile, times in tiles for piece in without_bands(tile)]
        return [self._launch(stack, times) for stack, times in count_stacks(cut, share)]

    def taking(self, launches: Sequence[Launch], *, is_first: bool) -> float:
        """Seconds of all of them; one is added to the other, as if they were told one by one."""
        computing = chain.from_iterable(repeat(one.computing, one.times) for one in launches)
        bringing = chain.from_iterable(repeat(one.bringing, one.times) for one in launches)
        if is_first:
            next(bringing, None)
        return ticked(sum(computing) + sum(bringing))

    def _launch(self, stack: Stack, times: int) -> Launch:
        return Launch(times, self._computing(stack), self._bringing(stack))

    def _computing(self, stack: Stack) -> float:
        queries, keys = stack.queries, stack.keys
        rows, cols = len(queries.rows), len(keys.rows)
        pairs = rows * cols if stack.shape == "full" else pairs_in_band(rows, cols, None, 0)
        width = 2 * pairs / rows  # rates are those of causal squares, whose rows see half as many keys as there are
        flops = FLOPS_OF_A_PAIR[self.phase] * self.head_dim * pairs * queries.many * queries.heads
        rate = self.hardware.flops(self.phase, itemsize=self.itemsize, head_dim=self.head_dim, rows=width)
        return self.hardware.launch_seconds + flops / rate

    def _bringing(self, stack: Stack) -> float:
        """A part is read and a total of the accumulator's dtype read and written: out, or dq, dk and dv."""
        queries, keys = stack.queries, stack.keys
        vectors = queries.many * queries.heads * len(queries.rows)
        if self.phase == "backward":
            vectors += 2 * keys.many * len(keys.kv_heads) * len(keys.rows)
        return vectors * self.head_dim * (self.itemsize + 2 * self.accumulator) / self.hardware.memory_bytes_per_second

    def copying(self, nbytes: int) -> float:
        """Reading and writing once."""
        return ticked(2 * nbytes / self.hardware.memory_bytes_per_second)

    def looking_at(self, desks: Iterable[tuple[Tiles, int]], *, is_first: bool = False) -> float:
        """One desk after the other, each with its tiles and its query heads to a kv head."""
        return sum(self.looking(tiles, share, is_first=is_first) for tiles, share in desks if tiles)
