"""The oracle: out, lse and every gradient by the definition, in float64 unless asked otherwise."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry.patterns import Pattern, Problem
from ..numerics.definition import defined_attention, pair_counts


class Result(NamedTuple):
    """What one forward and backward pass gives."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    scale: float | None = None,
    query_offset: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Result:
    """The definition's own answer for whole tensors, and its gradient for (dout, dlse)."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    out, lse = defined_attention(q, k, v, _counts(q, k, pattern, query_offset), _scale(q, scale))
    seen = lse.detach() != -torch.inf
    loss = (out * dout.to(dtype)).sum()
    if dlse is not None:
        loss = loss + (torch.where(seen, lse, 0.0) * dlse.to(dtype)).sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    return Result(out.detach(), lse.detach(), dq, dk, dv)


def magnitudes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    scale: float | None = None,
    query_offset: int | None = None,
) -> Result:
    """The same sums with every term taken positive: rounding is relative to these, not to what cancels."""
    q, k, v, dout = (x.detach().double() for x in (q, k, v, dout))
    scale, share = _scale(q, scale), q.shape[2] // k.shape[2]
    counts = _counts(q, k, pattern, query_offset)
    out, lse = defined_attention(q, k, v, counts, scale)
    wide_k, wide_v = (x.repeat_interleave(share, 2) for x in (k, v))
    log_counts = counts.repeat_interleave(share, 1).double().log()
    scores = scale * torch.einsum("bihd,bjhd->bhij", q, wide_k) + log_counts
    weights = torch.where(scores > -torch.inf, (scores - lse.unsqueeze(-1)).exp(), 0.0)
    delta = torch.einsum("bihd,bihd->bhi", dout.abs(), out.abs())
    delta = delta if dlse is None else delta + dlse.double().abs()
    dscores = scale * weights * (torch.einsum("bihd,bjhd->bhij", dout.abs(), wide_v.abs()) + delta.unsqueeze(-1))
    return Result(
        torch.einsum("bhij,bjhd->bihd", weights, wide_v.abs()),
        torch.where(lse > -torch.inf, lse.abs() + 1.0, 0.0),
        torch.einsum("bhij,bjhd->bihd", dscores, wide_k.abs()),
        _over_shares(torch.einsum("bhij,bihd->bjhd", dscores, q.abs()), share),
        _over_shares(torch.einsum("bhij,bihd->bjhd", weights, dout.abs()), share),
    )


def _over_shares(x: Tensor, share: int) -> Tensor:
    return x.unflatten(2, (-1, share)).sum(3)


def _counts(q: Tensor, k: Tensor, pattern: Pattern, query_offset: int | None) -> Tensor:
    offset = k.shape[1] - q.shape[1] if query_offset is None else query_offset
    problem = Problem(q.shape[0], q.shape[1], k.shape[1], k.shape[2], offset)
    pattern.check(problem)
    return pair_counts(pattern, problem).to(q.device)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[3] ** -0.5 if scale is None else scale
