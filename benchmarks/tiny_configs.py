"""Tiny configs and inputs for any architecture of Transformers: known size fields are shrunk, sub-configs too."""

# ruff: noqa: E501

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

VOCABULARY, TOKENS, BATCH, SPECIAL = 99, 12, 2, 80  # ids from SPECIAL on are kept for images and the like
WIDTH, HEADS, LAYERS, WINDOW, IMAGE, PATCH, FRAMES = 32, 4, 2, 5, 32, 8, 64

# the first pattern that a field's whole name matches gives its value
SIZES: list[tuple[str, int]] = [
    (r"num_key_value_heads|num_kv_heads|n_kv_heads|swa_num_key_value_heads|num_key_value_heads_per_layer", 2),
    (r"num_attention_heads|num_heads|n_heads?|(encoder|decoder)_(num_)?attention_heads|attention_heads|num_head", HEADS),
    (r"(swa_)?num_attention_heads|vision_heads|text_heads|index_n_heads|linear_num_(key|value)_heads|mamba_n_heads", HEADS),
    (r"head_dim|d_kv|v_head_dim|qk_nope_head_dim|linear_(key|value)_head_dim|attention_head_dim|index_head_dim", 8),
    (r"global_head_dim|swa_head_dim|swa_v_head_dim|kv_channels|d_head|head_size|attention_head_size", 8),
    (r"qk_rope_head_dim|rotary_dim", 4),
    (r"qk_head_dim", 12),
    (r"(num_)?(hidden_|encoder_|decoder_)?(num_)?layers?|n_layers?|num_hidden_layers|depth|num_blocks", LAYERS),
    (r"num_(encoder|decoder)_(hidden_)?layers|(encoder|decoder)_(num_)?hidden_layers|(encoder|decoder)_depth", LAYERS),
    (r"(vision|text|x|l|r|qformer|prediction)_layers", LAYERS),
    (r"(vocab_size|vocab_size_or_config_json_file|text_vocab_size|decoder_vocab_size|char_vocab_size)", VOCABULARY),
    (r"vocab_size_per_layer_input", VOCABULARY),
    (r"hidden_size|d_model|n_embd|embed_dim|embedding_size|emb_dim|dim|word_embed_proj_dim|hidden_dim", WIDTH),
    (r"(encoder|decoder|vision|text|output|out|projection|pooler_output)_(hidden_size|hidden_dim|embed_dim|size|dim)", WIDTH),
    (r"(vision|text|audio|encoder|decoder)_(hidden|embed|embedding)_(size|dim)|out_hidden_size|lru_width", WIDTH),
    (r"projection_dim|pooler_output_size|output_hidden_size|language_hidden_size|mm_hidden_size|input_hidden_size", WIDTH),
    (r"d_embed|cross_attention_hidden_size|classifier_proj_size|pooler_hidden_size|hidden_size_per_layer_input", WIDTH),
    (r".*(intermediate_size|ffn_dim|ffn_size|mlp_dim|ffn_hidden_size|ff_dim|ffn_expand_size|intermediate_dim)", 48),
    (r"d_ff|d_inner|n_inner|inner_dim|feed_forward_size|dim_feedforward|ffn_hidden|expert_dim|linear_units|ffn_inner", 48),
    (r"(q_lora_rank|kv_lora_rank|o_lora_rank|lora_rank|attn_lora_dim)", 16),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|n_experts?", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k|num_selected_experts|moe_top_k|num_experts_per_token|top_k_experts", 2),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"n_group|topk_group|num_expert_group|top_k_group", 1),
    (r"first_k_dense_replace|num_dense_layers|first_num_dense_layers|moe_layer_start_index|max_window_layers", 1),
    (r"num_nextn_predict_layers|num_kv_shared_layers|mtp_num_layers|num_mtp_layers", 0),
    (r"sliding_window(_size)?|local_attention|window_attn_size", WINDOW),
    (r"max_position_embeddings|n_positions|n_ctx|max_source_positions|max_target_positions|max_seq_len|seq_length", 128),
    (r"max_sequence_length|max_length|block_size", 128),
    (r"(image_size|img_size|pretrain_image_size|input_size)", IMAGE),
    (r"(patch_size)", PATCH),
    (r"temporal_patch_size|spatial_merge_size|num_frames|tubelet_size", 2),
    (r"num_mel_bins|input_feat_per_channel|feature_size", 16),
    (r"(num_channels|in_channels|in_chans)", 3),
    (r"num_queries|num_query_tokens|num_latents|query_length|num_object_queries|num_labels_queries", 6),
    (r"d_latents|qk_channels|v_channels|d_state|mamba_d_state|state_size|ssm_state_size", 16),
    (r"(mamba_d_ssm)", 64),
    (r"mamba_(d_)?head(_dim)?|mamba_headdim|mamba_head_dim", 16),
    (r"mamba_num_heads|mamba_n_heads", 4),
    (r"mamba_chunk_size|chunk_size|chunk_length", 8),
    (r"num_conv_pos_embeddings", 8),
    (r"num_conv_pos_embedding_groups", 2),
    (r"subsampling_conv_channels", 8),
    (r"time_step_rank", 8),
    (r"type_vocab_size", 2),
    (r"router_hidden_size|attn_temperature_.*|index_topk", 16),
    (r"codebook_size|num_embeddings|num_codevectors_per_group", 32),
]  # fmt: skip
LISTS: dict[str, list[Any]] = {  # of models in stages
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [16, 32, 32, 32],
    "embed_dims": [16, 32, 32, 32],
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 4],
    "num_attention_heads": [2, 2, 2, 2],
    "num_heads": [2, 2, 2, 2],
}
UNSAID: dict[str, int] = {  # fields that may be None, where a model needs them
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
BY_TYPE: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "xmod": {"default_language": "en_XX"},
    "xlm-prophetnet": {"is_decoder": True},
}
IS_DROPOUT = re.compile(r".*(drop|drop_path|layerdrop|mask_time_prob|mask_feature_prob|jitter).*")


def value(name: str, default: int) -> int | None:
    """The shrunken value of a field, None where it stays."""
    for pattern, small in SIZES:
        if re.fullmatch(pattern, name):
            return min(small, default) if name in ("num_key_value_heads", "type_vocab_size") else small
    return None


def kinds(types: list[Any]) -> list[Any]:
    """Two layers that have as many kinds as two can have."""
    return [types[0], next((kind for kind in types if kind != types[0]), types[0])]


def shrunk(config: PreTrainedConfig, only: str | None = None) -> dict[str, Any]:
    """What to make a config of this class with, so that it is tiny. `only`: fields that match it."""
    given: dict[str, Any] = {}
    special = iter(range(SPECIAL, VOCABULARY))
    for name, default in vars(config).items():
        if name.startswith("_") or name in ("id2label", "label2id", "transformers_version"):
            continue
        if isinstance(default, PreTrainedConfig):
            given[name] = type(default)(**shrunk(default, only))
        elif isinstance(default, dict) and "mrope_section" in default:
            given[name] = {**default, "mrope_section": [2, 1, 1]}
        elif isinstance(default, float) and IS_DROPOUT.fullmatch(name):
            given[name] = 0.0
        elif default is None and only is None and name in UNSAID:
            given[name] = UNSAID[name]
        elif isinstance(default, bool) or default is None:
            continue
        elif isinstance(default, int) and re.fullmatch(r".*_(token_id|token_index|token_idx)", name):
            text = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
            given[name] = text.get(name, next(special, 98))
        elif isinstance(default, (list, tuple)) and name.endswith("_token_id"):
            given[name] = type(default)([2])
        elif isinstance(default, int):
            if (small := value(name, default)) is not None and (only is None or re.fullmatch(only, name)):
                given[name] = small
        elif isinstance(default, (list, tuple)) and default:
            if name.endswith("layer_types") or name in ("layers_block_type", "block_types", "attention_types_list"):
                given[name] = kinds(list(default))
            elif re.fullmatch(r".*(_indexes|_indices|_layer_ids)", name) and isinstance(default[0], int):
                given[name] = [1]
            elif name in ("image_size", "img_size"):
                given[name] = [IMAGE] * len(default)
            elif only is None and name in LISTS and isinstance(default[0], int):
                given[name] = type(default)(LISTS[name][: len(default)])
    given |= BY_TYPE.get(config.model_type, {})
    if "qk_rope_head_dim" in given:  # of latent attention: rotary embeddings are as wide as this part of the heads
        given |= {"head_dim": given["qk_rope_head_dim"]} if "head_dim" in vars(config) else {}
        given |= {"num_key_value_heads": HEADS} if "num_key_value_heads" in vars(config) else {}
    return given


def candidates(kind: type[PreTrainedConfig]) -> Iterator[PreTrainedConfig]:
    """Configs from tiny to less so; what says that a shrunken value does not fit is skipped."""
    default = kind()
    attempts = [
        lambda: shrunk(default),
        lambda: {k: v for k, v in shrunk(default).items() if k not in LISTS},
        lambda: {k: v for k, v in shrunk(default).items() if k not in UNSAID or getattr(default, k) is not None},
        lambda: {k: v for k, v in shrunk(default).items() if not re.fullmatch(r".*head_dim|d_kv", k)},
        lambda: shrunk(default, r".*layers?|depth|.*vocab.*|.*experts?|.*(image_size|max_position_embeddings)"),
        lambda: shrunk(default, r".*layers?|depth|.*vocab.*"),
        lambda: shrunk(default, r".*vocab.*"),
        dict,
    ]
    before = None
    for attempt in attempts:
        given = attempt()
        if repr(given) == before:
            continue
        before = repr(given)
        for is_set_later in (False, True):
            try:
                config = _later(kind(), given) if is_set_later else kind(**given)
            except Exception:
                continue  # these sizes do not fit together
            yield config
            break


def _later(config: PreTrainedConfig, given: dict[str, Any]) -> PreTrainedConfig:
    for name, x in given.items():
        with contextlib.suppress(Exception):
            setattr(config, name, x)
    return config


# ------------------------------------------------------------------------------------------------------------ inputs


def field(config: Any, *names: str) -> Any:
    """The first of these fields that is somewhere in a config or its sub-configs."""
    for name in names:
        found = getattr(config, name, None)
        if found is not None and not isinstance(found, PreTrainedConfig):
            return found
    for x in vars(config).values():
        if isinstance(x, PreTrainedConfig) and (found := field(x, *names)) is not None:
            return found
    return None


def inputs(model: torch.nn.Module, *, images: bool = True) -> dict[str, Any]:
    """By the arguments of its forward: text, and images or sound where the model needs them."""
    generator = torch.Generator().manual_seed(7)
    config, names = model.config, inspect.signature(type(model).forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    given: dict[str, Any] = {}
    if "input_ids" in names:
        given["input_ids"] = torch.randint(5, 80, (BATCH, TOKENS), generator=generator)
    if main == "pixel_values" or ("pixel_values" in names and images):
        size = field(config, "image_size", "img_size") or IMAGE
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = field(config, "num_channels", "in_channels", "in_chans") or 3
        given["pixel_values"] = torch.randn(BATCH, channels, height, width, generator=generator)
    if main == "pixel_values_videos" or main == "video_values":
        given[main] = torch.randn(BATCH, field(config, "num_frames") or 2, 3, IMAGE, IMAGE, generator=generator)
    if main == "input_features":
        bins = field(config, "num_mel_bins", "input_feat_per_channel", "feature_size") or 16
        frames = 2 * (field(config, "max_source_positions") or FRAMES // 2)
        shape = (BATCH, bins, frames) if field(config, "max_source_positions") else (BATCH, FRAMES, bins)
        given["input_features"] = torch.randn(*shape, generator=generator)
    if main == "input_values":
        given["input_values"] = torch.randn(BATCH, 1600, generator=generator)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        given["decoder_input_ids"] = torch.randint(5, 80, (BATCH, TOKENS - 3), generator=generator)
    if "use_cache" in names:
        given["use_cache"] = False
    return given
