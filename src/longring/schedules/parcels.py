"""Packing rows of a tensor into a parcel, and unpacking them where they are used."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..geometry.parcels import Parcel, Share


def pack(x: Tensor, parcel: Parcel, within: range) -> Tensor:
    """The parcel's rows of x [batch, n, kv_heads, d], flat. Row i of x is row within[i] of the owner."""
    parts = [place.reshape(-1) for place in _places(x, parcel, within)]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def unpack(flat: Tensor, parcel: Parcel, batch: int, kv_heads: int) -> Tensor:
    """The parcel as [batch, rows of its frame, kv_heads, d]; rows that are not in it are whatever was there before.

    Of LongNet's far branches a few rows come, and the frame is as long as the shard: it is not cleared for them.
    """
    d = flat.numel() // parcel.vectors
    shape = (batch, len(parcel.frame), kv_heads, d)
    if is_one_block(parcel, batch, kv_heads):
        return flat.view(shape)
    x = flat.new_empty(shape)
    for place, part in _places_and_parts(x, flat, parcel, parcel.frame):
        place.copy_(part)
    return x


def is_one_block(parcel: Parcel, batch: int, kv_heads: int) -> bool:
    """Whether the parcel is the same rows of every batch row and head, so that it lies in place as it is."""
    share, *others = parcel.shares
    every_row_and_head = (len(share.batch), len(share.kv_heads)) == (batch, kv_heads)
    return not others and len(share.rows) == 1 and every_row_and_head


def add_parcel(x: Tensor, flat: Tensor, parcel: Parcel, within: range) -> None:
    """Add what the parcel brings to x, whose row i is row within[i] of the owner, as far as x has it."""
    at = 0
    for share in parcel.shares:
        for rows in share.rows:
            shape = (len(share.batch), len(rows), len(share.kv_heads), x.shape[3])
            part = flat[at : at + prod(shape)].view(shape)
            at += part.numel()
            here = range(_first_in(rows, within.start), _first_in(rows, within.stop))
            if here:
                _place(x, share, rows[here.start : here.stop], within).add_(part[:, here.start : here.stop])


def _first_in(rows: range, bound: int) -> int:
    """The index of the first row at or behind the bound."""
    return min(max(-(-(bound - rows.start) // rows.step), 0), len(rows))


def _places_and_parts(x: Tensor, flat: Tensor, parcel: Parcel, within: range) -> list[tuple[Tensor, Tensor]]:
    places = _places(x, parcel, within)
    parts = flat.split([place.numel() for place in places])
    return [(place, part.view(place.shape)) for place, part in zip(places, parts, strict=True)]


def _places(x: Tensor, parcel: Parcel, within: range) -> list[Tensor]:
    return [_place(x, share, rows, within) for share in parcel.shares for rows in share.rows]


def _place(x: Tensor, share: Share, rows: range, within: range) -> Tensor:
    first, last = within.index(rows[0]), within.index(rows[-1])
    step = max(1, rows.step // within.step)
    return x[_slice(share.batch), first : last + 1 : step, _slice(share.kv_heads)]


def _slice(r: range) -> slice:
    return slice(r.start, r.stop, r.step)
