"""Weights of torchscale's LongNet in our layers and models, against what torchscale's own gave with them.

golden/torchscale_layers.json has the configs, the names and shapes of state_dicts, and how the numbers came about.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.func import functional_call

import longring as lr
from documents import code_of
from longring.integrations.torchscale import decoder_config, encoder_config, load, translated
from longring.models import LongNet, LongNetLM
from longring.nn import Attention, DecoderLayer, EncoderLayer, Rotary
from longring.testing import run_ranks

GOLDEN = Path(__file__).parents[1] / "golden"
RECORD = json.loads((GOLDEN / "torchscale_layers.json").read_text())
CASES = {case["name"]: case for case in RECORD["cases"]}
ROUNDING = 1e-13  # of float64, through two layers and back


# ------------------------------------------------------------------------------------- the same questions as were asked


def drawn_state(case) -> dict[str, torch.Tensor]:
    """Weights for the names and shapes that torchscale's state_dict had, in 256ths."""
    draw = torch.Generator().manual_seed(case["seed"])
    state = {}
    for name, shape in sorted(case["state"].items()):
        x = torch.randint(-127, 128, shape, generator=draw).double() / 256
        is_norm = len(shape) == 1 and name.endswith("weight")  # around 1
        state[name] = 1 + x if is_norm else x
        if name.endswith("xpos.scale"):
            (pairs,) = shape
            state[name] = (torch.arange(pairs).double() / pairs + 0.4) / 1.4
    if case["words"].get("share_decoder_input_output_embed"):
        state["output_projection.weight"] = state["embed_tokens.weight"]
    return state


def drawn_inputs(case) -> dict[str, torch.Tensor]:
    """x (tokens or embeddings), the gradient of the output, and a memory where there is one, in 64ths."""
    draw = torch.Generator().manual_seed(case["seed"] + 1)
    words, batch, n = case["words"], case["batch"], case["n"]
    dim = words.get("encoder_embed_dim") or words["decoder_embed_dim"]
    vocabulary = words.get("vocab_size", -1)
    wide = vocabulary if case["kind"] == "decoder" else dim
    inputs = {
        "x": torch.randint(-127, 128, (batch, n, dim), generator=draw).double() / 64,
        "dout": torch.randint(-127, 128, (batch, n, wide), generator=draw).double() / 64,
    }
    if vocabulary > 0:
        inputs["x"] = torch.randint(vocabulary, (batch, n), generator=draw)
    if case.get("memory"):
        inputs["memory"] = torch.randint(-127, 128, (batch, case["memory"], dim), generator=draw).double() / 64
    return inputs


def digest(x: torch.Tensor) -> torch.Tensor:
    """One number a row, so that the record is small and no row goes unasked; vectors as they are."""
    return x.double() if x.ndim == 1 else x.double() @ torch.arange(1, x.shape[-1] + 1).double()


def golden(case) -> dict[str, torch.Tensor]:
    """The output, and gradients by torchscale's own names."""
    with numpy.load(GOLDEN / "torchscale_layers.npz", allow_pickle=False) as values:
        mine = [name for name in values.files if name.startswith(f"{case['name']}: ")]
        return {name.split(": ")[1]: torch.from_numpy(values[name]) for name in mine}


# ---------------------------------------------------------------------------------------------------------- answers


def config_for(case):
    words = case["words"]
    max_length = 64 if words.get("xpos_rel_pos") else None
    return (encoder_config if "encoder" in case["kind"] else decoder_config)(words, max_length=max_length)


def made(case, **words):
    words = {"dtype": torch.float64, **words}
    if case["kind"] == "encoder":
        return LongNet(config_for(case), **words)
    if case["kind"] == "decoder":
        return LongNetLM(config_for(case), **words)
    is_encoder = case["kind"] == "encoder layer"
    config = config_for(case)
    words |= config.words() | {"attention": config.attention(causal=not is_encoder), "positions": config.rotary()}
    if is_encoder:
        return EncoderLayer(config.dim, config.heads, **words)
    return DecoderLayer(config.dim, config.heads, cross_attention="memory" in case, **words)


def answer(case, group=None):
    """The whole output, and gradients by torchscale's names: whole of inputs, this rank's part of weights."""
    model, inputs, state = made(case), drawn_inputs(case), drawn_state(case)
    dout = inputs.pop("dout")
    leaves = {name: x for name, x in (inputs | state).items() if x.is_floating_point() and "xpos" not in name}
    for leaf in leaves.values():
        leaf.requires_grad_()
    s = {name: lr.Sharding(x.shape[1], group, "contiguous") for name, x in inputs.items()}
    given = tuple(s[name].shard(x) for name, x in inputs.items())
    told = {"sharding": s["x"]} | ({"memory_sharding": s["memory"]} if "memory" in s else {})
    out = functional_call(model, translated(model, state), given, told)
    gradients = torch.autograd.grad(out, list(leaves.values()), s["x"].shard(dout))
    return s["x"].unshard(out.detach()), dict(zip(leaves, gradients, strict=True))


def check(case, out, gradients) -> None:
    want = golden(case)
    got = {"out": out} | {f"d {name}": x for name, x in gradients.items()}
    if case["words"].get("share_decoder_input_output_embed"):
        got.pop("d output_projection.weight")  # the same tensor
    assert got.keys() == want.keys()
    usual = float(torch.stack([x.norm() for name, x in want.items() if name != "out"]).median())
    for name, theirs in want.items():
        # of what cancels to 0, as the gradient of a key's bias does, only what it cancelled from has digits
        size = float(theirs.norm()) + (0 if name == "out" else usual)
        error = float((digest(got[name]) - theirs).norm()) / size
        assert error <= ROUNDING, (case["name"], name, error)


def test_the_record():
    assert RECORD["commit"] == "4d1e0e82e5adf86dd424f1463192635b73fc8efc"
    assert {case["kind"] for case in CASES.values()} == {"encoder", "decoder", "encoder layer", "decoder layer"}
    sizes = [path.stat().st_size for path in GOLDEN.glob("torchscale_layers*")]
    assert len(sizes) == 2
    assert sum(sizes) < 400_000


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_torchscales(name):
    check(CASES[name], *answer(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_loading_is_what_was_translated(name):
    case, inputs = CASES[name], drawn_inputs(CASES[name])
    given = (inputs["x"], inputs["memory"]) if "memory" in inputs else (inputs["x"],)
    model = made(case)
    assert load(model, drawn_state(case)) is model
    state = {f"net.{name}": x for name, x in drawn_state(case).items()} | {"other": torch.zeros(3)}
    empty = load(made(case, device="meta").to_empty(device="cpu"), state, prefix="net.")
    error = (digest(model(*given).detach()) - golden(case)["out"]).norm() / golden(case)["out"].norm()
    assert error <= ROUNDING
    assert torch.equal(model(*given), empty(*given))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_as_one(name):
    case = CASES[name]
    parts = run_ranks(2, lambda group: answer(case, group))
    (out, mine), (again, others) = parts
    assert torch.equal(out, again)
    check(case, out, {name: mine[name] if name in ("x", "memory") else mine[name] + others[name] for name in mine})


# ---------------------------------------------------------------------------------------------------------- configs


def test_torchscales_defaults():
    words = {"segment_length": "[16, 64]", "dilated_ratio": "[1, 4]"}
    config = encoder_config({"encoder_layers": 2, **words})
    assert (config.dim, config.layers, config.heads, config.feedforward_dim) == (768, 2, 12, 3072)
    assert (config.segment_lengths, config.dilation_rates, config.compat) == ((16, 64), (1, 4), "torchscale")
    assert (config.sub_layernorm, config.norm_first, config.final_norm) == (True, True, True)
    assert (config.vocab_size, config.positions, config.activation, config.eps) == (None, None, "gelu", 1e-5)
    assert encoder_config(Namespace(encoder_layers=2, learning_rate=0.1, subln=None, **words)) == config
    assert encoder_config({"encoder_layers": 2, "segment_length": [16, 64], "dilated_ratio": (1, 4)}) == config


def test_what_configs_settle_among_themselves():
    words = {"segment_length": [16], "dilated_ratio": [1]}
    after = encoder_config({"encoder_layers": 8, "deepnorm": True, **words})
    assert (after.norm_first, after.sub_layernorm, after.final_norm, after.residual_scale) == (False, False, False, 2.0)
    forced = encoder_config({"encoder_layers": 8, "encoder_normalize_before": False, **words})
    assert forced.norm_first  # by subln, torchscale's default
    words |= {"decoder_layers": 8, "vocab_size": 5}
    assert decoder_config({"deepnorm": True, **words}).norm_first  # there it is the encoder's words that are settled
    assert not decoder_config({"decoder_normalize_before": False, **words}).norm_first


def test_prov_gigapath():
    """Its slide encoder; as its code makes it, but for dropout. 12 layers would be 85M numbers."""
    words = {
        "encoder_layers": 1,
        "encoder_embed_dim": 768,
        "encoder_ffn_embed_dim": 3072,
        "encoder_attention_heads": 16,
        "dilated_ratio": "[1, 2, 4, 8, 16]",
        "segment_length": "[1024, 5792, 32768, 185363, 1048576]",
        "flash_attention": True,
        "block_shift": True,
        "use_xmoe": False,
        "moe_top1_expert": False,
        "moe_freq": 0,
        "moe_expert_count": 0,
        "dropout": 0.0,
        "drop_path_rate": 0.0,
    }
    model = LongNet(encoder_config(words))
    with torch.no_grad():
        assert model(torch.randn(1, 50, 768)).shape == (1, 50, 768)
    with pytest.raises(lr.NotBuilt, match=r"dropout=0\.25: .* for evaluation, where it does nothing"):
        encoder_config({**words, "dropout": 0.25})


GOOD = {"encoder_layers": 2, "segment_length": [16], "dilated_ratio": [1]}
GOOD_DECODER = {"decoder_layers": 2, "segment_length": [16], "dilated_ratio": [1], "vocab_size": 5}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"drop_path_rate": 0.1}, "drop_path_rate=0.1"),
        ({"activation_dropout": 0.1}, "activation_dropout=0.1"),
        ({"attention_dropout": 0.1}, "in evaluation, too"),
        ({"moe_freq": 2}, "mixtures of experts"),
        ({"rel_pos_buckets": 32, "max_rel_pos": 128}, "relative position"),
        ({"multiway": True}, "multiway=True"),
        ({"activation_fn": "tanh"}, "activation_fn must be gelu, relu, swish; got 'tanh'"),
        ({"vocab_size": 5}, "no_output_layer=True"),
        ({"segment_lengths": [16]}, "segment_lengths: no words of torchscale's EncoderConfig"),
        ({"decoder_layers": 3}, "decoder_layers: no words"),
        ({"segment_length": "[np.int64(16)]"}, r"segment_length must be a list .* got '\[np"),
        ({"segment_length": None}, "segment_length must be a list"),
        ({"dilated_ratio": "3"}, "dilated_ratio must be a list .* got 3"),
        ({"xpos_rel_pos": True}, "max_length is what xPos needs"),
    ],
    ids=str,
)
def test_configs_that_are_refused(words, says):
    with pytest.raises(lr.ArgumentError, match=says):
        encoder_config({**GOOD, **words})


def test_more_configs_that_are_refused():
    with pytest.raises(lr.NotBuilt, match=r"without output layer .* layer by layer"):
        decoder_config({**GOOD_DECODER, "no_output_layer": True})
    layers_alone = decoder_config({**GOOD_DECODER, "vocab_size": -1, "no_output_layer": True})
    with pytest.raises(lr.ArgumentError, match="a language model needs vocab_size"):
        LongNetLM(layers_alone)
    with pytest.raises(lr.ArgumentError, match="is it the config of decoders at all"):
        decoder_config(Namespace(**GOOD))
    with pytest.raises(lr.ArgumentError, match="max_length is what xPos needs, and nothing else"):
        encoder_config(GOOD, max_length=10)
    far = decoder_config({**GOOD_DECODER, "xpos_rel_pos": True}, max_length=100_000)
    with pytest.raises(lr.ArgumentError, match="scale_base 512 fades too fast for 100,000 tokens"):
        LongNetLM(far)


# ---------------------------------------------------------------------------------------------------------- weights


def case_of(kind, **words):
    return next(
        case
        for case in CASES.values()
        if case["kind"] == kind and all(case["words"].get(name) == value for name, value in words.items())
    )


def test_missing_extra_and_misshapen():
    case = case_of("encoder")
    model, state = made(case), drawn_state(case)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    less = {name: x for name, x in state.items() if "layers.1.self_attn.k_proj" not in name}
    with pytest.raises(lr.ArgumentError, match=r"missing: layers\.1\.self_attn\.k_proj\.bias, layers.*weight$"):
        load(model, less)
    with pytest.raises(lr.ArgumentError, match=r"without a place: layers\.2\.ffn\.fc1\.weight, version$"):
        load(model, state | {"version": torch.ones(1), "layers.2.ffn.fc1.weight": torch.ones(1)})
    with pytest.raises(lr.ArgumentError, match=r"missing: .* and \d+ more; without a place: a$"):
        load(model, {"a": torch.ones(1)})
    wide = state["layers.0.self_attn.q_proj.weight"]
    with pytest.raises(
        lr.ArgumentError, match=r"layers\.0\.self_attn\.q_proj\.weight must be \[32, 32\], got \[31, 32"
    ):
        load(model, state | {"layers.0.self_attn.q_proj.weight": wide[1:]})
    with pytest.raises(lr.ArgumentError, match=r"ffn\.fc2\.bias must be \[32\], got \[32, 1\]"):
        load(model, state | {"layers.1.ffn.fc2.bias": torch.ones(32, 1)})
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])  # what is refused changes nothing


def test_rows_that_another_projection_has_too_many():
    """Packed, the three would have the right shape together."""
    case = case_of("encoder layer")
    state = drawn_state(case)
    state["self_attn.q_proj.bias"] = torch.ones(30)
    state["self_attn.k_proj.bias"] = torch.ones(34)
    with pytest.raises(lr.ArgumentError, match=r"self_attn\.q_proj\.bias must be \[32\], got \[30\]"):
        load(made(case), state)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("layers.1.moe_layer.gate.wg.weight", "mixtures of experts"),
        ("relative_position.relative_attention_bias.weight", "relative position"),
        ("layers.0.self_attn.q_proj.A.weight", "multiway"),
        ("embed_positions.weight", "learned positions"),
        ("output_projection.weight", "output layer behind an encoder"),
        ("layers.0.self_attn.xpos.scale", "the weights know xPos, but module has no positions"),
    ],
)
def test_parts_that_are_refused(name, says):
    case = case_of("encoder", xpos_rel_pos=None)
    with pytest.raises(lr.ArgumentError, match=says):
        load(made(case), drawn_state(case) | {name: torch.ones(2)})


def test_xpos_is_looked_at():
    case = case_of("decoder", xpos_rel_pos=True)
    state = drawn_state(case)
    name = "layers.1.self_attn.xpos.scale"
    load(made(case), state | {name: state[name].bfloat16()})
    with pytest.raises(lr.ArgumentError, match=rf"{name} must be the 4 numbers of xPos for heads of 8"):
        load(made(case), state | {name: state[name] + 0.1})
    del state[name]
    with pytest.raises(lr.ArgumentError, match=f"missing: {name}$"):
        load(made(case), state)


def test_a_head_that_is_the_embedding():
    case = case_of("decoder", share_decoder_input_output_embed=True)
    model, state = made(case), drawn_state(case)
    load(model, {name: x for name, x in state.items() if name != "output_projection.weight"})
    other = state["output_projection.weight"] + 1
    with pytest.raises(lr.ArgumentError, match=r"output_projection\.weight is not embed_tokens\.weight"):
        load(model, state | {"output_projection.weight": other})


def test_what_is_no_state_dict():
    case = case_of("encoder")
    model = made(case)
    with pytest.raises(lr.ArgumentError, match="names to tensors, got list"):
        load(model, [])  # type: ignore[arg-type]
    with pytest.raises(lr.ArgumentError, match="'model' is of type dict"):
        load(model, {"model": drawn_state(case)})  # type: ignore[dict-item]
    with pytest.raises(lr.ArgumentError, match=r"no name begins with 'encoder\.'; there are layer_norm"):
        load(model, drawn_state(case), prefix="encoder.")
    with pytest.raises(lr.ArgumentError, match="there are none at all"):
        load(model, {})


def test_modules_that_would_give_something_else():
    case = case_of("encoder")
    state, config = drawn_state(case), config_for(case)
    for module, says in (
        (torch.nn.Linear(2, 2), "got Linear"),
        (LongNet(replace(config, compat=None)), r"compat='torchscale', without which .* got DilatedAttention"),
        (LongNet(replace(config, positions="rotary")), "xPos .* or no positions, got Rotary"),
        (LongNet(replace(config, kv_heads=1)), "a kv head for every head, but module has 1"),
        (LongNet(replace(config, activation="swiglu")), r"feedforward\.gate\.weight: torchscale's layers have nothing"),
        (LongNet(replace(config, sub_layernorm=False)), r"without a place: layers\.0\.ffn\.ffn_layernorm\.bias"),
        (LongNet(replace(config, layers=3)), r"missing: layers\.2\."),
        (EncoderLayer(32, 4), r"dilated attention with compat"),
        (
            EncoderLayer(32, 4, attention=config.attention(causal=False), positions=Rotary(8, layout="interleaved")),
            "or no positions",
        ),
        (DecoderLayer(32, 4, attention=Attention()), "dilated attention with compat"),
    ):
        with pytest.raises(lr.ArgumentError, match=says):
            load(module, state)


def test_a_memory_of_another_width():
    case = CASES["decoder layer with memory"]
    with pytest.raises(lr.ArgumentError, match=r"encoder_attn\.k_proj\.weight must be \[32, 10\], got \[32, 32\]"):
        load(made(case, memory_dim=10), drawn_state(case))


def test_weights_of_another_dtype_are_rounded():
    case = case_of("encoder")
    model = load(made(case).float(), drawn_state(case))
    assert {x.dtype for x in model.parameters()} == {torch.float32}
    out = model(drawn_inputs(case)["x"].float())
    assert (digest(out.detach()) - golden(case)["out"]).norm() / golden(case)["out"].norm() < 1e-5


def test_the_page(monkeypatch):
    """What docs/torchscale.md shows, with fewer and smaller layers."""
    case = CASES["encoder as Prov-GigaPath's"]
    state = {f"encoder.{name}": x.float() for name, x in drawn_state(case).items()} | {"cls_token": torch.zeros(1)}

    def loaded(path, *, map_location, weights_only):
        assert weights_only
        return {"model": state}

    monkeypatch.setattr(torch, "load", loaded)
    code = code_of("torchscale.md")[-1]
    for long, short in (('layers": 12', 'layers": 2'), ('embed_dim": 768', 'embed_dim": 32'), ("3072", "48")):
        code = code.replace(long, short)
    said: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/torchscale.md", "exec"), said)
    assert said["out"].shape == (1, 500, 32)
    assert torch.equal(said["model"].stack.norm.bias, state["encoder.layer_norm.bias"])
