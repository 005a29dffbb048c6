"""Modules by their definitions, in the dtype of what they are given: every score in memory, nothing shared with ours.

Sizes and weights are read from the module; the arithmetic is written out here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from longring.geometry.patterns import Problem
from longring.numerics.definition import defined_attention, pair_counts


def turned(x, positions, *, base=10000.0, layout="half", centre=0.0, scale_base=None, keys=False):
    """x [batch, n, heads, d] as d/2 complex numbers, each times (fading * a turn) to the power of the position."""
    d = x.shape[-1]
    i = torch.arange(d // 2, dtype=torch.float64)
    pairs = x.unflatten(-1, (2, d // 2)).movedim(-2, -1) if layout == "half" else x.unflatten(-1, (d // 2, 2))
    numbers = torch.view_as_complex(pairs.double().contiguous())
    positions = positions.double() if positions.ndim == 2 else positions.double().unsqueeze(0)
    turns = torch.polar(torch.ones((), dtype=torch.float64), positions[..., None] * base ** (-2 * i / d))
    if scale_base is not None:
        fading = ((2 * i / d + 0.4) / 1.4) ** ((positions[..., None] - centre) / scale_base)
        turns = turns * (1 / fading if keys else fading)
    found = torch.view_as_real(numbers * turns.unsqueeze(2))
    return found.movedim(-1, -2).flatten(-2) if layout == "half" else found.flatten(-2)


def multihead(module, query, key=None, value=None, *, pattern, offset=None, scale=None):
    key = query if key is None else key
    value = key if value is None else value
    heads, kv_heads, d = module.num_heads, module.kv_heads, module.embed_dim // module.num_heads
    weights = module.state_dict(keep_vars=True)
    if "in_proj_weight" in weights:
        w = weights["in_proj_weight"].split([heads * d, kv_heads * d, kv_heads * d])
    else:
        w = [weights[f"{name}_proj_weight"] for name in "qkv"]
    bias = weights.get("in_proj_bias")
    b = [0.0] * 3 if bias is None else bias.split([heads * d, kv_heads * d, kv_heads * d])
    q, k, v = ((x @ w_.T + b_).unflatten(-1, (-1, d)) for x, w_, b_ in zip((query, key, value), w, b, strict=True))
    n_q, n_k = q.shape[1], k.shape[1]
    offset = n_k - n_q if offset is None else offset
    if (at := module.positions) is not None:
        words = {"base": at.base, "layout": at.layout}
        if hasattr(at, "scale_base"):
            words |= {"centre": at.length / 2, "scale_base": at.scale_base}
        q = turned(q, torch.arange(n_q) + offset, **words).to(query.dtype)
        k = turned(k, torch.arange(n_k), **words, keys=True).to(query.dtype)
    counts = pair_counts(pattern, Problem(q.shape[0], n_q, n_k, kv_heads, offset))
    out = defined_attention(q, k, v, counts, d**-0.5 if scale is None else scale)[0].flatten(-2)
    if "sub_norm.weight" in weights:
        out = layer_norm(module.sub_norm, out)
    return linear(module.out_proj, out)


def linear(module, x):
    return x @ module.weight.T + (0.0 if module.bias is None else module.bias)


def layer_norm(module, x):
    if isinstance(module, torch.nn.RMSNorm):
        return x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight + module.bias


def feedforward(module, x):
    up = linear(module.up, x)
    if module.activation == "swiglu":
        gate = linear(module.gate, x)
        hidden = gate * torch.sigmoid(gate) * up
    elif module.activation == "gelu":
        hidden = up * 0.5 * (1 + torch.erf(up / 2**0.5))
    elif module.activation == "silu":
        hidden = up * torch.sigmoid(up)
    else:
        hidden = up.clamp(min=0)
    if module.sub_norm is not None:
        hidden = layer_norm(module.sub_norm, hidden)
    return linear(module.down, hidden)


def layer(module, x, memory=None, *, pattern, memory_pattern=None):
    branches = [(module.attention_norm, lambda x: multihead(module.attention, x, pattern=pattern))]
    if memory is not None:
        look = module.cross_attention
        branches.append((module.cross_attention_norm, lambda x: multihead(look, x, memory, pattern=memory_pattern)))
    branches.append((module.feedforward_norm, lambda x: feedforward(module.feedforward, x)))
    for norm, branch in branches:
        kept = x * module.residual_scale
        x = kept + branch(layer_norm(norm, x)) if module.norm_first else layer_norm(norm, kept + branch(x))
    return x


def stack(module, x, *, pattern):
    x = x * module.embedding_scale
    if module.embedding_norm is not None:
        x = layer_norm(module.embedding_norm, x)
    for each in module.layers:
        x = layer(each, x, pattern=pattern)
    return x if module.norm is None else layer_norm(module.norm, x)


def language_model(module, tokens, *, pattern):
    x = stack(module.stack, module.embedding.weight[tokens], pattern=pattern)
    return x @ (module.embedding.weight if module.head is None else module.head.weight).T


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
