"""Which documents are trained on, and which are held out to be judged by: never the same."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from .corpus import Corpus

SPLITS = ("train", "held-out")
SHARE = 20  # one in so many is held out


class Part(NamedTuple):
    """Documents of a split; of each of them so many tokens from `start` on, which is not 0 for a cut document alone."""

    documents: NDArray[np.int64]
    lengths: NDArray[np.int64]
    start: int = 0


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ArgumentError(f"split must be 'train' or 'held-out', got {split!r}")


def part_of(corpus: Corpus, split: str) -> Part:
    """A document's own name and number decide, so that it stays where it is when others come and go."""
    check_split(split)
    if corpus.documents == 1:
        return _cut(corpus, split)
    is_held = _held_out(corpus)
    documents = np.flatnonzero(is_held if split == "held-out" else ~is_held)
    return Part(documents, corpus.lengths[documents])


def _held_out(corpus: Corpus) -> NDArray[np.bool_]:
    is_held = corpus.keys < np.uint64(2**64 // SHARE)
    if not is_held.any():  # few documents: the one that comes closest to the share wanted, lest it be the longest
        is_held[np.argmin(np.abs(corpus.lengths - corpus.total / SHARE))] = True
    if is_held.all():
        is_held[np.argmax(corpus.keys)] = False
    return is_held


def _cut(corpus: Corpus, split: str) -> Part:
    length = corpus.total
    if length < 2:
        raise ArgumentError(
            f"{corpus.name} is one document of {length} token: none is left to be held out; give more text"
        )
    held = max(1, length // SHARE)
    kept = length - held
    start, count = (kept, held) if split == "held-out" else (0, kept)
    return Part(np.zeros(1, np.int64), np.array([count], np.int64), start)
