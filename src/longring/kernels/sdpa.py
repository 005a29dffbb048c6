"""PyTorch's own fused attention, through the operations that return an lse and take one in the backward.

On the CPU that is flash-attention-for-CPU. Its traps, and where they are met here: an empty q or k kills
the process (tiles are never empty); a last dimension with a stride is silently wrong (`_stacked`); causal
is aligned to the top left (only squares are causal here); lse = -inf in the backward gives nan and +inf
gives 0 (`_nothing_to_plus`); a 16-bit backward is ten times slower than float32, and 16-bit partials
would round at every merge (everything is computed in the accumulator dtype).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry.tiles import Tile, without_bands
from ..numerics.online_softmax import Partial, accumulator_dtype, merge_, nothing_seen
from .contract import Gradients, Upstream, no_gradients
from .views import key_view, query_view, row_view

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
        pieces = [piece for tile in tiles for piece in without_bands(tile)]
        if total is None and _is_everything(pieces, q, k):
            out, lse = _attend(_Operands.of(q, k, v, pieces[0]), scale)
            return Partial(out.transpose(1, 2), lse.contiguous())
        total = nothing_seen(q) if total is None else total
        heads = k.shape[2]
        for piece in _portions(pieces, q, k.shape[2]):
            out, lse = _attend(_Operands.of(q, k, v, piece), scale)
            rows = query_view(total.out, piece, heads)
            merge_(rows, row_view(total.lse, piece, heads), out.reshape(rows.shape), lse.reshape(rows.shape[:-1]))
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
        pieces = [piece for tile in tiles for piece in without_bands(tile)]
        upstream = upstream._replace(lse=_nothing_to_plus(upstream.lse))
        if total is None and _is_everything(pieces, q, k):
            dq, dk, dv = _attend_backward(upstream, q, k, v, pieces[0], scale)
            return Gradients(dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2))
        total = no_gradients(q, k) if total is None else total
        for piece in _portions(pieces, q, k.shape[2]):
            found = _attend_backward(upstream, q, k, v, piece, scale)
            places = query_view(total.dq, piece, k.shape[2]), key_view(total.dk, piece), key_view(total.dv, piece)
            for place, gradient in zip(places, found, strict=True):
                place.add_(gradient.reshape(place.shape))
        return total


# ------------------------------------------------------------------------------------------------ one call


class _Operands(NamedTuple):
    """A piece as the operation wants it: [batch x repeat, heads, n, d], float32 or float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    shape: str

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, piece: Tile) -> _Operands:
        flipped = piece.shape == "flipped"
        return _Operands(
            _stacked(query_view(q, piece, k.shape[2]), flipped),
            _stacked(key_view(k, piece), flipped),
            _stacked(key_view(v, piece), flipped),
            piece.shape,
        )

    @property
    def causal(self) -> bool:
        return self.shape != "full"


def _stacked(view: Tensor, flipped: bool) -> Tensor:
    """[batch, repeat, kv head, query head, n, d] as [batch x repeat, heads, n, d]; a copy only where it must be."""
    stacked = view.to(accumulator_dtype(view.dtype)).flatten(2, 3).flatten(0, 1)
    if flipped:  # read from the last row and column, b >= a is b <= a
        return stacked.flip(2)
    return stacked if stacked.stride(-1) == 1 else stacked.contiguous()


def _attend(operands: _Operands, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v, shape = operands
    out, lse = _forward(q, k, v, 0.0, operands.causal, scale=scale)
    return (out.flip(2), lse.flip(2)) if shape == "flipped" else (out, lse)


def _attend_backward(
    upstream: Upstream, q: Tensor, k: Tensor, v: Tensor, piece: Tile, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    heads, d = k.shape[2], q.shape[3]
    q, k, v, shape = operands = _Operands.of(q, k, v, piece)
    flipped = shape == "flipped"
    dout, out = (_stacked(query_view(t, piece, heads), flipped) for t in (upstream.dout, upstream.out))
    lse = _stacked_rows(upstream.lse, piece, heads, flipped)
    if upstream.dlse is not None:
        # the operation knows no gradient of lse: one more column makes its rowsum(dout * out) less by dlse
        q, k, v, dout = F.pad(q, (0, 1)), F.pad(k, (0, 1)), F.pad(v, (0, 1)), F.pad(dout, (0, 1), value=1.0)
        dlse = _stacked_rows(upstream.dlse, piece, heads, flipped).to(q.dtype)
        out = torch.cat([out, -dlse.unsqueeze(-1)], dim=-1)
    found = _backward(dout, q, k, v, out, lse, 0.0, operands.causal, scale=scale)
    dq, dk, dv = (g[..., :d].flip(2) if flipped else g[..., :d] for g in found)
    return dq, dk, dv


def _stacked_rows(x: Tensor, piece: Tile, heads: int, flipped: bool) -> Tensor:
    rows = row_view(x, piece, heads).flatten(2, 3).flatten(0, 1)
    return rows.flip(2) if flipped else rows


def _nothing_to_plus(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, torch.inf)


# ------------------------------------------------------------------------------------------- how much at once


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
    """The pieces, cut by batch, repeat and head until a partial result is a fraction of the whole one."""
    limit = max(SMALLEST_PORTION, q.numel() // 4)
    numbers_a_row = q.shape[2] // kv_heads * q.shape[3]
    for piece in pieces:
        for one in _stackable(piece):
            numbers = len(one.batch) * len(one.rows) * numbers_a_row
            for some in one.split_repeat(max(1, limit // (numbers * len(one.kv_heads)))):
                for first in range(0, len(some.kv_heads), heads := max(1, limit // numbers)):
                    yield some.part(some.batch, some.kv_heads[first : first + heads])


def _stackable(piece: Tile) -> Iterator[Tile]:
    """Batch rows one by one where repeats already fill the operation's batch: both would need a copy."""
    if piece.repeat.count == 1 or len(piece.batch) == 1:
        yield piece
    else:
        yield from (piece.part(range(b, b + 1), piece.kv_heads) for b in piece.batch)
