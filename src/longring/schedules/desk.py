"""Where a rank computes: its queries, and what has been found for them so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ..geometry.tiles import Tile
from ..kernels.contract import Kernel, Upstream
from ..kernels.totals import Seen, Sum, Sums
from ..numerics.online_softmax import Partial
from .debug import check_found, check_gradients, is_debugging
from .labels import Doing, during

Tiles = tuple[Tile, ...]


@dataclass
class Desk:
    """Queries of some heads; `kv_heads` are theirs among the keys at hand.

    `is_one_look`: they look once, and there is nothing else to see.
    """

    kernel: Kernel
    scale: float
    q: Tensor
    kv_heads: slice = field(default_factory=lambda: slice(None))
    is_one_look: bool = False

    @cached_property
    def total(self) -> Seen:
        return Seen(self.q, is_one_look=self.is_one_look and not is_debugging())

    def look(self, tiles: Tiles, k: Tensor, v: Tensor, what: Doing) -> None:
        """Compute the tiles, and merge what they see. `what` says which step this is, to whoever wants to know."""
        k, v = k[:, :, self.kv_heads], v[:, :, self.kv_heads]
        for some in _at_once(tiles):
            with during("compute", what, self.q, k, v):
                self.kernel.forward(self.q, k, v, some, scale=self.scale, total=self.total)
            if is_debugging():
                check_found(self.total.in_place(), some[0], self.q, k, v, what)

    @property
    def seen(self) -> Partial:
        return self.total.result()


@dataclass
class BackwardDesk:
    """The same on the way back: dQ is summed here, dK and dV where the keys are."""

    kernel: Kernel
    scale: float
    q: Tensor
    upstream: Upstream
    dq: Sum
    kv_heads: slice = field(default_factory=lambda: slice(None))

    def look(self, tiles: Tiles, k: Tensor, v: Tensor, dk: Sum, dv: Sum, what: Doing) -> None:
        """Add the tiles' gradients to dq, dk and dv."""
        if not tiles:
            return
        k, v = k[:, :, self.kv_heads], v[:, :, self.kv_heads]
        rows = self.upstream.dout, self.upstream.out, self.upstream.lse
        total = Sums(self.dq, dk.of_heads(self.kv_heads), dv.of_heads(self.kv_heads))
        for some in _at_once(tiles):
            with during("compute", what, self.q, k, v, *rows):
                self.kernel.backward(self.upstream, self.q, k, v, some, scale=self.scale, total=total)
            if is_debugging():
                check_gradients([one.in_place() for one in total], some[0], self.upstream, self.q, k, v, what)
        total.dk.handed_back()
        total.dv.handed_back()


def _at_once(tiles: Tiles) -> Iterator[Tiles]:
    """All of them; one by one where each is looked at."""
    if is_debugging():
        yield from ((tile,) for tile in tiles)
    elif tiles:
        yield tiles
