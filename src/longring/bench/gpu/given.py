"""What every scenario starts from: random tensors of a shape, the same ones for a seed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    n: int
    heads: int
    kv_heads: int
    d: int

    def __str__(self) -> str:
        heads = f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads} heads"
        return f"n = {tokens(self.n)}, {heads}, d = {self.d}"


class Given(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None

    @property
    def upstream(self) -> Tensor:
        assert self.dout is not None, "made without a gradient to start a backward from"
        return self.dout

    @property
    def tensor_bytes(self) -> int:
        """One tensor of the call's size: the unit in which memory is told."""
        return self.q.numel() * self.q.element_size()

    def with_gradients(self) -> Given:
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        return Given(q, k, v, self.dout)


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
