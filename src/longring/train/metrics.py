"""What a run leaves of itself, step by step: a line of JSON, and TensorBoard's events where that is installed."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from .small_files import check_file, putting, reading

NAME = "metrics.jsonl"
CONFIG = "config.json"
MOST = 1 << 30  # bytes of the file: those of three million steps
LONGEST = 1 << 16  # bytes of a line
MANY = 1_000_000  # steps that are read for a picture: the last ones
SHOWN = ("loss", "tokens_per_second", "learning_rate", "gradient_norm")  # in TensorBoard


class Metrics:
    """The files of one run that goes on after `step` steps; what was written of later steps is forgotten.

    `about` is a line of its own: {"run": about}. Every step after it is {"step": 1, "loss": ..., ...}.
    """

    def __init__(self, folder: Path, *, step: int, about: Mapping[str, Any]) -> None:
        path = folder / NAME
        try:
            _keep(path, step)
            self._file = path.open("a", encoding="utf-8")
            self._board = _board(folder / "tensorboard", step)
        except OSError as failure:
            raise ArgumentError(f"metrics cannot be written into {folder}: {failure}") from failure
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


def check(folder: Path) -> None:
    """Refuse a folder in which what a run writes, step by step, is a link, a pipe, a device or a folder."""
    for name in (NAME, CONFIG):
        check_file(folder / name)
    if (folder / NAME).exists() and (size := (folder / NAME).stat().st_size) > MOST:
        raise ArgumentError(f"{folder / NAME} has {size:,} bytes, more than {MOST:,}; move it elsewhere")


def steps(folder: Path) -> list[dict[str, Any]]:
    """What was written of each step, in order; of very many steps, of the last ones."""
    return list(deque((told for _, told in _lines(folder / NAME) if "step" in told), MANY))


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Whole lines alone that a run may have written: who was killed may have left half of one."""
    if not os.path.lexists(path):
        return
    with reading(path) as file:
        is_beginning = True
        while line := file.readline(LONGEST):
            is_whole, is_beginning = is_beginning and line.endswith(b"\n"), line.endswith(b"\n")
            if is_whole and (told := _told(line)) is not None:
                yield line, told


def _told(line: bytes) -> dict[str, Any] | None:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(told, dict) and (_is_step(told) if "step" in told else "run" in told):
        return told
    return None


def _is_step(told: dict[str, Any]) -> bool:
    step, loss = told.get("step"), told.get("loss")
    return type(step) is int and 0 < step < 2**63 and type(loss) is float and math.isfinite(loss)


def _keep(path: Path, step: int) -> None:
    """Lines of steps up to this one, in a file of the run's own."""
    check_file(path)
    with putting(path) as file:
        for line, told in _lines(path):
            if told.get("step", 0) <= step:
                file.write(line)


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


def spoken_loss(loss: float) -> str:
    """Of bytes or tokens, in nats, and as many equal choices."""
    return f"{loss:.4f} (perplexity {math.exp(min(loss, 700)):,.4g})"
