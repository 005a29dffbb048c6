"""The arguments of flash-attn 3.0.0, in their order."""

import plain
import torch


def _flash_attn_forward(
    q,
    k,
    v,
    k_new=None,
    v_new=None,
    qv=None,
    out_=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    kv_batch_idx=None,
    leftpad_k=None,
    rotary_cos=None,
    rotary_sin=None,
    seqlens_rotary=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
):
    assert (k_new, v_new, qv, out_) == (None,) * 4
    assert (softcap, num_splits) == (0.0, 1)
    window = plain.window(window_size_left, window_size_right)
    pieces = plain.pieces(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window)
    out, lse = plain.forward_of(pieces, q, k, v, softmax_scale, causal, window)
    return out, lse, torch.empty(0), torch.empty(0)


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    sequed_q=None,
    sequed_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dq=None,
    dk=None,
    dv=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    deterministic=False,
    sm_margin=0,
):
    assert (sequed_q, sequed_k, softcap) == (None, None, 0.0)
    assert not deterministic or q.shape[-1] <= 192
    window = plain.window(window_size_left, window_size_right)
    pieces = plain.pieces(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window)
    told = softmax_scale, is_causal, deterministic, window
    found = plain.backward_of(pieces, dout, q, k, v, out, softmax_lse, *told)
    for into, x in zip((dq, dk, dv), found, strict=True):
        into.copy_(x)
    return torch.empty_like(softmax_lse)
