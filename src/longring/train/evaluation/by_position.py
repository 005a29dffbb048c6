"""Perplexity by how many tokens a token sees: does the far context help?"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ...errors import ArgumentError
from ..batches import Sequence_, Sequences
from ..checkpoints.manifest import shown
from ..corpus import Corpus, open_corpus
from .cutting import cut
from .subject import Listener, Setting, Subject

USUAL = 16  # sequences, unless somebody says how many
COUNTED, WHOLE, CUT = range(3)  # of a sequence and a bucket: tokens, the sum of their losses, and that in the window


@dataclass(frozen=True)
class Asked:
    """Documents to be predicted; data, kind and case are those of the run where data is None."""

    data: str | None = None
    kind: str | None = None
    case: str | None = None
    split: str = "held-out"
    sequences: int | None = None
    window: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Bucket:
    """Tokens that see `least` to `most` tokens of their document, themselves included.

    loss:         in nats a token; and its standard error, over sequences, whose tokens have something in common.
    window_loss:  of the same tokens where they see a window alone,
    gain:         and by how much that is worse: what the context beyond the window gives.
    """

    least: int
    most: int
    tokens: int
    loss: float | None = None
    loss_error: float | None = None
    window_loss: float | None = None
    gain: float | None = None
    gain_error: float | None = None

    @property
    def perplexity(self) -> float | None:
        return None if self.loss is None else math.exp(min(self.loss, 700))


@dataclass(frozen=True)
class ByPosition:
    """What was found; the same on all ranks, and within rounding the same on any number of them."""

    subject: dict[str, Any]
    corpus: str
    split: str
    sequences: int
    context: int
    window: int | None
    buckets: list[Bucket]
    beyond: Bucket | None  # those that see more than the window
    everything: Bucket
    notes: list[str]  # what to know before one believes the numbers

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        for told, bucket in zip(found["buckets"], self.buckets, strict=True):
            told["perplexity"] = bucket.perplexity
        found["everything"]["perplexity"] = self.everything.perplexity
        return found


def by_position(setting: Setting, asked: Asked, listener: Listener | None = None) -> ByPosition:
    """On every rank of an initialised process group; the listener is the first rank's."""
    subject = Subject.of(setting)
    sequences = _sequences(subject, asked)
    count = _count(sequences, asked)
    if asked.window is not None and asked.window >= sequences.context:
        raise ArgumentError(
            f"--window {asked.window} leaves nothing out of a context of {sequences.context}; take a smaller one"
        )
    with subject.world.telling_of_lost_peers("the evaluation"):
        table = _table(subject, sequences, count, asked.window, listener if subject.world.is_first else None)
    ends = _bucket_ends(sequences.context)
    named = [_bucket(least, most, table[:, :, i], asked.window) for i, (least, most) in enumerate(ends)]
    return ByPosition(
        subject=subject.describe(),
        corpus=sequences.corpus.describe(),
        split=asked.split,
        sequences=count,
        context=sequences.context,
        window=asked.window,
        buckets=[bucket for bucket in named if bucket.tokens],
        beyond=None
        if asked.window is None
        else _bucket(asked.window + 1, sequences.context, table[:, :, -1], asked.window),
        everything=_bucket(1, sequences.context, table[:, :, :-1].sum(2), asked.window),
        notes=_notes(subject, asked, sequences.corpus),
    )


def _sequences(subject: Subject, asked: Asked) -> Sequences:
    config = subject.config
    if asked.data is None and config.task != "language":
        raise ArgumentError(f"this run learned the task {config.task}, not text: say --passkey, or --data PATH")
    corpus = _corpus(asked, subject)
    if corpus.vocabulary != subject.vocabulary:
        raise ArgumentError(
            f"{corpus.name} has a vocabulary of {corpus.vocabulary}, but the model one of {subject.vocabulary}; "
            "give data of the kind it was trained on"
        )
    return Sequences(corpus, context=cast(int, config.context), seed=asked.seed, split=asked.split)


def _corpus(asked: Asked, subject: Subject) -> Corpus:
    if asked.data is not None:
        return open_corpus(Path(asked.data), kind=asked.kind or "auto", case=asked.case or "kept")
    config, folder = subject.config, subject.checkpoint.folder
    path = None if config.data is None else Path(config.data)
    if path is not None and not os.path.exists(path):  # of any length, and with any letter in it
        raise ArgumentError(f"the run's own --data, {_shown(str(path))}, is not there; say where it is, by --data PATH")
    return open_corpus(path, kind=asked.kind or config.kind, case=asked.case or config.case, without=folder)


def _shown(path: str) -> str:
    return path if path.isprintable() and len(path) <= 1000 else shown(path)


def _notes(subject: Subject, asked: Asked, corpus: Corpus) -> list[str]:
    """Of data that was read otherwise than the run did, nothing is known."""
    config = subject.config
    is_as_trained = asked.data is None and asked.kind in (None, config.kind) and asked.case in (None, config.case)
    if not is_as_trained or corpus.fingerprint == subject.about.fingerprint:
        return []
    return [f"{corpus.name} has changed since the run was trained on it: it may have seen some of what is held out now"]


def _count(sequences: Sequences, asked: Asked) -> int:
    """No token counts twice: one epoch is all that there is."""
    if asked.sequences is not None and asked.sequences > sequences.per_epoch:
        raise ArgumentError(
            f"--sequences {asked.sequences}, but the {sequences.split} part of {sequences.corpus.name} has "
            f"{sequences.per_epoch} of {sequences.context} tokens"
        )
    return asked.sequences or min(USUAL, sequences.per_epoch)


# ------------------------------------------------------------------------------------------------------ the numbers


def _bucket_ends(context: int) -> list[tuple[int, int]]:
    """1, 2, 3 to 4, 5 to 8, ... tokens."""
    return [((1 << i) // 2 + 1, min(1 << i, context)) for i in range((context - 1).bit_length() + 1)]


def _bucket_of(seen: Tensor) -> Tensor:
    """How many bits it takes to write seen - 1: which of the buckets."""
    return torch.frexp((seen - 1).double()).exponent.long()


def _seen(documents: Sequence[int]) -> Tensor:
    """How many tokens of its document each token sees, itself included."""
    return torch.cat([torch.arange(1, end - begin + 1) for begin, end in pairwise(documents)])


def _table(subject: Subject, sequences: Sequences, count: int, window: int | None, listener: Listener | None) -> Tensor:
    """[sequences, 3, buckets + 1], of all ranks: the last column is of those tokens that see more than the window."""
    table = torch.zeros(count, 3, len(_bucket_ends(sequences.context)) + 1, dtype=torch.float64)
    first, rings = subject.ring
    if listener is not None:
        listener.begin(count)
    for number in range(first, count, rings):
        _fill(table[number], subject, _once(sequences, number), window)
        if listener is not None:
            listener.advance(min(rings, count - number))
    if listener is not None:
        listener.end()
    return torch.tensor(subject.world.total(table.flatten().tolist()), dtype=torch.float64).view_as(table)


def _once(sequences: Sequences, number: int) -> Sequence_:
    """A sequence in which nothing is predicted a second time: the last of an epoch ends with tokens of the next one."""
    found = sequences.sequence(number)
    found.targets[max(0, sequences.tokens_per_epoch - number * sequences.context) :] = -100
    return found


def _fill(row: Tensor, subject: Subject, sequence: Sequence_, window: int | None) -> None:
    """Add what this rank knows of one sequence, [3, buckets + 1]."""
    seen = _seen(sequence.documents)
    row[COUNTED], row[WHOLE] = _sums(subject, *sequence, seen, window)
    if window is not None:
        tokens, targets, documents, origins = cut(sequence, window)
        _, row[CUT] = _sums(subject, tokens, targets, documents, seen[origins], window)


def _sums(
    subject: Subject,
    tokens: Tensor,
    targets: Tensor,
    documents: tuple[int, ...],
    seen: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """(how many of this rank's tokens, the sum of their losses), by bucket of `seen`."""
    bounds = None if len(documents) == 2 else documents
    s = subject.sharding(len(tokens), bounds)
    tokens, targets, seen = (s.shard(whole.unsqueeze(0)) for whole in (tokens, targets, seen))
    device = subject.world.device
    losses = subject.losses(tokens.to(device), targets.to(device), s, bounds).double().cpu()
    counts = (targets != -100).double()
    bucket, beyond = _bucket_of(seen), seen > (window or torch.inf)
    size = len(_bucket_ends(cast(int, subject.config.context)))
    found = []
    for values in (counts, losses):
        sums = torch.zeros(size, dtype=torch.float64).index_add_(0, bucket.flatten(), values.flatten())
        found.append(torch.cat([sums, values[beyond].sum().unsqueeze(0)]))
    return found[0], found[1]


def _bucket(least: int, most: int, of: Tensor, window: int | None) -> Bucket:
    """From [sequences, 3]."""
    counts, whole, cut_ = of.unbind(1)
    tokens = int(counts.sum().item())
    if not tokens:
        return Bucket(least, most, 0)
    loss, loss_error = _mean(whole, counts)
    if window is None:
        return Bucket(least, most, tokens, loss, loss_error)
    gain, gain_error = _mean(cut_ - whole, counts)
    return Bucket(least, most, tokens, loss, loss_error, loss + gain, gain, gain_error)


def _mean(sums: Tensor, counts: Tensor) -> tuple[float, float | None]:
    """Over all tokens, and its standard error from how sequences differ; None of a single one."""
    mean = (sums.sum() / counts.sum()).item()
    several = int((counts > 0).sum())
    if several < 2:
        return mean, None
    spread = (sums - mean * counts).square().sum().item() * several / (several - 1)
    return mean, math.sqrt(spread) / counts.sum().item()
