"""Attention in plain PyTorch on [many, rows, heads, d], as strict about its tensors as the packages are.

Of sequences there is no batch: tensors are [rows, heads, d], and lse [heads, rows].
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

Window = tuple[int | None, int | None]  # how far a row sees before and behind the diagonal that ends in the last corner

said: list[bool] = []  # what every backward pass was told of determinism
launched: list[tuple[int | None, Window]] = []  # how many sequences each call had, or None, and its window


NO_WINDOW: Window = (None, None)


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: Window = NO_WINDOW
) -> tuple[Tensor, Tensor]:
    _check(q, k, v)
    scores = _scores(q, k, scale, causal, window)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ _heads_first(v, q.shape[2])
    return out.transpose(1, 2).to(q.dtype).contiguous(), lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    deterministic: bool,
    dlse: Tensor | None = None,
    window: Window = NO_WINDOW,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, dout, out)
    _check_rows(lse, q)
    said.append(deterministic)
    heads, kv_heads = q.shape[2], k.shape[2]
    p = (_scores(q, k, scale, causal, window) - lse.unsqueeze(-1)).exp()
    q_, k_, v_, dout_, out_ = (_heads_first(x, heads) for x in (q, k, v, dout, out))
    delta = (dout_ * out_).sum(-1)
    if dlse is not None:
        _check_rows(dlse, q)
        delta = delta - dlse
    ds = scale * p * (dout_ @ v_.mT - delta.unsqueeze(-1))
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (ds.mT @ q_, p.mT @ dout_))
    dq, dk, dv = (x.transpose(1, 2).to(q.dtype).contiguous() for x in (ds @ k_, dk, dv))
    return dq, dk, dv


# ----------------------------------------------------------------------------------------------- sequences


def window(left: int, right: int) -> Window:
    """As flash-attn 2 and 3 are told of it: -1 is no limit."""
    assert min(left, right) >= -1
    return None if left == -1 else left, None if right == -1 else right


def as_flash_attn_2_takes_it(left: int, right: int, most: int) -> tuple[int, int]:
    """A limit of as many keys as there are is none; and where there is another, none is a limit of as many keys."""
    left, right = (-1 if side >= most else side for side in (left, right))
    if left >= 0 > right:
        return left, most
    return (most, right) if right >= 0 > left else (left, right)


Pieces = list[tuple[slice, slice]]


def pieces(
    of_queries: Tensor | None, of_keys: Tensor | None, most_queries: int | None, most_keys: int | None, window: Window
) -> Pieces | None:
    """Slices of the rows of each sequence, and of its keys; None where there are no sequences."""
    launched.append((None if of_queries is None else len(of_queries) - 1, window))
    if of_queries is None or of_keys is None:
        assert of_queries is of_keys is most_queries is most_keys is None
        return None
    assert of_queries.dtype == of_keys.dtype == torch.int32
    found = []
    for bounds, most in ((of_queries.tolist(), most_queries), (of_keys.tolist(), most_keys)):
        found.append([slice(*pair) for pair in pairwise(bounds)])
        assert max(b - a for a, b in pairwise(bounds)) == most
    return list(zip(*found, strict=True))


def forward_of(
    found: Pieces | None, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: Window
) -> tuple[Tensor, Tensor]:
    if found is None:
        return forward(q, k, v, scale, causal, window)
    parts = [forward(q[mine][None], k[theirs][None], v[theirs][None], scale, causal, window) for mine, theirs in found]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], dim=1)


def backward_of(
    found: Pieces | None,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    deterministic: bool,
    window: Window,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if found is None:
        return backward(dout, q, k, v, out, lse, scale, causal, deterministic, dlse, window)
    for terms in (lse, dlse):
        assert terms is None or (terms.is_contiguous() and terms.shape == (q.shape[1], q.shape[0]))
    parts = []
    for mine, theirs in found:
        tensors = [dout[mine][None], q[mine][None], k[theirs][None], v[theirs][None], out[mine][None]]
        slope = None if dlse is None else dlse[None, :, mine].contiguous()
        tensors.append(lse[None, :, mine].contiguous())
        parts.append(backward(*tensors, scale, causal, deterministic, slope, window))
    dq, dk, dv = (torch.cat([part[i][0] for part in parts]) for i in range(3))
    return dq, dk, dv


# --------------------------------------------------------------------------------------------------- details


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, window: Window) -> Tensor:
    """Causal, as a window, is aligned at the last row and the last column."""
    found = scale * _heads_first(q, q.shape[2]) @ _heads_first(k, q.shape[2]).mT
    left, right = window
    right = 0 if causal else right
    rows, cols = found.shape[-2:]
    gap = torch.arange(cols) - torch.arange(rows)[:, None] - (cols - rows)
    hidden = torch.zeros(rows, cols, dtype=torch.bool)
    for limit, beyond in ((left, -gap), (right, gap)):
        if limit is not None:
            assert limit >= 0
            hidden |= beyond > limit
    return found.masked_fill(hidden, -torch.inf)


def _heads_first(x: Tensor, heads: int) -> Tensor:
    return x.float().transpose(1, 2).repeat_interleave(heads // x.shape[2], 1)


def _check(*tensors: Tensor) -> None:
    q, k, v, *like_q = tensors
    assert all(x.stride(-1) == 1 and x.dtype == q.dtype and x.numel() for x in tensors)
    assert q.shape[3] % 8 == 0
    assert q.shape[3] <= 256
    assert k.shape == v.shape == (q.shape[0], k.shape[1], k.shape[2], q.shape[3])
    assert all(x.shape == q.shape for x in like_q)


def _check_rows(x: Tensor, q: Tensor) -> None:
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert x.shape == (q.shape[0], q.shape[2], q.shape[1])
