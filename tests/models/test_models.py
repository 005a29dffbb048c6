"""Every model by its definition, and over ranks as in one process: logits, loss, the gradient of every parameter."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from model_cases import BRANCHES, CASES, DIM, LENGTH, SMALL, WORDS, alone, found, inputs, made, on_this_rank

import longring as lr
from defined_modules import language_model, stack
from longring.models import Decoder, DecoderConfig, LongNet, LongNetConfig, LongNetLM
from longring.testing import run_ranks
from module_cases import in_place

NAMES = list(CASES)
TINY = DecoderConfig(vocab_size=WORDS, **SMALL)


def defined(case):
    model, (x, target) = made(case), inputs(case)
    if case.kind is LongNet:
        embedded = x if model.embedding is None else model.embedding.weight[x]
        out = stack(model.stack, embedded, pattern=case.pattern)
        return found(model, out, (out * target).sum())
    out = language_model(model, x, pattern=case.pattern)
    return found(model, out, F.cross_entropy(out.flatten(0, 1), target.flatten()))


def check_same(got, want, what):
    """Equal but for float64's rounding, relative to each quantity's own size."""
    pairs = {"out": (got.out, want.out), "loss": (got.loss, want.loss)}
    assert got.parameters.keys() == want.parameters.keys()
    pairs |= {name: (got.parameters[name], want.parameters[name]) for name in want.parameters}
    for name, (ours, theirs) in pairs.items():
        assert ours.shape == theirs.shape, (what, name)
        error = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-6))
        assert error <= 1e-11, (what, name, error)


def check_ranks(names, found_by_ranks):
    for number, name in enumerate(names):
        case, parts = CASES[name], [found[number] for found in found_by_ranks]
        want = alone(case)
        out = in_place([part.out for part in parts], LENGTH, case.layout)
        sums = {key: sum(part.parameters[key] for part in parts) for key in want.parameters}
        losses = [part.loss for part in parts]
        loss = sum(losses) if case.kind is LongNet else losses[0]
        if case.kind is not LongNet:
            assert all(torch.equal(each, loss) for each in losses)
        check_same(type(want)(out, loss, sums), want, name)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_definition(name):
    check_same(alone(CASES[name]), defined(CASES[name]), name)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_in_processes_are_as_one(ranks):
    check_ranks(NAMES, lr.launch(on_this_rank, NAMES, ranks=ranks, timeout=100))


def test_more_ranks_than_tokens():
    names = ["longnet, language", "decoder"]
    check_ranks(names, run_ranks(31, lambda group: on_this_rank(names, group)))


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_changes_no_bit(name):
    case = CASES[name]
    with_it, without = (alone(case, checkpoint_activations=flag) for flag in (True, False))
    assert torch.equal(with_it.out, without.out)
    for key, gradient in without.parameters.items():
        assert torch.equal(with_it.parameters[key], gradient), key


def test_checkpointing_over_ranks_changes_no_bit():
    names = ["longnet, language", "decoder"]
    plain, again = (
        run_ranks(3, lambda group, flag=flag: on_this_rank(names, group, checkpoint_activations=flag))
        for flag in (False, True)
    )
    for mine, theirs in zip(plain, again, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a.out, b.out)
            assert all(torch.equal(a.parameters[key], b.parameters[key]) for key in a.parameters)


def test_checkpointing_keeps_less():
    kept = []
    for flag in (False, True):
        model, sizes = made(CASES["decoder"], checkpoint_activations=flag), []

        def pack(x, sizes=sizes):
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(inputs(CASES["decoder"])[0])
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 3


@pytest.mark.parametrize("name", NAMES)
def test_copies_states_and_the_meta_device(name):
    case, (x, _) = CASES[name], inputs(CASES[name])
    model = made(case)
    want = model(x, **case.told)
    empty = case.kind(case.config, device="meta", dtype=torch.float64).to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), empty):
        assert torch.equal(other(x, **case.told), want)
    for parameter in empty.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    empty.reset_parameters()
    assert empty(x, **case.told).isfinite().all()
    with torch.device("meta"):  # as FSDP's users write it
        assert all(parameter.is_meta for parameter in case.kind(case.config).parameters())
        case.kind(case.config, device="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_autocast_and_16_bits(name):
    case, (x, _) = CASES[name], inputs(CASES[name])
    torch.manual_seed(0)
    model = case.kind(case.config)
    x = x.float() if x.is_floating_point() else x
    want = model(x, **case.told)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x, **case.told)
    torch.testing.assert_close(out.float(), want, atol=0.1, rtol=0.1)
    out.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    half = model.to(torch.bfloat16)(x.bfloat16() if x.is_floating_point() else x, **case.told)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), want, atol=0.1, rtol=0.1)


def test_initial_values_of_a_decoder():
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=500, dim=128, layers=8, heads=4)
    for model in (Decoder(config), Decoder(config, device="meta").to_empty(device="cpu")):
        model.reset_parameters()
        layer = model.stack.layers[3]
        for weight, want in (
            (model.embedding.weight, 0.02),
            (model.head.weight, 0.02),
            (layer.attention.in_proj_weight, 0.02),
            (layer.feedforward.gate.weight, 0.02),
            (layer.feedforward.up.weight, 0.02),
            (layer.attention.out_proj.weight, 0.02 / 4),
            (layer.feedforward.down.weight, 0.02 / 4),
        ):
            assert weight.std().item() == pytest.approx(want, rel=0.05)
        assert torch.equal(model.stack.norm.weight, torch.ones(128))
        tokens = torch.randint(500, (1, 50))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        assert loss.item() == pytest.approx(math.log(500), rel=0.1)  # knowing nothing


def test_initial_values_of_longnet():
    torch.manual_seed(0)
    config = LongNetConfig(vocab_size=500, dim=128, layers=8, heads=4, **BRANCHES)
    reset = LongNet(config, device="meta").to_empty(device="cpu")
    reset.reset_parameters()
    for model in (LongNetLM(config), LongNet(config), reset):
        layer = model.stack.layers[3]
        gain = math.sqrt(math.log(16))
        q, _, v = layer.attention.projections
        for weight, want in (
            (q, 1),
            (v, gain),
            (layer.attention.out_proj.weight, gain),
            (layer.feedforward.up.weight, gain),
        ):
            assert weight.std().item() == pytest.approx(want * math.sqrt(2 / sum(weight.shape)), rel=0.05)
        assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    plain = LongNetLM(LongNetConfig(vocab_size=500, dim=128, layers=8, heads=4, sub_layernorm=False, **BRANCHES))
    assert plain.stack.layers[0].feedforward.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert not plain.stack.layers[0].feedforward.up.bias.any()


def test_a_language_model_sees_no_future():
    for name in ("longnet, language", "decoder", "decoder, dilated"):
        model, (tokens, _) = made(CASES[name]), inputs(CASES[name])
        other = tokens.clone()
        other[:, 15:] = (other[:, 15:] + 1) % WORDS
        assert torch.equal(model(tokens)[:, :15], model(other)[:, :15])
        assert not torch.equal(model(tokens)[:, 15:], model(other)[:, 15:])


def test_it_learns():
    torch.manual_seed(0)
    model, tokens = Decoder(TINY), torch.randint(WORDS, (1, 40)).repeat(1, 2)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(30):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_a_config_goes_through_json():
    for config in (TINY, DecoderConfig(vocab_size=5, **BRANCHES), DecoderConfig(vocab_size=5, window=(3, None))):
        assert DecoderConfig(**json.loads(json.dumps(asdict(config)))) == config
    config = LongNetConfig(vocab_size=5, positions="xpos", max_length=1 << 20)
    assert LongNetConfig(**json.loads(json.dumps(asdict(config)))) == config


def test_options_reach_every_layer():
    model = Decoder(TINY, kernel="reference", timeout=7, deterministic=True)
    for layer in model.stack.layers:
        options = layer.attention.attention.options
        assert (options["kernel"], options["timeout"], options["deterministic"]) == ("reference", 7, True)
    assert "vocab_size=17" in repr(model)
    assert "dim=24" in repr(LongNet(LongNetConfig(**SMALL, **BRANCHES)))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"dim": 0}, "dim"),
        ({"layers": 1.5}, "layers"),
        ({"segment_lengths": (4,)}, "come together"),
        ({**BRANCHES, "window": (3, 0)}, "window"),
        ({"phase": "block"}, "needs segment_lengths"),
        ({**BRANCHES, "phase": "other"}, "phase"),
        ({"window": (3,)}, "window"),
    ],
    ids=str,
)
def test_configs_that_are_refused(words, says):
    with pytest.raises(lr.ArgumentError, match=says):
        DecoderConfig(**{"vocab_size": WORDS, **words})


def test_a_decoder_turns_by_the_base_of_its_config():
    model = Decoder(replace(TINY, base=500.0))
    assert [layer.attention.positions.base for layer in model.stack.layers] == [500.0] * TINY.layers
    other, tokens = Decoder(TINY), torch.arange(9).unsqueeze(0)
    other.load_state_dict(model.state_dict())
    assert not torch.equal(model(tokens), other(tokens))


def test_more_that_is_refused():
    with pytest.raises(lr.ArgumentError, match="max_length"):
        LongNetConfig(positions="xpos")
    with pytest.raises(lr.ArgumentError, match="max_length"):
        LongNetConfig(max_length=5)
    with pytest.raises(lr.ArgumentError, match="positions"):
        LongNetConfig(positions="learned")
    with pytest.raises(lr.ArgumentError, match="scale_base=16 is xPos's, but positions='rotary'"):
        LongNetConfig(scale_base=16)
    with pytest.raises(lr.ArgumentError, match="final_norm must be True or False, got 0"):
        LongNetConfig(final_norm=0)  # type: ignore[arg-type]
    with pytest.raises(lr.ArgumentError, match="embedding_scale must be a positive number, got -1"):
        LongNet(LongNetConfig(**SMALL, **BRANCHES, embedding_scale=-1))
    with pytest.raises(lr.ArgumentError, match="contradicts"):
        LongNetConfig(compat="torchscale", phase="mod")
    with pytest.raises(lr.ArgumentError, match="needs vocab_size"):
        LongNetLM(LongNetConfig(**SMALL, **BRANCHES))
    with pytest.raises(lr.ArgumentError, match="embed_dim must be a multiple"):
        Decoder(DecoderConfig(vocab_size=5, dim=24, heads=5))
    with pytest.raises(lr.ArgumentError, match=r"config must be a longring\.models\.LongNetConfig, got DecoderConfig"):
        LongNet(TINY)  # type: ignore[arg-type]
    with pytest.raises(lr.ArgumentError, match=r"config must be a longring\.models\.DecoderConfig, got dict"):
        Decoder(asdict(TINY))  # type: ignore[arg-type]
    with pytest.raises(lr.ArgumentError, match="tie_embeddings must be True or False, got 'no'"):
        DecoderConfig(vocab_size=5, tie_embeddings="no")  # type: ignore[arg-type]
    with pytest.raises(lr.ArgumentError, match="sub_layernorm must be True or False, got 1"):
        LongNetConfig(sub_layernorm=1)  # type: ignore[arg-type]
    with pytest.raises(lr.ArgumentError, match="checkpoint_activations"):
        Decoder(TINY, checkpoint_activations=1)
    with pytest.raises(TypeError, match="dropout"):
        Decoder(TINY, dropout=0.1)  # type: ignore[call-arg]
    model = made(CASES["longnet, language"])
    with pytest.raises(lr.ArgumentError, match="41 tokens, but xPos was made for a length of 40"):
        model(torch.zeros(1, 41, dtype=torch.int64))
    with pytest.raises(lr.ArgumentError, match="whole numbers"):
        model(torch.zeros(1, 4))
    with pytest.raises(lr.ArgumentError, match=r"int64 or int32, got torch\.uint8"):
        model(torch.zeros(1, 4, dtype=torch.uint8))
    with pytest.raises(lr.ArgumentError, match=rf"embeddings \[batch, n, {DIM}\]"):
        LongNet(LongNetConfig(**SMALL, **BRANCHES))(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(lr.ArgumentError, match="no rotary embedding"):
        LongNet(LongNetConfig(**SMALL, **BRANCHES, positions=None))(torch.zeros(1, 4, DIM), positions=torch.arange(4))
