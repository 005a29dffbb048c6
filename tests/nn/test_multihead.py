"""Multi-head attention beside torch's: its words, its state_dict, its numbers; and what is refused by name."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import longring as lr
from longring.nn import (
    Attention,
    DilatedAttention,
    Multihead,
    MultiheadAttention,
    MultiheadDilatedAttention,
    Rotary,
    XPos,
    magneto_gain,
)

E, H, N, M = 24, 4, 11, 7
BRANCHES = {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}


def drawn(n=N, width=E, batch=3, dtype=torch.float64, seed=0):
    return torch.randn(batch, n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pair(dtype=torch.float64, **words):
    """(torch's, ours with its state)."""
    torch.manual_seed(5)
    theirs = nn.MultiheadAttention(E, H, batch_first=True, dtype=dtype, **words)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = MultiheadAttention(E, H, dtype=dtype, **words)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def check_both(theirs, ours, inputs, told=None, extra=None):
    """Outputs, and the gradients of inputs and parameters. `extra` is said to torch's alone."""
    results = []
    for module, words in ((theirs, {"need_weights": False, **(told or {}), **(extra or {})}), (ours, told or {})):
        given = [x.clone().requires_grad_() for x in inputs]
        out, weights = module(*given, **words)
        assert weights is None
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
        names, parameters = zip(*module.named_parameters(), strict=True)
        results.append((names, [out, *torch.autograd.grad(out, (*given, *parameters), dout)]))
    (their_names, want), (our_names, got) = results
    assert their_names == our_names
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


WORDS = [{}, {"bias": False}, {"kdim": 10, "vdim": 6}, {"kdim": 10, "bias": False}]


@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torchs_state_gives_torchs_outputs_and_gradients(words, dtype):
    theirs, ours = pair(dtype, **words)
    key, value = (drawn(M, words.get(name, E), dtype=dtype, seed=1) for name in ("kdim", "vdim"))
    check_both(theirs, ours, [drawn(dtype=dtype), key, value])
    if "kdim" not in words:
        x = drawn(dtype=dtype)
        check_both(theirs, ours, [x, x, x])
        torch.testing.assert_close(ours(x)[0], theirs(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("as_float", [False, True])
def test_padding_on_the_right(as_float):
    theirs, ours = pair()
    lengths = torch.tensor([M, 3, 1])
    mask = torch.arange(M) >= lengths.unsqueeze(1)
    given = [drawn(), drawn(M, seed=1), drawn(M, seed=2)]
    told = torch.zeros(3, M, dtype=torch.float64).masked_fill(mask, -torch.inf) if as_float else mask
    check_both(theirs, ours, given, {"key_padding_mask": told})
    out, _ = ours(*given, lengths=lengths)
    assert torch.equal(out, ours(*given, key_padding_mask=mask)[0])


@pytest.mark.parametrize("as_float", [False, True])
def test_the_causal_mask(as_float):
    theirs, ours = pair()
    mask = torch.ones(N, N, dtype=torch.bool).triu(1)
    mask = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64) if as_float else mask
    x = drawn()
    check_both(theirs, ours, [x, x, x], {"attn_mask": mask, "is_causal": True})
    want = ours(x, attn_mask=mask, is_causal=True)[0]
    assert torch.equal(ours(x, is_causal=True)[0], want)
    causal = MultiheadAttention(E, H, causal=True, dtype=torch.float64)
    causal.load_state_dict(ours.state_dict())
    assert torch.equal(causal(x)[0], want)


def test_the_same_seed_draws_torchs_weights():
    for words in WORDS:
        made = []
        for kind in (nn.MultiheadAttention, MultiheadAttention):
            torch.manual_seed(2)
            made.append(kind(E, H, batch_first=True, **words).state_dict())
        assert made[0].keys() == made[1].keys()
        for name, weight in made[0].items():
            assert torch.equal(weight, made[1][name]), (words, name)


def test_it_serves_in_torchs_own_layers():
    """Training and evaluating: torch's fast path must not take our weights and leave out our attention."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 48, dropout=0.0, batch_first=True, dtype=torch.float64)
    x = drawn()
    mask = torch.arange(N) >= torch.tensor([N, 4, 9]).unsqueeze(1)
    want = layer(x, src_key_padding_mask=mask)
    ours = MultiheadAttention(E, H, dtype=torch.float64)
    ours.load_state_dict(layer.self_attn.state_dict())
    dilated = MultiheadDilatedAttention(E, H, **BRANCHES, dtype=torch.float64)
    dilated.load_state_dict(ours.state_dict())
    layer.self_attn = ours
    torch.testing.assert_close(layer(x, src_key_padding_mask=mask), want)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x, src_key_padding_mask=mask), want)
        layer.self_attn = dilated
        assert not torch.allclose(layer(x, src_key_padding_mask=mask), want)


def test_a_state_goes_there_and_back():
    for make in (
        lambda: MultiheadAttention(E, H, kv_heads=2, sub_layernorm=True),
        lambda: MultiheadDilatedAttention(E, H, **BRANCHES, kdim=10, vdim=10),
    ):
        module, x = make(), drawn(dtype=torch.float32)
        given = (x,) if module.kdim == E else (x, drawn(M, 10, dtype=torch.float32))
        want = module(*given)[0]
        copied, empty = copy.deepcopy(module), make().to("meta").to_empty(device="cpu")
        empty.load_state_dict(module.state_dict())
        for other in (copied, empty):
            assert torch.equal(other(*given)[0], want)
    fresh = MultiheadAttention(E, H, gain=1.5, sub_layernorm=True, device="meta").to_empty(device="cpu")
    fresh.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in fresh.parameters())
    assert torch.equal(fresh.sub_norm.weight, torch.ones(E))


def test_autocast_and_16_bits():
    x = drawn(dtype=torch.float32)
    for words in ({}, {"positions": Rotary(E // H)}, {"sub_layernorm": True, "kv_heads": 2}):
        torch.manual_seed(1)
        module = MultiheadAttention(E, H, causal=True, **words)
        want = module(x)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(x)[0]
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), want, atol=0.05, rtol=0.05)
        out.float().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in module.parameters())
        half = copy.deepcopy(module).to(torch.bfloat16)(x.bfloat16())[0]
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half.float(), want, atol=0.05, rtol=0.05)


def test_positions_may_be_said():
    """Restarting or shifted positions give the scores of the global ones, and angles may be computed beforehand."""
    module = MultiheadAttention(E, H, causal=True, positions=Rotary(E // H), dtype=torch.float64)
    x = drawn()
    want = module(x)[0]
    torch.testing.assert_close(module(x, positions=torch.arange(N) + 1000)[0], want)
    torch.testing.assert_close(module(x, x, positions=torch.arange(N) + 5, key_positions=torch.arange(N) + 5)[0], want)
    angles = module.positions.at(torch.arange(N), dtype=torch.float64)
    assert torch.equal(module(x, positions=angles)[0], want)
    documents = [0, 4, N]
    restarting = torch.cat([torch.arange(4), torch.arange(N - 4)])
    packed = module(x, documents=documents)[0]
    torch.testing.assert_close(module(x, documents=documents, positions=restarting)[0], packed)
    assert not torch.allclose(module(x, positions=2 * torch.arange(N))[0], want)


def test_a_cached_prefix():
    """Fewer queries than keys: the last meets the last, positions included."""
    module = MultiheadAttention(E, H, causal=True, positions=Rotary(E // H), kv_heads=2, dtype=torch.float64)
    x = drawn()
    want = module(x)[0]
    torch.testing.assert_close(module(x[:, 8:], x)[0], want[:, 8:])
    torch.testing.assert_close(module(x[:, 2:5], x, query_offset=2)[0], want[:, 2:5])
    with pytest.raises(lr.ArgumentError, match="query_offset must be a whole number, got 'two'"):
        module(x[:, 2:5], x, query_offset="two")


def test_gains_of_magneto():
    assert magneto_gain(decoder_layers=12) == math.sqrt(math.log(24))
    assert magneto_gain(encoder_layers=12, of="encoder") == math.sqrt(math.log(24))
    assert magneto_gain(encoder_layers=6, decoder_layers=4) == math.sqrt(math.log(12))
    both = magneto_gain(encoder_layers=6, decoder_layers=4, of="encoder")
    assert both == pytest.approx(math.sqrt(math.log(12) * math.log(12) / 3))
    with pytest.raises(lr.ArgumentError, match="decoder must have layers"):
        magneto_gain(encoder_layers=6)
    with pytest.raises(lr.ArgumentError, match="of must be"):
        magneto_gain(encoder_layers=6, of="both")


def test_magnetos_initial_values():
    """Xavier's deviation: 1 for queries and keys, the gain for values and the output."""
    torch.manual_seed(0)
    module = MultiheadAttention(256, 4, gain=2.0, kv_heads=2)
    for weight, gain in zip((*module.projections, module.out_proj.weight), (1, 1, 2, 2), strict=True):
        want = gain * math.sqrt(2 / sum(weight.shape))
        assert weight.std().item() == pytest.approx(want, rel=0.03)
    assert not module.in_proj_bias.any()
    assert not module.out_proj.bias.any()


def test_what_it_is_can_be_read():
    module = MultiheadDilatedAttention(E, H, **BRANCHES, kv_heads=2, positions=XPos(6, length=100), sub_layernorm=True)
    told = repr(module)
    for part in ("24, 4, kv_heads=2", "DilatedAttention(segment_lengths=[4, 8]", "XPos(6", "(sub_norm): LayerNorm"):
        assert part in told
    assert repr(MultiheadAttention(E, H, bias=False, kdim=3, gain=2)).startswith(
        "MultiheadAttention(\n  24, 4, kdim=3, bias=False, gain=2\n"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"add_bias_kv": True}, "add_bias_kv"),
        ({"add_zero_attn": True}, "add_zero_attn"),
        ({"batch_first": False}, "batch_first"),
    ],
    ids=str,
)
def test_what_is_not_built_is_refused_by_name(words, says):
    with pytest.raises(lr.NotBuilt, match=says):
        MultiheadAttention(E, H, **words)
    with pytest.raises(lr.NotBuilt, match=says):
        MultiheadDilatedAttention(E, H, **BRANCHES, **words)


def test_what_nothing_can_be_made_of():
    for words, says in (
        ({"num_heads": 5}, "embed_dim must be a multiple of num_heads, got 24 and 5"),
        ({"num_heads": 4, "kv_heads": 3}, "num_heads must be a multiple of kv_heads, got 4 and 3"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": 4, "kdim": -1}, "kdim"),
        ({"num_heads": 4, "positions": Rotary(8)}, "head_dim 8, but embed_dim / num_heads is 6"),
        ({"num_heads": 4, "positions": "rotary"}, "positions must be"),
        ({"num_heads": 4, "kernel": "fast"}, "kernel"),
        ({"num_heads": 4, "window": (1, 2, 3)}, "window"),
        ({"num_heads": 4, "gain": -1}, "gain must be a positive number, got -1"),
        ({"num_heads": 4, "eps": "1e-5"}, "eps must be a positive number, got '1e-5'"),
        ({"num_heads": 4, "bias": "no"}, "bias must be True or False, got 'no'"),
        ({"num_heads": 4, "sub_layernorm": None}, "sub_layernorm must be True or False, got None"),
    ):
        with pytest.raises(lr.ArgumentError, match=says):
            MultiheadAttention(E, **words)
    with pytest.raises(lr.ArgumentError, match=r"longring\.nn\.Attention"):
        Multihead(E, H, attention=nn.MultiheadAttention(E, H))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pattern"):
        MultiheadAttention(E, H, pattern=lr.Dense())  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("told", "error", "says"),
    [
        ({"need_weights": True}, lr.NotBuilt, "never in memory"),
        ({"attn_mask": torch.zeros(N, N)}, lr.NotBuilt, "attn_mask"),
        ({"attn_mask": torch.zeros(N, N), "is_causal": True}, lr.NotBuilt, "not the causal mask"),
        ({"attn_mask": torch.ones(N, N).bool().triu(2), "is_causal": True}, lr.NotBuilt, "not the causal mask"),
        ({"attn_mask": torch.ones(3 * H, N, N).bool().triu(1), "is_causal": True}, lr.NotBuilt, "attn_mask of shape"),
        ({"attn_mask": torch.ones(N, N), "is_causal": True}, lr.NotBuilt, "a bias is not built"),
        ({"attn_mask": torch.ones(N, N).long(), "is_causal": True}, lr.ArgumentError, "bool or float"),
        ({"key_padding_mask": torch.eye(N).bool()[:3]}, lr.NotBuilt, "on the right"),
        ({"key_padding_mask": torch.arange(N).expand(3, N) < 2}, lr.NotBuilt, "on the right"),
        ({"key_padding_mask": torch.zeros(3, N + 1).bool()}, lr.ArgumentError, r"must be \[3, 11\]"),
        ({"key_padding_mask": torch.ones(3, N)}, lr.NotBuilt, "a bias is not built"),
        ({"key_padding_mask": torch.zeros(3, N).bool(), "lengths": [N] * 3}, lr.ArgumentError, "say the same"),
        ({"value": drawn()}, lr.ArgumentError, "value was given without key"),
        ({"key": drawn(), "value": drawn(M)}, lr.ArgumentError, "differ in tokens"),
        ({"key": [1, 2]}, lr.ArgumentError, r"key must be a tensor \[batch, n, 24\], got list"),
        ({"is_causal": "yes"}, lr.ArgumentError, "is_causal must be True or False, got 'yes'"),
        ({"key": drawn(width=5)}, lr.ArgumentError, r"key must be \[batch, n, 24\]"),
        ({"positions": torch.arange(N)}, lr.ArgumentError, "no rotary embedding"),
        ({"sharding": "zigzag"}, lr.ArgumentError, "must be a longring.Sharding"),
        ({"kv_sharding": lr.Sharding(N)}, lr.ArgumentError, "without sharding"),
        ({"lengths": [1, 2]}, lr.PatternError, "one number for each of 3 rows"),
        ({"documents": [0, 4]}, lr.PatternError, "must end at the 11 keys"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_refused_in_a_call(told, error, says):
    module = MultiheadAttention(E, H, dtype=torch.float64)
    with pytest.raises(error, match=says):
        module(drawn(), **told)


def test_tokens_without_a_batch():
    with pytest.raises(lr.ArgumentError, match=r"query must be \[batch, n, 24\], got shape \[11, 24\]"):
        MultiheadAttention(E, H, dtype=torch.float64)(drawn()[0])


def test_parts_may_be_put_together():
    torch.manual_seed(0)
    made = Multihead(E, H, attention=DilatedAttention(**BRANCHES, causal=False), dtype=torch.float64)
    spelled = MultiheadDilatedAttention(E, H, **BRANCHES, dtype=torch.float64)
    spelled.load_state_dict(made.state_dict())
    assert torch.equal(made(drawn())[0], spelled(drawn())[0])
    dense = Multihead(E, H, attention=Attention(lr.Dense(causal=False)), dtype=torch.float64)
    dense.load_state_dict(made.state_dict())
    assert not torch.allclose(dense(drawn())[0], made(drawn())[0])
