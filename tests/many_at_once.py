"""An operation of the CPU that takes many stacks at once, as ours in Triton does on a GPU: stack by stack, but onto the
trays of the pack, by their berths alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import stacking
from longring.geometry.packs import Berth, Pack, Trays, Whole, pack
from longring.geometry.stacks import Stack
from longring.kernels.operations.contract import Rows
from longring.kernels.operations.cpu import CpuFlash

LOG = torch.float32


class ManyAtOnce(CpuFlash):
    name = "many_at_once"
    takes_anything = True

    def __init__(self) -> None:
        self.packs: list[Pack] = []

    def takes_many(self, has_dlse: bool) -> bool:
        return True

    def in_packs(self, stacks: Sequence[Stack], queries: Whole, keys: Whole) -> list[Pack]:
        return [pack(stacks, queries, keys)]

    def forward_many(self, q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float) -> list[tuple[Tensor, Tensor]]:
        self.packs.append(pack)
        out, lse = _memory(pack.queries, q.shape[3], q.dtype, 0.0), _memory(pack.queries, 1, LOG, -torch.inf)
        for i, stack in enumerate(pack.stacks):
            if stack.shape == "band":
                found, log = stacking.attended(q, k, v, stack, scale)
            else:
                found, log = self.forward(*_turned(stack, q, k, v), stack.shape != "full", scale)
            _put(out, pack.queries.berths[i], _back(stack, found))
            _put(lse, pack.queries.berths_by_head[i], _back(stack, log.unsqueeze(-1)))
        found = zip(_read(out, pack.queries, by_head=False), _read(lse, pack.queries, by_head=True), strict=True)
        return [(one, log.squeeze(-1)) for one, log in found]

    def backward_many(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        self.packs.append(pack)
        kinds = pack.queries, pack.keys, pack.keys
        memory = [_memory(trays, q.shape[3], q.dtype, 0.0) for trays in kinds]
        for i, stack in enumerate(pack.stacks):
            if stack.shape == "band":
                found = stacking.gradients(*rows, q, k, v, stack, scale)
                for into, trays, x in zip(memory, kinds, found, strict=True):
                    _put(into, trays.berths[i], x)
                continue
            place = stack.queries
            dlse = None if rows.dlse is None else place.row_view(rows.dlse)
            lines = place.view(rows.dout), place.view(rows.out), place.row_view(rows.lse), dlse
            mine = Rows(*(None if x is None else _back(stack, x) for x in lines))  # type: ignore[arg-type]
            found = self.backward(mine, *_turned(stack, q, k, v), stack.shape != "full", scale)
            for into, trays, x in zip(memory, kinds, found, strict=True):
                _put(into, trays.berths[i], _back(stack, x))
        dq, dk, dv = (_read(into, trays, by_head=False) for into, trays in zip(memory, kinds, strict=True))
        return dq, dk, dv


def _turned(stack: Stack, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [_back(stack, x) for x in (stack.queries.view(q), stack.keys.view(k), stack.keys.view(v))]


def _back(stack: Stack, x: Tensor) -> Tensor:
    return x.flip(2) if stack.shape == "flipped" else x


def _memory(trays: Trays, d: int, dtype: torch.dtype, nothing: float) -> Tensor:
    made = torch.full((trays.lines, d), torch.nan, dtype=dtype)
    for tray in trays.trays:
        if not tray.is_full:
            made[tray.first : tray.first + tray.lines] = nothing
    return made


def _put(memory: Tensor, berth: Berth, x: Tensor) -> None:
    d = memory.shape[1]
    steps = berth.by_many * d, berth.by_head * d, berth.by_row * d, 1
    memory.as_strided(x.shape, steps, berth.first * d).copy_(x)


def _read(memory: Tensor, trays: Trays, *, by_head: bool) -> list[Tensor]:
    found = []
    for tray in trays.trays:
        (many, heads, rows), part = tray.shape, memory[tray.first : tray.first + tray.lines]
        is_like_q = tray.is_shared and not by_head
        found.append(
            part.view(many, rows, heads, -1).transpose(1, 2) if is_like_q else part.view(many, heads, rows, -1)
        )
    return found
