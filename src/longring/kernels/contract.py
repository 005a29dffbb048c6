"""What a kernel promises.

Shapes: q [batch, n_q, heads, d]; k, v [batch, n_k, kv_heads, d]; lse [batch, heads, n_q].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..geometry.tiles import Tile
from ..numerics.online_softmax import Partial, accumulator_dtype


class Gradients(NamedTuple):
    """Sums of gradients, in the accumulator dtype."""

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
    is_deterministic: bool  # the same bits from run to run on one kind of hardware

    def refusal(self, q: Tensor, k: Tensor) -> str | None:
        """Why this kernel cannot compute exactly on such tensors, or None if it can."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], *, scale: float, total: Partial | None = None
    ) -> Partial:
        """Everything the tiles see, merged with `total`, which is used up."""
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
        total: Gradients | None = None,
    ) -> Gradients:
        """The tiles' gradients added to `total`, in place."""
        ...


def no_gradients(q: Tensor, k: Tensor) -> Gradients:
    dtype = accumulator_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (q, k, k))
    return Gradients(dq, dk, dv)
