"""Numbers that are a function of seed, tensor, batch row, position, head and dimension: no tensor has to exist whole.

Those of gradients are a function of who sends them, too: many ranks find some for the same row.

A hash of integers that wrap around, the same bits on every device: 64 bits of a row (a position of a head), of which
32 are stepped through the dimensions by the other 32, and stirred. Uniform, with mean 0 and variance 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ArgumentError

TENSORS = {"q": 1, "k": 2, "v": 3, "dout": 4, "dk": 5, "dv": 6}
AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 23}  # numbers: what a core's cache holds; what keeps a GPU busy
GOLDEN = 0x9E3779B97F4A7C15  # odd, and its multiples are spread evenly over 64 bits
STIR_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # splitmix64
STIR_32 = (0x21F0AAAD, 0x735A2D97)  # the "lowbias32" hash
SPREAD = 3**0.5 / 2**31  # from the integers of 32 bits to variance 1


class Numbers:
    """Draws rows of q, k, v and dout, and of gradients. All memory it works in is `workspace_bytes`, taken once."""

    def __init__(self, seed: int, head_dim: int, device: torch.device) -> None:
        if not 0 <= seed < 2**63:
            raise ArgumentError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed}")
        self.seed, self.d, self.device = seed, head_dim, device
        self._vectors = max(1, AT_ONCE[device.type] // head_dim)
        size = (self._vectors, head_dim)
        self._words, self._shifted = (torch.empty(size, dtype=torch.int32, device=device) for _ in range(2))
        self._drawn = torch.empty(size, dtype=torch.float32, device=device)
        self._dims = torch.arange(head_dim, dtype=torch.int32, device=device)
        self._keys = torch.empty(3, self._vectors, dtype=torch.int64, device=device)
        self._steps = torch.empty(2, self._vectors, dtype=torch.int32, device=device)

    @property
    def workspace_bytes(self) -> int:
        held = (self._words, self._shifted, self._drawn, self._dims, self._keys, self._steps)
        return sum(x.nbytes for x in held)

    def fill(
        self, into: Tensor, tensor: str, batch: int, positions: range, heads: range, *, sender: int | None = None
    ) -> None:
        """Draw into [positions, heads, d], contiguous."""
        flat = into.view(-1, self.d)
        assert len(flat) == len(positions) * len(heads)
        for first in range(0, len(flat), self._vectors):
            count = min(self._vectors, len(flat) - first)
            index = self._keys[2, :count]
            torch.arange(first, first + count, out=index)
            high, low = self._keys[0, :count], self._keys[1, :count]
            torch.div(index, len(heads), rounding_mode="floor", out=high)
            torch.remainder(index, len(heads), out=low)
            high.mul_(positions.step).add_(positions.start)
            low.mul_(heads.step).add_(heads.start)
            self._draw(flat[first : first + count], high, low, self._salt(tensor, batch, sender))

    def at(
        self,
        tensor: str,
        batch: int,
        positions: Tensor,
        head: int,
        dtype: torch.dtype,
        *,
        sender: int | None = None,
    ) -> Tensor:
        """[positions, d] of one head, at any positions."""
        found = torch.empty(len(positions), self.d, dtype=dtype, device=self.device)
        for first in range(0, len(positions), self._vectors):
            some = positions[first : first + self._vectors]
            high, low = self._keys[0, : len(some)], self._keys[1, : len(some)]
            high.copy_(some)
            low.fill_(head)
            self._draw(found[first : first + len(some)], high, low, self._salt(tensor, batch, sender))
        return found

    def _salt(self, tensor: str, batch: int, sender: int | None) -> int:
        """64 bits of seed, tensor and batch row, and of the sender if there is one."""
        salt = _stirred(_stirred(self.seed * GOLDEN) + GOLDEN * (8 * batch + TENSORS[tensor]))
        return salt if sender is None else _stirred(salt + GOLDEN * (sender + 1))

    def _draw(self, into: Tensor, positions: Tensor, heads: Tensor, salt: int) -> None:
        """The positions and heads, as int64, are used up."""
        count = len(into)
        scratch = self._keys[2, :count]
        key = positions.mul_(1 << 20).bitwise_xor_(heads)  # positions below 2**44, heads below 2**20
        _stir(key.mul_(signed(GOLDEN)).add_(signed(salt)), scratch)
        start, step = self._steps[0, :count], self._steps[1, :count]
        start.copy_(_low(key, scratch))
        torch.bitwise_right_shift(key, 32, out=scratch)
        step.copy_(scratch)
        step.bitwise_or_(1)  # odd: no dimension repeats another
        words, shifted, drawn = self._words[:count], self._shifted[:count], self._drawn[:count]
        torch.mul(step.unsqueeze(1), self._dims, out=words)
        words.add_(start.unsqueeze(1))
        for multiplier, shift in zip(STIR_32, (16, 15), strict=True):
            torch.bitwise_right_shift(words, shift, out=shifted)
            words.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1)).mul_(multiplier)
        into.copy_(drawn.copy_(words).mul_(SPREAD))  # the upper bits are the good ones, and a float has no others


def _stir(x: Tensor, scratch: Tensor) -> None:
    """splitmix64's finalizer, in place."""
    for shift, multiplier in zip((30, 27), STIR_64, strict=True):
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_((1 << (64 - shift)) - 1)).mul_(signed(multiplier))
    torch.bitwise_right_shift(x, 31, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_((1 << 33) - 1))


def _stirred(x: int) -> int:
    x %= 1 << 64
    for shift, multiplier in zip((30, 27), STIR_64, strict=True):
        x = (x ^ x >> shift) * multiplier % (1 << 64)
    return x ^ x >> 31


def _low(x: Tensor, scratch: Tensor) -> Tensor:
    """The lower 32 bits as a signed number, by arithmetic that no device rounds or saturates."""
    torch.bitwise_and(x, (1 << 32) - 1, out=scratch)
    return scratch.bitwise_xor_(1 << 31).sub_(1 << 31)


def signed(x: int) -> int:
    """The number of 64 bits that torch reads in the same bits."""
    return x - (1 << 64) if x >= 1 << 63 else x
