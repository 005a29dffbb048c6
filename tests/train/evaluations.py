"""Runs on ranks of this machine that are then judged, for tests; and what they should be found to be, by definition."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from longring import ArgumentError
from longring.train import checkpoints
from longring.train.batches import Sequences
from longring.train.config import Config
from longring.train.corpus import open_corpus
from longring.train.draws import mixed
from longring.train.evaluation import by_depth, by_position
from longring.train.evaluation.subject import Setting
from longring.train.job import new_model
from longring.train.retrieval import passkey
from longring.train.weights import load_weights


def judged(folder: Path, questions: list[tuple[dict[str, Any], Any]]) -> list[dict[str, Any]]:
    """On each rank, one question after the other: (words of a Setting, what is asked)."""
    import torch.distributed as dist

    found = []
    for words, asked in questions:
        setting = Setting(str(folder), dist.get_world_size(), "cpu", timeout=60.0, **words)
        ask = by_position.by_position if isinstance(asked, by_position.Asked) else by_depth.by_depth
        told = ask(setting, asked).as_json()
        del told["subject"]  # where, and on how many ranks
        found.append(told)
    return found


def refused(questions: list[tuple[Path, Any]]) -> list[str]:
    """What each of them is refused with."""
    texts = []
    for folder, asked in questions:
        try:
            judged(folder, [({}, asked)])
        except ArgumentError as refusal:
            texts.append(str(refusal))
    return texts


def model_of(folder: Path) -> Any:
    """In this process, alone."""
    found = checkpoints.find(folder)
    model = new_model(Config(**found.about["config"]), found.about["vocabulary"])
    load_weights(found, model, group=None, timeout=None)
    return model.eval()


# --------------------------------------------------------------------------------------------- by their definitions


@torch.no_grad()
def loss_of(model: Any, tokens: torch.Tensor, target: int) -> float:
    """Of what comes behind these tokens, which the model reads with nothing before them."""
    return F.cross_entropy(model(tokens.unsqueeze(0))[0, -1], torch.tensor(target)).item()


def first_seen(offset: int, window: int | None) -> int:
    """The first token of its document that the one at `offset` sees: pieces begin every half window."""
    if window is None or offset < window:
        return 0
    half = window // 2
    return -(-(offset + 1 - window) // half) * half


def losses_by_seen(folder: Path, corpus: Path, context: int, window: int | None) -> dict[int, list[float]]:
    """Every token of the held-out documents, on its own: how many it may see -> losses."""
    model, found = model_of(folder), {}
    sequences = Sequences(open_corpus(corpus), context=context, seed=0, split="held-out")
    left = sequences.tokens_per_epoch
    for number in range(sequences.per_epoch):
        tokens, targets, documents = sequences.sequence(number)
        for begin, end in pairwise(documents):
            for place in range(begin, min(end, left)):
                if targets[place] != -100:
                    start = begin + first_seen(place - begin, window)
                    loss = loss_of(model, tokens[start : place + 1], int(targets[place]))
                    found.setdefault(place - begin + 1, []).append(loss)
        left -= context
    return found


@torch.no_grad()
def right_digits(folder: Path, context: int, depth: float, *, trials: int, digits: int) -> list[list[bool]]:
    """Of each key, whether each digit is the likeliest behind what was said so far; all is read anew for each."""
    model, found = model_of(folder), []
    for trial in range(trials):
        tokens, answer = passkey(context, depth, mixed(0, trial) >> 1, digits=digits, split="held-out")
        said = tokens[: answer.start]
        for _ in answer:
            said = torch.cat([said, model(said.unsqueeze(0))[0, -1:].argmax(-1)])
        found.append((said == tokens)[answer.start :].tolist())
    return found
