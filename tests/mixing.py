"""Branches that are mixed by constants: what that is by definition, and how ranks are asked for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import longring as lr
from longring.geometry.layouts import deal
from longring.geometry.patterns import Problem
from longring.numerics.definition import defined_attention, pair_counts
from longring.numerics.online_softmax import accumulator_dtype
from longring.testing import Result
from longring.testing.budgets import SLACK, distance
from longring.testing.oracle import magnitudes

Definition = Callable[..., Result]
View = Callable[[Tensor], Tensor]


# ------------------------------------------------------------------------------------------------- by definition


def detached(q, k, v, pattern, dout, dlse=None, *, dtype=torch.float64) -> Result:
    """Each branch by the definition, weighed by what its denominator is of their sum, without a derivative."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    parts = [defined_attention(q, k, v, counts, q.shape[3] ** -0.5) for counts in branch_counts(q, k, pattern)]
    sums = torch.stack([lse for _, lse in parts]).exp()  # tests have scores of which exp is finite
    out = weighed(parts, (sums / sums.sum(0)).nan_to_num(0.0).detach())
    seen = sums.detach().sum(0) > 0
    lse = torch.where(seen, sums.sum(0), 1.0).log()
    loss = (out * dout.to(dtype)).sum() + (0 if dlse is None else (lse * dlse.to(dtype)).sum())
    return Result(out.detach(), torch.where(seen, lse, -torch.inf).detach(), *torch.autograd.grad(loss, (q, k, v)))


def released(q, k, v, pattern, dout, *, dtype=torch.float64) -> Result:
    """What LongNet's code gives: zero keys where it pads, and an lse of 0 that counts as no key at all."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    wide_k, wide_v = (torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in (k, v))
    parts = []
    for (w, r), counts in zip(pattern.branches, branch_counts(q, k, pattern), strict=True):
        zeros = torch.zeros_like(counts[..., :1])
        if not pattern.causal:
            zeros += zero_keys(w, r, q.shape[1], q.shape[2])[None, :, :, None] * counts.any(-1, keepdim=True)
        wide = torch.cat([counts, zeros], -1)
        parts.append(defined_attention(q, wide_k, wide_v, wide, q.shape[3] ** -0.5))
    lses = torch.stack([lse.detach() for _, lse in parts])
    taken = torch.where((lses == 0) | (lses == -torch.inf), -1e8, lses)
    out = weighed(parts, taken.softmax(0))
    gradients = torch.autograd.grad(out, (q, k, v), dout.to(dtype))
    return Result(out.detach(), lses.logsumexp(0), *gradients)


def weighed(parts: list[tuple[Tensor, Tensor]], weights: Tensor) -> Tensor:
    return torch.stack([out * weight.mT.unsqueeze(-1) for (out, _), weight in zip(parts, weights, strict=True)]).sum(0)


def branch_counts(q: Tensor, k: Tensor, pattern: lr.Dilated) -> list[Tensor]:
    """For each branch how often each pair counts: 0 or 1, [batch, kv_heads, n, n]."""
    problem = Problem(q.shape[0], q.shape[1], k.shape[1], k.shape[2], k.shape[1] - q.shape[1])
    words = {"causal": pattern.causal, "phase": pattern.phase, "documents": pattern.documents}
    return [pair_counts(lr.Dilated([w], [r], **words), problem) for w, r in pattern.branches]


def zero_keys(w: int, r: int, n: int, heads: int) -> Tensor:
    """[heads, n], by laying out the slots of every row's padded segment."""
    w = min(w, n)
    found = torch.zeros(heads, n, dtype=torch.int64)
    for head in range(heads):
        phase = head // -(-heads // r)
        for row in range(n):
            start = row // w * w
            slots = range(start + phase, start + -(-w // r) * r, r)
            found[head, row] = sum(slot >= min(start + w, n) for slot in slots)
    return found


def allowed(definition: Definition, q, k, v, pattern, *upstream, of: View = lambda x: x) -> Result:
    """How far `of` each quantity may be from the definition's, as longring.testing derives it from the dtype."""
    want = definition(q, k, v, pattern, *upstream)
    narrow, wide = torch.float32 if q.dtype == torch.float64 else q.dtype, accumulator_dtype(q.dtype)
    finer = torch.finfo(q.dtype).eps / torch.finfo(narrow).eps
    rough = definition(q, k, v, pattern, *upstream, dtype=narrow)
    if q.dtype != wide:  # 16 bits, of which lse has more
        rough = rough._replace(lse=definition(q, k, v, pattern, *upstream, dtype=wide).lse)
    budget = []
    steepest = 1.0 + float(want.lse[want.lse.isfinite()].abs().max())  # weights are exp of an lse that was rounded
    for exact, near, large in zip(want, rough, magnitudes(q, k, v, pattern, *upstream), strict=True):
        exact, near, large = of(exact), of(near), of(large)
        one, terms = torch.finfo(q.dtype).eps * exact[exact.isfinite()].norm(), torch.finfo(wide).eps * large.norm()
        budget.append(SLACK * finer * distance(near, exact) + float(one) + steepest * float(terms))
    return Result(*budget)


# ---------------------------------------------------------------------------------------------------- over ranks


@dataclass(frozen=True)
class Ask:
    """Dilated attention with these options, asked of ranks that share one sequence."""

    options: dict[str, Any]
    n: int = 45
    heads: int = 6
    kv_heads: int = 3
    batch: int = 2
    layout: str = "contiguous"
    schedule: str = "auto"
    dtype: torch.dtype = torch.float64
    with_lse: bool = True
    kernel: str = "auto"
    tensors: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)  # q, k, v, dout, dlse if not drawn

    @property
    def pattern(self) -> lr.Dilated:
        words = {name: self.options[name] for name in ("causal", "phase", "documents") if name in self.options}
        if self.options.get("compat"):
            words["phase"] = "block"
        return lr.Dilated(self.options["segment_lengths"], self.options["dilation_rates"], **words)

    def whole(self) -> tuple[Tensor, ...]:
        if self.tensors:
            return self.tensors
        draw = torch.Generator().manual_seed(3)
        shapes = [(self.batch, self.n, h, 4) for h in (self.heads, self.kv_heads, self.kv_heads, self.heads)]
        drawn = [torch.randn(shape, generator=draw, dtype=torch.float64).to(self.dtype) for shape in shapes]
        dlse = torch.randn(self.batch, self.heads, self.n, generator=draw, dtype=torch.float64)
        return *drawn, dlse.to(accumulator_dtype(self.dtype))


def answer(ask: Ask, group: Any = None) -> Result:
    """This rank's part of it; without a group, all of it."""
    s = lr.Sharding(ask.n, group, ask.layout)
    q, k, v, dout, *dlse = ask.whole()
    q, k, v = (s.shard(x).requires_grad_() for x in (q, k, v))
    words = {**ask.options, "kernel": ask.kernel, "sharding": s, "schedule": ask.schedule, "timeout": 60.0}
    if not ask.with_lse:
        out = lr.dilated_attention(q, k, v, **words)
        gradients = torch.autograd.grad(out, (q, k, v), s.shard(dout))
        return Result(out.detach(), torch.zeros(q.shape[0], q.shape[2], q.shape[1]), *gradients)
    out, lse = lr.dilated_attention(q, k, v, return_lse=True, **words)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (s.shard(dout), s.shard(dlse[0], dim=2)))
    return Result(out.detach(), lse.detach(), *gradients)


def answers(asks: list[Ask]) -> list[Result]:
    """What a rank in a process of its own does."""
    torch.set_num_threads(1)
    return [answer(ask, dist.group.WORLD) for ask in asks]


def together(ask: Ask, parts: list[Result]) -> Result:
    """Every rank's rows where they belong."""
    shards = deal(ask.layout, ask.n, len(parts)).shards
    rows = torch.tensor([p for shard in shards for r in shard for p in r])
    whole = []
    for name, *tensors in zip(Result._fields, *parts, strict=True):
        dim = 2 if name == "lse" else 1
        whole.append(torch.cat(tensors, dim).index_select(dim, rows.argsort()))
    return Result(*whole)
