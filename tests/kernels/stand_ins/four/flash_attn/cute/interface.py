"""Of the many arguments of flash-attn-4 4.0.0b36 the first, and of the others those that attention alone needs."""

import plain


def _flash_attn_fwd(q, k, v, *, softmax_scale=None, causal=False, return_lse=False, out=None):
    found, lse = plain.forward(q, k, v, softmax_scale, causal)
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
):
    found = plain.backward(dout, q, k, v, out, lse, softmax_scale, causal, deterministic, dlse)
    return tuple(map(_written, found, (dq, dk, dv)))


def _written(found, into):
    """As it is, or into the memory that was given for it, which must be like it."""
    if into is None:
        return found
    assert (into.shape, into.dtype) == (found.shape, found.dtype)
    return into.copy_(found)
