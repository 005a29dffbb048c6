"""The flash-attn packages, where they are installed: nothing of them is imported before it is used.

They take [many, rows, heads, d]. flash-attn-4 compiles a kernel on the first call of its kind, for seconds, and
warns meanwhile of things that concern its authors.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .contract import Rows
from .cuda import not_for

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


@cache
def is_there(package: str, part: str) -> bool:
    """Whether the package is installed and has that part, found without importing either."""
    found = find_spec(package)
    if found is None:
        return False
    places = found.submodule_search_locations or []
    return any((Path(place) / part).exists() for place in places)


class FlashAttn4:
    """flash-attn-4, written in CuTe, for Hopper and later. It takes the gradient of lse as it is."""

    name = "flash_attn_4"

    def __init__(self, *, is_deterministic: bool = False) -> None:
        self.is_deterministic = is_deterministic

    def with_the_same_bits(self) -> FlashAttn4:
        return _in_order

    def refusal(self, q: Tensor, head_dim: int) -> str | None:
        if not is_there("flash_attn", "cute/interface.py"):
            return "needs the package flash-attn-4, which is not installed (pip install longring[flash])"
        if head_dim % 8:
            return f"takes head dimensions in steps of 8, got {head_dim}"
        return not_for(q, head_dim, least=(9, 0), most=256, dtypes=_SIXTEEN_BITS)

    def takes(self, rows: int, cols: int) -> bool:
        return True

    def columns_for_dlse(self, head_dim: int) -> int:
        return 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _interface()._flash_attn_fwd(
            *_rows_first(q, k, v), softmax_scale=scale, causal=causal, return_lse=True
        )
        return out.transpose(1, 2), lse

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dlse = None if rows.dlse is None else rows.dlse.float().contiguous()
        found = _interface()._flash_attn_bwd(
            *_rows_first(q, k, v, rows.out, rows.dout),
            rows.lse.float().contiguous(),
            softmax_scale=scale,
            causal=causal,
            deterministic=self.is_deterministic,
            dlse=dlse,
        )
        dq, dk, dv = _rows_first(*found[:3])
        return dq, dk, dv


@cache
def _interface() -> Any:
    """What its kernels' compiler warns of concerns the authors of flash-attn-4, whenever a new kind is compiled."""
    for message in (r"Argument \w+ \(position \d+\) cannot be converted", r"cutlass\."):
        warnings.filterwarnings("ignore", message)
    return importlib.import_module("flash_attn.cute.interface")


_in_order = FlashAttn4(is_deterministic=True)


def _rows_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]
