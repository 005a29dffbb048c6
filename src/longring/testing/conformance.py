"""Conformance: give it any distributed attention function, and it says where that departs from the definition.

The function is called on every rank with that rank's part of q, k and v, and must be differentiable:

    fn(q, k, v, *, group, pattern, layout, length) -> out, or (out, lse)

A case it does not serve it should refuse by raising; what it returns is judged, forward and each gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..geometry.layouts import Layout, deal
from ..geometry.patterns import Dense, Dilated, Pattern, Problem
from ..numerics.definition import pair_counts
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
    for case in cases:
        for layout in layouts:
            if layout == "dealt" and case.pattern.documents is None:
                continue
            for size in ranks:
                report.findings += _examine(_Trial(fn, case, layout, size, dtype, seed, run))
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

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(self.seed)
        case = self.case
        shapes = [
            (case.batch, case.length, heads, case.d) for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
        ]
        q, k, v, dout = (torch.randn(shape, generator=draw, dtype=torch.float64).to(self.dtype) for shape in shapes)
        return q, k, v, dout

    def ask(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Result:
        """The function's answer, put together from all ranks; lse is None where it returns none."""
        dealt, given = self.dealt, (q, k, v)

        def program(group: Any) -> list[Tensor | None]:
            shard = dealt.shards[group.rank]
            q_, k_, v_ = (take_rows(x, shard).requires_grad_() for x in given)
            options = {"group": group, "pattern": self.case.pattern, "layout": self.layout, "length": self.case.length}
            answer = self.fn(q_, k_, v_, **options)
            out, lse = answer if isinstance(answer, tuple) else (answer, None)
            gradients = torch.autograd.grad(out, (q_, k_, v_), take_rows(dout, shard))
            return [out.detach(), None if lse is None else lse.detach().mT, *gradients]

        parts = self.run(self.size, program)
        whole = [torch.full_like(x, torch.nan) for x in (q, q, k, v)]
        for part, shard in zip(parts, dealt.shards, strict=True):
            place_rows(whole, [part[0], *part[2:]], shard)
        return Result(whole[0], self._whole_lse(parts), *whole[1:])  # type: ignore[arg-type]

    def _whole_lse(self, parts: list[list[Tensor]]) -> Tensor | None:
        if any(part[1] is None for part in parts):
            return None
        whole = parts[0][1].new_empty(self.case.batch, self.case.length, self.case.heads)
        for part, shard in zip(parts, self.dealt.shards, strict=True):
            place_rows([whole], [part[1]], shard)
        return whole.mT

    def finding(self, quantity: str, error: float, allowed: float, message: str = "") -> Finding:
        status = "exact" if error <= allowed else "wrong"
        return Finding(self.case.name, self.layout, self.size, quantity, status, error, allowed, message)


def _examine(trial: _Trial) -> list[Finding]:
    q, k, v, dout = trial.tensors()
    try:
        got = trial.ask(q, k, v, dout)
    except Exception as error:  # any refusal is a finding, whatever the library under test raises
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        return [Finding(trial.case.name, trial.layout, trial.size, "all", "refused", torch.nan, torch.nan, message)]
    want, allowed = budgets(q, k, v, trial.case.pattern, dout)
    findings = [
        trial.finding(name, relative_error(getattr(got, name), getattr(want, name)), allowed[name])
        for name in Result._fields
        if getattr(got, name) is not None
    ]
    return [*findings, _ones_give_ones(trial, allowed["out"]), _edits_stay(trial, got, allowed["out"])]


def _ones_give_ones(trial: _Trial, allowed: float) -> Finding:
    """Weights sum to one: where v is 1 and a row sees anything, out is 1; where it sees nothing, 0."""
    q, k, v, dout = trial.tensors()
    got = trial.ask(q, k, torch.ones_like(v), dout).out
    sees = pair_counts(trial.case.pattern, trial.problem).any(-1).transpose(1, 2)
    want = sees.repeat_interleave(q.shape[2] // k.shape[2], 2).unsqueeze(-1).expand(q.shape)
    return trial.finding("probe: v = 1", relative_error(got, want), allowed, "weights do not sum to one")


def _edits_stay(trial: _Trial, before: Result, allowed: float) -> Finding:
    """One token edited: rows that do not see it stay, so a causal row never learns of the future."""
    q, k, v, dout = trial.tensors()
    token = 2 * trial.case.length // 3
    k, v = k.clone(), v.clone()
    k[:, token] += 3.0
    v[:, token] -= 3.0
    after = trial.ask(q, k, v, dout).out
    sees = pair_counts(trial.case.pattern, trial.problem)[..., token] > 0
    blind = ~sees.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 2)
    moved = relative_error(after[blind], before.out[blind])
    message = f"editing token {token} moved rows that do not see it"
    return trial.finding("probe: one token edited", moved, allowed, message)


def _line(finding: Finding) -> str:
    what = f"{finding.case} | {finding.layout} | {finding.ranks} ranks | {finding.quantity}: {finding.status}"
    if finding.status == "refused":
        return f"{what} ({finding.message})"
    return f"{what}, error {finding.error:.2e} where {finding.allowed:.2e} is allowed" + (
        f" ({finding.message})" if finding.message else ""
    )
