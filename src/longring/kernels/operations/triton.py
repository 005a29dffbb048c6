"""Our own attention, in Triton: not the fastest where cuDNN or flash-attn-4 run, but the same bits from run to run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...geometry.packs import Pack, Whole, pack
from ..places import Stack
from ..triton import is_available
from .contract import Rows
from .cuda import not_for

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TritonTiles:
    name = "triton"
    is_deterministic = True
    builds_plans = False
    takes_anything = True

    def with_the_same_bits(self) -> TritonTiles:
        return self

    def refusal(self, q: Tensor, head_dim: int) -> str | None:
        if q.device.type == "cuda" and not is_available(q.device):
            return "needs the package triton, which is not installed"
        return not_for(q, head_dim, least=(8, 0), most=256, dtypes=_DTYPES)

    def takes(self, rows: int, cols: int) -> bool:
        return True

    def columns_for_dlse(self, head_dim: int) -> int:
        return 0

    def takes_many(self, has_dlse: bool) -> bool:
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v, everything = *_rows_first(q, k, v), _everything(q, k, causal)
        return self.forward_many(q, k, v, everything, scale)[0]

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        everything = _everything(q, k, causal)
        dout, out, q, k, v = _rows_first(rows.dout, rows.out, q, k, v)
        (dq,), (dk,), (dv,) = self.backward_many(Rows(dout, out, rows.lse, rows.dlse), q, k, v, everything, scale)
        return dq, dk, dv

    def in_packs(self, stacks: Sequence[Stack], queries: Whole, keys: Whole) -> list[Pack]:
        return [pack(stacks, queries, keys)]

    def forward_many(self, q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float) -> list[tuple[Tensor, Tensor]]:
        from ..triton import tiles

        return tiles.forward(q, k, v, pack, scale)

    def backward_many(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        from ..triton import tiles

        return tiles.backward(*rows, q, k, v, pack, scale)


def _rows_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _everything(q: Tensor, k: Tensor, causal: bool) -> Pack:
    """All there is in q [many, heads, rows, d] and k, as one stack."""
    many, heads, rows, _ = q.shape
    return _square(many, heads, k.shape[1], rows, k.shape[2], causal)


@lru_cache(maxsize=1024)
def _square(many: int, heads: int, kv_heads: int, rows: int, cols: int, causal: bool) -> Pack:
    queries, keys = Whole(many, range(rows), kv_heads, heads // kv_heads), Whole(many, range(cols), kv_heads, 1)
    return pack([Stack(queries.place, keys.place, hi=0 if causal else None)], queries, keys)
