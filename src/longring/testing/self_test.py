"""A self-test: two ranks on this machine, forward and backward, held against the definition."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import LongringError
from ..functional import attention, explain
from ..geometry.patterns import Dense, Dilated, Pattern
from ..launching import launch
from ..sharding import Sharding
from .budgets import Verdict, budgets, relative_error
from .oracle import Result

RANKS, TOKENS, HEADS, KV_HEADS, HEAD_DIM = 2, 301, 4, 2, 32


class Question(NamedTuple):
    name: str
    pattern: Pattern
    layout: str
    dtype: torch.dtype


QUESTIONS = (
    Question("causal", Dense(causal=True), "zigzag", torch.float32),
    Question("causal, 16 bits", Dense(causal=True), "zigzag", torch.bfloat16),
    Question("window", Dense(causal=True, window=(40, 0)), "contiguous", torch.float32),
    Question("dilated", Dilated([32, 128, 512], [1, 2, 4]), "contiguous", torch.float32),
)


class Said(NamedTuple):
    """What a rank says of a question: the whole answer, and what was taken for it."""

    answer: Result
    schedule: str
    kernel: str


@dataclass(frozen=True)
class Judged:
    question: str
    layout: str
    dtype: str
    schedule: str
    kernel: str
    verdicts: tuple[Verdict, ...]

    @property
    def ok(self) -> bool:
        return all(verdict.ok for verdict in self.verdicts)

    @property
    def budget_used(self) -> float:
        """The largest share of what is allowed."""
        return max(verdict.error / verdict.allowed for verdict in self.verdicts)


@dataclass(frozen=True)
class Outcome:
    device: str
    judged: tuple[Judged, ...]
    seconds: float
    failure: str | None = None  # what kept it from an answer

    @property
    def ok(self) -> bool:
        return self.failure is None and all(one.ok for one in self.judged)


def self_test(device: str = "cpu", *, timeout: float = 30.0) -> Outcome:
    """Every question on two processes of this machine; `device` is "cpu" or "cuda", and all is over after `timeout`."""
    start = time.monotonic()
    backend = "gloo" if device == "cpu" else "auto"
    try:
        said, *_ = launch(_answers, device, timeout, ranks=RANKS, timeout=timeout, backend=backend)
    except (LongringError, OSError, EOFError, RuntimeError) as failure:  # of ranks, the system, the fork server
        what = str(failure).strip().partition("\n")[0]
        return Outcome(device, (), time.monotonic() - start, what or type(failure).__name__)
    judged = tuple(_judged(question, one) for question, one in zip(QUESTIONS, said, strict=True))
    return Outcome(device, judged, time.monotonic() - start)


def _answers(device: str, timeout: float) -> list[Said]:
    """In each process."""
    if device == "cuda":  # where ranks are more than GPUs, they share them
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return [_answer(question, device, timeout) for question in QUESTIONS]


def _answer(question: Question, device: str, timeout: float) -> Said:
    sharding = Sharding(TOKENS, dist.group.WORLD, question.layout, pattern=question.pattern)
    q, k, v, dout = (sharding.shard(x).to(device) for x in _inputs(question.dtype))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    options: dict[str, Any] = {"pattern": question.pattern, "sharding": sharding, "timeout": timeout}
    out, lse = attention(q, k, v, return_lse=True, **options)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    taken = explain(q, k, v, **options)
    whole = (sharding.unshard(x.detach(), timeout=timeout).cpu() for x in (out, *gradients))
    whole_out, dq, dk, dv = whole
    whole_lse = sharding.unshard(lse.detach(), 2, timeout=timeout).cpu()
    return Said(Result(whole_out, whole_lse, dq, dk, dv), taken.schedule.name, taken.kernel.name)


def _inputs(dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of out; the same on every rank."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(1, TOKENS, h, HEAD_DIM, generator=random).to(dtype) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def _judged(question: Question, said: Said) -> Judged:
    q, k, v, dout = _inputs(question.dtype)
    want, allowed = budgets(q, k, v, question.pattern, dout)
    verdicts = (
        Verdict(name, relative_error(getattr(said.answer, name), getattr(want, name)), allowed[name])
        for name in Result._fields
    )
    dtype = str(question.dtype).removeprefix("torch.")
    return Judged(question.name, question.layout, dtype, said.schedule, said.kernel, tuple(verdicts))
