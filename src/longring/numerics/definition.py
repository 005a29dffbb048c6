"""The definition: attention with every count and every score in memory. Slow, short, and the judge.

Written from the contract alone; it shares nothing with the tile cutter, the merge or any kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import PatternError
from ..geometry.head_split import HeadSplit
from ..geometry.patterns import Dense, Dilated, Pattern, Problem


def defined_attention(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) by ordinary attention with log(count) added to the scores, in the dtype given.

    q [batch, n_q, heads, d]; k, v [batch, n_k, kv_heads, d]; counts [batch, kv_heads, n_q, n_k].
    """
    share = q.shape[2] // k.shape[2]
    k, v, counts = (t.repeat_interleave(share, dim) for t, dim in ((k, 2), (v, 2), (counts, 1)))
    scores = scale * torch.einsum("bihd,bjhd->bhij", q, k) + counts.to(q.dtype).log()
    seen = (counts > 0).any(-1)
    # a row of -inf has no softmax: it is computed as a row of zeros, and its result replaced
    safe = torch.where(seen.unsqueeze(-1), scores, 0.0)
    out = torch.einsum("bhij,bjhd->bihd", safe.softmax(-1), v)
    lse = torch.where(seen, safe.logsumexp(-1), -torch.inf)
    return torch.where(seen.transpose(1, 2).unsqueeze(-1), out, 0.0), lse


def pair_counts(pattern: Pattern, problem: Problem) -> Tensor:
    """How often each pair counts, [batch, kv_heads, n_q, n_k], by asking every pair in turn."""
    counts = pair_counts_at(pattern, problem, torch.arange(problem.n_q), torch.arange(problem.n_k))
    return counts.expand(problem.batch, problem.kv_heads, problem.n_q, problem.n_k)


def pair_counts_at(pattern: Pattern, problem: Problem, rows: Tensor, keys: Tensor) -> Tensor:
    """The counts of these rows of q and these keys only, [batch or 1, kv_heads or 1, rows, keys], on their device."""
    i, j = rows.add(problem.offset).view(1, 1, -1, 1), keys.view(1, 1, 1, -1)
    if isinstance(pattern, Dense):
        return _dense_counts(pattern, i, j).long()
    if isinstance(pattern, Dilated):
        return _dilated_counts(pattern, problem, i, j).long()
    raise PatternError(f"pattern must be longring.Dense or longring.Dilated, got {pattern!r}")


def _dense_counts(pattern: Dense, i: Tensor, j: Tensor) -> Tensor:
    counts = torch.ones_like(j - i, dtype=torch.bool)
    if pattern.causal:
        counts = counts & (j <= i)
    left, right = pattern.window or (None, None)
    if left is not None:
        counts = counts & (i - left <= j)
    if right is not None:
        counts = counts & (j <= i + right)
    if pattern.documents is not None:
        starts_i, starts_j = _document_starts(pattern.documents, i), _document_starts(pattern.documents, j)
        counts = counts & (starts_i == starts_j) & (starts_i >= 0)
    if pattern.lengths is not None:
        counts = counts & (j < torch.tensor(pattern.lengths, device=j.device).view(-1, 1, 1, 1))
    return counts


def _dilated_counts(pattern: Dilated, problem: Problem, i: Tensor, j: Tensor) -> Tensor:
    heads = torch.arange(problem.kv_heads, device=j.device).view(1, -1, 1, 1)
    together = torch.ones_like(j - i, dtype=torch.bool)
    if pattern.documents is not None:
        starts_i, starts_j = _document_starts(pattern.documents, i), _document_starts(pattern.documents, j)
        together = (starts_i == starts_j) & (starts_i >= 0)
        i, j = i - starts_i, j - starts_j
    if pattern.causal:
        together = (j <= i) & together
    total = torch.zeros(1, 1, 1, 1, dtype=torch.uint8, device=j.device)  # one byte a pair: millions at a time
    for number, (w, r) in enumerate(pattern.branches):
        phase, here = heads % r, torch.ones_like(heads, dtype=torch.bool)
        if isinstance(pattern, HeadSplit):
            phase, here = torch.full_like(heads, number % r), _heads_of_branch(heads, number, len(pattern.branches))
        elif pattern.phase == "block":
            phase = heads // -(-problem.kv_heads // r)
        kept_i, kept_j = i % w % r == phase, j % w % r == phase
        total = total + (kept_i & kept_j & (i // w == j // w) & together & here).byte()
    return total


def _heads_of_branch(heads: Tensor, number: int, branches: int) -> Tensor:
    """Which heads a branch has: a run of heads for every branch, the first runs longer by one."""
    many, longer = divmod(heads.numel(), branches)
    first = number * many + min(number, longer)
    return (first <= heads) & (heads < first + many + (number < longer))


def _document_starts(documents: tuple[tuple[int, ...], ...], positions: Tensor) -> Tensor:
    """Where the document of each position starts, per batch row; -1 for a position in no document."""
    rows = []
    for boundaries in documents:
        # one more start at the end, and one before all others, for positions outside of every document
        starts = torch.tensor([-1, *boundaries[:-1], -1], device=positions.device)
        ends = torch.tensor(boundaries, device=positions.device)
        rows.append(starts[torch.bucketize(positions, ends, right=True)])
    return torch.cat(rows)
