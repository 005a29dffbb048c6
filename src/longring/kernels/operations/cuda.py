"""PyTorch's fused attention on a GPU: cuDNN, flash and memory-efficient, by the operations that give an lse.

Their traps, and where they are met here:

- cuDNN refuses one query with one key, and answers nan to float32 without a word: `takes`, `refusal`;
- cuDNN and flash want head dimensions in steps of 8: `_padded`;
- efficient knows no grouped heads, pads its lse to 32 rows, and takes the rows of out to lie heads * d apart, whatever
  they do: `_expanded`, `_in_steps`, `_rows_together`;
- an lse must be dense for the backward, float32, and [.., rows, 1] for cuDNN;
- behind flash there may be another since torch.nn.attention.activate_flash_attention_impl: `behind_flash`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .contract import Rows
from .sequences import Gradients, How, OfSequences, has_far_batch_rows, one_by_one

_aten: Any = torch.ops.aten
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def not_on_cuda(q: Tensor) -> str | None:
    if q.device.type != "cuda":
        return f"computes on CUDA devices only, and the tensors are on {q.device}"
    return None


def not_for(
    q: Tensor, head_dim: int, *, least: tuple[int, int], most: int, dtypes: tuple[torch.dtype, ...]
) -> str | None:
    """Why an operation with these limits cannot compute on tensors like q."""
    if (elsewhere := not_on_cuda(q)) is not None:
        return elsewhere
    if q.dtype not in dtypes:
        return f"computes in {', '.join(str(x).removeprefix('torch.') for x in dtypes)}, and the tensors are {q.dtype}"
    if head_dim > most:
        return f"takes a head dimension of at most {most}, got {head_dim}"
    if torch.version.hip is not None:
        return "was not tried on this kind of GPU"
    if (has := capability(q.device)) < least:
        return f"needs compute capability {least[0]}.{least[1]}, and {q.device} has {has[0]}.{has[1]}"
    return None


def behind_flash() -> str | None:
    """What PyTorch was told to take for its flash attention, "FA3" or "FA4"; None where that is its own."""
    return getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()


class _InSteps:
    """Head dimensions in steps of 8, of which a gradient of lse needs one; sums by atomics, in any order."""

    is_deterministic = False
    builds_plans = False

    def with_the_same_bits(self) -> None:
        return None

    def takes(self, rows: int, cols: int) -> bool:
        return True

    def columns_for_dlse(self, head_dim: int) -> int:
        return 8 + -head_dim % 8


class Cudnn(_InSteps):
    name = "cudnn"
    builds_plans = True

    def refusal(self, q: Tensor, head_dim: int) -> str | None:
        if q.device.type == "cuda" and not torch.backends.cudnn.is_available():
            return "needs cuDNN, which this PyTorch is without"
        most = 256 if q.device.type == "cuda" and capability(q.device)[0] == 9 else 128
        return not_for(q, head_dim, least=(8, 0), most=most, dtypes=_SIXTEEN_BITS)

    def takes(self, rows: int, cols: int) -> bool:
        return rows > 1 or cols > 1

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        d = q.shape[-1]
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            *_padded(q, k, v), None, True, 0.0, causal, False, scale=scale
        )
        return out[..., :d], lse.squeeze(-1)

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        d, none = q.shape[-1], _no_seed(q.device)
        dout, out, q, k, v = _padded(rows.dout, rows.out, q, k, v)
        lse = rows.lse.float().contiguous().unsqueeze(-1)
        sides = q.shape[2], k.shape[2]
        found = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, none, none, None, None, None, *sides, 0.0, causal, scale=scale
        )
        return _cut(found, d)


class Flash(_InSteps, OfSequences):
    """flash-attn 2 as PyTorch has it; windows and sequences by the operation below the one for a single call."""

    name = "flash"
    limits_want_keys = True
    counts_to_two_billion = True

    def refusal(self, q: Tensor, head_dim: int) -> str | None:
        if behind_flash() == "FA4":  # as which it takes head dimensions whose gradients are wrong
            return "is flash-attn-4 since torch.nn.attention.activate_flash_attention_impl: take flash_attn_4 itself"
        return not_for(q, head_dim, least=(8, 0), most=256, dtypes=_SIXTEEN_BITS)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        d = q.shape[-1]
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(*_padded(q, k, v), 0.0, causal, False, scale=scale)
        return out[..., :d], lse

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if has_far_batch_rows(q):
            return one_by_one(lambda r, q, k, v: self.backward(r, q, k, v, causal, scale), rows, q, k, v)
        d, none = q.shape[-1], _no_seed(q.device)
        dout, out, q, k, v = _padded(rows.dout, rows.out, q, k, v)
        lse, sides = rows.lse.float().contiguous(), (q.shape[2], k.shape[2])
        found = _aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, *sides, 0.0, causal, none, none, scale=scale
        )
        return _cut(found, d)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        d = q.shape[-1]
        bounds, causal, window = _told(q, k, how)
        out, lse, *_ = _aten._flash_attention_forward(
            *_padded(q, k, v), *bounds, 0.0, causal, False, scale=how.scale, **window
        )
        return out[..., :d], lse

    def _attend_backward(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, how: How) -> Gradients:
        d, none = q.shape[-1], _no_seed(q.device)
        bounds, causal, window = _told(q, k, how)
        dout, q, k, v, out = _padded(rows.dout, q, k, v, rows.out)
        found = _aten._flash_attention_backward(
            dout, q, k, v, out, rows.lse, *bounds, 0.0, causal, none, none, scale=how.scale, **window
        )
        return _cut(found, d)


def _told(q: Tensor, k: Tensor, how: How) -> tuple[tuple[Any, ...], bool, dict[str, int]]:
    """Where sequences begin, and how long the longest are; whether all is causal; the window, if there is one."""
    causal = how.window == (None, 0)
    left, right = (-1 if side is None or causal else side for side in how.window)
    window = {"window_size_left": left, "window_size_right": right}
    if how.sequences is None:
        return (None, None, q.shape[1], k.shape[1]), causal, window
    longest = how.sequences.longest_queries, how.sequences.longest_keys
    return (*how.sequences.tables.read(), *longest), causal, window


class Efficient(_InSteps):
    name = "efficient"

    def refusal(self, q: Tensor, head_dim: int) -> str | None:
        is_old = q.device.type == "cuda" and capability(q.device) < (8, 0)
        dtypes = (torch.float32, torch.float16) if is_old else (torch.float32, *_SIXTEEN_BITS)
        return not_for(q, head_dim, least=(5, 0), most=1024, dtypes=dtypes)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        d, rows = q.shape[-1], q.shape[2]
        q, k, v = map(_near, _padded(q, *_expanded(q, k, v)))
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return out[..., :d], lse[..., :rows]

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        d, none, kv_heads = q.shape[-1], _no_seed(q.device), k.shape[1]
        dout, out, q, k, v = map(_near, _padded(rows.dout, rows.out, q, *_expanded(q, k, v)))
        lse, out = _in_steps(rows.lse), _rows_together(out)
        found = _aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, none, none, 0.0, [True, True, True, False], causal, scale=scale
        )
        dq, dk, dv = _cut(found[:3], d)
        return dq, _gathered(dk, kv_heads), _gathered(dv, kv_heads)


@cache
def _no_seed(device: torch.device) -> Tensor:
    """There is no dropout, but the operations want to be told its random state."""
    return torch.zeros((), dtype=torch.int64, device=device)


def _padded(*tensors: Tensor) -> list[Tensor]:
    """With zeros up to a head dimension in steps of 8, which change no score and no sum."""
    missing = -tensors[0].shape[-1] % 8
    return [F.pad(x, (0, missing)) for x in tensors] if missing else list(tensors)


def _cut(found: Any, d: int) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x[..., :d] for x in found)
    return dq, dk, dv


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    share = q.shape[1] // k.shape[1]
    return (k, v) if share == 1 else (k.repeat_interleave(share, 1), v.repeat_interleave(share, 1))


def _gathered(x: Tensor, kv_heads: int) -> Tensor:
    """What the query heads of a kv head found, added up in float32."""
    share = x.shape[1] // kv_heads
    return x if share == 1 else x.unflatten(1, (kv_heads, share)).sum(2, dtype=torch.float32)


def _near(x: Tensor) -> Tensor:
    """Where there is one of many, the distance to the next may be beyond the 32 bits that are kept for it."""
    return x if x.shape[0] > 1 or x.stride(0) < 1 << 31 else x.as_strided(x.shape, (x.stride(1), *x.stride()[1:]))


def _rows_together(x: Tensor) -> Tensor:
    """Dense as [many, rows, heads, d], seen as [many, heads, rows, d]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _in_steps(lse: Tensor) -> Tensor:
    """Rows in steps of 32; what is beyond the last weighs nothing."""
    return F.pad(lse.float(), (0, -lse.shape[-1] % 32), value=torch.inf).contiguous()
