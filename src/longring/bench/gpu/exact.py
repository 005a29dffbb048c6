"""Attention and its gradients for some rows or some columns, in float64, over all keys or queries, in chunks.

The counts are asked pair by pair from the definition of the pattern; nothing is shared with tiles, kernels or merging.
Beside each sum stands its *size*: the root of the sum of its terms' squares. Rounding errors are in proportion to
that, also where the terms cancel, as in the gradient of a query that sees a single key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import PatternError
from ...geometry.patterns import Dense, Dilated, Pattern
from .given import Given

NUMBERS_AT_ONCE = 1 << 25  # 256 MiB of float64, a few of which are alive at a time


class Sum(NamedTuple):
    value: Tensor  # [batch, rows, heads, d]
    size: Tensor  # [batch, rows, heads]


class Rows(NamedTuple):
    """What some queries get."""

    out: Sum
    lse: Tensor  # [batch, heads, rows]
    dq: Sum | None


class Columns(NamedTuple):
    """What some keys and values get."""

    dk: Sum
    dv: Sum


def exact_rows(x: Given, pattern: Pattern, rows: Tensor, *, dtype: torch.dtype = torch.float64) -> Rows:
    """out, lse and, where there is an upstream gradient, dq of the queries at `rows`, from q, k, v and dout alone.

    In another dtype this is the same definition, no longer exact: it shows what rounding alone does.
    """
    scale, share = x.q.shape[3] ** -0.5, x.q.shape[2] // x.k.shape[2]
    q = x.q[:, rows].to(dtype)
    chunks = list(_chunks(x, pattern, rows))
    lse = q.new_full((q.shape[0], q.shape[2], len(rows)), -torch.inf)
    for columns, counts in chunks:
        lse = torch.logaddexp(lse, _scores(q, _wide(x.k, columns, share, dtype), counts, scale).logsumexp(-1))
    out, out_size = torch.zeros_like(q), q.new_zeros(q.shape[:3])
    for columns, counts in chunks:
        weights = _weights(_scores(q, _wide(x.k, columns, share, dtype), counts, scale), lse)
        v = _wide(x.v, columns, share, dtype)
        out += torch.einsum("bhij,bjhd->bihd", weights, v)
        out_size += torch.einsum("bhij,bjh->bih", weights**2, (v**2).sum(-1))
    found = Sum(out, out_size.sqrt_())
    if x.dout is None:
        return Rows(found, lse, None)
    dout = x.dout[:, rows].to(dtype)
    delta = torch.einsum("bihd,bihd->bhi", dout, out).unsqueeze(-1)
    dq, dq_size = torch.zeros_like(q), q.new_zeros(q.shape[:3])
    for columns, counts in chunks:
        k = _wide(x.k, columns, share, dtype)
        weights = _weights(_scores(q, k, counts, scale), lse)
        dweights = torch.einsum("bihd,bjhd->bhij", dout, _wide(x.v, columns, share, dtype))
        dq += scale * torch.einsum("bhij,bjhd->bihd", weights * (dweights - delta), k)
        terms = weights**2 * (dweights**2 + delta**2)
        dq_size += scale**2 * torch.einsum("bhij,bjh->bih", terms, (k**2).sum(-1))
    return Rows(found, lse, Sum(dq, dq_size.sqrt_()))


def exact_columns(
    x: Given, pattern: Pattern, columns: Tensor, out: Tensor, lse: Tensor, *, dtype: torch.dtype = torch.float64
) -> Columns:
    """dk and dv of the keys at `columns`. out and lse of all rows are taken as they were found.

    What rounding those had, the backward under test had to live with as well.
    """
    scale, share = x.q.shape[3] ** -0.5, x.q.shape[2] // x.k.shape[2]
    k, v = _wide(x.k, columns, share, dtype), _wide(x.v, columns, share, dtype)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    dk_size, dv_size = k.new_zeros(k.shape[:3]), k.new_zeros(k.shape[:3])
    for rows, counts in _chunks(x, pattern, columns, transposed=True):
        q, dout = x.q[:, rows].to(dtype), x.upstream[:, rows].to(dtype)
        weights = _weights(_scores(q, k, counts, scale), lse[:, :, rows].to(dtype))
        delta = torch.einsum("bihd,bihd->bhi", dout, out[:, rows].to(dtype)).unsqueeze(-1)
        dweights = torch.einsum("bihd,bjhd->bhij", dout, v)
        dv += torch.einsum("bhij,bihd->bjhd", weights, dout)
        dk += scale * torch.einsum("bhij,bihd->bjhd", weights * (dweights - delta), q)
        dv_size += torch.einsum("bhij,bih->bjh", weights**2, (dout**2).sum(-1))
        terms = weights**2 * (dweights**2 + delta**2)
        dk_size += scale**2 * torch.einsum("bhij,bih->bjh", terms, (q**2).sum(-1))
    return Columns(*(_over_shares(total, size, share) for total, size in ((dk, dk_size), (dv, dv_size))))


def _over_shares(total: Tensor, size: Tensor, share: int) -> Sum:
    return Sum(total.unflatten(2, (-1, share)).sum(3), size.unflatten(2, (-1, share)).sum(3).sqrt_())


# ----------------------------------------------------------------------------------------------------- pairs


def pair_counts_at(pattern: Pattern, i: Tensor, j: Tensor, kv_heads: int) -> Tensor:
    """How often queries at positions i and keys at positions j count: [kv_heads or 1, i, j]."""
    i, j = i.view(1, -1, 1), j.view(1, 1, -1)
    if isinstance(pattern, Dense) and pattern.lengths is None:
        lo, hi = pattern.limits
        seen = torch.ones_like(j - i, dtype=torch.bool) if lo is None else j - i >= lo
        seen = seen if hi is None else seen & (j - i <= hi)
        return (seen & _are_in_one_document(pattern, i, j)).long()
    if not isinstance(pattern, Dilated) or pattern.documents is not None:
        raise PatternError(
            "the checker knows dense attention without lengths, and dilated attention without documents, got "
            f"{pattern!r}"
        )
    heads = torch.arange(kv_heads, device=i.device).view(-1, 1, 1)
    counts = torch.zeros((), dtype=torch.long, device=i.device)
    for w, r in pattern.branches:
        phase = heads % r if pattern.phase == "mod" else heads // -(-kv_heads // r)
        counts = counts + ((i % w % r == phase) & (j % w % r == phase) & (i // w == j // w)).long()
    return counts * (j <= i) if pattern.causal else counts


def _are_in_one_document(pattern: Dense, i: Tensor, j: Tensor) -> Tensor | bool:
    if pattern.documents is None:
        return True
    if len(pattern.documents) > 1:
        raise PatternError(f"the checker knows one list of documents for all batch rows, got {len(pattern.documents)}")
    ends = torch.tensor(pattern.documents[0][1:], device=i.device)
    return torch.bucketize(i, ends, right=True) == torch.bucketize(j, ends, right=True)


def _chunks(x: Given, pattern: Pattern, some: Tensor, transposed: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """All positions that meet `some`, a chunk at a time, with the counts [kv_heads or 1, queries, keys]."""
    heads, d = x.q.shape[2:]
    most = max(1, NUMBERS_AT_ONCE // (heads * max(d, len(some))))
    for start in range(0, x.k.shape[1], most):
        others = torch.arange(start, min(start + most, x.k.shape[1]), device=x.k.device)
        i, j = (others, some) if transposed else (some, others)
        counts = pair_counts_at(pattern, i, j, x.k.shape[2])
        met = counts.sum(dim=(0, 2) if transposed else (0, 1)) > 0
        if not bool(met.any()):
            continue
        kept = met.nonzero().squeeze(1)  # of LongNet's positions only few meet a given one
        yield others[kept], counts[:, kept] if transposed else counts[:, :, kept]


def _wide(x: Tensor, positions: Tensor, share: int, dtype: torch.dtype) -> Tensor:
    """[batch, positions, heads, d]: every query head with the keys of its kv head."""
    return x[:, positions].to(dtype).repeat_interleave(share, 2)


def _scores(q: Tensor, k: Tensor, counts: Tensor, scale: float) -> Tensor:
    """[batch, heads, i, j], log(count) added."""
    scores = scale * torch.einsum("bihd,bjhd->bhij", q, k)
    logs = counts.to(q.dtype).log()
    return scores + (logs if len(logs) == 1 else logs.repeat_interleave(q.shape[2] // len(logs), 0))


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # a row that sees nothing has only scores of -inf, which weigh 0
    return (scores - lse.unsqueeze(-1)).exp()
