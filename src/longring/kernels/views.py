"""A tile's part of a tensor, as a view: nothing is copied to read or to write it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..geometry.tiles import Tile


def query_view(x: Tensor, tile: Tile, kv_heads: int) -> Tensor:
    """[batch, repeat, kv head, query head of it, row, d] of x [batch, n, heads, d]."""
    share = x.shape[2] // kv_heads
    return _view(x, tile, tile.rows, tile.repeat.rows, share)


def key_view(x: Tensor, tile: Tile) -> Tensor:
    """[batch, repeat, kv head, 1, column, d] of x [batch, n, kv_heads, d]."""
    return _view(x, tile, tile.cols, tile.repeat.cols, 1)


def row_view(x: Tensor, tile: Tile, kv_heads: int) -> Tensor:
    """[batch, repeat, kv head, query head of it, row] of x [batch, heads, n], such as an lse."""
    return query_view(x.transpose(1, 2).unsqueeze(-1), tile, kv_heads).squeeze(-1)


def _view(x: Tensor, tile: Tile, positions: range, spacing: int, share: int) -> Tensor:
    b, n, h, d = x.stride()
    batch, heads, repeat = tile.batch, tile.kv_heads, tile.repeat.count
    size = (len(batch), repeat, len(heads), share, len(positions), x.shape[3])
    stride = (b * batch.step, n * spacing, h * share * heads.step, h, n * positions.step, d)
    start = b * batch.start + n * positions.start + h * share * heads.start
    return torch.as_strided(x, size, stride, x.storage_offset() + start)
