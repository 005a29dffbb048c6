"""Of the many arguments of flash-attn-4 4.0.0b36 the first, and of the others those that attention alone needs."""

import plain


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
    pieces = plain.pieces(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window)
    assert pieces is None or out is None
    found, lse = plain.forward_of(pieces, q, k, v, softmax_scale, causal, window)
    return _written(found, out), lse if return_lse else None, None, None, None


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
    pieces = plain.pieces(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window)
    assert pieces is None or (dq, dk, dv) == (None, None, None)
    told = softmax_scale, causal, deterministic, window, dlse
    found = plain.backward_of(pieces, dout, q, k, v, out, lse, *told)
    return tuple(map(_written, found, (dq, dk, dv)))


def _written(found, into):
    """As it is, or into the memory that was given for it, which must be like it."""
    if into is None:
        return found
    assert (into.shape, into.dtype) == (found.shape, found.dtype)
    return into.copy_(found)
