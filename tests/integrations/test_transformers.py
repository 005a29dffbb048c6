"""attn_implementation="longring": what stock models compute by it is what they compute by sdpa."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from torch.utils.checkpoint import checkpoint
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    DogeConfig,
    DogeForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MobileBertConfig,
    MobileBertModel,
    Qwen2VLTextConfig,
    Qwen2VLTextModel,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RobertaConfig,
    RobertaModel,
    StaticCache,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)
from transformers.masking_utils import (
    causal_mask_function,
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
)

import longring as lr
from hugging import (
    BATCH,
    DOCUMENTS,
    GROUPED,
    LENGTH,
    LENGTHS,
    MODELS,
    SIZES,
    VOCABULARY,
    WINDOW,
    Case,
    check,
    inputs,
    model,
    of_a_rank,
    of_one_process,
    padding,
    restarting,
    tokens,
)
from longring.integrations import transformers as integration
from longring.integrations.same_batch import checksums
from longring.integrations.transformers import attend, register, requested, shard_batch, sharded
from longring.nn.loss import cross_entropy
from longring.testing import run_ranks
from longring.testing.budgets import SLACK, distance
from longring.transport.loopback import Loopback

DATA = ["plain", "padded", "packed"]


# ------------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize(("name", "data"), [case for case in product(MODELS, DATA) if case != ("bert", "packed")])
def test_in_one_process_it_is_sdpa(name, data):
    """BERT takes documents only as a mask given as a tensor, or from `sharded`."""
    check([of_one_process(Case(name, data), "longring")], of_one_process(Case(name, data)), data)


GENERATE = {"max_new_tokens": 2 * WINDOW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


@pytest.mark.parametrize("name", ["llama", "mistral", "mixed", "gpt_neox"])
def test_prefill_and_decoding_with_a_cache(name):
    """Past the window too, whose cache forgets."""
    made = [model(name, attention).eval() for attention in ("longring", "sdpa")]
    logits = [torch.stack(each.generate(tokens()[:, : WINDOW - 2], **GENERATE).logits) for each in made]
    torch.testing.assert_close(*logits, rtol=1e-10, atol=1e-12)


def test_static_caches_are_refused_where_masks_are_made_in_advance():
    with pytest.raises(lr.NotBuilt, match="generating with a static cache is not built"):
        model("llama", "longring").eval().generate(tokens(), **GENERATE, cache_implementation="static")


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_prompt_in_several_parts(name):
    """Into a cache that has room for more, whose empty end nobody may see."""
    logits = []
    for attention in ("longring", "sdpa"):
        made, parts = model(name, attention).eval(), []
        cache = StaticCache(made.config, max_cache_len=LENGTH + 5)
        for part in tokens().split([11, 1, 9, 8], dim=1):
            parts.append(made(part, past_key_values=cache, use_cache=True).logits)
        logits.append(torch.cat(parts, 1))
    torch.testing.assert_close(*logits, rtol=1e-10, atol=1e-12)


def test_the_scale_is_the_models():
    q, k, v = torch.randn(3, 1, 4, 9, 8, dtype=torch.float64)
    got, weights = attend(torch.nn.Module(), q, k, v, None, scaling=0.7)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7)
    torch.testing.assert_close(got, want.transpose(1, 2))
    assert weights is None


def test_a_decoder_that_looks_at_an_encoder():
    register()
    states, ids = torch.randn(BATCH, 13, 24), tokens()
    seen = torch.ones(BATCH, 13, dtype=torch.long)
    seen[1, 6:] = 0
    logits = []
    for attention in ("longring", "sdpa"):
        torch.manual_seed(0)
        config = BertConfig(**SIZES, is_decoder=True, add_cross_attention=True, pad_token_id=None)
        made = BertLMHeadModel._from_config(config, attn_implementation=attention).eval()
        logits.append(made(ids, encoder_hidden_states=states, encoder_attention_mask=seen).logits)
    torch.testing.assert_close(*logits)


def test_models_that_never_ask_for_a_mask():
    register()
    image, seen = torch.randn(2, 3, 16, 16), []
    for attention in ("longring", "sdpa"):
        torch.manual_seed(0)
        config = ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4)
        seen.append(ViTModel._from_config(config, attn_implementation=attention).eval()(image).last_hidden_state)
    torch.testing.assert_close(*seen)


def test_boundaries_of_documents_may_be_said_twice():
    """As the collator says them that flattens a batch; they must be those of the position ids."""
    packed = {"position_ids": restarting()[:1], "use_cache": False}
    made, ends = model("llama", "longring").eval(), torch.tensor(DOCUMENTS[0])
    twice = made(tokens()[:1], **packed, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=14).logits
    torch.testing.assert_close(twice, model("llama", "sdpa").eval()(tokens()[:1], **packed).logits)
    made(tokens(), cu_seq_lens_k=torch.tensor([0, LENGTH]))
    with pytest.raises(lr.PatternError, match=r"cu_seq_lens_k tells of documents \[0, 9, 29\], but .* \[\[0, 5, 6, 20"):
        made(tokens()[:1], **packed, cu_seq_lens_k=torch.tensor([0, 9, LENGTH]))


def test_position_ids_of_padding_do_not_matter():
    """Some tokenizers let them be 0 or 1."""
    is_token = padding().bool()
    positions = torch.arange(LENGTH).where(is_token, 0)

    def program(group):
        s = lr.Sharding(LENGTH, group)
        batch = shard_batch(tokens(), s, attention_mask=padding())
        with sharded(batch):
            logits = model("llama", "longring").eval()(s.shard(tokens()), position_ids=s.shard(positions)).logits
        return s.unshard(logits)

    want = model("llama", "sdpa").eval()(tokens(), attention_mask=padding()).logits[is_token]
    alone = model("llama", "longring").eval()(tokens(), attention_mask=padding(), position_ids=positions).logits
    for got in (alone, run_ranks(2, program)[0]):
        torch.testing.assert_close(got[is_token], want, rtol=1e-10, atol=1e-12)


def test_padding_that_a_cache_has_forgotten_does_not_matter():
    """Keys 2 to 4 are left of a window's cache; in 0 and 1 nobody looks."""
    there = torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.bool)
    mask = requested(1, 1, 3, q_offset=4, kv_offset=2, mask_function=causal_mask_function, attention_mask=there)
    assert (mask.pattern, mask.query_offset) == (lr.Dense(), 2)


def test_a_decoder_can_look_both_ways():
    made = [model("mistral", attention).eval() for attention in ("longring", "sdpa")]
    both = [each(tokens(), attention_mask=padding(), is_causal=False).logits for each in made]
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(both[1], made[1](tokens(), attention_mask=padding()).logits)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
@pytest.mark.parametrize("data", ["plain", "padded"])
def test_a_compiled_model(data):
    case, made = Case("mistral", data), model("mistral", "longring")
    logits = torch.compile(made, backend="aot_eager")(tokens(), **inputs(case), use_cache=False).logits
    want = model("mistral", "sdpa")(tokens(), **inputs(case)).logits
    torch.testing.assert_close(logits, want, rtol=1e-10, atol=1e-12)


def test_a_model_can_change_over():
    made = model("llama", "sdpa").eval()
    want = made(tokens()).logits
    made.set_attn_implementation("longring")
    torch.testing.assert_close(made(tokens()).logits, want, rtol=1e-10, atol=1e-12)


# -------------------------------------------------------------------------------------------------------- over ranks


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_have_the_logits_loss_and_gradients_of_one_process(name, data, layout):
    case = Case(name, data, layout)
    check(run_ranks(3, lambda group: of_a_rank(case, group)), of_one_process(case), case.name)


def test_any_layout():
    case = Case("llama", layout="striped")
    check(run_ranks(2, lambda group: of_a_rank(case, group)), of_one_process(case), case.name)


def test_float32_within_twice_the_error_of_sdpa():
    """The yardstick is sdpa in float32 against the same model in float64."""
    case = Case("llama", dtype=torch.float32)
    exact, rough = of_one_process(replace(case, dtype=torch.float64)), of_one_process(case)
    parts = run_ranks(4, lambda group: of_a_rank(case, group))
    for name, want in {"logits": exact.logits, **exact.gradients}.items():
        is_logits = name == "logits"
        near = rough.logits if is_logits else rough.gradients[name]
        got = parts[0].logits if is_logits else sum(part.gradients[name].double() for part in parts)
        allowed = SLACK * distance(near, want) + torch.finfo(torch.float32).eps * float(want.norm())
        assert distance(got, want) <= allowed, name


def test_autocast_within_twice_the_error_of_sdpa():
    """Its attention is in bfloat16 though rotary embeddings leave queries and keys in float32."""

    def logits(attention):
        with torch.autocast("cpu", torch.bfloat16):
            return model("llama", attention, torch.float32)(tokens(), use_cache=False).logits

    def program(group):
        s = lr.Sharding(LENGTH, group)
        batch = shard_batch(tokens(), s)
        with sharded(batch), torch.autocast("cpu", torch.bfloat16):
            return s.unshard(model("llama", "longring", torch.float32)(**batch.inputs, use_cache=False).logits)

    exact = of_one_process(Case("llama")).logits
    allowed = SLACK * distance(logits("sdpa"), exact)
    for got in (logits("longring"), run_ranks(3, program)[0]):
        assert got.dtype == torch.bfloat16
        assert 0 < distance(got, exact) <= allowed


def test_autocast_leaves_float64_alone():
    x = torch.randn(3, 1, 4, LENGTH, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = attend(torch.nn.Module(), *x, None)
    torch.testing.assert_close(
        got.transpose(1, 2), torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True)
    )


def test_a_layer_can_ask_for_the_same_bits_each_time(monkeypatch):
    asked = []
    monkeypatch.setattr(
        integration, "attention", lambda q, k, v, **options: asked.append(options.get("deterministic", False)) or q
    )
    for given in ({}, {"deterministic": False}, {"deterministic": True}):
        attend(torch.nn.Module(), *torch.randn(3, 1, 4, LENGTH, 8), None, **given)
    assert asked == [False, False, True]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_recomputed_outside_of_sharded(monkeypatch, reentrant):
    """The backward repeats the forward's messages, in the same order on all ranks."""
    case, kind = Case("mistral", "packed", checkpointing=True), MODELS["mistral"][0]
    enable, options = kind.gradient_checkpointing_enable, {"use_reentrant": reentrant}
    monkeypatch.setattr(kind, "gradient_checkpointing_enable", lambda made: enable(made, options))
    check(run_ranks(3, lambda group: of_a_rank(case, group)), of_one_process(case), reentrant)


def whole_model_recomputed(group, *, backward_within):
    s = lr.Sharding(LENGTH, group)
    made, batch = model("llama", "longring"), shard_batch(tokens(), s)

    def forward(ids):
        return made(ids, position_ids=batch.inputs["position_ids"], use_cache=False).logits

    with sharded(batch):
        logits = checkpoint(forward, batch.inputs["input_ids"], use_reentrant=False)
        loss = cross_entropy(logits, batch.targets, sharding=s)
        if backward_within:
            loss.backward()
    if not backward_within:
        loss.backward()
    return made.model.embed_tokens.weight.grad


def test_a_whole_model_is_recomputed_within_sharded_or_refused():
    want = of_one_process(Case("llama")).gradients["model.embed_tokens.weight"]
    parts = run_ranks(2, lambda group: whole_model_recomputed(group, backward_within=True))
    torch.testing.assert_close(sum(parts), want, rtol=1e-10, atol=1e-12)
    with pytest.raises(lr.NotBuilt, match="recomputed in the backward outside of `sharded`"):
        run_ranks(2, lambda group: whole_model_recomputed(group, backward_within=False))


def test_contexts_nest_and_end():
    def program(group):
        made = model("llama", "longring").eval()
        whole, part = lr.Sharding(LENGTH, group), lr.Sharding(11, group, "contiguous")
        first, second = shard_batch(tokens(), whole), shard_batch(tokens()[:, :11], part)
        with sharded(first):
            before = made(**first.inputs).logits
            with sharded(second):
                inner = made(**second.inputs).logits
            with pytest.raises(lr.LayoutError), sharded(second):
                made(**first.inputs)
            after = made(**first.inputs).logits
        assert torch.equal(before, after)
        return whole.unshard(after), part.unshard(inner), made(tokens()).logits

    want = model("llama", "sdpa").eval()
    outer, inner, alone = run_ranks(2, program)[1]
    torch.testing.assert_close(outer, want(tokens()).logits, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(inner, want(tokens()[:, :11]).logits, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(alone, want(tokens()).logits, rtol=1e-10, atol=1e-12)


def test_prefill_over_ranks_fills_their_caches_and_decoding_is_refused():
    def program(group):
        s = lr.Sharding(LENGTH, group, "contiguous")
        made, batch = model("llama", "longring").eval(), shard_batch(tokens(), s)
        with sharded(batch):
            found = made(**batch.inputs, use_cache=True)
            assert found.past_key_values.get_seq_length() == s.local_length
            with pytest.raises(lr.NotBuilt, match=r"decoding over a group .* behind 1[45] cached tokens"):
                made(tokens()[:, :1], past_key_values=found.past_key_values)
        return s.unshard(found.logits)

    want = model("llama", "sdpa").eval()(tokens()).logits
    torch.testing.assert_close(run_ranks(2, program)[0], want, rtol=1e-10, atol=1e-12)


def test_a_sharding_alone_is_told_documents_and_lengths():
    def program(group):
        s = lr.Sharding(LENGTH, group)
        made, batch = model("llama", "longring").eval(), shard_batch(tokens(), s, documents=DOCUMENTS)
        with sharded(s, documents=DOCUMENTS, schedule="gather", kernel="reference", deterministic=True):
            packed = s.unshard(made(**batch.inputs).logits)
        batch = shard_batch(tokens(), s)
        with sharded(s, lengths=LENGTHS):
            return packed, s.unshard(made(**batch.inputs, attention_mask=s.shard(padding())).logits)

    made = model("llama", "sdpa").eval()
    packed, padded = run_ranks(2, program)[0]
    torch.testing.assert_close(packed, made(tokens(), **inputs(Case("llama", "packed"))).logits, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(padded, made(tokens(), attention_mask=padding()).logits, rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------------------ dealing a batch


def test_a_batch_is_dealt_with_its_positions_and_targets():
    ids = torch.arange(10).repeat(2, 1)

    def program(group):
        s = lr.Sharding(10, group, "contiguous")
        batch = shard_batch(ids, s, documents=[[0, 4, 10], [0, 10]])
        return batch.inputs["input_ids"].tolist(), batch.inputs["position_ids"].tolist(), batch.targets.tolist()

    first, second = run_ranks(2, program)
    assert first == ([[0, 1, 2, 3, 4]] * 2, [[0, 1, 2, 3, 0], [0, 1, 2, 3, 4]], [[1, 2, 3, -100, 5], [1, 2, 3, 4, 5]])
    ends = [6, 7, 8, 9, -100]  # the first rank's last token has predicted what the second rank holds first
    assert second == ([[5, 6, 7, 8, 9]] * 2, [[1, 2, 3, 4, 5], [5, 6, 7, 8, 9]], [ends] * 2)


def test_padding_is_neither_predicted_nor_predicts_and_labels_may_differ_from_tokens():
    ids, s = torch.arange(4).unsqueeze(0), lr.Sharding(4)
    batch = shard_batch(ids, s, attention_mask=torch.tensor([[1, 1, 1, 0]]))
    assert (batch.lengths, batch.targets.tolist()) == ((3,), [[1, 2, -100, -100]])
    assert shard_batch(ids, s, labels=torch.tensor([[-100, -100, 7, 8]])).targets.tolist() == [[-100, 7, 8, -100]]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["input_ids", "labels", "attention_mask"])
def test_ranks_that_were_given_different_batches_all_hear_it(name, ranks):
    """Of one shape, their loss would be wrong without an error. Nobody else differs."""
    given = {"input_ids": tokens(), "labels": tokens(), "attention_mask": padding()}
    other = {"input_ids": tokens().flip(1), "labels": tokens().flip(0), "attention_mask": torch.ones_like(tokens())}

    def program(group):
        mine = {**given, name: other[name]} if group.rank == 1 else given
        try:
            shard_batch(sharding=lr.Sharding(LENGTH, group), timeout=20.0, **mine)
        except lr.Disagreement as error:
            return str(error)

    for said in run_ranks(ranks, program):
        assert said.startswith("shard_batch needs the same batch on every rank of a sequence's group; a data loader")
        differ = said.partition("disagree ")[2]
        assert f"{name}: " in differ
        assert not any(f"{word}: " in differ for word in given.keys() - {name})


def test_what_a_rank_refuses_of_its_batch_the_others_hear_of(monkeypatch):
    heard = []
    monkeypatch.setattr(Loopback, "decline", lambda transport, error: heard.append((transport.rank, str(error))))

    def program(group):
        shard_batch(tokens()[:, group.rank :], lr.Sharding(LENGTH, group), timeout=20.0)

    with pytest.raises(lr.LayoutError, match=f"rank 1: input_ids hold {LENGTH - 1} tokens, but the sharding is of 29"):
        run_ranks(2, program)
    assert [rank for rank, _ in heard] == [1]


def test_checksums_tell_values_places_and_shapes_apart():
    """Of any dtype, and of numbers that are as large as they get."""
    x = torch.tensor([[5, 6, -100, 2**62]])
    others = [x.flip(1), x + 1, x.T, x[:, :3], torch.cat([x, x], 1), torch.tensor([[6, 5, -100, 2**62]])]
    found = [checksums({"x": each})["x"] for each in (x, *others)]
    assert len(set(found)) == len(found)
    assert checksums({"x": torch.ones(2, 3, dtype=torch.bool), "y": None}) == {
        "x": checksums({"x": torch.ones(2, 3, dtype=torch.int32)})["x"],
        "y": None,
    }


# -------------------------------------------------------------------------------------------------- what is refused


def hole():
    mask = torch.ones_like(tokens())
    mask[1, 4] = 0
    return mask


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"attention_mask": padding().flip(1)}, lr.NotBuilt, r"row 1 before its tokens \(left padding\)"),
        ({"attention_mask": hole()}, lr.NotBuilt, "row 1 between its tokens"),
        ({"attention_mask": torch.ones(BATCH, 1, LENGTH, LENGTH)}, lr.NotBuilt, "a tensor of shape"),
        ({"output_attentions": True}, lr.NotBuilt, "output_attentions: returning the attention weights"),
        ({"head_mask": torch.ones(4)}, lr.NotBuilt, "head_mask: a mask over heads"),
        ({"temperature_of_attention": 2.0}, lr.NotBuilt, "temperature_of_attention: it is not known"),
        ({"position_ids": restarting()}, lr.PatternError, "restart within a row"),
        ({"position_ids": restarting(), "attention_mask": padding()}, lr.PatternError, "use_cache=False"),
        ({"position_ids": torch.arange(LENGTH)[None].sub(1).clamp(min=0)}, lr.PatternError, "restart within a row"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, LENGTH])}, lr.PatternError, "cu_seq_lens_q tells of documents"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options, error, said):
    with pytest.raises(error, match=said):
        model("llama", "longring").eval()(tokens(), **options)


@pytest.mark.parametrize(
    ("name", "changes"), [("llama", {"attention_dropout": 0.1}), ("bert", {"attention_probs_dropout_prob": 0.1})]
)
def test_dropout_is_refused_in_training_alone(name, changes):
    made = model(name, "longring", **changes)
    with pytest.raises(lr.NotBuilt, match=r"dropout=0\.1: dropout of attention weights in training is not built"):
        made(tokens())
    made.eval()(tokens())


def test_softcaps_and_sinks_and_biases_are_refused():
    register()
    small = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None}
    with pytest.raises(lr.NotBuilt, match="softcap"):
        Gemma2ForCausalLM._from_config(Gemma2Config(**small), attn_implementation="longring").eval()(tokens())
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    with pytest.raises(lr.NotBuilt, match="attention sinks"):
        GptOssForCausalLM._from_config(GptOssConfig(**small, **experts), attn_implementation="longring").eval()(
            tokens()
        )
    config = T5Config(vocab_size=VOCABULARY, d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(lr.NotBuilt, match="bias"):
        T5EncoderModel._from_config(config, attn_implementation="longring").eval()(tokens())


@pytest.mark.parametrize(("name", "window"), [("mixed", WINDOW - 1), ("mixed", WINDOW + 1), ("qwen2", WINDOW)])
def test_a_layer_of_another_window_than_its_mask_is_refused(name, window):
    made = model(name, "longring")
    made.model.layers[1].self_attn.sliding_window = window
    with pytest.raises(lr.NotBuilt, match=rf"sliding_window={window}, but the model's mask is for the window"):
        made(tokens())


def test_a_model_that_works_on_its_mask_is_told_that_there_is_none():
    register()
    made = DogeForCausalLM._from_config(DogeConfig(**GROUPED), attn_implementation="longring").eval()
    with pytest.raises(lr.NotBuilt, match=r"DogeForCausalLM works on its attention mask as a tensor \(dtype\)"):
        made(tokens())


def test_mask_functions_that_nobody_here_knows_are_refused():
    made = model("llama", "longring")
    about = {"inputs_embeds": torch.zeros(1, LENGTH, 24), "attention_mask": None, "past_key_values": None}
    for changes in ("or_mask_function", "and_mask_function"):
        with pytest.raises(lr.NotBuilt, match=r"or_masks|a function of its own \(.*<lambda>"):
            create_causal_mask(made.config, **about, **{changes: lambda b, h, q, k: q == k})
    made.config.attention_chunk_size = 8
    with pytest.raises(lr.NotBuilt, match="chunked_overlay"):
        create_chunked_causal_mask(made.config, **about)


def test_a_mask_is_for_the_lengths_it_was_made_for():
    states = torch.zeros(1, LENGTH, 24)
    mask = create_causal_mask(model("llama", "longring").config, states, attention_mask=None, past_key_values=None)
    q = torch.zeros(1, 4, 5, 8)
    with pytest.raises(lr.LayoutError, match=f"5 queries and 5 keys, but its mask was made for {LENGTH} and {LENGTH}"):
        attend(torch.nn.Module(), q, q, q, mask)
    whole = torch.zeros(1, 4, LENGTH, 8)
    with pytest.raises(lr.NotBuilt, match="is_causal=False, but the model's mask is for causal=True"):
        attend(torch.nn.Module(), whole, whole, whole, mask, is_causal=False)
    with pytest.raises(lr.NotBuilt, match="sliding_window=3, but the model's mask is for the window None"):
        attend(torch.nn.Module(), whole, whole, whole, mask, sliding_window=3)


def test_without_a_mask_what_is_not_said_is_not_guessed():
    q, k = torch.zeros(1, 4, 5, 8), torch.zeros(1, 4, 9, 8)
    with pytest.raises(lr.NotBuilt, match="causal attention of 5 queries over 9 keys without a mask"):
        attend(torch.nn.Module(), q, k, k, None)
    with pytest.raises(lr.NotBuilt, match="sliding window of 3 without a mask"):
        attend(torch.nn.Module(), k, k, k, None, sliding_window=3)
    with pytest.raises(lr.NotBuilt, match="Module attends without asking"), sharded(lr.Sharding(9)):
        attend(torch.nn.Module(), k, k, k, None, is_causal=False)


# ------------------------------------------------------------------------------ what contradicts how data is dealt


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        ("contiguous", {"position_ids": None}, "rank 1: token 0 of row 0 has position id 0, but .* the one at 15"),
        ("zigzag", {"position_ids": None}, "has position id"),
        ("zigzag", {"position_ids": None, "use_cache": True}, "has position id"),
        ("contiguous", {"position_ids": restarting()}, "told of no document"),
        ("contiguous", {"input_ids": tokens(), "position_ids": None}, f"is given {LENGTH} tokens"),
        ("contiguous", {"attention_mask": padding()}, f"hold {LENGTH} tokens"),
    ],
)
def test_inputs_that_were_dealt_otherwise_are_refused(layout, changes, said):
    """Forgotten position ids begin at 0 on every rank."""

    def program(group):
        s = lr.Sharding(LENGTH, group, layout)
        batch = shard_batch(tokens(), s)
        given = {"use_cache": False, **batch.inputs, **changes}
        if changes.get("position_ids") is not None:
            given["position_ids"] = given["position_ids"][:, : s.local_length]
        with sharded(batch, timeout=20.0):
            model("llama", "longring")(**given)

    with pytest.raises(lr.LayoutError, match=said):
        run_ranks(2, program)


def test_padding_that_sharded_was_not_told_of_is_refused():
    def program(group):
        s = lr.Sharding(LENGTH, group, "contiguous")
        batch = shard_batch(tokens(), s)
        with sharded(batch, timeout=20.0):
            model("llama", "longring")(**batch.inputs, attention_mask=s.shard(padding()))

    with pytest.raises(lr.PatternError, match="rank 1: attention_mask says otherwise than the lengths of `sharded`"):
        run_ranks(2, program)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [4.0] * 3, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("layout", "fits", "rope"),
    [
        ("contiguous", False, {"max_position_embeddings": 20, "rope_parameters": DYNAMIC}),
        ("zigzag", False, {"max_position_embeddings": 20, "rope_parameters": DYNAMIC}),
        ("zigzag", True, {"max_position_embeddings": LENGTH, "rope_parameters": DYNAMIC}),
        ("contiguous", False, {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 20}}),
        ("contiguous", True, {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": LENGTH}}),
        ("zigzag", True, {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 20}}),
    ],
)
def test_rotary_embeddings_that_depend_on_the_longest_in_sight(layout, fits, rope):
    """Each rank would turn by frequencies of its own; where all ranks see the same, nothing is wrong."""

    def program(group):
        s = lr.Sharding(LENGTH, group, layout)
        batch = shard_batch(tokens(), s)
        with sharded(batch, timeout=20.0):
            return s.unshard(model("llama", "longring", **rope).eval()(**batch.inputs).logits)

    if fits:
        want = model("llama", "sdpa", **rope).eval()(tokens()).logits
        torch.testing.assert_close(run_ranks(2, program)[0], want, rtol=1e-10, atol=1e-12)
    else:
        with pytest.raises(lr.NotBuilt, match=r"rotary embeddings of type .* the longest sequence in sight beyond 20"):
            run_ranks(2, program)


MIXING = {
    "Lfm2Config has layers of type 'conv'": (
        Lfm2ForCausalLM,
        Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
    ),
    r"RecurrentGemmaModel has a convolution \(layers.0": (
        RecurrentGemmaForCausalLM,
        RecurrentGemmaConfig(**{**GROUPED, "num_hidden_layers": 3}),
    ),
    "trigram_input mixes neighbouring tokens": (MobileBertModel, MobileBertConfig(vocab_size=VOCABULARY)),
}


@pytest.mark.parametrize("said", MIXING)
def test_models_that_mix_tokens_by_other_means_are_refused_over_ranks(said):
    register()
    kind, config = MIXING[said]
    with torch.device("meta"):
        made = kind._from_config(config, attn_implementation="longring").eval()

    def program(group):
        batch = shard_batch(tokens().to("meta"), lr.Sharding(LENGTH, group, "contiguous"))
        with sharded(batch, timeout=20.0):
            made(**batch.inputs)

    with pytest.raises(lr.NotBuilt, match=said):
        run_ranks(2, program)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_cross_attention_over_ranks_is_refused_whatever_the_encoders_length(name, masked):
    """As long as a shard it would pass for the keys of this rank."""
    register()
    if name == "bert":
        config = BertConfig(**SIZES, is_decoder=True, add_cross_attention=True, pad_token_id=None)
        made = BertLMHeadModel._from_config(config, attn_implementation="longring").eval()
    else:
        config = GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=1, n_head=4, add_cross_attention=True)
        config.bos_token_id = config.eos_token_id = None
        made = GPT2LMHeadModel._from_config(config, attn_implementation="longring").eval()

    def program(group):
        sharding = lr.Sharding(LENGTH, group, "contiguous")
        batch, length = shard_batch(tokens(), sharding), sharding.local_length
        given = {"encoder_attention_mask": torch.ones(BATCH, length)} if masked else {}
        with sharded(batch, timeout=20.0):
            made(**batch.inputs, encoder_hidden_states=torch.randn(BATCH, length, 24), use_cache=False, **given)

    with pytest.raises(lr.NotBuilt, match="cross-attention over ranks is not built"):
        run_ranks(2, program)


class AsksForAnEncodersKeys(torch.nn.Module):
    """Its layers may have any name: what the mask is for tells."""

    def forward(self, states, position_ids):
        config = model("llama", "longring").config
        return create_bidirectional_mask(config, states, None, encoder_hidden_states=torch.zeros_like(states))


def test_cross_attention_over_ranks_is_refused_where_its_mask_is_asked_for():
    def program(group):
        sharding = lr.Sharding(LENGTH, group, "contiguous")
        with sharded(sharding, timeout=20.0):
            AsksForAnEncodersKeys()(torch.zeros(BATCH, sharding.local_length, 24), sharding.positions[None])

    with pytest.raises(lr.NotBuilt, match="cross-attention over ranks is not built"):
        run_ranks(2, program)


def test_models_that_count_tokens_themselves_are_refused_over_ranks():
    register()
    sizes = {"d_model": 24, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 32}
    bart = BartForCausalLM._from_config(BartConfig(vocab_size=VOCABULARY, **sizes), attn_implementation="longring")

    def program(group, made, leaving_out=()):
        batch = shard_batch(tokens(), lr.Sharding(LENGTH, group, "contiguous"))
        with sharded(batch, timeout=20.0):
            made.eval()(**{name: x for name, x in batch.inputs.items() if name not in leaving_out})

    with pytest.raises(lr.NotBuilt, match="BartDecoder takes no position_ids"):
        run_ranks(2, lambda group: program(group, bart))
    with pytest.raises(lr.LayoutError, match="BertModel was given no position_ids"):
        run_ranks(2, lambda group: program(group, model("bert", "longring"), ["position_ids"]))


def test_positions_of_several_kinds_are_not_counted_from_0_on_every_rank():
    register()
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}
    config = Qwen2VLTextConfig(**GROUPED, rope_parameters=rope)
    made = Qwen2VLTextModel._from_config(config, attn_implementation="longring").eval()
    want = made(tokens()).last_hidden_state

    def program(group, given):
        sharding = lr.Sharding(LENGTH, group, "zigzag")
        batch = shard_batch(tokens(), sharding)
        with sharded(batch, timeout=20.0):
            return sharding.unshard(made(**{name: batch.inputs[name] for name in given}).last_hidden_state)

    got = run_ranks(2, lambda group: program(group, ["input_ids", "position_ids"]))
    torch.testing.assert_close(got[0], want)
    with pytest.raises(lr.LayoutError, match="give the model the position_ids of shard_batch"):
        run_ranks(2, lambda group: program(group, ["input_ids"]))


class WithLossOfItsOwn(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model("llama", "longring")

    def forward(self, batch, labels):
        with sharded(batch, timeout=20.0):
            logits = self.model(**batch.inputs).logits
        return cross_entropy(logits, labels, sharding=batch.sharding)


def test_a_models_own_loss_is_refused_over_ranks_but_not_that_of_who_wraps_it():
    made = model("llama", "longring")
    made.__class__ = type("FSDPLlama", (type(made),), {})  # as fully_shard makes them

    def program(group, own):
        batch = shard_batch(tokens(), lr.Sharding(LENGTH, group, "contiguous"))
        if not own:
            return WithLossOfItsOwn()(batch, batch.targets)
        with sharded(batch, timeout=20.0):
            return made(**batch.inputs, labels=batch.targets).loss

    with pytest.raises(lr.NotBuilt, match=r"FSDPLlama is given labels.* leave labels out"):
        run_ranks(2, lambda group: program(group, own=True))
    one, two = run_ranks(2, lambda group: program(group, own=False))
    assert one == two


def test_position_ids_of_models_that_begin_behind_their_padding():
    register()
    config, states = RobertaConfig(**{**SIZES, "pad_token_id": 1}), {}
    for attention in ("sdpa", "longring"):
        torch.manual_seed(0)
        states[attention] = RobertaModel._from_config(config, attn_implementation=attention, dtype=torch.float64).eval()
    ids = tokens() % (VOCABULARY - 2) + 2  # no token is padding
    want = states["sdpa"](ids).last_hidden_state

    def program(group, first):
        sharding = lr.Sharding(LENGTH, group, "zigzag")
        batch = shard_batch(ids, sharding)
        given = {**batch.inputs, "position_ids": batch.inputs["position_ids"] + first}
        with sharded(batch, timeout=20.0):
            return sharding.unshard(states["longring"](**given).last_hidden_state)

    torch.testing.assert_close(run_ranks(2, lambda group: program(group, 2))[0], want, rtol=1e-10, atol=1e-12)
    with pytest.raises(lr.LayoutError, match=r"shard_batch \+ 2, since .* first token has position id 2"):
        run_ranks(2, lambda group: program(group, 0))


@pytest.mark.parametrize("changes", [{"position_ids": None}, {"attention_mask": padding()}, {"head_mask": True}])
def test_what_one_rank_refuses_the_others_hear_of(monkeypatch, changes):
    """Or they would wait for its attention until their time is over."""
    heard = []
    monkeypatch.setattr(Loopback, "decline", lambda transport, error: heard.append((transport.rank, str(error))))

    def program(group):
        batch = shard_batch(tokens(), lr.Sharding(LENGTH, group, "contiguous"))
        with sharded(batch, timeout=20.0):
            model("llama", "longring")(**{**batch.inputs, **(changes if group.rank == 1 else {})})

    with pytest.raises(lr.ArgumentError) as raised:
        run_ranks(2, program)
    assert heard == [(1, str(raised.value))]
    assert heard[0][1].startswith("rank 1: ")


def test_what_sharded_cannot_use_is_refused():
    s = lr.Sharding(LENGTH)
    batch = shard_batch(tokens(), s)
    for error, said, attempt in [
        (lr.ArgumentError, "takes a longring.Sharding", lambda: sharded(tokens())),
        (lr.ArgumentError, "knows its documents", lambda: sharded(batch, documents=DOCUMENTS)),
        (lr.PatternError, f"end at the {LENGTH} tokens", lambda: sharded(s, documents=[0, 4])),
        (TypeError, "argument 'layout'", lambda: sharded(s, layout="zigzag")),
    ]:
        with pytest.raises(error, match=said), attempt():
            pass
    for options in ({"lengths": [4]}, {"schedule": "by post"}, {"kernel": "corn"}, {"timeout": -1.0}):
        with pytest.raises(lr.ArgumentError, match=r"each of 2 rows|by post|corn|-1"), sharded(s, **options):
            model("llama", "longring")(**batch.inputs)


def test_every_rank_needs_a_token():
    def program(group):
        with sharded(lr.Sharding(2, group, "contiguous")):
            pass

    with pytest.raises(lr.LayoutError, match="deals 2 tokens to 3 ranks, of which some get none"):
        run_ranks(3, program)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"documents": [0, 4]}, f"end at the {LENGTH} keys"),
        ({"attention_mask": padding().flip(1)}, "left padding"),
        ({"attention_mask": padding()[:1]}, r"attention_mask must be \[2, 29\] as input_ids are, got \[1, 29\]"),
        ({"labels": tokens()[:, 1:]}, "labels must be"),
        ({"input_ids": tokens()[0]}, r"input_ids must be \[batch, n\], got \[29\]"),
        ({"sharding": None}, "sharding must be a longring.Sharding, got None"),
    ],
)
def test_batches_that_contradict_themselves_are_refused(options, said):
    with pytest.raises(lr.ArgumentError, match=said):
        shard_batch(**{"input_ids": tokens(), "sharding": lr.Sharding(LENGTH), **options})


# ------------------------------------------------------------------------------------------- what is told and imported


def said_by(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)


def test_unregistered_transformers_refuses_the_name():
    done = said_by(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"LlamaForCausalLM._from_config(LlamaConfig(**{SIZES}), attn_implementation='longring')"
    )
    assert 'Specified `attn_implementation="longring"` is not supported' in done.stderr


def test_without_transformers_its_name_and_remedy_are_said():
    done = said_by("import sys; sys.modules['transformers'] = None\nimport longring.integrations.transformers")
    assert "needs transformers of 5.8 or later; install it with: pip install 'longring[transformers]'" in done.stderr
    assert (
        said_by("import longring, longring.integrations, sys; assert 'transformers' not in sys.modules").returncode == 0
    )


@pytest.mark.parametrize(
    ("version", "is_refused"), [("4.57.1", True), ("5.7.0", True), ("5.8.0", False), ("6.0", False)]
)
def test_versions_that_are_too_old_are_refused_before_the_first_call(monkeypatch, version, is_refused):
    monkeypatch.setattr("transformers.__version__", version)
    if not is_refused:
        return register()
    with pytest.raises(
        ImportError, match=rf"needs transformers of 5\.8 or later; .* \(this is transformers {version}\)"
    ):
        register()
