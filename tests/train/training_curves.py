"""Short training runs on ranks of this machine, for tests: the real loop, on a small corpus, several in one launch."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import longring as lr
from longring.train.config import read
from longring.train.metrics import steps as steps_of
from longring.train.run import train
from longring.train.stopping import Stopping

STEPS = 30
SMALL = {"context": 61, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "batch": 2, "learning_rate": 3e-3}
SMALL |= {"steps": STEPS, "save_every": 1000, "dtype": "fp64", "timeout": 60.0}
"""An odd number of tokens, which no number of ranks divides, and documents that are shorter and longer than that."""


def write_corpus(folder: Path) -> Path:
    """Words from a few letters: something to learn."""
    draw = random.Random(3)
    words = ["".join(draw.choices(string.ascii_lowercase[:8], k=draw.randint(2, 5))) for _ in range(12)]
    folder.mkdir()
    for number in range(40):
        text = " ".join(draw.choices(words, k=draw.choice([3, 8, 60])))
        (folder / f"{number:02}.txt").write_text(text)
    return folder


class After(Stopping):
    """Asks to stop in step `number`, on one rank alone."""

    def __init__(self, number: int | None, rank: int = 0) -> None:
        super().__init__()
        self.left, self.rank = number, rank

    @property
    def is_asked(self) -> bool:
        if self.left is None or lr.Sharding(1, _world()).rank != self.rank:
            return False
        self.left -= 1
        return self.left <= 0


def _world() -> Any:
    import torch.distributed as dist

    return dist.group.WORLD


def settings(ranks: int, out: Path, **words: Any) -> Any:
    """A settled config of so many ranks; words are those of Config."""
    return read({**SMALL, **words, "out": out}).settled(device=words.get("device", "cpu"), ranks=ranks)


def run_all(configs: list[Any], stop_in_step: int | None = None, keeps_batch: bool = False) -> list[Any]:
    """On each rank, one run after the other: their reports."""
    return [train(config, stopping=After(stop_in_step), keeps_batch=keeps_batch) for config in configs]


def refusals(configs: list[Any], keeps_batch: bool = False) -> list[str]:
    """What each of them is refused with."""
    texts = []
    for config in configs:
        try:
            train(config, stopping=Stopping(), keeps_batch=keeps_batch)
        except lr.ArgumentError as refusal:
            texts.append(str(refusal))
    return texts


def outcomes(configs: list[Any], keeps_batch: bool = False) -> list[str]:
    """What comes of each of them on this rank: what it is refused with, or where it began."""
    texts = []
    for config in configs:
        try:
            report = train(config, stopping=Stopping(), keeps_batch=keeps_batch)
        except lr.LongringError as refusal:
            texts.append(f"{type(refusal).__name__}: {refusal}")
        else:
            texts.append(f"from {report.resumed_from} to {report.steps}; {'; '.join(report.notes)}")
    return texts


def losses(out: Path) -> list[float]:
    return _column(out, "loss")


def norms(out: Path) -> list[float]:
    """Of the gradients, before they are cut down: Adam takes gradients that are all too large for right ones."""
    return _column(out, "gradient_norm")


def _column(out: Path, name: str) -> list[float]:
    records = steps_of(out)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1)), "every step once, in order"
    return [record[name] for record in records]


def launched(configs: list[Any], stop_in_step: int | None = None, keeps_batch: bool = False) -> list[Any]:
    """Reports of the first rank; all ranks tell the same."""
    every = lr.launch(run_all, configs, stop_in_step, keeps_batch, ranks=configs[0].ranks, timeout=110)
    for reports in every[1:]:
        for ours, theirs in zip(every[0], reports, strict=True):
            assert (ours.steps, ours.last_loss) == (theirs.steps, theirs.last_loss)
    return every[0]
