"""A case: who computes what, on how many ranks. Plain values, so that it can be sent to every rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ...errors import ArgumentError
from ...geometry.patterns import Dense, Dilated, Pattern
from ..gpu.given import Given, Place, Shape, given

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


class Contender(NamedTuple):
    """Who takes part: a schedule, layout and kernel of ours, or somebody whom `seats.SEATS` knows by name."""

    name: str
    kind: str = "ours"
    schedule: str | None = None
    layout: str | None = None
    kernel: str | None = None
    nodes: int = 1  # that the ranks pass for, equally many in each
    pattern: Pattern | None = None  # what it computes, where that is not what was asked for


@dataclass(frozen=True)
class Case:
    scenario: str
    shape: Shape
    ranks: int
    pattern: Pattern
    contenders: tuple[Contender, ...]
    baseline: str  # the contender that the others are compared with
    dtype: str = "fp32"
    seed: int = 0
    rounds: int = 7  # at most
    budget: float = 60.0  # seconds after which no round begins, unless there was but one
    peers: Path | None = None  # a folder with clones of other people's code

    @property
    def title(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"{spoken_pattern(self.pattern)}, {self.shape}, {self.dtype}, {ranks}"

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype not in DTYPES:
            raise ArgumentError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        return DTYPES[self.dtype]

    @property
    def heads(self) -> tuple[int, int, int]:
        """Of q, k and v."""
        return self.shape.heads, self.shape.kv_heads, self.shape.kv_heads

    def inputs(self) -> Given:
        """The same on every rank, whole."""
        return given(self.shape, Place(torch.device("cpu"), self.torch_dtype), seed=self.seed)

    def computed_by(self, contender: Contender) -> Pattern:
        return contender.pattern or self.pattern


def spoken_pattern(pattern: Pattern) -> str:
    if isinstance(pattern, Dilated):
        branches = ", ".join(f"{w}:{r}" for w, r in pattern.branches)
        return f"{'causal' if pattern.causal else 'full'} dilated {branches}"
    assert isinstance(pattern, Dense)
    words = "causal" if pattern.causal else "full"
    return words if pattern.window is None else f"{words}, window {pattern.window[0]} to {pattern.window[1]}"
