"""What a kernel promises.

Shapes: q [batch, n_q, heads, d]; k, v [batch, n_k, kv_heads, d]; lse [batch, heads, n_q].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ..geometry.tiles import Tile
from .totals import Seen, Sums


class Gradients(NamedTuple):
    """Gradients, in the accumulator's dtype or rounded once."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class Upstream(NamedTuple):
    """What the backward pass knows of the *whole* rows, whatever part of them a tile was.

    With the row's final out and lse the gradient of a tile is exact on its own, and the sum over the
    tiles is the gradient: delta = rowsum(dout * out) - dlse.
    """

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor


class Kernel(Protocol):
    """Computes a list of tiles, forward and backward, on one device. Tiles are never empty."""

    name: str

    def with_the_same_bits(self) -> Kernel | None:
        """The same, with the same bits from run to run on one kind of hardware, if there is such a thing."""
        ...

    def refusal(self, q: Tensor, k: Tensor) -> str | None:
        """Why this kernel cannot compute exactly on such tensors, or None if it can."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], *, scale: float, total: Seen | None = None
    ) -> Seen:
        """Everything the tiles see, brought to `total`."""
        ...

    def backward(
        self,
        upstream: Upstream,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Sequence[Tile],
        *,
        scale: float,
        total: Sums | None = None,
    ) -> Sums:
        """The tiles' gradients, brought to `total`."""
        ...
