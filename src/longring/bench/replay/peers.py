"""Who stands in for the other ranks: their keys and values are drawn when they are due, their gradients are nothing.

So what the rank sends of gradients is its own contribution alone, of which some vectors are kept to be checked. Of the
keys and values that it sends, some vectors of every parcel are looked at: they must be those drawn, to the bit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import TransportError
from ...geometry.layouts import Shard
from ...geometry.parcels import Parcel
from ...geometry.task import Task
from .clock import Clock
from .numbers import Numbers


class Sent(NamedTuple):
    """A contribution to the gradients of one row of another rank's keys and values."""

    batch: int
    position: int
    kv_head: int
    dk: Tensor
    dv: Tensor


class MadeUp:
    """`keep` are the numbers of those vectors of sent gradients that are kept, counted from the first that is sent."""

    def __init__(self, task: Task, numbers: Numbers, clock: Clock, keep: Sequence[int] = ()) -> None:
        self._task, self._numbers, self._clock = task, numbers, clock
        self._keep, self._gone = sorted(keep), 0
        self.kept: list[Sent] = []

    def bring(self, parcel: Parcel, buffers: tuple[Tensor, Tensor]) -> None:
        with self._clock.aside():
            for tensor, flat in zip("kv", buffers, strict=True):
                if parcel.kind == "gradients":
                    flat.zero_()
                else:
                    self._draw(parcel, tensor, flat)

    def _draw(self, parcel: Parcel, tensor: str, flat: Tensor) -> None:
        shard, at = self._task.keys.shards[parcel.owner], 0
        for share in parcel.shares:
            for rows in share.rows:
                for batch in share.batch:
                    for positions in positions_of(shard, rows):
                        count = len(positions) * len(share.kv_heads) * self._numbers.d
                        self._numbers.fill(flat[at : at + count], tensor, batch, positions, share.kv_heads)
                        at += count
        assert at == flat.numel()

    def take(self, parcel: Parcel, tensors: tuple[Tensor, Tensor]) -> None:
        first, second = (flat.view(parcel.vectors, -1) for flat in tensors)
        with self._clock.aside():
            if parcel.kind == "gradients":
                self._keep_some(parcel, first, second)
            else:
                self._look_at_some(parcel, first, second)

    def _keep_some(self, parcel: Parcel, dk: Tensor, dv: Tensor) -> None:
        first = self._gone
        self._gone += parcel.vectors
        for number in self._keep[bisect_left(self._keep, first) : bisect_left(self._keep, self._gone)]:
            batch, position, kv_head = self._place(parcel, number - first)
            self.kept.append(Sent(batch, position, kv_head, dk[number - first].clone(), dv[number - first].clone()))

    def _look_at_some(self, parcel: Parcel, k: Tensor, v: Tensor) -> None:
        for number in {0, parcel.vectors // 2, parcel.vectors - 1}:
            batch, position, kv_head = self._place(parcel, number)
            at = torch.tensor([position], device=k.device)
            for tensor, sent in (("k", k), ("v", v)):
                if not torch.equal(sent[number], self._numbers.at(tensor, batch, at, kv_head, sent.dtype)[0]):
                    raise TransportError(
                        f"rank {parcel.sender} sent another {tensor} to rank {parcel.receiver} than that of position "
                        f"{position}, kv head {kv_head}: whoever computes with it goes wrong"
                    )

    def _place(self, parcel: Parcel, number: int) -> tuple[int, int, int]:
        """(batch row, position, kv head) of a vector of the parcel."""
        batch, row, kv_head = vector_of(parcel, number)
        return batch, position_of(self._task.keys.shards[parcel.owner], row), kv_head


def vector_of(parcel: Parcel, number: int) -> tuple[int, int, int]:
    """(batch row, local row of the owner, kv head) of a vector of the parcel."""
    for share in parcel.shares:
        for rows in share.rows:
            each = len(rows) * len(share.kv_heads)
            if number < each * len(share.batch):
                batch, rest = divmod(number, each)
                row, head = divmod(rest, len(share.kv_heads))
                return share.batch[batch], rows[row], share.kv_heads[head]
            number -= each * len(share.batch)
    raise IndexError(f"the parcel has {parcel.vectors} vectors")


def positions_of(shard: Shard, rows: range) -> Iterator[range]:
    """The positions of some local rows, piece by piece."""
    before = 0
    for piece in shard:
        first = max(0, -(-(before - rows.start) // rows.step))
        stop = min(len(rows), max(0, -(-(before + len(piece) - rows.start) // rows.step)))
        if first < stop:
            some = rows[first:stop]
            yield piece[some[0] - before : some[-1] - before + 1 : rows.step]
        before += len(piece)


def position_of(shard: Shard, row: int) -> int:
    return next(positions_of(shard, range(row, row + 1)))[0]


def row_of(shard: Shard, position: int) -> int:
    """Where a rank holds a position."""
    before = 0
    for piece in shard:
        if position in piece:
            return before + piece.index(position)
        before += len(piece)
    raise ValueError(f"position {position} is not in the shard {shard}")
