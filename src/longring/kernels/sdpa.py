"""PyTorch's own fused attention, through the operations that return an lse and take one in the backward.

On the CPU that is flash-attention-for-CPU. Its traps, and where they are met here:

- an empty q or k kills the process: tiles are never empty;
- a last dimension with a stride is silently wrong: `_dense_last`;
- causal is aligned to the top left, and nan unless the scale is above 0: only squares are causal, `_positive`;
- lse = -inf in the backward gives nan: a row that sees nothing is in no tile;
- a 16-bit backward is ten times slower than float32, and 16-bit partials would round at every merge:
  everything is computed in the accumulator's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry.tiles import Tile, without_bands
from ..numerics.online_softmax import Partial, accumulator_dtype, log_dtype, merge_, nothing_seen
from .contract import Gradients, Upstream, no_gradients
from .views import stackable, stacked_keys, stacked_queries, stacked_rows

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

LARGEST_HEAD = 512
SMALLEST_PORTION = 1 << 18  # elements: below 1 MiB a tile is not cut to save memory


class SdpaKernel:
    name = "sdpa"
    is_deterministic = True

    def refusal(self, q: Tensor, k: Tensor) -> str | None:
        if q.device.type != "cpu":
            return f"computes on the CPU only, and the tensors are on {q.device}"
        if q.shape[-1] >= LARGEST_HEAD:  # one column is kept for the gradient of lse
            return f"takes a head dimension below {LARGEST_HEAD}, got {q.shape[-1]}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], *, scale: float, total: Partial | None = None
    ) -> Partial:
        pieces = _pieces(tiles)
        if total is None and _is_everything(pieces, q, k):
            out, lse = _attend(q, k, v, pieces[0], scale)
            return Partial(out.transpose(1, 2), lse.to(log_dtype(q.device), memory_format=torch.contiguous_format))
        total = nothing_seen(q) if total is None else total
        for piece in _portions(pieces, q, k.shape[2]):
            _merge_piece(q, k, v, piece, scale, total)
        return total

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
        pieces = _pieces(tiles)
        if total is None and _is_everything(pieces, q, k):
            dq, dk, dv = _attend_backward(upstream, q, k, v, pieces[0], scale)
            return Gradients(dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2))
        total = no_gradients(q, k) if total is None else total
        for piece in _portions(pieces, q, k.shape[2]):
            _add_piece(upstream, q, k, v, piece, scale, total)
        return total


# the two below are functions so that a piece's results are freed before the next piece makes its own


def _merge_piece(q: Tensor, k: Tensor, v: Tensor, piece: Tile, scale: float, total: Partial) -> None:
    out, lse = _attend(q, k, v, piece, scale)
    heads = k.shape[2]
    merge_(stacked_queries(total.out, piece, heads), stacked_rows(total.lse, piece, heads), out, lse)


def _add_piece(
    upstream: Upstream, q: Tensor, k: Tensor, v: Tensor, piece: Tile, scale: float, total: Gradients
) -> None:
    dq, dk, dv = _attend_backward(upstream, q, k, v, piece, scale)
    stacked_queries(total.dq, piece, k.shape[2]).add_(dq)
    stacked_keys(total.dk, piece).add_(dk)
    stacked_keys(total.dv, piece).add_(dv)


# ------------------------------------------------------------------------------------------------ one call


def _attend(q: Tensor, k: Tensor, v: Tensor, piece: Tile, scale: float) -> tuple[Tensor, Tensor]:
    flipped = piece.shape == "flipped"
    q_, k_, v_ = _operands(q, k, v, piece)
    factor, scale = _positive(scale)
    out, lse = _forward(q_ if factor == 1 else factor * q_, k_, v_, 0.0, piece.shape != "full", scale=scale)
    return (out.flip(2), lse.flip(2)) if flipped else (out, lse)


def _attend_backward(
    upstream: Upstream, q: Tensor, k: Tensor, v: Tensor, piece: Tile, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    heads, d, flipped = k.shape[2], q.shape[3], piece.shape == "flipped"
    q_, k_, v_ = _operands(q, k, v, piece)
    factor, scale = _positive(scale)
    q_ = q_ if factor == 1 else factor * q_
    dout, out = (_ready(stacked_queries(t, piece, heads), flipped) for t in (upstream.dout, upstream.out))
    lse = _ready(stacked_rows(upstream.lse, piece, heads), flipped)
    if upstream.dlse is not None:
        # the operation knows no gradient of lse: one more column makes its rowsum(dout * out) less by dlse
        q_, k_, v_, dout = F.pad(q_, (0, 1)), F.pad(k_, (0, 1)), F.pad(v_, (0, 1)), F.pad(dout, (0, 1), value=1.0)
        dlse = _ready(stacked_rows(upstream.dlse, piece, heads), flipped)
        out = torch.cat([out, -dlse.unsqueeze(-1)], dim=-1)
    found = _backward(dout, q_, k_, v_, out, lse, 0.0, piece.shape != "full", scale=scale)
    if upstream.dlse is not None:
        found = tuple(g[..., :d] for g in found)
    dq, dk, dv = (g.flip(2) for g in found) if flipped else found
    return (dq if factor == 1 else factor * dq), dk, dv


def _positive(scale: float) -> tuple[float, float]:
    """(factor, scale above 0): the operation's causal mask is -inf times the scale, nan at 0 and +inf below it."""
    if 1e-30 < scale < 1e30:  # well inside what float32 can hold
        return 1.0, scale
    return scale, 1.0


def _operands(q: Tensor, k: Tensor, v: Tensor, piece: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """[batch x repeat, heads, n, d] each, float32 or float64."""
    stacked = stacked_queries(q, piece, k.shape[2]), stacked_keys(k, piece), stacked_keys(v, piece)
    q_, k_, v_ = (_dense_last(_ready(x, piece.shape == "flipped")) for x in stacked)
    return q_, k_, v_


def _ready(x: Tensor, flipped: bool) -> Tensor:
    """In the dtype of the computation; read from the last row and column, b >= a is b <= a."""
    x = x.to(accumulator_dtype(x.dtype))
    return x.flip(2) if flipped else x


def _dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# ------------------------------------------------------------------------------------------- how much at once


def _pieces(tiles: Sequence[Tile]) -> list[Tile]:
    """The tiles in shapes the operation knows."""
    return [piece for tile in tiles for piece in without_bands(tile)]


def _is_everything(pieces: Sequence[Tile], q: Tensor, k: Tensor) -> bool:
    """Whether one piece is the whole call, so that its result needs no merging."""
    if len(pieces) != 1 or pieces[0].shape == "flipped":
        return False
    (piece,) = pieces
    return (
        piece.rows == range(q.shape[1])
        and piece.cols == range(k.shape[1])
        and piece.kv_heads == range(k.shape[2])
        and piece.batch == range(q.shape[0])
    )


def _portions(pieces: Sequence[Tile], q: Tensor, kv_heads: int) -> Iterator[Tile]:
    """The pieces, cut by repeat and head until a partial result is a fraction of the whole one."""
    limit = max(SMALLEST_PORTION, q.numel() // 4)
    share = q.shape[2] // kv_heads
    for piece in pieces:
        for one in stackable(piece, share):
            numbers = len(one.batch) * max(len(one.rows) * share, len(one.cols)) * q.shape[3]
            for some in one.split_repeat(max(1, limit // (numbers * len(one.kv_heads)))):
                for first in range(0, len(some.kv_heads), heads := max(1, limit // numbers)):
                    yield some.part(some.batch, some.kv_heads[first : first + heads])
