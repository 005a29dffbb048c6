"""Where a rank computes: its queries, and what has been found for them so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from ..geometry.tiles import Tile
from ..kernels.contract import Gradients, Kernel, Upstream
from ..numerics.online_softmax import Partial, nothing_seen
from .debug import check_found, check_gradients, is_debugging

Tiles = tuple[Tile, ...]


@dataclass
class Desk:
    """Queries of some heads; `kv_heads` are theirs among the keys at hand."""

    kernel: Kernel
    scale: float
    q: Tensor
    kv_heads: slice = field(default_factory=lambda: slice(None))
    total: Partial | None = None

    def look(self, tiles: Tiles, k: Tensor, v: Tensor, what: str) -> None:
        """Compute the tiles, and merge what they see. `what` says which step this is, should something be wrong."""
        k, v = k[:, :, self.kv_heads], v[:, :, self.kv_heads]
        for some in _at_once(tiles):
            self.total = self.kernel.forward(self.q, k, v, some, scale=self.scale, total=self.total)
            if is_debugging():
                check_found(self.total, some[0], self.q, k, v, what)

    @property
    def seen(self) -> Partial:
        return nothing_seen(self.q) if self.total is None else self.total


@dataclass
class BackwardDesk:
    """The same on the way back: dQ is summed here, dK and dV where the keys are."""

    kernel: Kernel
    scale: float
    q: Tensor
    upstream: Upstream
    dq: Tensor
    kv_heads: slice = field(default_factory=lambda: slice(None))

    def look(self, tiles: Tiles, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, what: str) -> None:
        """Add the tiles' gradients to dq, dk and dv."""
        k, v, dk, dv = (x[:, :, self.kv_heads] for x in (k, v, dk, dv))
        total = Gradients(self.dq, dk, dv)
        for some in _at_once(tiles):
            self.kernel.backward(self.upstream, self.q, k, v, some, scale=self.scale, total=total)
            if is_debugging():
                check_gradients(total, some[0], self.upstream, self.q, k, v, what)


def _at_once(tiles: Tiles) -> Iterator[Tiles]:
    """All of them; one by one where each is looked at."""
    if is_debugging():
        yield from ((tile,) for tile in tiles)
    elif tiles:
        yield tiles
