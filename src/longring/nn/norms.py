"""The two norms a layer may have, by name."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import ArgumentError

NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


def make_norm(
    name: str,
    dim: int,
    eps: float = 1e-5,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    if name not in NORMS:
        raise ArgumentError(f"norm must be one of {', '.join(NORMS)}; got {name!r}")
    return NORMS[name](dim, eps=eps, device=device, dtype=dtype)
