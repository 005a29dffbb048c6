"""Retrieval by depth: is a key found wherever in a long text it was planted?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from ...errors import ArgumentError
from ..checks import whole
from ..corpus import BYTES, Corpus, open_corpus
from ..draws import mixed
from ..retrieval import DIGITS, Passkey, passkey
from .subject import Listener, Setting, Subject

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Asked:
    """Keys to be found: `trials` at each depth, read `batch` at a time; in words, or in the text of `data`."""

    depths: tuple[float, ...] = DEPTHS
    trials: int = 20
    digits: int = DIGITS
    batch: int = 8
    data: str | None = None
    kind: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        whole(self.trials, "trials", least=1)
        whole(self.batch, "batch", least=1)
        if not self.depths:
            raise ArgumentError("at least one depth is needed, from 0, the beginning, to 1, before the question")


@dataclass(frozen=True)
class Depth:
    """What was found of the keys at one depth.

    tokens_back:  from the first digit of the answer to that of the key.
    found:        of how many of the `trials` all digits were right; its share, and the standard error of that.
    digits:       the share of digits that were right.
    """

    depth: float
    tokens_back: int
    trials: int
    found: int
    digits: float

    @property
    def share(self) -> float:
        return self.found / self.trials

    @property
    def error(self) -> float:
        return math.sqrt(self.share * (1 - self.share) / self.trials)


@dataclass(frozen=True)
class ByDepth:
    """What was found; the same on all ranks, and on any number of them."""

    subject: dict[str, Any]
    context: int
    digits: int
    depths: list[Depth]

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        for told, depth in zip(found["depths"], self.depths, strict=True):
            told |= {"share": depth.share, "error": depth.error}
        return found


def by_depth(setting: Setting, asked: Asked, listener: Listener | None = None) -> ByDepth:
    """On every rank of an initialised process group; the listener is the first rank's."""
    subject = Subject.of(setting)
    if subject.vocabulary != BYTES + 1:
        raise ArgumentError(
            f"--passkey is a text, of {BYTES + 1} tokens, but the model has a vocabulary of {subject.vocabulary}"
        )
    corpus = None if asked.data is None else open_corpus(Path(asked.data), kind=asked.kind)
    context = cast(int, subject.config.context)
    with subject.world.telling_of_lost_peers("the evaluation"):
        table = _table(subject, asked, corpus, listener if subject.world.is_first else None)
    return ByDepth(
        subject=subject.describe(),
        context=context,
        digits=asked.digits,
        depths=[
            Depth(depth, _back(context, depth, asked), asked.trials, int(found), digits / asked.trials / asked.digits)
            for depth, (found, digits) in zip(asked.depths, table, strict=True)
        ],
    )


def _back(context: int, depth: float, asked: Asked) -> int:
    one = passkey(context, depth, 0, digits=asked.digits)
    return one.answer.start - one.planted.start


def _table(
    subject: Subject, asked: Asked, corpus: Corpus | None, listener: Listener | None
) -> list[tuple[float, float]]:
    """Of each depth, and of all ranks: (keys found, digits that were right)."""
    found = torch.zeros(len(asked.depths), 2, dtype=torch.float64)
    first, rings = subject.ring
    rounds = list(_rounds(asked))
    if listener is not None:
        listener.begin(len(rounds))
    for number in range(first, len(rounds), rings):
        _fill(found, subject, asked, corpus, rounds[number])
        if listener is not None:
            listener.advance(min(rings, len(rounds) - number))
    if listener is not None:
        listener.end()
    total = subject.world.total(found.flatten().tolist())
    return list(zip(total[::2], total[1::2], strict=True))


def _rounds(asked: Asked) -> Iterator[list[tuple[int, int]]]:
    """(number of the depth, trial) of texts that are read together."""
    every = [(depth, trial) for depth in range(len(asked.depths)) for trial in range(asked.trials)]
    for start in range(0, len(every), asked.batch):
        yield every[start : start + asked.batch]


def _fill(
    found: torch.Tensor, subject: Subject, asked: Asked, corpus: Corpus | None, texts: list[tuple[int, int]]
) -> None:
    """Read these texts as far as their questions, and go on: the answer is what comes."""
    rows = [_text(subject, asked, corpus, depth, trial) for depth, trial in texts]
    prompt = torch.stack([row.tokens[: row.answer.start] for row in rows])
    s = subject.sharding(prompt.shape[1])
    with subject.numerics():
        said = subject.model.generate(
            s.shard(prompt).to(subject.world.device), sharding=s, new_tokens=asked.digits
        ).cpu()
    if s.rank > 0:
        return  # who says the same
    right = said == torch.stack([row.tokens[row.answer.start :] for row in rows])
    for (depth, _), digits in zip(texts, right, strict=True):
        found[depth, 0] += float(digits.all())
        found[depth, 1] += float(digits.sum())


def _text(subject: Subject, asked: Asked, corpus: Corpus | None, depth: int, trial: int) -> Passkey:
    """The same texts and keys at every depth, so that depths differ in nothing else; keys that no run trains on."""
    context = cast(int, subject.config.context)
    seed = mixed(asked.seed, trial) >> 1  # below 2**63, as seeds are
    return passkey(context, asked.depths[depth], seed, digits=asked.digits, corpus=corpus, split="held-out")
