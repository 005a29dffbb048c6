"""What a run leaves of itself, step by step: a line of JSON, and TensorBoard's events where that is installed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .small_files import put

NAME = "metrics.jsonl"
SHOWN = ("loss", "tokens_per_second", "learning_rate", "gradient_norm")  # in TensorBoard


class Metrics:
    """The files of one run that goes on after `step` steps; what was written of later steps is forgotten.

    `about` is a line of its own: {"run": about}. Every step after it is {"step": 1, "loss": ..., ...}.
    """

    def __init__(self, folder: Path, *, step: int, about: Mapping[str, Any]) -> None:
        path = folder / NAME
        _keep(path, step)
        self._file = path.open("a", encoding="utf-8")
        self._board = _board(folder / "tensorboard", step)
        self._write({"run": dict(about)})

    @property
    def has_board(self) -> bool:
        return self._board is not None

    def step(self, record: Mapping[str, Any]) -> None:
        self._write(record)
        if self._board is not None:
            for name in SHOWN:
                self._board.add_scalar(name, record[name], record["step"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _write(self, told: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(told, allow_nan=False) + "\n")
        self._file.flush()  # whoever looks, or a kill, finds whole lines


def steps(folder: Path) -> list[dict[str, Any]]:
    """What was written of each step, in order."""
    return [told for _, told in _lines(folder / NAME) if "step" in told]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Whole lines alone: who was killed may have left half of one."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                told = json.loads(line)
            except ValueError:
                continue
            if isinstance(told, dict) and line.endswith("\n"):
                yield line, told


def _keep(path: Path, step: int) -> None:
    """Lines of steps up to this one."""
    if path.exists():
        put(path, "".join(line for line, told in _lines(path) if told.get("step", 0) <= step))


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


def spoken_loss(loss: float) -> str:
    """Of bytes or tokens, in nats, and as many equal choices."""
    return f"{loss:.4f} (perplexity {math.exp(min(loss, 700)):,.4g})"
