"""The kernel to read: plain PyTorch, any device, any dtype, in blocks, so that no score matrix is ever held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..geometry.portions import SCORES_AT_ONCE, SIDE
from ..geometry.tiles import Tile
from ..numerics.online_softmax import accumulator_dtype, merge_
from .contract import Upstream
from .totals import Seen, Sums
from .views import key_view, query_view, row_view


class ReferenceKernel:
    name = "reference"

    def with_the_same_bits(self) -> ReferenceKernel:
        return self

    def refusal(self, q: Tensor, k: Tensor) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], *, scale: float, total: Seen | None = None
    ) -> Seen:
        found = Seen(q) if total is None else total
        seen = found.in_place()
        heads, dtype = k.shape[2], accumulator_dtype(q.dtype)
        for tile in _blocks(tiles, q.shape[2] // heads):
            mask = _mask(tile, q.device)
            scores = _scores(query_view(q, tile, heads).to(dtype), key_view(k, tile).to(dtype), scale, mask)
            lse = scores.logsumexp(-1)
            weights = _weights(scores, lse, mask)
            out = _weighted_sum(weights, key_view(v, tile).to(dtype), mask)
            merge_(query_view(seen.out, tile, heads), row_view(seen.lse, tile, heads), out, lse)
        return found

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
        total = Sums.of(q, k) if total is None else total
        dq, dk, dv = (one.in_place() for one in total)
        heads, dtype = k.shape[2], accumulator_dtype(q.dtype)
        delta = _delta(upstream, dtype)
        for tile in _blocks(tiles, q.shape[2] // heads):
            mask = _mask(tile, q.device)
            q_, dout = (query_view(t, tile, heads).to(dtype) for t in (q, upstream.dout))
            k_, v_ = (key_view(t, tile).to(dtype) for t in (k, v))
            weights = _weights(_scores(q_, k_, scale, mask), row_view(upstream.lse, tile, heads), mask)
            dscores = weights * (dout @ v_.mT - row_view(delta, tile, heads).unsqueeze(-1)) * scale
            dscores = dscores if mask is None else dscores.masked_fill(~mask, 0.0)
            query_view(dq, tile, heads).add_(_weighted_sum(dscores, k_, mask))
            across = None if mask is None else mask.mT
            # every query head of a kv head adds to its gradient
            key_view(dk, tile).add_(_weighted_sum(dscores.mT, q_, across).sum(3, keepdim=True))
            key_view(dv, tile).add_(_weighted_sum(weights.mT, dout, across).sum(3, keepdim=True))
        return total


def _delta(upstream: Upstream, dtype: torch.dtype) -> Tensor:
    """[batch, heads, n]: what the softmax's normalisation takes from every score's gradient in a row."""
    delta = torch.einsum("bnhd,bnhd->bhn", upstream.dout.to(dtype), upstream.out.to(dtype))
    return delta if upstream.dlse is None else delta - upstream.dlse


def _blocks(tiles: Sequence[Tile], share: int) -> Iterator[Tile]:
    """The tiles, cut until a block's scores are few."""
    for tile in tiles:
        for one in _few_at_a_time(tile, share):
            for row in range(0, len(one.rows), SIDE):
                for col in range(0, len(one.cols), SIDE):
                    block = one.block(row, SIDE, col, SIDE)
                    if block is not None:
                        yield block


def _few_at_a_time(tile: Tile, share: int) -> Iterator[Tile]:
    """One repeat and one batch row at a time where all together would be too many scores."""
    scores = min(SIDE, len(tile.rows)) * min(SIDE, len(tile.cols)) * share * len(tile.kv_heads)
    if scores * len(tile.batch) * tile.repeat.count <= SCORES_AT_ONCE:
        yield tile
        return
    for one in tile.each_repeat():
        for b in one.batch:
            heads = max(1, SCORES_AT_ONCE * len(one.kv_heads) // scores)
            for first in range(0, len(one.kv_heads), heads):
                yield one.part(range(b, b + 1), one.kv_heads[first : first + heads])


def _mask(tile: Tile, device: torch.device) -> Tensor | None:
    """True where row and column meet; None where all do."""
    if tile.lo is None and tile.hi is None:
        return None
    gap = torch.arange(len(tile.cols), device=device) - torch.arange(len(tile.rows), device=device).unsqueeze(-1)
    mask = torch.ones_like(gap, dtype=torch.bool)
    if tile.lo is not None:
        mask &= gap >= tile.lo
    if tile.hi is not None:
        mask &= gap <= tile.hi
    return mask


def _scores(q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    scores = scale * (q @ k.mT)
    return scores if mask is None else scores.masked_fill_(~mask, -torch.inf)


def _weights(scores: Tensor, lse: Tensor, mask: Tensor | None) -> Tensor:
    weights = (scores - lse.unsqueeze(-1)).exp_()
    return weights if mask is None else weights.masked_fill_(~mask, 0.0)  # also where a row has no lse


def _weighted_sum(weights: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """weights @ values, where a value that is nan or infinite reaches only the rows that see it."""
    if mask is None or bool(values.isfinite().all()):
        return weights @ values
    total = weights @ torch.where(values.isfinite(), values, 0.0)
    for poison in (torch.inf, -torch.inf, torch.nan):
        there = values.isnan() if poison != poison else values == poison
        total = total + torch.where(mask.to(total.dtype) @ there.to(total.dtype) > 0, poison, 0.0)
    return total
