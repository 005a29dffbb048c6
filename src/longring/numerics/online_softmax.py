"""Online softmax: attention over some of the keys, and how partial results become one.

Shapes: out [batch, n, heads, d]; lse [batch, heads, n], the natural logarithm of what normalised out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention over some of the keys; lse = -inf marks a row that has seen none, and its out is 0.

    Between merges out is in the accumulator's dtype and lse in `log_dtype`.
    """

    out: Tensor
    lse: Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results and gradients are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def log_dtype(device: torch.device) -> torch.dtype:
    """What lse is carried in from merge to merge: rounded to float32 each time, its error would grow with them."""
    return torch.float32 if device.type == "mps" else torch.float64  # which knows no float64


def nothing_seen(q: Tensor) -> Partial:
    """The identity of merging."""
    batch, n, heads, _ = q.shape
    out = torch.zeros(q.shape, dtype=accumulator_dtype(q.dtype), device=q.device)
    return Partial(out, torch.full((batch, heads, n), -torch.inf, dtype=log_dtype(q.device), device=q.device))


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a part into (out, lse) in place, exactly; the lse have one dimension less. The part is used up.

    Associative and commutative up to rounding, with (0, -inf) as identity: ring steps, branches,
    documents and split keys may be merged in any order.
    """
    part_lse = part_lse.to(lse.dtype)
    together = torch.logaddexp(lse, part_lse)
    base = together.masked_fill(together == -torch.inf, 0.0)  # (-inf) - (-inf) is nan: who saw nothing weighs 0
    out.mul_((lse - base).exp_().to(out.dtype).unsqueeze(-1))
    out.add_(part_out.mul_((part_lse - base).exp_().to(out.dtype).unsqueeze(-1)))
    lse.copy_(together)


def merged(out: Tensor, lse: Tensor) -> Partial:
    """Parts along a first dimension, merged at once: who has the same parts in the same order has the same bits."""
    lse = lse.to(log_dtype(lse.device))
    together = lse.logsumexp(0)
    base = together.masked_fill(together == -torch.inf, 0.0)  # as above
    weights = (lse - base).exp_().to(out.dtype)
    return Partial((out * weights.mT.unsqueeze(-1)).sum(0), together)
