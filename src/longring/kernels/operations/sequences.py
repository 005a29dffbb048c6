"""Packed sequences as kernels want them told: rows of all batch rows one behind the other, and where each begins.

Flash attention takes them from its second generation on, and windows with them: `OfSequences` is what the operations
that are built on it have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...geometry.packs import Pack, Whole
from ...geometry.sequences import Window, bounds, common_window, in_sequence
from ..places import Place, Stack
from ..shelf import Shelf
from ..tables import Tables
from .contract import Rows


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


Gradients = tuple[Tensor, Tensor, Tensor]
"""dq, dk and dv."""


class How(NamedTuple):
    """What is asked, besides the tensors: [many, rows, heads, d], or [rows, heads, d] of sequences."""

    scale: float
    window: Window
    sequences: Sequences | None = None
    into: dict[str, Tensor] | None = None  # where to write what has these names, for one that can


class OfSequences:
    """Takes many sequences of one window at once, and any single band."""

    takes_anything = False
    limits_want_keys = False  # a window is mistaken where queries are more than keys, as flash-attn 2 does
    counts_to_two_billion = False  # of a batch row's float32 sums, as flash-attn 2's backward does to find the next

    def takes_many(self, has_dlse: bool) -> bool:
        return not has_dlse

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """(out, lse); of sequences lse is [heads, rows]."""
        raise NotImplementedError

    def _attend_backward(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, how: How) -> Gradients:
        """dq, dk and dv. lse and dlse are dense, in float32."""
        raise NotImplementedError

    def in_packs(self, stacks: Sequence[Stack], queries: Whole, keys: Whole) -> list[Pack]:
        packs = in_sequence(stacks, queries, keys)
        return [] if self.limits_want_keys and any(map(_is_mistaken, packs)) else packs

    def forward_many(self, q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float) -> list[tuple[Tensor, Tensor]]:
        (tray,), (of_keys,) = pack.queries.trays, pack.keys.trays
        if not tray.is_shared:
            (stack,) = pack.stacks
            views = stack.queries.view(q), stack.keys.view(k), stack.keys.view(v)
            return [self._forward(*views, How(scale, common_window(pack.stacks)))]
        found = sequences(pack, q.device)
        views = _in_a_row(q, tray.place), _in_a_row(k, of_keys.place), _in_a_row(v, of_keys.place)
        out, lse = self._attend(*views, How(scale, found.window, found))
        return [(_by_batch(out, tray.place), _terms_by_batch(lse, tray.place))]

    def backward_many(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        (tray,), (of_keys,) = pack.queries.trays, pack.keys.trays
        if not tray.is_shared:
            (stack,) = pack.stacks
            of, at = stack.queries.view, stack.queries.row_view
            mine = Rows(of(rows.dout), of(rows.out), at(rows.lse), None if rows.dlse is None else at(rows.dlse))
            views = of(q), stack.keys.view(k), stack.keys.view(v)
            dq, dk, dv = self._backward(mine, *views, How(scale, common_window(pack.stacks)))
            return [dq], [dk], [dv]
        found = sequences(pack, q.device)
        dlse = None if rows.dlse is None else _terms_in_a_row(rows.dlse, tray.place)
        dout, out = _in_a_row(rows.dout, tray.place), _in_a_row(rows.out, tray.place)
        mine = Rows(dout, out, _terms_in_a_row(rows.lse, tray.place), dlse)
        views = _in_a_row(q, tray.place), _in_a_row(k, of_keys.place), _in_a_row(v, of_keys.place)
        dq, dk, dv = self._attend_backward(mine, *views, How(scale, found.window, found))
        return [_by_batch(dq, tray.place)], [_by_batch(dk, of_keys.place)], [_by_batch(dv, of_keys.place)]

    # ---- one stack: tensors are [many, heads, rows, d]

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        q, k, v = _swapped(q, k, v)
        out, lse = self._attend(q, k, v, how)
        return out.transpose(1, 2), lse

    def _backward(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, how: How) -> Gradients:
        if self.counts_to_two_billion and has_far_batch_rows(q):
            return one_by_one(lambda r, q, k, v: self._backward(r, q, k, v, how), rows, q, k, v)
        dout, out, q, k, v = _swapped(rows.dout, rows.out, q, k, v)
        dlse = None if rows.dlse is None else rows.dlse.float().contiguous()
        mine = Rows(dout, out, rows.lse.float().contiguous(), dlse)
        dq, dk, dv = _swapped(*self._attend_backward(mine, q, k, v, how))
        return dq, dk, dv


def has_far_batch_rows(q: Tensor) -> bool:
    """Whether from one of several [heads, rows, d] to the next, in whole blocks, it is further than 32 bits can say."""
    many, heads, rows, d = q.shape
    return many > 1 and heads * (rows + -rows % 128) * (d + -d % 64) >= 1 << 31


def one_by_one(
    backward: Callable[[Rows, Tensor, Tensor, Tensor], Gradients], rows: Rows, q: Tensor, k: Tensor, v: Tensor
) -> Gradients:
    """A backward by batch row, or by repeat."""
    found = []
    for i in range(q.shape[0]):
        dout, out, lse, q_, k_, v_ = (x[i : i + 1] for x in (rows.dout, rows.out, rows.lse, q, k, v))
        dlse = None if rows.dlse is None else rows.dlse[i : i + 1]
        found.append(backward(Rows(dout, out, lse, dlse), q_, k_, v_))
    dq, dk, dv = (torch.cat(some) for some in zip(*found, strict=True))
    return dq, dk, dv


def _is_mistaken(pack: Pack) -> bool:
    """By flash-attn 2, to which as many keys as there are to the right are no limit, and no limit is as many keys."""
    has_limits = common_window(pack.stacks) != (None, None)
    return has_limits and any(len(stack.queries.rows) > len(stack.keys.rows) for stack in pack.stacks)


def _swapped(*tensors: Tensor) -> list[Tensor]:
    """[many, rows, heads, d] of [many, heads, rows, d], and the other way round."""
    return [x.transpose(1, 2) for x in tensors]


def _in_a_row(x: Tensor, place: Place) -> Tensor:
    """[batch * rows, heads, d] of x [batch, n, heads, d]; a copy where batch rows do not follow each other."""
    return x[:, place.rows.start : place.rows.stop].flatten(0, 1)


def _terms_in_a_row(x: Tensor, place: Place) -> Tensor:
    """Dense float32 [heads, batch * rows] of x [batch, heads, n], such as an lse."""
    return x[:, :, place.rows.start : place.rows.stop].transpose(0, 1).flatten(1).float().contiguous()


def _by_batch(x: Tensor, place: Place) -> Tensor:
    """[batch, heads, rows, d] of x [batch * rows, heads, d]."""
    return x.unflatten(0, (len(place.batch), -1)).transpose(1, 2)


def _terms_by_batch(x: Tensor, place: Place) -> Tensor:
    """Dense [batch, heads, rows] of x [heads, batch * rows]."""
    return x.unflatten(1, (len(place.batch), -1)).transpose(0, 1).contiguous()
