"""The fused kernels themselves, called as directly as Python can: what longring's call is measured against.

All take [batch, n, heads, d]. A backward takes any out and lse, so that these also serve the re-created peers, whose
tiles see a part of the keys each.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

aten = torch.ops.aten


class Found(NamedTuple):
    out: Tensor  # [batch, n, heads, d]
    lse: Tensor  # [batch, heads, n]


class Direct(Protocol):
    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Found: ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Found, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def direct_kernels(device: torch.device) -> dict[str, Direct]:
    """Those that can be called here; whether they take a shape shows when they are."""
    if device.type == "cpu":
        return {"cpu": FlashForCpu()}
    found: list[Direct] = [Cudnn(), Flash(), Efficient()]
    if flash_attn_4() is not None:
        found.append(FlashAttn4())
    return {kernel.name: kernel for kernel in found}


class Cudnn:
    name = "cudnn"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Found:
        q, k, v = _by_heads(q, k, v)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
        return Found(out.transpose(1, 2), lse.squeeze(-1))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Found, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = _by_heads(dout, q, k, v, found.out)
        seed = offset = _no_dropout(q.device)
        lse = found.lse.contiguous().unsqueeze(-1)
        length, keys = q.shape[2], k.shape[2]
        gradients = aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, None, None, length, keys, 0.0, causal
        )
        return _by_rows(*gradients)


class Flash:
    name = "flash"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Found:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*_by_heads(q, k, v), 0.0, causal)
        return Found(out.transpose(1, 2), lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Found, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = _by_heads(dout, q, k, v, found.out)
        seed = offset = _no_dropout(q.device)
        lse = found.lse.contiguous()
        length, keys = q.shape[2], k.shape[2]
        gradients = aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, length, keys, 0.0, causal, seed, offset
        )
        return _by_rows(*gradients)


class Efficient:
    name = "efficient"
    lse_rows = 32  # to whose multiple its lse is padded

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Found:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(*_by_heads(q, k, v), None, True, 0.0, causal)
        return Found(out.transpose(1, 2), lse[:, :, : q.shape[1]])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Found, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = _by_heads(dout, q, k, v, found.out)
        seed = offset = _no_dropout(q.device)
        missing = -found.lse.shape[2] % self.lse_rows
        lse = torch.nn.functional.pad(found.lse, (0, missing), value=torch.inf).contiguous()
        *gradients, _ = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False], causal
        )
        return _by_rows(*gradients)


class FlashAttn4:
    name = "flash_attn_4"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Found:
        out, lse, *_ = flash_attn_4()._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)
        return Found(out, lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Found, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv, *_ = flash_attn_4()._flash_attn_bwd(q, k, v, found.out, dout, found.lse, causal=causal)
        return dq, dk, dv


class FlashForCpu:
    """In the inputs' own precision, which longring's kernel is not content with."""

    name = "cpu"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Found:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*_by_heads(q, k, v), 0.0, causal)
        return Found(out.transpose(1, 2), lse.contiguous())

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Found, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = _by_heads(dout, q, k, v, found.out)
        return _by_rows(
            *aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, found.lse, 0.0, causal)
        )


@lru_cache(maxsize=1)
def flash_attn_4() -> Any:
    """The package's interface, or None where it is not installed."""
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except ImportError:
        return None


@lru_cache(maxsize=8)
def _no_dropout(device: torch.device) -> Tensor:
    """For the state of a random generator that draws nothing."""
    return torch.zeros((), dtype=torch.int64, device=device)


def _by_heads(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


_by_rows: Any = _by_heads
