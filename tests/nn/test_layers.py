"""Layers: refusals, copies and 16 bits; their numbers are judged in test_module_ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import longring as lr
from longring.nn import (
    Attention,
    DecoderLayer,
    DilatedAttention,
    EncoderLayer,
    FeedForward,
    RingAttention,
    Rotary,
    magneto_gain,
)

E, H, N = 24, 4, 9


def drawn(n=N, width=E, dtype=torch.float32, seed=0):
    return torch.randn(2, n, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_it_is_torchs_layer(norm_first, activation):
    torch.manual_seed(1)
    words = {"norm_first": norm_first, "activation": activation, "dtype": torch.float64}
    theirs = nn.TransformerEncoderLayer(E, H, 48, dropout=0.0, batch_first=True, **words)
    ours = EncoderLayer(E, H, feedforward_dim=48, **words)
    names = {
        "self_attn": "attention",
        "linear1": "feedforward.up",
        "linear2": "feedforward.down",
        "norm1": "attention_norm",
        "norm2": "feedforward_norm",
    }
    state = {}
    for name, weight in theirs.state_dict().items():
        first, rest = name.split(".", 1)
        state[f"{names[first]}.{rest}"] = weight
    ours.load_state_dict(state)
    x = drawn(dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
    mask = torch.arange(N) >= torch.tensor([N, 4]).unsqueeze(1)
    torch.testing.assert_close(ours(x, lengths=[N, 4])[1, :4], theirs(x, src_key_padding_mask=mask)[1, :4])


def test_it_is_torchs_decoder_layer():
    torch.manual_seed(1)
    theirs = nn.TransformerDecoderLayer(E, H, 48, dropout=0.0, batch_first=True, dtype=torch.float64)
    ours = DecoderLayer(
        E, H, feedforward_dim=48, cross_attention=True, norm_first=False, activation="relu", dtype=torch.float64
    )
    names = {
        "self_attn": "attention",
        "multihead_attn": "cross_attention",
        "linear1": "feedforward.up",
        "linear2": "feedforward.down",
        "norm1": "attention_norm",
        "norm2": "cross_attention_norm",
        "norm3": "feedforward_norm",
    }
    state = {}
    for name, weight in theirs.state_dict().items():
        first, rest = name.split(".", 1)
        state[f"{names[first]}.{rest}"] = weight
    ours.load_state_dict(state)
    x, memory = drawn(dtype=torch.float64), drawn(5, dtype=torch.float64, seed=1)
    mask = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    padding = torch.zeros(2, 5, dtype=torch.float64)
    padding[1, 3:] = -torch.inf
    want = theirs(x, memory, tgt_mask=mask, tgt_is_causal=True, memory_key_padding_mask=padding)
    torch.testing.assert_close(ours(x, memory, memory_lengths=[5, 3]), want)


def test_both_attentions_of_a_decoder_have_one_way_to_compute():
    own = RingAttention(kernel="reference", deterministic=True, timeout=3.0)
    options = DecoderLayer(E, H, attention=own, cross_attention=True).cross_attention.attention.options
    assert options == own.options | {"schedule": "auto"}


def test_copies_states_and_the_meta_device():
    words = {"cross_attention": True, "sub_layernorm": True, "gain": magneto_gain(decoder_layers=3), "kv_heads": 2}

    def make(**more):
        return DecoderLayer(E, H, positions=Rotary(6), attention=Attention(lr.Dense(window=(4, 0))), **words, **more)

    layer = make()
    want = layer(drawn(), drawn(5))
    empty = make(device="meta").to_empty(device="cpu")
    empty.load_state_dict(layer.state_dict())
    for other in (copy.deepcopy(layer), empty):
        assert torch.equal(other(drawn(), drawn(5)), want)


def test_autocast():
    for layer in (
        EncoderLayer(E, H, attention=DilatedAttention(segment_lengths=[4, 8], dilation_rates=[1, 2], causal=False)),
        DecoderLayer(E, H, norm="rms", activation="swiglu", bias=False, sub_layernorm=True, positions=Rotary(6)),
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(drawn())
        torch.testing.assert_close(out.float(), layer(drawn()), atol=0.1, rtol=0.1)
        out.float().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_the_gain_is_in_the_feedforward_too():
    torch.manual_seed(0)
    made = FeedForward(256, 512, gain=2.0)
    for weight in (made.up.weight, made.down.weight):
        assert weight.std().item() == pytest.approx(2 * (2 / 768) ** 0.5, rel=0.02)
    assert not made.up.bias.any()
    made.reset_parameters()
    assert made.down.weight.std().item() == pytest.approx(2 * (2 / 768) ** 0.5, rel=0.02)


def test_refusals():
    with pytest.raises(lr.ArgumentError, match="activation"):
        FeedForward(8, 8, activation="tanh")
    with pytest.raises(lr.ArgumentError, match="hidden must be a whole number of at least 1, got 0"):
        EncoderLayer(E, H, feedforward_dim=0)
    with pytest.raises(lr.ArgumentError, match="gain must be a positive number, got 0"):
        FeedForward(8, 8, gain=0)
    with pytest.raises(lr.ArgumentError, match="cross_attention must be True or False, got 'no'"):
        DecoderLayer(E, H, cross_attention="no")  # type: ignore[arg-type]
    with pytest.raises(lr.ArgumentError, match="norm must be one of"):
        EncoderLayer(E, H, norm="batch")
    with pytest.raises(lr.ArgumentError, match="norm_first"):
        EncoderLayer(E, H, norm_first="yes")  # type: ignore[arg-type]
    with pytest.raises(lr.ArgumentError, match="residual_scale must be a positive number, got 0"):
        EncoderLayer(E, H, residual_scale=0)
    with pytest.raises(lr.ArgumentError, match="a decoder's attention is causal"):
        DecoderLayer(E, H, attention=Attention(lr.Dense(causal=False)))
    with pytest.raises(lr.ArgumentError, match="without cross_attention"):
        DecoderLayer(E, H, memory_dim=8)
    with pytest.raises(lr.ArgumentError, match="made without cross_attention"):
        DecoderLayer(E, H)(drawn(), drawn(5))
    with pytest.raises(lr.ArgumentError, match="needs a memory"):
        DecoderLayer(E, H, cross_attention=True)(drawn())
    with pytest.raises(lr.ArgumentError, match="memory_sharding"):
        DecoderLayer(E, H, cross_attention=True)(drawn(), drawn(5), sharding=lr.Sharding(N))
    with pytest.raises(TypeError, match="dropout"):
        EncoderLayer(E, H, dropout=0.1)  # type: ignore[call-arg]
