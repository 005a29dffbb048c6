"""Within `sharded` no attention of a model is local without an error, and no error is one of somebody else's."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref
from itertools import pairwise

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import (
    CLIPVisionConfig,
    CpmAntConfig,
    CpmAntForCausalLM,
    FlaubertConfig,
    FlaubertWithLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    StableLmConfig,
    StableLmForCausalLM,
    ViTConfig,
    ViTModel,
    XLMConfig,
    XLMWithLMHeadModel,
)
from transformers.models.llama.modeling_llama import LlamaAttention

import longring as lr
from hugging import BATCH, DOCUMENTS, GROUPED, LENGTH, SIZES, VOCABULARY, model, restarting, tokens
from longring.integrations.transformers import _first_position, register, shard_batch, sharded, unregister
from longring.nn.loss import cross_entropy
from longring.testing import run_ranks
from longring.transport.loopback import Loopback

with warnings.catch_warnings():  # torch.jit.script, which they use, is deprecated
    warnings.simplefilter("ignore")
    from transformers import (
        DebertaConfig,
        DebertaForMaskedLM,
        DebertaV2Model,  # noqa: F401 - by name, below
        GPTBigCodeConfig,
        GPTBigCodeForCausalLM,
    )

NOT_CALLED = "ran within `sharded` without calling longring"


def within(made, group=None, **options):
    s = lr.Sharding(LENGTH) if group is None else lr.Sharding(LENGTH, group, "zigzag")
    batch = shard_batch(tokens(), s)
    with sharded(batch, timeout=20.0):
        return made(**batch.inputs, **options)


@pytest.fixture(autouse=True)
def no_hooks_are_left():
    register()
    yield
    assert not _global_forward_hooks
    assert not _global_forward_pre_hooks


# ------------------------------------------------------------------------------------------- attention by other means


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_neox", "bert"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_of_another_attention_is_noticed_on_every_rank(monkeypatch, name, attention):
    heard = []
    monkeypatch.setattr(Loopback, "decline", lambda transport, error: heard.append(str(error)))
    made = model(name, attention)
    said = (
        rf"{NOT_CALLED}.* its attn_implementation is '{attention}': call model.set_attn_implementation\(\"longring\"\)"
    )
    with pytest.raises(lr.NotBuilt, match=said) as raised:
        run_ranks(2, lambda group: within(made, group))
    assert type(made).__name__ in str(raised.value)
    assert str(raised.value) in heard


def test_what_it_says_helps():
    made = model("llama", "sdpa")
    want = made(tokens()).logits
    made.set_attn_implementation("longring")
    torch.testing.assert_close(within(made).logits, want, rtol=1e-10, atol=1e-12)


NEVER_ASK = {
    "openai-gpt": (OpenAIGPTLMHeadModel, OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=24, n_layer=1, n_head=4)),
    "xlm": (XLMWithLMHeadModel, XLMConfig(vocab_size=VOCABULARY, emb_dim=24, n_layers=1, n_heads=4)),
    "flaubert": (FlaubertWithLMHeadModel, FlaubertConfig(vocab_size=VOCABULARY, emb_dim=24, n_layers=1, n_heads=4)),
    "deberta": (DebertaForMaskedLM, DebertaConfig(**SIZES)),
    "cpmant": (
        CpmAntForCausalLM,
        CpmAntConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            num_attention_heads=4,
            dim_head=6,
            dim_ff=32,
            num_hidden_layers=1,
            prompt_length=2,
            prompt_types=4,
        ),
    ),
    "mamba": (MambaForCausalLM, MambaConfig(vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=1)),
}


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("name", NEVER_ASK)
def test_models_that_never_call_it_are_noticed_even_where_they_have_accepted_the_name(name, accepted):
    kind, config = NEVER_ASK[name]
    made = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    if accepted:
        made.config._attn_implementation_internal = "longring"
    batch = shard_batch(tokens(), lr.Sharding(LENGTH))
    said = f"{NOT_CALLED}.* longring cannot compute it: use another model"
    with pytest.raises(lr.NotBuilt, match=said), sharded(batch):
        made(input_ids=batch.inputs["input_ids"])


def with_one_layer_by(attention, layer, name="LlamaAttention"):
    made = model("llama", "longring")
    other = copy.deepcopy(made.config)
    other._attn_implementation_internal = attention
    module = made.model.layers[layer].self_attn
    module.config = other
    module.__class__ = type(name, (LlamaAttention,), {"forward": without_its_mask})
    return made


def without_its_mask(self, *given, **options):
    return LlamaAttention.forward(self, *given, **{**options, "attention_mask": None})


@pytest.mark.parametrize(
    ("layer", "name", "said"),
    [
        (0, "LlamaAttention", r"LlamaAttention \(model.layers.0.self_attn of LlamaForCausalLM\)"),
        (1, "FSDPLlamaAttention", r"FSDPLlamaAttention \(model.layers.1.self_attn of LlamaForCausalLM\)"),
        (1, "Mixer", r"LlamaDecoderLayer \(model.layers.1 of LlamaForCausalLM\)"),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_layer_of_several_is_noticed(layer, name, said, checkpointing):
    made = with_one_layer_by("sdpa", layer, name)
    if checkpointing:
        made.gradient_checkpointing_enable()
    with pytest.raises(lr.NotBuilt, match=f"{said} {NOT_CALLED}"):
        run_ranks(2, lambda group: within(made, group))


def test_one_rank_of_several_is_noticed():
    """The other waits for its attention."""
    with pytest.raises(lr.NotBuilt, match=f"^rank 1: .*{NOT_CALLED}"):
        run_ranks(2, lambda group: within(model("llama", ["longring", "sdpa"][group.rank]), group))


def llava(vision):
    small = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**small, image_size=16, patch_size=8, projection_dim=24),
        text_config=LlamaConfig(**GROUPED),
        image_token_index=VOCABULARY - 1,
    )
    implementation = {"text_config": "longring", "vision_config": vision}
    return LlavaForConditionalGeneration._from_config(config, attn_implementation=implementation).double().eval()


@pytest.mark.parametrize("vision", ["sdpa", "longring"])
def test_images_are_for_outside(vision):
    made, image = llava(vision), torch.randn(BATCH, 3, 16, 16, dtype=torch.float64)
    want = made(tokens() % (VOCABULARY - 1)).logits
    made.get_image_features(image, vision_feature_layer=-1)
    s = lr.Sharding(LENGTH)
    batch = shard_batch(tokens() % (VOCABULARY - 1), s)
    with sharded(batch):
        torch.testing.assert_close(made(**batch.inputs).logits, want, rtol=1e-10, atol=1e-12)
        with pytest.raises(lr.NotBuilt, match="what every rank is given whole, as images, is run outside of `sharded`"):
            made.get_image_features(image, vision_feature_layer=-1)


def compiled(made, how):
    match how:
        case "model":
            return torch.compile(made, backend="eager")
        case "in place":
            made.compile(backend="eager")
        case "forward":
            made.forward = torch.compile(made.forward, backend="eager")
        case "layers":
            for layer in made.model.layers:
                layer.compile(backend="eager")
        case "attention":
            for layer in made.model.layers:
                layer.self_attn.compile(backend="eager")
        case "function":
            return torch.compile(lambda **given: made(**given), backend="eager")
    return made


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("how", ["model", "in place", "forward", "layers", "attention", "function"])
def test_compiled_models_are_noticed(how):
    """And PyTorch does not warn of the hooks that notice them."""
    torch._dynamo.reset()
    want = model("llama", "sdpa").eval()(tokens()).logits
    got = within(compiled(model("llama", "longring").eval(), how)).logits
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    torch._dynamo.reset()
    with pytest.raises(lr.NotBuilt, match=f"LlamaForCausalLM {NOT_CALLED}.* 'sdpa'"):
        within(compiled(model("llama", "sdpa").eval(), how))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_model_is_compiled_once_for_all_contexts():
    torch._dynamo.reset()
    counter, counts = CompileCounter(), []
    made = torch.compile(model("llama", "longring").eval(), backend=counter)
    for _ in range(4):
        within(made)
        counts.append(counter.frame_count)
    torch._dynamo.reset()
    assert counts[1] == counts[3], counts


def test_a_model_that_asks_for_a_mask_and_attends_by_itself_is_noticed():
    class Mixer(torch.nn.Module):  # by its name it does not attend
        def forward(self, hidden_states, **given):
            return hidden_states.cumsum(1), None

    made = model("llama", "longring")
    for layer in made.model.layers:
        layer.self_attn = Mixer()
    with pytest.raises(lr.NotBuilt, match=NOT_CALLED):
        within(made)


# ----------------------------------------------------------------------------------------------------- no false alarm


def test_nothing_is_said_where_no_model_ran():
    with sharded(lr.Sharding(LENGTH)):
        pass
    with sharded(lr.Sharding(LENGTH)):
        torch.nn.Linear(3, 4)(torch.zeros(2, 3))
        torch.nn.MultiheadAttention(4, 2)(*torch.zeros(3, 5, 1, 4))
        torch.compile(torch.nn.Linear(3, 4), backend="eager")(torch.zeros(2, 3))
    model("llama", "sdpa")(tokens())


class InheritedAttention(LlamaAttention):
    """In another module than the attention that it inherits from."""


class InheritingModel(PreTrainedModel):
    config_class = LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.attention = InheritedAttention(config, 0)


def test_attention_may_be_inherited_from_another_module():
    register()
    InheritingModel._from_config(LlamaConfig(**SIZES), attn_implementation="longring")


class GateAfterAttention(torch.nn.Module):
    """Named as if it attended, as there are some."""

    def forward(self, x):
        return 2 * x


def test_what_works_on_the_result_of_attention_need_not_attend():
    made = model("llama", "longring").eval()
    for layer in made.model.layers:
        layer.self_attn.o_proj = torch.nn.Sequential(
            layer.self_attn.o_proj, type("GatedAttention", (GateAfterAttention,), {})()
        )
    torch.testing.assert_close(within(made).logits, made(tokens()).logits, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("attention", ["sdpa", "longring"])
def test_another_error_passes_as_it_is(attention):
    made = model("llama", attention)
    with pytest.raises(ZeroDivisionError), sharded(lr.Sharding(LENGTH)):
        raise ZeroDivisionError
    made.model.layers[0].mlp.register_forward_hook(lambda *given: 1 / 0)
    made.model.layers[0].self_attn.register_forward_pre_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # and no warning, which would be an error
        within(made)


def test_a_context_goes_on_after_an_error_that_was_caught():
    made, other = model("llama", "longring").eval(), model("llama", "sdpa").eval()
    hook = made.model.layers[1].mlp.register_forward_hook(lambda *given: 1 / 0)
    batch = shard_batch(tokens(), lr.Sharding(LENGTH))
    with sharded(batch):
        with pytest.raises(ZeroDivisionError):
            made(**batch.inputs)
        hook.remove()
        made(**batch.inputs)
        with pytest.raises(lr.NotBuilt, match=NOT_CALLED):
            other(**batch.inputs)
        made(**batch.inputs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_recomputed_within_the_context(reentrant):
    def program(group):
        made = model("llama", "longring")
        made.gradient_checkpointing_enable({"use_reentrant": reentrant})
        s = lr.Sharding(LENGTH, group)
        batch = shard_batch(tokens(), s)
        with sharded(batch):
            cross_entropy(made(**batch.inputs).logits, batch.targets, sharding=s).backward()
        return made.model.embed_tokens.weight.grad

    assert all(gradient.isfinite().all() for gradient in run_ranks(2, program))


# -------------------------------------------------------------------------------------------- refused by a line of ours

GPT = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 1, "n_head": 4}
SMALL = {**SIZES, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
KEEP_IT = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(**GPT)),
    "gpt_bigcode": (GPTBigCodeForCausalLM, GPTBigCodeConfig(**GPT)),
    "opt": (OPTForCausalLM, OPTConfig(**SMALL, word_embed_proj_dim=24, ffn_dim=32)),
    "stablelm": (StableLmForCausalLM, StableLmConfig(**{**SMALL, "hidden_size": 32}, num_key_value_heads=2)),
}


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("name", KEEP_IT)
def test_attention_weights_are_refused_by_models_that_keep_the_wish_to_themselves(name, is_sharded):
    kind, config = KEEP_IT[name]
    made = kind._from_config(copy.deepcopy(config), attn_implementation="longring").eval()
    call = within if is_sharded else (lambda made, **options: made(tokens(), **options))
    call(made)
    with pytest.raises(lr.NotBuilt, match="output_attentions: returning the attention weights"):
        call(made, output_attentions=True)
    made.config._output_attentions = True  # as of a config that was saved with it
    with pytest.raises(lr.NotBuilt, match="output_attentions: returning the attention weights"):
        call(made)


def test_attention_weights_are_refused_of_images():
    config = ViTConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=4)
    made = ViTModel._from_config(config, attn_implementation="longring").eval()
    with pytest.raises(lr.NotBuilt, match="output_attentions"):
        made(torch.zeros(1, 3, 16, 16), output_attentions=True)


UNSERVED = [
    "FalconForCausalLM",
    "GPTJForCausalLM",
    "Data2VecVisionModel",
    "BloomForCausalLM",
    "MPNetModel",
    "RemBertModel",
    "ConvBertModel",
    "BigBirdModel",
    "MegatronBertModel",
    "RoFormerModel",
    "LongformerModel",
    "LEDModel",
    "MptForCausalLM",
    "MvpModel",
    "TrOCRForCausalLM",
    "GPTNeoForCausalLM",
    "GitForCausalLM",
    "CodeGenForCausalLM",
    "OpenAIGPTLMHeadModel",
    "XLMModel",
    "FlaubertModel",
    "CpmAntForCausalLM",
    "DebertaModel",
    "DebertaV2Model",
    "XGLMForCausalLM",
]


@pytest.mark.parametrize("name", UNSERVED)
def test_models_that_do_not_use_the_interface_are_refused_when_they_are_built(name):
    import transformers

    kind = getattr(transformers, name)
    said = f"{name} has attention that does not go through the AttentionInterface.*; use attn_implementation="
    with pytest.raises(lr.NotBuilt, match=said) as raised, torch.device("meta"):
        kind._from_config(kind.config_class(), attn_implementation="longring")
    other = "sdpa" if kind._supports_sdpa else "eager"
    assert f'use attn_implementation="{other}"' in str(raised.value)
    with torch.device("meta"):
        assert kind._from_config(kind.config_class(), attn_implementation=other)


def test_masks_are_no_tensors_whatever_a_model_does_with_them():
    class Asks(PreTrainedModel):
        config_class = LlamaConfig

        def forward(self, work):
            from transformers.masking_utils import create_causal_mask

            return work(create_causal_mask(self.config, torch.zeros(1, 5, 24), None, None))

    config = copy.deepcopy(model("llama", "longring").config)
    asks, x = Asks._from_config(config, attn_implementation="longring"), torch.zeros(1, 1, 5, 5)
    for work in (
        lambda mask: x + mask,
        lambda mask: mask + x,
        lambda mask: x.masked_fill(mask, 0.0),
        lambda mask: torch.cat([x, mask]),
        lambda mask: mask[:, None],
        lambda mask: 1.0 - mask,
        lambda mask: mask.to(torch.bool),
        lambda mask: mask.contiguous(),
        lambda mask: mask < 0,
        lambda mask: ~mask,
        lambda mask: len(mask),
    ):
        with pytest.raises(
            lr.NotBuilt, match=r"Asks works on its attention mask as a tensor .*; use attn_implementation="
        ):
            asks(work)
    assert asks(lambda mask: hasattr(mask, "shape")) is False


# ------------------------------------------------------------------------------------------------- the right remedies


def test_packed_documents_in_models_that_keep_their_positions_to_themselves():
    """`use_cache=False`, which was said, would not help; what is said does."""
    config = OPTConfig(**SMALL, word_embed_proj_dim=24, ffn_dim=32, dropout=0.0, attention_dropout=0.0)
    made = OPTForCausalLM._from_config(config, attn_implementation="longring").double().eval()
    packed = {"position_ids": restarting(), "use_cache": False}
    with pytest.raises(lr.PatternError, match=r"does not tell .* its position_ids .*; say them to `sharded") as raised:
        made(tokens(), **packed)
    assert "use_cache" not in str(raised.value)
    with sharded(lr.Sharding(LENGTH), documents=DOCUMENTS):
        got = made(tokens(), **packed).logits
    for row, ends in enumerate(DOCUMENTS):
        for start, end in pairwise(ends):
            alone = made(tokens()[row : row + 1, start:end]).logits[0]
            torch.testing.assert_close(got[row, start:end], alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "pass use_cache=False$"),
        ({"attention_mask": torch.ones(BATCH, LENGTH), "use_cache": False}, "leave attention_mask out$"),
        ({"attention_mask": torch.ones(BATCH, LENGTH)}, "leave attention_mask out and pass use_cache=False$"),
    ],
)
def test_packed_documents_that_transformers_did_not_look_for(options, said):
    with pytest.raises(lr.PatternError, match=said):
        model("llama", "longring").eval()(tokens(), position_ids=restarting(), **options)


@pytest.mark.parametrize(
    ("name", "field"),
    [("llama", "attention_dropout"), ("bert", "attention_probs_dropout_prob"), ("gpt_neox", "attention_dropout")],
)
def test_dropout_names_the_field_of_the_config(name, field):
    made = model(name, "longring", **{field: 0.1})
    with pytest.raises(lr.NotBuilt, match=rf"load the model with {field}=0\.0, or call model\.eval\(\)$"):
        made(tokens())


def test_dropout_of_gpt2_has_another_name():
    made = GPT2LMHeadModel._from_config(GPT2Config(**GPT), attn_implementation="longring").train()
    with pytest.raises(lr.NotBuilt, match=r"load the model with attn_pdrop=0\.0"):
        made(tokens())


def test_looking_at_frames_keeps_nothing_alive():
    made = model("llama", "longring").eval()
    gc.collect()
    gc.disable()
    try:
        for ran in (made, functools.partial(within, made)):
            logits = ran(tokens()).logits if ran is made else ran().logits
            alive = weakref.ref(logits)
            del logits
            assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["position_embeddings", "embed_positions"])
def test_position_ids_that_begin_behind_padding_whatever_the_table(name):
    """Kosmos-2.5 has a table that is no Embedding; with position ids from 0 it gave other logits without a word."""
    model, table = torch.nn.Module(), torch.nn.Module()
    model.add_module(name, table)
    assert _first_position(model) == 0
    table.padding_idx = 1
    assert _first_position(model) == 2


# ------------------------------------------------------------------------------------------- registered, and no longer


def test_register_wraps_one_method_once_and_unregister_restores_it():
    ours = PreTrainedModel.get_correct_attn_implementation
    register()
    assert PreTrainedModel.get_correct_attn_implementation is ours
    before = dict(vars(PreTrainedModel))
    try:
        unregister()
        unregister()
        after = dict(vars(PreTrainedModel))
        assert after["get_correct_attn_implementation"] is ours.__wrapped__
        changed = {name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)}
        assert changed == {"get_correct_attn_implementation"}
        with pytest.raises(ValueError, match='attn_implementation="longring"` is not supported'):
            model_without_registering()
    finally:
        register()
    assert model_without_registering()


def model_without_registering():
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM._from_config(LlamaConfig(**GROUPED), attn_implementation="longring")


def test_a_method_of_another_signature_is_refused(monkeypatch):
    unregister()
    monkeypatch.setattr(PreTrainedModel, "get_correct_attn_implementation", lambda self, names, device: "sdpa")
    try:
        with pytest.raises(lr.NotBuilt, match=r"takes \(self, names, device\), not \(self, requested_attention"):
            register()
        unregister()
        monkeypatch.undo()
        with pytest.raises(ValueError, match="longring"):
            model_without_registering()
    finally:
        monkeypatch.undo()
        register()
