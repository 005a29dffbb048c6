"""Random numbers that are defined here, to the bit, on every machine and for ever.

The order of the data is part of a checkpoint, and a generator of a library may change with its version. This one is
splitmix64 (Steele, Lea and Flood 2014): a counter, and a mixing of its 64 bits.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ODD = 0x9E3779B97F4A7C15  # the counter's step: 2**64 over the golden ratio
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(*numbers: int) -> int:
    """One number of 64 bits from several of any size; another one wherever one of them, or their order, changes."""
    said = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little")


def named(name: bytes) -> int:
    """64 bits from a name."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def draws(count: int, *numbers: int, start: int = 0) -> NDArray[np.uint64]:
    """`count` draws of 64 bits each from the stream of these numbers, from its draw `start` on."""
    counter = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    return scrambled(np.uint64(mixed(*numbers)) + counter * np.uint64(ODD))


def scrambled(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A one-to-one map of 64 bits onto 64 bits in which every bit decides about every other."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_FIRST)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_SECOND)
    return bits ^ (bits >> np.uint64(31))


def below(limit: int, drawn: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Each draw as a whole number from 0 to limit - 1; limit at most 2**32."""
    assert 1 <= limit <= 2**32
    return (((drawn >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32)).astype(np.int64)


def one(limit: int, draw: np.uint64) -> int:
    """A single draw as a whole number from 0 to limit - 1."""
    return int(draw) * limit >> 64
