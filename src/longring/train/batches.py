"""Sequences of equal length, cut from documents laid end to end in an order that seed and epoch decide.

Sequence 7 is the same whoever asks, and whenever: on any number of ranks, in any layout, after any restart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ArgumentError
from .checks import whole
from .corpus import Corpus
from .draws import draws
from .held_out import Part, part_of

NOTHING = -100  # the target of a token that predicts none, as cross-entropy ignores it


class Sequence_(NamedTuple):  # noqa: N801  (Sequence is Python's)
    """One sequence: tokens [context], what each is to predict, and where documents lie: (0, b1, ..., context)."""

    tokens: Tensor
    targets: Tensor
    documents: tuple[int, ...]


class Piece(NamedTuple):
    """Tokens start..stop-1 of a document that its end has been put behind."""

    number: int  # of the document, in its split
    start: int
    stop: int


class Epoch(NamedTuple):
    """Documents in the order of an epoch, and where on the line each of them ends."""

    order: NDArray[np.int64]
    ends: NDArray[np.int64]


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The numbers 0..count-1 in the order of an epoch: by a draw for each, and of equal draws the lower first."""
    return np.argsort(draws(count, seed, epoch), kind="stable")


class Sequences:
    """The sequences of a split, by number: a pure function of corpus, context, seed and number.

    Each document is closed by the corpus's end token. An epoch lays all of them end to end, in an order of its own, and
    the next begins where it ended: a line that is cut into sequences of `context` tokens. A long document runs on from
    one sequence into the next, and the last sequence of an epoch is filled from the next epoch. Every token of a
    document is to predict the next one, even where that is in the next sequence; the end token predicts nothing.

    per_epoch:         how many sequences it takes to see every token once.
    tokens_per_epoch:  end tokens included.
    """

    def __init__(self, corpus: Corpus, *, context: int, seed: int, split: str = "train") -> None:
        self.corpus = corpus
        self.context = whole(context, "context", least=2)
        self.seed = whole(seed, "seed", least=0)
        self.split = split
        self.part: Part = part_of(corpus, split)
        self.tokens_per_epoch = int(self.part.lengths.sum()) + len(self.part.lengths)
        self.per_epoch = -(-self.tokens_per_epoch // self.context)
        self._epochs: dict[int, Epoch] = {}

    def sequence(self, number: int) -> Sequence_:
        """Any one of them. There is no last: epochs follow one another."""
        whole(number, "number", least=0)
        if (number + 1) * self.context >= 2**63:
            raise ArgumentError(f"sequence {number} of {self.context} tokens lies beyond token 2**63")
        tokens = np.empty(self.context, np.int64)
        targets = np.full(self.context, NOTHING, np.int64)
        bounds = [0]
        for piece in self._pieces(number):
            begin, end = bounds[-1], bounds[-1] + piece.stop - piece.start
            closed = self._read(piece)  # one token further than the piece, where the document goes on
            tokens[begin:end] = closed[: end - begin]
            targets[begin : begin + len(closed) - 1] = closed[1:]
            bounds.append(end)
        return Sequence_(torch.from_numpy(tokens), torch.from_numpy(targets), tuple(bounds))

    def _pieces(self, number: int) -> Iterator[Piece]:
        """What lies on the line from the first token of a sequence to its last."""
        epoch, at = divmod(number * self.context, self.tokens_per_epoch)
        missing = self.context
        while missing:
            order, ends = self._laid_out(epoch)
            for place in range(int(np.searchsorted(ends, at, side="right")), len(order)):
                document, end = int(order[place]), int(ends[place])
                stop = int(self.part.lengths[document]) + 1
                start = stop - (end - at)
                taken = min(missing, end - at)
                yield Piece(document, start, start + taken)
                at, missing = at + taken, missing - taken
                if not missing:
                    return
            epoch, at = epoch + 1, 0

    def _read(self, piece: Piece) -> NDArray[np.int64]:
        """The piece, and the token after it unless the piece ends its document."""
        length = int(self.part.lengths[piece.number])
        stop = min(piece.stop + 1, length)
        found = np.empty(0, np.int64)
        if piece.start < stop:
            first = self.part.start
            document = int(self.part.documents[piece.number])
            found = self.corpus.tokens(document, first + piece.start, first + stop).astype(np.int64)
        return np.append(found, self.corpus.end) if piece.stop >= length else found

    def _laid_out(self, epoch: int) -> Epoch:
        """The order of an epoch. Two are kept: a sequence may begin in one and end in the next."""
        found = self._epochs.get(epoch)
        if found is None:
            order = shuffled(len(self.part.lengths), self.seed, epoch)
            found = Epoch(order, np.cumsum(self.part.lengths[order] + 1))
            self._epochs = dict([*self._epochs.items()][-1:]) | {epoch: found}
        return found
