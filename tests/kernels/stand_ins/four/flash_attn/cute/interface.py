"""Of the many arguments of flash-attn-4 4.0.0b36 the first, and of the others those that attention alone needs.

With cu_seqlens_q and cu_seqlens_k there is no batch: tensors are [rows, heads, d], and lse [heads, rows].
"""

from itertools import pairwise

import plain
import torch

launched = []  # how many sequences each call had, or None, and its window


def _flash_attn_fwd(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    causal=False,
    return_lse=False,
    out=None,
    window_size_left=None,
    window_size_right=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
):
    window = window_size_left, window_size_right
    pieces = _pieces(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window)
    if pieces is None:
        found, lse = plain.forward(q, k, v, softmax_scale, causal, window)
        return _written(found, out), lse if return_lse else None, None, None, None
    assert out is None
    parts = [
        plain.forward(q[mine][None], k[theirs][None], v[theirs][None], softmax_scale, causal, window)
        for mine, theirs in pieces
    ]
    out, lse = (torch.cat([part[i][0] for part in parts], dim=i) for i in (0, 1))
    return out, lse if return_lse else None, None, None, None


def _flash_attn_bwd(
    q,
    k,
    v,
    out,
    dout,
    lse,
    *,
    softmax_scale=None,
    causal=False,
    deterministic=False,
    dq=None,
    dk=None,
    dv=None,
    dlse=None,
    window_size_left=None,
    window_size_right=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
):
    window = window_size_left, window_size_right
    pieces = _pieces(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window)
    told = softmax_scale, causal, deterministic
    if pieces is None:
        found = plain.backward(dout, q, k, v, out, lse, *told, dlse, window)
        return tuple(map(_written, found, (dq, dk, dv)))
    assert (dq, dk, dv) == (None, None, None)
    for terms in (lse, dlse):
        assert terms is None or (terms.is_contiguous() and terms.shape == (q.shape[1], q.shape[0]))
    parts = []
    for mine, theirs in pieces:
        rows = [x[mine][None] for x in (dout, q)]
        keys = [x[theirs][None] for x in (k, v)]
        slope = None if dlse is None else dlse[None, :, mine].contiguous()
        parts.append(
            plain.backward(*rows, *keys, out[mine][None], lse[None, :, mine].contiguous(), *told, slope, window)
        )
    return tuple(torch.cat([part[i][0] for part in parts]) for i in range(3))


def _pieces(of_queries, of_keys, most_queries, most_keys, window):
    """Slices of the rows of each sequence, and of its keys."""
    launched.append((None if of_queries is None else len(of_queries) - 1, window))
    if of_queries is None:
        assert of_keys is None
        return None
    assert of_queries.dtype == of_keys.dtype == torch.int32
    found = []
    for bounds, most in ((of_queries.tolist(), most_queries), (of_keys.tolist(), most_keys)):
        found.append([slice(*pair) for pair in pairwise(bounds)])
        assert max(b - a for a, b in pairwise(bounds)) == most
    return list(zip(*found, strict=True))


def _written(found, into):
    """As it is, or into the memory that was given for it, which must be like it."""
    if into is None:
        return found
    assert (into.shape, into.dtype) == (found.shape, found.dtype)
    return into.copy_(found)
