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
    return with_other_keys(_zeros(q), k)


def with_other_keys(dq: Tensor, k: Tensor) -> Gradients:
    """dQ as it is so far, and nothing yet for the keys and values at hand."""
    return Gradients(dq, _zeros(k), _zeros(k))


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=accumulator_dtype(like.dtype), device=like.device)
