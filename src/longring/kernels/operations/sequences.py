"""Packed sequences as kernels want them told: rows of all batch rows one behind the other, and where each begins."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...geometry.packs import Pack, Whole
from ...geometry.sequences import Window, bounds, common_window
from ..places import Place
from ..shelf import Shelf
from ..tables import Tables


class Sequences(NamedTuple):
    tables: Tables  # int32 [sequences + 1] each: where those of queries begin, and those of keys
    count: int
    longest_queries: int
    longest_keys: int
    window: Window


COUNT_KEPT = 1 << 16  # sequences of all packs that are remembered

_shelf: Shelf[Sequences] = Shelf(COUNT_KEPT, lambda found: found.count)


def sequences(pack: Pack, device: torch.device) -> Sequences:
    """Of a pack whose results lie side by side."""
    return _shelf.find((pack, device), lambda: _written(pack, device))


def _written(pack: Pack, device: torch.device) -> Sequences:
    (queries,), (keys,) = pack.queries.trays, pack.keys.trays
    found = bounds(pack.stacks, _whole(queries.place), _whole(keys.place))
    assert found is not None
    begin = [torch.tensor(side, dtype=torch.int32, device="cpu") for side in found]
    of_queries, of_keys = (int(side.diff().max()) for side in begin)
    return Sequences(Tables(begin, device), len(found.queries) - 1, of_queries, of_keys, common_window(pack.stacks))


def _whole(place: Place) -> Whole:
    return Whole(len(place.batch), place.rows, len(place.kv_heads), place.share)


def in_a_row(x: Tensor, place: Place) -> Tensor:
    """[batch * rows, heads, d] of x [batch, n, heads, d]; a copy where batch rows do not follow each other."""
    return x[:, place.rows.start : place.rows.stop].flatten(0, 1)


def terms_in_a_row(x: Tensor, place: Place) -> Tensor:
    """Dense float32 [heads, batch * rows] of x [batch, heads, n], such as an lse."""
    return x[:, :, place.rows.start : place.rows.stop].transpose(0, 1).flatten(1).float().contiguous()


def by_batch(x: Tensor, place: Place) -> Tensor:
    """[batch, heads, rows, d] of x [batch * rows, heads, d]."""
    return x.unflatten(0, (len(place.batch), -1)).transpose(1, 2)


def terms_by_batch(x: Tensor, place: Place) -> Tensor:
    """Dense [batch, heads, rows] of x [heads, batch * rows]."""
    return x.unflatten(1, (len(place.batch), -1)).transpose(0, 1).contiguous()
