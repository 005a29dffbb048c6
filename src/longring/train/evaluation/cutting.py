"""The same tokens, predicted from the last few tokens alone: a sequence cut into pieces that overlap."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import ArgumentError
from ..batches import NOTHING, Sequence_


class Cut(NamedTuple):
    """Pieces end to end, which do not see each other: their tokens, targets and bounds; and where each token stood."""

    tokens: Tensor
    targets: Tensor
    documents: tuple[int, ...]
    origins: Tensor


def cut(sequence: Sequence_, window: int) -> Cut:
    """So that no token sees more than `window` tokens, itself included, and none that may see more than half of them.

    Where a document is longer, a piece begins every half window, and predicts what no piece before it did: every token
    of the sequence is predicted once, by one that sees from half a window to a whole one, or all that there is.
    """
    if window < 2:
        raise ArgumentError(
            f"a window must be of at least 2 tokens, the one that predicts and one before; got {window}"
        )
    origins, kept, bounds = [], [], [0]
    for begin, end in pairwise(sequence.documents):
        for piece, first in _pieces(begin, end, window):
            origins.append(torch.arange(piece.start, piece.stop))
            kept.append(origins[-1] >= first)
            bounds.append(bounds[-1] + len(piece))
    where, is_kept = torch.cat(origins), torch.cat(kept)
    targets = sequence.targets[where].where(is_kept, NOTHING)
    return Cut(sequence.tokens[where], targets, tuple(bounds), where)


def _pieces(begin: int, end: int, window: int) -> Iterator[tuple[range, int]]:
    """Of one document: a piece, and the first of its tokens that predicts in it."""
    first = start = begin
    while first < end:
        stop = min(start + window, end)
        yield range(start, stop), first
        first, start = stop, start + window // 2
