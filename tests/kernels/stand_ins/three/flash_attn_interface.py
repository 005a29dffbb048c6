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
    assert (window_size_left, window_size_right, softcap, num_splits) == (-1, -1, 0.0, 1)
    out, lse = plain.forward(q, k, v, softmax_scale, causal)
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
    assert (cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k) == (None,) * 6
    assert (window_size_left, window_size_right, softcap) == (-1, -1, 0.0)
    assert not deterministic or q.shape[3] <= 192
    found = plain.backward(dout, q, k, v, out, softmax_lse, softmax_scale, is_causal, deterministic)
    for into, x in zip((dq, dk, dv), found, strict=True):
        into.copy_(x)
    return torch.empty_like(softmax_lse)
