"""A ring played on one device, one rank after the other: longring's own schedule and kernels, and nothing that travels.

The one place of the benchmarks that knows how schedules are called. Once, to be checked, every message is delivered;
when it is timed the buffers hold what came last, and what a rank computes, merges and adds takes as long as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...call import check_scale, choose_kernel, make_journey
from ...geometry.layouts import Shard, deal
from ...geometry.parcels import Parcel
from ...geometry.patterns import Pattern, Problem
from ...geometry.task import Task
from ...kernels.contract import Upstream
from ...numerics.online_softmax import accumulator_dtype
from ...plan.work import pairs
from ...schedules.gather import take_rows
from ...schedules.parcels import add_parcel, pack
from ...schedules.select import SCHEDULES
from ...transport.replay import Replay
from .check import Result
from .contest import Entry
from .given import Given


class Delivery:
    """Brings a rank the rows that its plan names, and nothing for gradients; what it sends of those is summed up.

    So each gradient that leaves a rank is the rank's own part, and the parts together are the whole.
    """

    def __init__(self, ring: VirtualRing) -> None:
        self._ring = ring

    def bring(self, parcel: Parcel, buffers: tuple[Tensor, Tensor]) -> None:
        if parcel.kind == "gradients":
            for buffer in buffers:
                buffer.zero_()
            return
        for x, buffer in zip(self._ring.keys_of(parcel.owner), buffers, strict=True):
            buffer.copy_(pack(x, parcel, range(x.shape[1])))

    def take(self, parcel: Parcel, tensors: tuple[Tensor, Tensor]) -> None:
        if parcel.kind == "gradients":
            self._ring.add_gradients(parcel, tensors)


class VirtualRing(Entry):
    """Some of the ranks of a ring, or all of them, in turn."""

    kind = "ours"

    def __init__(
        self, x: Given, pattern: Pattern, ranks: int, *, only: Sequence[int] | None = None, layout: str = "zigzag"
    ) -> None:
        self.name = f"ring of {ranks}"
        n, heads, kv_heads = x.q.shape[1], x.q.shape[2], x.k.shape[2]
        dealt = deal(layout, n, ranks)
        self.task = Task(pattern, Problem(x.q.shape[0], n, n, kv_heads, 0), dealt, dealt, heads)
        self.only = range(ranks) if only is None else only
        self._x = x
        self._mine = {rank: [take_rows(y, dealt.shards[rank]) for y in (x.q, x.k, x.v)] for rank in self.only}
        self._dout = {rank: take_rows(x.upstream, dealt.shards[rank]) for rank in self.only}
        self._transports = {rank: Replay(self.task, "ring", rank, None) for rank in self.only}
        kernel, self.chosen = choose_kernel("auto", x.q, x.k, False)
        scale = check_scale(None, x.q)
        self._journeys = {
            rank: make_journey(self.task, transport, kernel, "ring", scale, None)
            for rank, transport in self._transports.items()
        }
        complete = len(self.only) == ranks
        self.rows = None if complete else self._positions().sort().values.to(x.q.device)
        self.share = 1.0 if complete else sum(pairs(self.task, rank) for rank in self.only) / _all_pairs(self.task)
        self._found: dict[int, tuple[Tensor, Tensor]] = {}
        self._sums: tuple[Tensor, Tensor] | None = None  # dk and dv of all rows, while gradients are delivered

    # ------------------------------------------------------------------------------------------- what is timed

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        return [self._forward(rank) for rank in self.only]

    def backward(self) -> list[tuple[Tensor, ...]]:
        return [self._backward(rank) for rank in self.only]

    def _forward(self, rank: int) -> tuple[Tensor, Tensor]:
        q, k, v = self._mine[rank]
        with torch.no_grad():
            total = SCHEDULES["ring"].forward(self._journeys[rank], q, k, v)
        return total.out.to(q.dtype), total.lse.to(accumulator_dtype(q.dtype))

    def _backward(self, rank: int) -> tuple[Tensor, ...]:
        q, k, v = self._mine[rank]
        upstream = Upstream(self._dout[rank], None, *self._found[rank])
        with torch.no_grad():
            found = SCHEDULES["ring"].backward(self._journeys[rank], upstream, q, k, v)
        return tuple(gradient.to(q.dtype) for gradient in found)

    # ----------------------------------------------------------------------------------------- what is checked

    def result(self) -> Result:
        """With every message delivered. Where only some ranks are played dk and dv are parts, and left out."""
        for rank in self.only:
            self._transports[rank].peers = Delivery(self)
            self._found[rank] = self._forward(rank)
        k = self._x.k
        dk, dv = (torch.zeros(k.shape, dtype=accumulator_dtype(k.dtype), device=k.device) for _ in "kv")
        self._sums = dk, dv
        dq = []
        for rank in self.only:
            mine, *own = self._backward(rank)
            dq.append(mine)
            self._add(self.task.keys.shards[rank], own)
            self._transports[rank].peers = None
        self._sums = None
        order = self._positions().argsort().to(k.device)
        out, lse = zip(*(self._found[rank] for rank in self.only), strict=True)
        whole = Result(torch.cat(out, 1)[:, order], torch.cat(lse, 2)[:, :, order], torch.cat(dq, 1)[:, order])
        return whole._replace(dk=dk.to(k.dtype), dv=dv.to(k.dtype)) if self.rows is None else whole

    def keys_of(self, owner: int) -> tuple[Tensor, Tensor]:
        shard = self.task.keys.shards[owner]
        return take_rows(self._x.k, shard), take_rows(self._x.v, shard)

    def add_gradients(self, parcel: Parcel, tensors: Sequence[Tensor]) -> None:
        shard = self.task.keys.shards[parcel.owner]
        rows = sum(map(len, shard))
        parts = [x.new_zeros(self._x.k.shape[0], rows, *self._x.k.shape[2:]) for x in tensors]
        for part, flat in zip(parts, tensors, strict=True):
            add_parcel(part, flat, parcel, range(rows))
        self._add(shard, parts)

    def _add(self, shard: Shard, parts: Sequence[Tensor]) -> None:
        assert self._sums is not None
        for whole, part in zip(self._sums, parts, strict=True):
            at = 0
            for r in shard:
                whole[:, r.start : r.stop : r.step] += part[:, at : at + len(r)]
                at += len(r)

    def _positions(self) -> Tensor:
        shards = (self.task.queries.shards[rank] for rank in self.only)
        return torch.cat([torch.arange(r.start, r.stop, r.step) for shard in shards for r in shard])


def _all_pairs(task: Task) -> int:
    return sum(pairs(task, rank) for rank in range(task.ranks))
