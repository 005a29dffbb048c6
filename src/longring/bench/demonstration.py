"""The demonstration: patterns, layouts and schedules on virtual ranks, forward and backward, counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry.patterns import Dense, Dilated, Pattern
from ..simulation import Simulation, simulate


class Size(NamedTuple):
    """How large a demonstration is."""

    tokens: int
    ranks: int
    heads: int
    kv_heads: int
    head_dim: int
    seed: int


@dataclass(frozen=True)
class Case:
    """One row of the demonstration."""

    name: str
    pattern: Pattern
    layout: str
    schedule: str
    dtype: torch.dtype = torch.float32


class Answer(NamedTuple):
    """What attention gives back, forward and backward."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class Played:
    """What a case gave, and for every rank what it held and sent, beside what the plan said."""

    case: Case
    kernel: str
    answer: Answer
    peak_bytes: tuple[int, ...]
    peak_bytes_alone: int
    forward_bytes: tuple[int, ...]
    forward_predicted: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    backward_predicted: tuple[int, ...]

    @property
    def share_of_one_rank(self) -> float:
        """The fullest rank's bytes over those of one rank that does everything."""
        return max(self.peak_bytes) / self.peak_bytes_alone

    @property
    def bytes_sent(self) -> int:
        """By the rank that sent most, forward and backward."""
        return max(map(sum, zip(self.forward_bytes, self.backward_bytes, strict=True)))

    @property
    def bytes_predicted(self) -> int:
        return max(map(sum, zip(self.forward_predicted, self.backward_predicted, strict=True)))

    @property
    def bytes_agree(self) -> bool:
        """Rank by rank and pass by pass, not only at the busiest rank."""
        return (self.forward_bytes, self.backward_bytes) == (self.forward_predicted, self.backward_predicted)


def cases(tokens: int) -> list[Case]:
    """Every schedule and every layout, on patterns that a sequence of so many tokens can show."""
    causal = Dense(causal=True)
    window = Dense(causal=True, window=(max(1, tokens // 8), 0))
    segments, rates = _branches(tokens)
    return [
        Case("causal", causal, "zigzag", "ring"),
        Case("causal", causal, "contiguous", "ring"),
        Case("causal", causal, "striped", "ring"),
        Case("causal", causal, "zigzag", "gather"),
        Case("causal, bf16", causal, "zigzag", "ring", torch.bfloat16),
        Case("window", window, "contiguous", "exchange"),
        Case("documents", Dense(causal=True, documents=_documents(tokens)), "dealt", "exchange"),
        Case("dilated", Dilated(segments, rates), "contiguous", "exchange"),
        Case("dilated, block", Dilated(segments, rates, phase="block"), "contiguous", "ring"),
    ]


def _branches(tokens: int) -> tuple[list[int], list[int]]:
    """A short branch of about an eighth of the tokens, and two that are longer and sparser."""
    shortest = 1 << max(0, (tokens // 8).bit_length() - 1)
    return [shortest, 4 * shortest, 16 * shortest], [1, 2, 4]


def _documents(tokens: int) -> list[int]:
    """Long and short ones, cut where no rank ends."""
    inside = {tokens * part // 100 for part in (4, 5, 33, 52, 86)}
    return sorted({0, tokens} | inside)


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def inputs(size: Size, dtype: torch.dtype) -> Inputs:
    """The same random numbers for every case, rounded to its dtype."""
    random = torch.Generator().manual_seed(size.seed)
    heads = size.heads, size.kv_heads, size.kv_heads, size.heads
    return Inputs(*(torch.randn(1, size.tokens, h, size.head_dim, generator=random).to(dtype) for h in heads))


def play(case: Case, ranks: int, given: Inputs) -> Played:
    """The case on so many ranks, and once more on one, to compare with what that one holds."""
    sim, answer = _simulated(case, ranks, given)
    alone, _ = _simulated(case, 1, given)
    assert sim.backward is not None
    return Played(
        case=case,
        kernel=sim.kernel.name,
        answer=answer,
        peak_bytes=sim.peak_bytes,
        peak_bytes_alone=max(alone.peak_bytes),
        forward_bytes=sim.forward.bytes_sent,
        forward_predicted=sim.forward.predicted_bytes,
        backward_bytes=sim.backward.bytes_sent,
        backward_predicted=sim.backward.predicted_bytes,
    )


def _simulated(case: Case, ranks: int, given: Inputs) -> tuple[Simulation, Answer]:
    q, k, v = (x.clone().requires_grad_() for x in given[:3])
    sim = simulate(q, k, v, ranks=ranks, pattern=case.pattern, layout=case.layout, schedule=case.schedule)
    dq, dk, dv = torch.autograd.grad(sim.out, (q, k, v), given.dout)
    return sim, Answer(sim.out.detach(), sim.lse.detach(), dq, dk, dv)
