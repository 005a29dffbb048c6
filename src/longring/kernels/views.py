"""A tile's part of a tensor, as a view: nothing is copied to read or to write it."""

from __future__ import annotations

from collections.abc import Iterator

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


def stacked_queries(x: Tensor, tile: Tile, kv_heads: int) -> Tensor:
    """[batch x repeat, query heads, row, d] of x [batch, n, heads, d], for a stackable tile."""
    return _stacked(x, tile, tile.rows, tile.repeat.rows, x.shape[2] // kv_heads)


def stacked_keys(x: Tensor, tile: Tile) -> Tensor:
    """[batch x repeat, kv heads, column, d] of x [batch, n, kv_heads, d], for a stackable tile."""
    return _stacked(x, tile, tile.cols, tile.repeat.cols, 1)


def stacked_rows(x: Tensor, tile: Tile, kv_heads: int) -> Tensor:
    """[batch x repeat, query heads, row] of x [batch, heads, n], for a stackable tile."""
    return stacked_queries(x.transpose(1, 2).unsqueeze(-1), tile, kv_heads).squeeze(-1)


def stackable(tile: Tile, share: int) -> Iterator[Tile]:
    """The tile in parts whose batch rows and repeats, and whose heads, are each evenly spaced in memory."""
    apart = tile.repeat.count > 1 and len(tile.batch) > 1
    batches = [range(b, b + 1) for b in tile.batch] if apart else [tile.batch]
    gaps = share > 1 and tile.kv_heads.step > 1
    heads = [range(h, h + 1) for h in tile.kv_heads] if gaps else [tile.kv_heads]
    if len(batches) == len(heads) == 1:
        yield tile
        return
    for batch in batches:
        for some in heads:
            yield tile.part(batch, some)


def _stacked(x: Tensor, tile: Tile, positions: range, spacing: int, share: int) -> Tensor:
    b, n, h, d = x.stride()
    batch, heads, repeat = tile.batch, tile.kv_heads, tile.repeat.count
    assert repeat == 1 or len(batch) == 1
    assert share == 1 or heads.step == 1 or len(heads) == 1
    many, far = (repeat, n * spacing) if repeat > 1 else (len(batch), b * batch.step)
    size = (many, len(heads) * share, len(positions), x.shape[3])
    stride = (far, h * (heads.step if share == 1 else 1), n * positions.step, d)
    start = b * batch.start + n * positions.start + h * share * heads.start
    return torch.as_strided(x, size, stride, x.storage_offset() + start)


def _view(x: Tensor, tile: Tile, positions: range, spacing: int, share: int) -> Tensor:
    b, n, h, d = x.stride()
    batch, heads, repeat = tile.batch, tile.kv_heads, tile.repeat.count
    size = (len(batch), repeat, len(heads), share, len(positions), x.shape[3])
    stride = (b * batch.step, n * spacing, h * share * heads.step, h, n * positions.step, d)
    start = b * batch.start + n * positions.start + h * share * heads.start
    return torch.as_strided(x, size, stride, x.storage_offset() + start)
