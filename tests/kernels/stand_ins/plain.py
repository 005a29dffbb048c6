"""Attention in plain PyTorch on [many, rows, heads, d], as strict about its tensors as the packages are."""

from __future__ import annotations

import torch
from torch import Tensor

said: list[bool] = []  # what every backward pass was told of determinism


Window = tuple[int | None, int | None]  # how far a row sees before and behind the diagonal that ends in the last corner
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
