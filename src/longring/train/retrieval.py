"""A task that only a long memory solves: a key, planted somewhere in a long text, is asked for at its end.

After "Landmark Attention" (Mohtashami and Jaggi 2023), whose text is repeated sentences; here it is words in random
order, or real text, of which a model cannot know that it may be skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError
from .batches import Sequence_
from .checks import whole
from .corpus import BYTES, Corpus
from .draws import below, draws, mixed
from .held_out import SHARE, check_split

QUESTION = b" What is the pass key? The pass key is "
BEFORE, AFTER = b" The pass key is ", b". Remember it. "
DIGITS = 5
WORDS = """
the of and to in that it is was for on with as his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people
""".split()  # noqa: SIM905  (a list of them would be 80 lines)


class Passkey(NamedTuple):
    """Bytes as tokens, [context], and where at their end the answer stands. Until there all may be read."""

    tokens: Tensor
    answer: range

    @property
    def targets(self) -> Tensor:
        """What each token is to predict, [context]: the answer alone, and -100 elsewhere."""
        targets = torch.full_like(self.tokens, -100)
        targets[self.answer.start - 1 : self.answer.stop - 1] = self.tokens[self.answer.start : self.answer.stop]
        return targets

    @property
    def planted(self) -> range:
        """Where the key stands the first time."""
        text = bytes(self.tokens.tolist())
        start = text.index(BEFORE + text[self.answer.start : self.answer.stop] + AFTER) + len(BEFORE)
        return range(start, start + len(self.answer))


def passkey(
    context: int,
    depth: float,
    seed: int,
    *,
    digits: int = DIGITS,
    corpus: Corpus | None = None,
    split: str | None = None,
) -> Passkey:
    """A text of `context` bytes in which a key is planted at `depth`, from 0, the beginning, to 1, before the question.

    A pure function of its arguments. The seed decides about key and text, the depth about the place alone. The text
    is common words in random order, or what stands somewhere in a `corpus` of text. With a `split` the key is one of
    those to be trained on ("train") or one of the others ("held-out"), of which there is about one in twenty.
    """
    for value, name, least in ((context, "context", 2), (seed, "seed", 0)):
        whole(value, name, least=least)
    whole(digits, "digits", least=1, most=18)
    if not 0 <= depth <= 1:
        raise ArgumentError(f"depth must be from 0, the beginning, to 1, the end; got {depth}")
    key = _key(seed, digits, split)
    planted = BEFORE + key + AFTER
    length = context - len(planted) - len(QUESTION) - digits
    if length < 0:
        raise ArgumentError(
            f"a key of {digits} digits and its question take {context - length} tokens, got a context of {context}"
        )
    filler = _words(length, seed) if corpus is None else _passage(corpus, length, seed)
    place = int(depth * length + 0.5)
    text = filler[:place] + planted + filler[place:] + QUESTION + key
    tokens = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
    return Passkey(tokens, range(context - digits, context))


def is_held_out(key: bytes) -> bool:
    """Whether it is never trained on; its own digits decide."""
    return mixed(len(key), int(key)) % SHARE == 0


def _key(seed: int, digits: int, split: str | None) -> bytes:
    """The first one drawn that is in the split."""
    if split is not None:
        check_split(split)
    drawn, time = mixed(seed, 0), 0
    while True:
        key = str(drawn % 10**digits).zfill(digits).encode()
        if split is None or is_held_out(key) == (split == "held-out"):
            return key
        time += 1
        drawn = mixed(seed, 0, time)


def _words(length: int, seed: int) -> bytes:
    count = length // 3 + 1  # a word has two letters at least, and a space
    return " ".join([WORDS[i] for i in below(len(WORDS), draws(count, seed, 1))]).encode()[:length]


def _passage(corpus: Corpus, length: int, seed: int) -> bytes:
    """From somewhere in the corpus on, document after document, and from the first again behind the last."""
    if corpus.end != BYTES:
        raise ArgumentError(f"the filler must be text, but {corpus.name} has a vocabulary of {corpus.vocabulary}")
    ends = np.cumsum(corpus.lengths)
    at = mixed(seed, 1) % corpus.total
    document = int(np.searchsorted(ends, at, side="right"))
    start = at - int(ends[document] - corpus.lengths[document])
    parts = []
    while length:
        stop = min(int(corpus.lengths[document]), start + length)
        parts.append(corpus.tokens(document, start, stop).tobytes())
        length -= stop - start
        document, start = (document + 1) % corpus.documents, 0
    return b"".join(parts)


@dataclass(frozen=True)
class Passkeys:
    """Texts with a key each, by number, as `Sequences` gives documents: the task "passkey" of a run.

    Every text is a sequence of its own, its key at any depth with equal chance, and the digits of the answer are all
    that is to be predicted.
    """

    context: int
    seed: int
    digits: int = DIGITS
    corpus: Corpus | None = None

    def __post_init__(self) -> None:
        self.sequence(0)  # which refuses what cannot be planted

    def sequence(self, number: int) -> Sequence_:
        whole(number, "number", least=0)
        depth = mixed(self.seed, number, 1) / 2**64
        seed = mixed(self.seed, number, 0) >> 1  # below 2**63, as seeds are
        found = passkey(self.context, depth, seed, digits=self.digits, corpus=self.corpus, split="train")
        return Sequence_(found.tokens, found.targets, (0, self.context))
