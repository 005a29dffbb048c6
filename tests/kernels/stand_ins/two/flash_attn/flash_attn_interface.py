"""The arguments of flash-attn 2.7.0 to 2.8.4, in their order: those of a batch, and those of sequences.

A limit that is as large as there are keys is taken for none, and no limit beside another for as many keys, as they do:
to the right both are wrong where queries are more.
"""

import plain
import torch


def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
):
    window = window_size_left, window_size_right
    return _forward(None, q, k, v, softmax_scale, causal, window, dropout_p, softcap, alibi_slopes, return_softmax)


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
):
    assert (block_table, leftpad_k, seqused_k, zero_tensors) == (None, None, None, False)
    bounds, window = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
    return _forward(bounds, q, k, v, softmax_scale, causal, window, dropout_p, softcap, alibi_slopes, return_softmax)


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
):
    given, window = (dout, q, k, v, out, softmax_lse), (window_size_left, window_size_right)
    told = softmax_scale, causal, deterministic
    return _backward(None, given, (dq, dk, dv), told, window, dropout_p, softcap, alibi_slopes, rng_state)


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
    zero_tensors=False,
):
    assert not zero_tensors
    bounds, window = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
    given, told = (dout, q, k, v, out, softmax_lse), (softmax_scale, causal, deterministic)
    return _backward(bounds, given, (dq, dk, dv), told, window, dropout_p, softcap, alibi_slopes, rng_state)


def _as_taken(window, bounds, k):
    most = k.shape[1] if bounds is None else bounds[3]
    return plain.window(*plain.as_flash_attn_2_takes_it(*window, most))


def _forward(bounds, q, k, v, scale, causal, window, dropout_p, softcap, alibi_slopes, return_softmax):
    assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
    window = _as_taken(window, bounds, k)
    pieces = plain.pieces(*(bounds or (None,) * 4), window)
    out, lse = plain.forward_of(pieces, q, k, v, scale, causal, window)
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def _backward(bounds, given, into, told, window, dropout_p, softcap, alibi_slopes, rng_state):
    assert (dropout_p, softcap, alibi_slopes, rng_state) == (0.0, 0.0, None, None)
    window = _as_taken(window, bounds, given[2])
    pieces = plain.pieces(*(bounds or (None,) * 4), window)
    found = plain.backward_of(pieces, *given, *told, window)
    for memory, x in zip(into, found, strict=True):
        memory.copy_(x)
    return torch.empty_like(given[-1])
