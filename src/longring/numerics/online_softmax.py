"""Online softmax: attention over some of the keys, and how partial results become one.

Shapes: out [batch, n, heads, d]; lse [batch, heads, n], the natural logarithm of what normalised out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention over some of the keys; lse = -inf marks a row that has seen none, and its out is 0."""

    out: Tensor
    lse: Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results and gradients are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def nothing_seen(q: Tensor) -> Partial:
    """The identity of merging."""
    batch, n, heads, _ = q.shape
    dtype = accumulator_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    return Partial(out, torch.full((batch, heads, n), -torch.inf, dtype=dtype, device=q.device))


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a part into (out, lse) in place, exactly; the lse have one dimension less. The part is used up.

    Associative and commutative up to rounding, with (0, -inf) as identity: ring steps, branches,
    documents and split keys may be merged in any order.
    """
    together = torch.logaddexp(lse, part_lse)
    unseen = together == -torch.inf  # (-inf) - (-inf) is nan: a row that saw nothing stays zero
    out.mul_((lse - together).exp_().masked_fill_(unseen, 0.0).unsqueeze(-1))
    out.add_(part_out.mul_((part_lse - together).exp_().masked_fill_(unseen, 0.0).unsqueeze(-1)))
    lse.copy_(together)
