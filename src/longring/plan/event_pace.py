"""Pace: how long a rank computes with the tiles at hand, by what its hardware attains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..geometry.stacks import Stack, stacks
from ..geometry.task import Task
from ..geometry.tiles import Tile, pairs_in_band, without_bands
from .hardware import Hardware, Phase
from .links import ticked
from .traffic import BYTES

FLOPS_OF_A_PAIR = {"forward": 4, "backward": 10}  # for each of the head's dimensions
Tiles = tuple[Tile, ...]


@dataclass(frozen=True)
class Pace:
    """Of one phase of a task, on one kind of rank."""

    hardware: Hardware
    task: Task
    phase: Phase
    head_dim: int
    itemsize: int
    _known: dict[tuple[Tiles, int], float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def accumulator(self) -> int:
        return max(4, self.itemsize)

    def bytes_of(self, kind: str, vectors: int) -> int:
        """What so many vectors of a kind of parcel are on a line."""
        return vectors * BYTES[kind](self.head_dim, self.itemsize, self.accumulator)

    def looking(self, tiles: Tiles, share: int | None = None) -> float:
        """Seconds of one look: every stack is launched, computed, and what it found brought to the rest.

        share: query heads to a kv head, where a desk has not all of them.
        """
        share = self.task.share if share is None else share
        if (tiles, share) not in self._known:
            self._known[tiles, share] = ticked(self._looking(tiles, share))
        return self._known[tiles, share]

    def _looking(self, tiles: Tiles, share: int) -> float:
        cut = [piece for tile in tiles for piece in without_bands(tile)]
        return sum(self._of_stack(stack) for stack in stacks(cut, share)) if cut else 0.0

    def _of_stack(self, stack: Stack) -> float:
        queries, keys = stack.queries, stack.keys
        rows, cols = len(queries.rows), len(keys.rows)
        pairs = rows * cols if stack.shape == "full" else pairs_in_band(rows, cols, None, 0)
        width = 2 * pairs / rows  # rates are those of causal squares, whose rows see half as many keys as there are
        flops = FLOPS_OF_A_PAIR[self.phase] * self.head_dim * pairs * queries.many * queries.heads
        rate = self.hardware.flops(self.phase, itemsize=self.itemsize, head_dim=self.head_dim, rows=width)
        found = queries.many * queries.heads * rows, keys.many * len(keys.kv_heads) * cols
        return self.hardware.launch_seconds + flops / rate + self._bringing(*found)

    def _bringing(self, rows: int, cols: int) -> float:
        """A part is read and a total of the accumulator's dtype read and written: out, or dq, dk and dv."""
        vectors = rows if self.phase == "forward" else rows + 2 * cols
        return vectors * self.head_dim * (self.itemsize + 2 * self.accumulator) / self.hardware.memory_bytes_per_second

    def copying(self, nbytes: int) -> float:
        """Reading and writing once."""
        return ticked(2 * nbytes / self.hardware.memory_bytes_per_second)

    def looking_at(self, desks: Iterable[tuple[Tiles, int]]) -> float:
        """One desk after the other, each with its tiles and its query heads to a kv head."""
        return sum(self.looking(tiles, share) for tiles, share in desks if tiles)
