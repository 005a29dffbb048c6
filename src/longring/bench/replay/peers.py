"""Who stands in for the other ranks: their keys, values and gradients are made up when they are due.

Of the gradients that the rank sends some vectors are kept, to be checked. Of the keys and values that it sends, some
vectors of every parcel are looked at: they must be those drawn, to the bit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import TransportError
from ...geometry.parcels import Parcel
from ...geometry.task import Task
from .clock import Clock
from .gradients import Gradients
from .numbers import Numbers
from .places import Vector, stretches, vector_of


class Sent(NamedTuple):
    """Gradients of one row of another rank's keys and values, as they left."""

    key: Vector
    dk: Tensor
    dv: Tensor


class MadeUp:
    """`keep` are the numbers of those vectors of sent gradients that are kept, counted from the first that is sent."""

    def __init__(
        self, task: Task, numbers: Numbers, gradients: Gradients, clock: Clock, keep: Sequence[int] = ()
    ) -> None:
        self._task, self._numbers, self._gradients, self._clock = task, numbers, gradients, clock
        self._keep, self._gone = sorted(keep), 0
        self.kept: list[Sent] = []

    def bring(self, parcel: Parcel, buffers: tuple[Tensor, Tensor]) -> None:
        with self._clock.aside():
            for tensor, flat in zip("kv", buffers, strict=True):
                if parcel.kind == "gradients":
                    self._gradients.draw(parcel, f"d{tensor}", flat)
                else:
                    self._draw(parcel, tensor, flat)

    def _draw(self, parcel: Parcel, tensor: str, flat: Tensor) -> None:
        at = 0
        for stretch in stretches(self._task, parcel):
            count = stretch.vectors * self._numbers.d
            self._numbers.fill(flat[at : at + count], tensor, stretch.batch, stretch.positions, stretch.kv_heads)
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
            key = vector_of(self._task, parcel, number - first)
            self.kept.append(Sent(key, dk[number - first].clone(), dv[number - first].clone()))

    def _look_at_some(self, parcel: Parcel, k: Tensor, v: Tensor) -> None:
        for number in {0, parcel.vectors // 2, parcel.vectors - 1}:
            batch, position, kv_head = vector_of(self._task, parcel, number)
            at = torch.tensor([position], device=k.device)
            for tensor, sent in (("k", k), ("v", v)):
                if not torch.equal(sent[number], self._numbers.at(tensor, batch, at, kv_head, sent.dtype)[0]):
                    raise TransportError(
                        f"rank {parcel.sender} sent another {tensor} to rank {parcel.receiver} than that of position "
                        f"{position}, kv head {kv_head}: whoever computes with it goes wrong"
                    )
