"""Where a rank computes: its queries, and what has been found for them so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..geometry.tiles import Tile
from ..kernels.contract import Gradients, Kernel, Upstream
from ..numerics.online_softmax import Partial, nothing_seen

Tiles = tuple[Tile, ...]


@dataclass
class Desk:
    """Queries of some heads; `kv_heads` are theirs among the keys at hand."""

    kernel: Kernel
    scale: float
    q: Tensor
    kv_heads: slice = field(default_factory=lambda: slice(None))
    total: Partial | None = None

    def look(self, tiles: Tiles, k: Tensor, v: Tensor) -> None:
        """Compute the tiles, and merge what they see."""
        if tiles:
            k, v = k[:, :, self.kv_heads], v[:, :, self.kv_heads]
            self.total = self.kernel.forward(self.q, k, v, tiles, scale=self.scale, total=self.total)

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

    def look(self, tiles: Tiles, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add the tiles' gradients to dq, dk and dv."""
        if tiles:
            k, v, dk, dv = (x[:, :, self.kv_heads] for x in (k, v, dk, dv))
            total = Gradients(self.dq, dk, dv)
            self.kernel.backward(self.upstream, self.q, k, v, tiles, scale=self.scale, total=total)
