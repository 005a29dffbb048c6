"""Where the rows of one fused operation lie, and what was computed for them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..geometry.stacks import Place, Stack, stacks

__all__ = ["Part", "Place", "Stack", "stacks"]


class Part(NamedTuple):
    """What was computed for the rows of a place."""

    place: Place
    out: Tensor  # [many, heads, rows, d]
    lse: Tensor | None  # [many, heads, rows]; none where parts are plainly added
