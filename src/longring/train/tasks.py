"""What a run learns from: sequences by number, and what a checkpoint remembers them by."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from ..errors import ArgumentError
from . import batches
from .batches import Sequence_
from .config import Config
from .corpus import BYTES, Corpus, open_corpus
from .retrieval import Passkeys


class Sequences(Protocol):
    """A sequence is the same whoever asks for it, and whenever."""

    def sequence(self, number: int) -> Sequence_: ...


@dataclass(frozen=True)
class Task:
    """The sequences of a run.

    vocabulary:   how many tokens there are.
    fingerprint:  changes when the sequences do.
    description:  one line, for people.
    """

    name: str
    vocabulary: int
    fingerprint: str
    description: str
    sequences: Sequences = field(repr=False)


def task_of(config: Config) -> Task:
    """Of a settled config."""
    return _passkeys(config) if config.task == "passkey" else _language(config)


def corpus_of(config: Config) -> Corpus:
    """Without the run's own folder, which would be other data with every step."""
    data, out = None if config.data is None else Path(config.data), Path(config.out)
    if data is not None and os.path.isdir(data) and os.path.realpath(out) == os.path.realpath(data):
        raise ArgumentError(f"--out {out} is the folder of the data, and what a run writes is none; take another")
    return open_corpus(data, kind=config.kind, case=config.case, without=out)


def _language(config: Config) -> Task:
    corpus = corpus_of(config)
    sequences = batches.Sequences(corpus, context=cast(int, config.context), seed=config.seed)
    return Task(corpus.name, corpus.vocabulary, corpus.fingerprint, corpus.describe(), sequences)


def _passkeys(config: Config) -> Task:
    corpus = None if config.data is None else corpus_of(config)
    sequences = Passkeys(cast(int, config.context), config.seed, digits=config.digits, corpus=corpus)
    around = "words in random order" if corpus is None else corpus.describe()
    return Task(
        name="passkeys",
        vocabulary=BYTES + 1,
        fingerprint="words" if corpus is None else corpus.fingerprint,
        description=f"passkeys of {config.digits} digits in {around}",
        sequences=sequences,
    )
