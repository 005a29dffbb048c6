"""Of the many arguments of flash-attn-4 4.0.0b36 the first, and of the others those that attention alone needs."""

import plain


def _flash_attn_fwd(q, k, v, *, softmax_scale=None, causal=False, return_lse=False):
    out, lse = plain.forward(q, k, v, softmax_scale, causal)
    return out, lse if return_lse else None, None, None, None


def _flash_attn_bwd(q, k, v, out, dout, lse, *, softmax_scale=None, causal=False, deterministic=False, dlse=None):
    return plain.backward(dout, q, k, v, out, lse, softmax_scale, causal, deterministic, dlse)
