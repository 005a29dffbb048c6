"""Rotary and xPos embeddings on global positions, whichever rank holds them.

Both turn pairs of numbers of a head. Pair i of d/2 turns by the angle a_i = position * base ** (-2 i / d):

    (x, y) -> (x cos a - y sin a, x sin a + y cos a)

so that the product of a query and a key depends on the difference of their positions alone. xPos also shrinks a
query's pair by z_i ** e and lets a key's grow by z_i ** -e, with e = (position - centre) / scale_base and
z_i = (2 i / d + 0.4) / 1.4, so that pairs fade with the distance from a query back to its key.

Angles are computed in float64: in float32 that of a position near a million is wrong by up to 0.03.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..numerics.online_softmax import accumulator_dtype
from .checks import check_positive

LAYOUTS = ("half", "interleaved")
GAMMA = 0.4  # of the xPos paper
WIDEST = -math.log(GAMMA / (1 + GAMMA))  # how far the first pair, which fades fastest, goes by each scale_base
FADES = {torch.float16: 7.0}  # by how many powers of e a query or key may shrink or grow
FADE = 40.0  # in other dtypes: a product of two such has room in float32


class Angles(NamedTuple):
    """cos and sin for tokens, [1 or batch, n, 1, d/2], and by what xPos shrinks queries there."""

    cos: Tensor
    sin: Tensor
    scale: Tensor | None


class Rotary(nn.Module):
    """Rotary embedding of q or k [batch, n, heads, d] at positions [n] or [batch, n]; no parameters.

    layout:  "half" pairs number i with i + d/2 (GPT-NeoX, Llama in Transformers), "interleaved" 2i with 2i + 1
             (the paper, Llama's own weights, xPos).

    Positions are numbers, not necessarily whole: dividing them interpolates. `at(positions)` gives angles, to be
    passed instead of positions where many layers share them. The result is computed in float32 at least, and has
    x's dtype.
    """

    def __init__(self, head_dim: int, *, base: float = 10000.0, layout: str = "half") -> None:
        super().__init__()
        if not isinstance(head_dim, int) or isinstance(head_dim, bool) or head_dim < 2 or head_dim % 2:
            raise ArgumentError(f"head_dim must be even and at least 2, to be turned in pairs; got {head_dim!r}")
        if layout not in LAYOUTS:
            raise ArgumentError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
        check_positive("base", base)
        self.head_dim = head_dim
        self.base = float(base)
        self.layout = layout

    def at(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Angles:
        """What tokens at these positions are turned by; float64 for x in float64."""
        angles = _column(positions) * self.base ** -self._pairs(positions.device)
        return Angles(angles.cos().to(dtype), angles.sin().to(dtype), None)

    def _pairs(self, device: torch.device) -> Tensor:
        """2 i / d. Not a buffer, which would lose its numbers on the meta device and its digits in bfloat16."""
        return torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim

    def forward(self, x: Tensor, positions: Tensor | Angles, *, keys: bool = False) -> Tensor:
        """x turned; `keys` says that x holds keys, which xPos treats otherwise than queries."""
        dtype = accumulator_dtype(x.dtype)
        angles = positions if isinstance(positions, Angles) else self.at(positions, dtype=dtype)
        self._check(x, angles)
        wide, (cos, sin) = x.to(dtype), _scaled(angles, keys)
        if self.layout == "half":
            a, b = wide.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
        else:
            a, b = wide[..., 0::2], wide[..., 1::2]
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        return turned.to(x.dtype)

    def _check(self, x: Tensor, angles: Angles) -> None:
        if x.ndim != 4 or x.shape[-1] != self.head_dim:
            raise ArgumentError(f"x must be [batch, n, heads, {self.head_dim}], got shape {list(x.shape)}")
        if angles.cos.dtype != (wanted := accumulator_dtype(x.dtype)):
            raise ArgumentError(
                f"angles are {angles.cos.dtype}, but for x in {x.dtype} they must be {wanted}; say dtype= to `at`, and "
                "cast_forward_inputs=False to the mixed precision of FSDP2, which rounds them"
            )
        rows, tokens = angles.cos.shape[:2]
        if tokens != x.shape[1] or rows not in (1, x.shape[0]):
            raise ArgumentError(f"positions are of {rows} rows and {tokens} tokens, but x has shape {list(x.shape)}")

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base:g}, layout={self.layout!r}"


class XPos(Rotary):
    """xPos: rotary embedding whose pairs fade with the distance from a query back to its key; for causal attention.

    length:      of the longest sequence; exponents are counted from its middle. Scores do not depend on it.
    scale_base:  the distance at which the first pair has faded to 0.4 / 1.4. None is 512, as in the paper, where
                 that fits, and otherwise the least that does.

    A fading that depends on distance alone and is a factor of the query times a factor of the key is exponential, and
    floating point holds only so much of it. At most e ** 40 either way is allowed (float16: e ** 7), which by 512 are
    32,695 tokens. A scale_base that does not fit is refused: the numbers would be inf at the ends.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        length: int,
        scale_base: float | None = None,
        base: float = 10000.0,
        layout: str = "interleaved",
    ) -> None:
        super().__init__(head_dim, base=base, layout=layout)
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ArgumentError(f"length must be a whole number of at least 1, got {length!r}")
        self.length = length
        if scale_base is None:
            scale_base = max(512.0, self._least_base(FADE))
        check_positive("scale_base", scale_base)
        self.scale_base = float(scale_base)
        self._check_fade(torch.float32)

    def at(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Angles:
        self._check_reach(positions)
        cos, sin, _ = super().at(positions, dtype=dtype)
        fading = (self._pairs(positions.device) + GAMMA) / (1 + GAMMA)
        scale = fading ** ((_column(positions) - self.length / 2) / self.scale_base)
        return Angles(cos, sin, scale.to(dtype))

    def _check_reach(self, positions: Tensor) -> None:
        """Where looking costs nothing; elsewhere a position far beyond `length` gives nan."""
        if not isinstance(positions, Tensor) or positions.device.type != "cpu" or torch.compiler.is_compiling():
            return
        if positions.numel() and not 0 <= positions.min() <= positions.max() < self.length:
            raise ArgumentError(
                f"positions are {positions.min()} to {positions.max()}, but xPos was made for length {self.length}"
            )

    def _check(self, x: Tensor, angles: Angles) -> None:
        super()._check(x, angles)
        self._check_fade(x.dtype)

    def _check_fade(self, dtype: torch.dtype) -> None:
        least = self._least_base(FADES.get(dtype, FADE))
        if self.scale_base < least * (1 - 1e-9):
            raise ArgumentError(
                f"scale_base {self.scale_base:g} fades too fast for {self.length:,} tokens in {dtype}: numbers are "
                f"inf at the ends; use scale_base >= {math.ceil(least)}, or None for the least that fits float32"
            )

    def _least_base(self, fade: float) -> float:
        return self.length / 2 * WIDEST / fade

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, length={self.length}, scale_base={self.scale_base:g}"


def _scaled(angles: Angles, keys: bool) -> tuple[Tensor, Tensor]:
    cos, sin, scale = angles
    if scale is None:
        return cos, sin
    return (cos / scale, sin / scale) if keys else (cos * scale, sin * scale)


def _column(positions: Tensor) -> Tensor:
    """[1 or batch, n, 1, 1], in float64."""
    if not isinstance(positions, Tensor) or positions.ndim not in (1, 2) or positions.is_complex():
        spoken = list(positions.shape) if isinstance(positions, Tensor) else repr(positions)
        raise ArgumentError(f"positions must be numbers of shape [n] or [batch, n], got {spoken}")
    return (positions if positions.ndim == 2 else positions.unsqueeze(0)).double()[..., None, None]
