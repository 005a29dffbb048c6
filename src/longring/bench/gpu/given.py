"""What every scenario starts from: random tensors of a shape, the same ones for a seed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...testing.sampled import Given


class Shape(NamedTuple):
    n: int
    heads: int
    kv_heads: int
    d: int

    def __str__(self) -> str:
        heads = f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads} heads"
        return f"n = {tokens(self.n)}, {heads}, d = {self.d}"


class Place(NamedTuple):
    """Where, and in which precision, everything is computed."""

    device: torch.device
    dtype: torch.dtype


def given(shape: Shape, place: Place, *, seed: int = 0, backward: bool = True) -> Given:
    """Standard normal, drawn in the dtype and on the device where they are used: millions of tokens fit but once."""
    random = torch.Generator(place.device).manual_seed(seed)

    def draw(heads: int) -> Tensor:
        size = (1, shape.n, heads, shape.d)
        return torch.randn(size, generator=random, dtype=place.dtype, device=place.device)

    q, k, v = draw(shape.heads), draw(shape.kv_heads), draw(shape.kv_heads)
    return Given(q, k, v, draw(shape.heads) if backward else None)


def tokens(n: int) -> str:
    """131072 as 128K, 1048576 as 1M, and what is no such multiple in full."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if n % unit == 0:
            return f"{n // unit}{name}"
    return f"{n:,}"
