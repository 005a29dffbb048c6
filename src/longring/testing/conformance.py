"""Conformance: give it any distributed attention function, and it says where that departs from the definition.

The function is called on every rank with that rank's part of q, k and v, and must be differentiable:

    fn(q, k, v, *, group, pattern, layout, length) -> out, or (out, lse)

A case it does not serve it should refuse by raising; what it returns is judged, forward and each gradient.
Where lse is returned and differentiable, its gradient is part of the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..geometry.layouts import Layout, Shard, deal
from ..geometry.patterns import Dense, Dilated, Pattern, Problem
from ..numerics.definition import pair_counts
from ..numerics.online_softmax import accumulator_dtype
from ..schedules.gather import place_rows, take_rows
from ..transport.loopback import run_ranks
from .budgets import budgets, relative_error
from .oracle import Result


@dataclass(frozen=True)
class Case:
    """One question put to the function."""

    name: str
    pattern: Pattern
    length: int = 48
    heads: int = 4
    kv_heads: int = 4
    batch: int = 2
    d: int = 8


CASES = (
    Case("full", Dense(causal=False)),
    Case("causal", Dense(causal=True)),
    Case("causal, one batch row", Dense(causal=True), batch=1),
    Case("causal, uneven length", Dense(causal=True), length=53),
    Case("causal, fewer tokens than ranks", Dense(causal=True), length=3),
    Case("causal, grouped heads", Dense(causal=True), kv_heads=2),
    Case("causal, one kv head", Dense(causal=True), kv_heads=1),
    Case("window to the left", Dense(causal=True, window=(7, 0))),
    Case("window to both sides", Dense(causal=False, window=(5, 9))),
    Case("documents, causal", Dense(causal=True, documents=(0, 5, 23, 24, 48))),
    Case("documents", Dense(causal=False, documents=(0, 11, 30, 48))),
    Case("dilated, mod", Dilated([8, 16, 48], [1, 2, 4], causal=True)),
    Case("dilated, mod, not causal", Dilated([8, 16, 48], [1, 2, 4], causal=False)),
    Case("dilated, block", Dilated([8, 16, 48], [1, 2, 4], causal=True, phase="block")),
    Case("dilated, uneven", Dilated([7, 10, 64], [1, 3, 4], causal=True), length=53, kv_heads=2),
)


class Finding(NamedTuple):
    """What the function did with one case: "exact", "wrong" or "refused", quantity by quantity."""

    case: str
    layout: str
    ranks: int
    quantity: str
    status: str
    error: float
    allowed: float
    message: str = ""


@dataclass
class Report:
    """All findings. `ok` means that nothing returned was wrong; see `refused` for what was not served."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def wrong(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "wrong"]

    @property
    def refused(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "refused"]

    @property
    def exact(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "exact"]

    @property
    def ok(self) -> bool:
        return bool(self.exact) and not self.wrong

    def __str__(self) -> str:
        lines = [_line(finding) for finding in self.findings if finding.status != "exact"]
        count = f"{len(self.exact)} exact, {len(self.wrong)} wrong, {len(self.refused)} refused"
        return "\n".join([*lines, count])


def conformance(
    fn: Callable[..., Any],
    *,
    ranks: Sequence[int] = (1, 2, 3, 4),
    layouts: Sequence[str] = ("contiguous", "zigzag", "striped", "dealt"),
    cases: Iterable[Case] = CASES,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    run: Callable[[int, Callable[[Any], Any]], list[Any]] = run_ranks,
) -> Report:
    """Every case on every layout and number of ranks, and the probes; `run` starts the ranks."""
    report = Report()
    alone: dict[str, Tensor] = {}
    for case in cases:
        for layout in layouts:
            if layout == "dealt" and case.pattern.documents is None:
                continue
            for size in ranks:
                report.findings += _examine(_Trial(fn, case, layout, size, dtype, seed, run), alone)
    return report


@dataclass(frozen=True)
class _Trial:
    fn: Callable[..., Any]
    case: Case
    layout: str
    size: int
    dtype: torch.dtype
    seed: int
    run: Callable[[int, Callable[[Any], Any]], list[Any]]

    @property
    def dealt(self) -> Layout:
        documents = self.case.pattern.documents if self.layout == "dealt" else None
        return deal(self.layout, self.case.length, self.size, documents=documents)

    @property
    def problem(self) -> Problem:
        return Problem(self.case.batch, self.case.length, self.case.length, self.case.kv_heads, 0)

    def tensors(self) -> _Tensors:
        draw = torch.Generator().manual_seed(self.seed)
        case = self.case

        def normal(*shape: int) -> Tensor:
            return torch.randn(case.batch, *shape, generator=draw, dtype=torch.float64)

        q, dout = (normal(case.length, case.heads, case.d).to(self.dtype) for _ in range(2))
        k, v = (normal(case.length, case.kv_heads, case.d).to(self.dtype) for _ in range(2))
        return _Tensors(q, k, v, dout, normal(case.heads, case.length).to(accumulator_dtype(self.dtype)))

    def ask(self, given: _Tensors) -> _Answer:
        """The function's answer, put together from all ranks."""
        dealt = self.dealt
        options = {"pattern": self.case.pattern, "layout": self.layout, "length": self.case.length}

        def program(group: Any) -> _RankAnswer:
            shard = dealt.shards[group.rank]
            q, k, v = (take_rows(x, shard).requires_grad_() for x in given[:3])
            answer = self.fn(q, k, v, group=group, **options)
            out, lse = answer if isinstance(answer, tuple) else (answer, None)
            outputs, upstream = [out], [take_rows(given.dout, shard)]
            if lse is not None and lse.requires_grad:
                outputs.append(lse)
                upstream.append(take_rows(given.dlse.mT, shard).mT)
            gradients = torch.autograd.grad(outputs, (q, k, v), upstream)
            return _RankAnswer(out.detach(), None if lse is None else lse.detach().mT, gradients, len(outputs) > 1)

        answers = self.run(self.size, program)
        shards = dealt.shards
        out = _put_together(given.q, [answer.out for answer in answers], shards)
        gradients = [
            _put_together(x, [answer.gradients[i] for answer in answers], shards) for i, x in enumerate(given[:3])
        ]
        lses = [answer.lse for answer in answers if answer.lse is not None]
        lse = _put_together(given.dlse.mT, lses, shards).mT if len(lses) == self.size else None
        return _Answer(out, lse, *gradients, with_dlse=all(answer.with_dlse for answer in answers))

    def counts(self) -> Tensor:
        """[batch, heads, n, n]"""
        return pair_counts(self.case.pattern, self.problem).repeat_interleave(self.case.heads // self.case.kv_heads, 1)

    def finding(self, quantity: str, error: float, allowed: float, message: str = "") -> Finding:
        status = "exact" if error <= allowed else "wrong"
        return Finding(self.case.name, self.layout, self.size, quantity, status, error, allowed, message)


class _Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


class _RankAnswer(NamedTuple):
    out: Tensor
    lse: Tensor | None
    gradients: tuple[Tensor, ...]
    with_dlse: bool


class _Answer(NamedTuple):
    out: Tensor
    lse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    with_dlse: bool


def _put_together(like: Tensor, parts: list[Tensor], shards: tuple[Shard, ...]) -> Tensor:
    """The whole tensor; nan where no rank gave anything."""
    whole = torch.full_like(like, torch.nan, dtype=parts[0].dtype, memory_format=torch.contiguous_format)
    for part, shard in zip(parts, shards, strict=True):
        place_rows([whole], [part], shard)
    return whole


def _examine(trial: _Trial, alone: dict[str, Tensor]) -> list[Finding]:
    """`alone` keeps the first answer of each case, with which those of other numbers of ranks must agree."""
    given = trial.tensors()
    try:
        got = trial.ask(given)
    except Exception as error:  # any refusal is a finding, whatever the function under test raises
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        return [Finding(trial.case.name, trial.layout, trial.size, "all", "refused", torch.nan, torch.nan, message)]
    dlse = given.dlse if got.with_dlse else None
    want, allowed = budgets(given.q, given.k, given.v, trial.case.pattern, given.dout, dlse)
    findings = [
        trial.finding(name, relative_error(getattr(got, name), getattr(want, name)), allowed[name])
        for name in Result._fields
        if getattr(got, name) is not None
    ]
    first = alone.setdefault(trial.case.name, got.out)
    findings.append(
        trial.finding("probe: any number of ranks", relative_error(got.out, first), allowed["out"], "depends on ranks")
    )
    return [*findings, _ones_give_ones(trial, allowed["out"]), _edits_stay(trial, got.out, allowed["out"])]


def _ones_give_ones(trial: _Trial, allowed: float) -> Finding:
    """Weights sum to one: where v is 1 and a row sees anything, out is 1; where it sees nothing, 0."""
    given = trial.tensors()
    got = trial.ask(given._replace(v=torch.ones_like(given.v))).out
    sees = trial.counts().any(-1).transpose(1, 2).unsqueeze(-1)
    message = "weights do not sum to one"
    return trial.finding("probe: v = 1", relative_error(got, sees.expand(got.shape)), allowed, message)


def _edits_stay(trial: _Trial, before: Tensor, allowed: float) -> Finding:
    """One token edited: rows that do not see it stay, so a causal row never learns of the future."""
    given = trial.tensors()
    token = 2 * trial.case.length // 3
    k, v = given.k.clone(), given.v.clone()
    k[:, token] += 3.0
    v[:, token] -= 3.0
    after = trial.ask(given._replace(k=k, v=v)).out
    blind = (trial.counts()[..., token] == 0).transpose(1, 2)
    message = f"editing token {token} moved rows that do not see it"
    moved = relative_error(after[blind], before[blind])
    return trial.finding("probe: one token edited", moved, allowed, message)


def _line(finding: Finding) -> str:
    what = f"{finding.case} | {finding.layout} | {finding.ranks} ranks | {finding.quantity}: {finding.status}"
    if finding.status == "refused":
        return f"{what} ({finding.message})"
    return f"{what}, error {finding.error:.2e} where {finding.allowed:.2e} is allowed" + (
        f" ({finding.message})" if finding.message else ""
    )
