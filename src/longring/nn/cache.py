"""What a model has read: keys and values of every layer, each token's on the rank that holds it.

A prompt is read in as it is dealt; every further token is the same on all ranks, and kept by the one of them that
holds the fewest, so that memory stays even. Nothing is ever dealt anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

import torch
from torch import Tensor

from ..call import Dealing, is_replicated
from ..errors import ArgumentError
from ..sharding import Sharding
from .checks import check_size

LEAST_ROOM = 16  # tokens


class Cache:
    """The keys and values of a model's layers that this rank holds, and who holds which token.

    capacity:  tokens of this rank that memory is made for at once. Without it, and beyond it, memory is doubled
               whenever it is full: it then is at most twice what is held, and while one layer's keys or values
               move into the larger room, their old room is there too.

    Keys are kept as they were turned, at their positions in the whole sequence.
    """

    def __init__(self, *, capacity: int | None = None) -> None:
        if capacity is not None:
            check_size("capacity", capacity)
        self.capacity = capacity
        self.sharding: Sharding | None = None  # of all tokens that were admitted
        self.holder: int | None = None  # of the tokens admitted last; None for a prompt, of which each rank has a part
        self._sizes: list[int] = []  # tokens of every rank
        self._layers: dict[int, LayerCache] = {}

    @property
    def length(self) -> int:
        """How many tokens all ranks hold together."""
        return 0 if self.sharding is None else self.sharding.length

    @property
    def nbytes(self) -> int:
        """The memory of this rank, what is not filled yet included."""
        return sum(layer.nbytes for layer in self._layers.values())

    def layer(self, number: int) -> LayerCache:
        return self._layers.setdefault(number, LayerCache(self))

    def admit(self, tokens: int, sharding: Dealing | None) -> None:
        """Tokens that all layers are about to read: a prompt, dealt or not, or further ones that every rank has."""
        if is_replicated(sharding):
            self._admit_further(tokens)
        elif self.sharding is not None:
            raise ArgumentError(
                f"the cache holds {self.length:,} tokens already, and a prompt comes first; further tokens are those "
                "that every rank has: say sharding='replicated'"
            )
        elif not isinstance(sharding, Sharding | None):
            raise ArgumentError(f"sharding must be a longring.Sharding, got {sharding!r}")
        else:
            self.sharding = Sharding(tokens, layout="contiguous") if sharding is None else sharding
            self._sizes = list(self.sharding.dealt.sizes)

    def _admit_further(self, tokens: int) -> None:
        if self.sharding is None:
            raise ArgumentError("sharding='replicated' adds to a cache, and this one is empty: read a prompt first")
        self.holder = min(range(len(self._sizes)), key=lambda rank: (self._sizes[rank], rank))
        self._sizes[self.holder] += tokens
        self.sharding = self.sharding.extend(self.holder, tokens)

    def is_kept_here(self) -> bool:
        """Whether this rank keeps the tokens that were admitted last, or its part of them."""
        assert self.sharding is not None
        return self.holder is None or self.holder == self.sharding.rank


class LayerCache:
    """Keys and values of one layer.

    Kept head by head, since a query reads one head's tokens after the other: on a CPU in a quarter of the time that
    it takes where heads lie between them.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache, self._held, self._room = cache, 0, 0
        self._keys = self._values = torch.empty(0)

    @property
    def sharding(self) -> Sharding:
        """Of everything that was admitted."""
        assert self.cache.sharding is not None
        return self.cache.sharding

    @property
    def keys(self) -> Tensor:
        """[batch, n, kv_heads, d] of this rank's tokens, in the order of their positions."""
        return self._keys[:, :, : self._held].transpose(1, 2)

    @property
    def values(self) -> Tensor:
        return self._values[:, :, : self._held].transpose(1, 2)

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def take(self, k: Tensor, v: Tensor) -> None:
        """Keep what this rank is to keep of the admitted tokens' keys and values, [batch, n, kv_heads, d]."""
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ArgumentError("a cache keeps numbers, through which no gradient flows; read under torch.no_grad()")
        if not self._room:
            self._make(k)
        self._check(k)
        if not self.cache.is_kept_here():
            k, v = k[:, :0], v[:, :0]
        first, self._held = self._held, self._held + k.shape[1]
        self._grow()
        self._keys[:, :, first : self._held] = k.transpose(1, 2)
        self._values[:, :, first : self._held] = v.transpose(1, 2)

    def _make(self, k: Tensor) -> None:
        self._room = max(self.cache.capacity or LEAST_ROOM, k.shape[1] if self.cache.is_kept_here() else 0)
        batch, _, kv_heads, d = k.shape
        self._keys, self._values = (k.new_empty(batch, kv_heads, self._room, d) for _ in range(2))

    def _grow(self) -> None:
        if self._held <= self._room:
            return
        before, self._room = self._room, max(2 * self._room, self._held)
        self._keys = _moved(self._keys, before, self._room)
        self._values = _moved(self._values, before, self._room)

    def _check(self, k: Tensor) -> None:
        batch, _, kv_heads, d = k.shape
        if (batch, kv_heads, d, k.dtype) != (*self._keys.shape[:2], self._keys.shape[3], self._keys.dtype):
            raise ArgumentError(
                f"the cache holds [{self._keys.shape[0]}, n, {self._keys.shape[1]}, {self._keys.shape[3]}] in "
                f"{self._keys.dtype}, and keys of shape {list(k.shape)} in {k.dtype} do not go with them"
            )


def _moved(x: Tensor, tokens: int, room: int) -> Tensor:
    wider = x.new_empty(*x.shape[:2], room, x.shape[3])
    wider[:, :, :tokens] = x[:, :, :tokens]
    return wider


def sizes_in_the_end(sizes: Sequence[int], tokens: int) -> list[int]:
    """How many tokens each rank holds when so many more were admitted, one by one."""
    fewest = [(size, rank) for rank, size in enumerate(sizes)]
    heapify(fewest)
    for _ in range(tokens):
        size, rank = fewest[0]
        heapreplace(fewest, (size + 1, rank))
    return [size for size, _ in sorted(fewest, key=lambda one: one[1])]
