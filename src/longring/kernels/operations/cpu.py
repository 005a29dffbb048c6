"""PyTorch's flash attention for the CPU. Its traps, and where they are met here:

- an empty q or k kills the process: stacks are never empty;
- a last dimension with a stride is silently wrong: `_ready`;
- causal is aligned to the top left, and nan unless the scale is above 0: causal stacks are square, scales positive;
- lse = -inf in the backward gives nan: a row that sees nothing is in no tile;
- a 16-bit backward is ten times slower than float32, and 16-bit parts would round at every merge:
  everything is computed in the accumulator's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...numerics.online_softmax import accumulator_dtype
from .contract import Rows, with_columns_for_dlse

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

LARGEST_HEAD = 512


class CpuFlash:
    name = "cpu_flash"
    is_deterministic = True
    builds_plans = False

    def with_the_same_bits(self) -> CpuFlash | None:
        return self if self.is_deterministic else None

    def refusal(self, q: Tensor, head_dim: int) -> str | None:
        if q.device.type != "cpu":
            return f"computes on the CPU only, and the tensors are on {q.device}"
        if head_dim >= LARGEST_HEAD:  # one column is kept for the gradient of lse
            return f"takes a head dimension below {LARGEST_HEAD}, got {head_dim}"
        return None

    def takes(self, rows: int, cols: int) -> bool:
        return True

    def columns_for_dlse(self, head_dim: int) -> int:
        return 0  # it takes one, but in the accumulator's dtype

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if q.shape[2] == 1 and q.shape[1] > k.shape[1] and not causal:
            return self._one_row(q, k, v, scale)
        out, lse = _forward(*map(_ready, (q, k, v)), 0.0, causal, scale=scale)
        return out, lse

    def _one_row(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """A query of each head, as in decoding: those of one kv head as its rows, or each would read its keys again."""
        rows = q.unflatten(1, (k.shape[1], -1)).squeeze(3)
        out, lse = _forward(*map(_ready, (rows, k, v)), 0.0, False, scale=scale)
        return out.flatten(1, 2).unsqueeze(2), lse.flatten(1, 2).unsqueeze(2)

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        d = q.shape[-1]
        q, k, v = map(_ready, (q, k, v))
        rows = rows._replace(dout=_ready(rows.dout), out=_ready(rows.out))
        if rows.dlse is not None:
            rows, q, k, v = with_columns_for_dlse(rows, q, k, v, 1)
        dq, dk, dv = _backward(rows.dout, q, k, v, rows.out, rows.lse, 0.0, causal, scale=scale)
        return dq[..., :d], dk[..., :d], dv[..., :d]


def _ready(x: Tensor) -> Tensor:
    x = x.to(accumulator_dtype(x.dtype))
    return x if x.stride(-1) == 1 else x.contiguous()
