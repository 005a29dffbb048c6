"""torchscale's LongNet: its configs as ours, its weights in our layers and models, with its outputs and gradients.

    config = encoder_config(their_config)
    model = load(LongNet(config), their_state_dict)

torchscale itself is not needed: a config is words, weights are a state_dict. What LongNet does not use of torchscale
is refused by name. Names are those of microsoft/torchscale at 4d1e0e8, of which Prov-GigaPath carries a copy.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, NotBuilt
from ..models.longnet import LongNet, LongNetConfig, LongNetLM
from ..nn.attention import DilatedAttention
from ..nn.layers import DecoderLayer, EncoderLayer
from ..nn.positions import GAMMA, Rotary, XPos

Module = TypeVar("Module", bound=nn.Module)


# ----------------------------------------------------------------------------------------------------------- configs


def encoder_config(config: Any, *, max_length: int | None = None) -> LongNetConfig:
    """What `LongNet` is made of to be the LongNetEncoder of torchscale's EncoderConfig, in evaluation.

    config:      an EncoderConfig, a mapping of its words, or any object that has some of them, as argparse gives.
                 What is not said has torchscale's default.
    max_length:  of the longest sequence, which xPos has to know; for xpos_rel_pos=True alone.
    """
    return _config(_Words.of(config, "encoder"), max_length)


def decoder_config(config: Any, *, max_length: int | None = None) -> LongNetConfig:
    """What `LongNetLM` is made of to be the LongNetDecoder of torchscale's DecoderConfig; as `encoder_config`."""
    return _config(_Words.of(config, "decoder"), max_length)


SHARED: dict[str, Any] = {
    "activation_fn": "gelu",
    "no_scale_embedding": True,
    "layernorm_embedding": False,
    "deepnorm": False,
    "subln": True,
    "layernorm_eps": 1e-5,
    "vocab_size": -1,
    "no_output_layer": False,
    "xpos_rel_pos": False,
    "xpos_scale_base": 512,
    "segment_length": None,
    "dilated_ratio": None,
    # refused unless they are as here
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "drop_path_rate": 0.0,
    "attention_dropout": 0.0,
    "moe_freq": 0,
    "rel_pos_buckets": 0,
    "max_rel_pos": 0,
    "multiway": False,
}
ONE_SIDE: dict[str, Any] = {
    "embed_dim": 768,
    "attention_heads": 12,
    "ffn_embed_dim": 3072,
    "layers": 12,
    "normalize_before": True,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "encoder": {**SHARED, "normalize_output": True},
    "decoder": {**SHARED, "share_decoder_input_output_embed": False},
}

# They change nothing that one process computes: initial values, memory, details of experts where there are none,
# sizes of what is not LongNet's own. block_shift is in Prov-GigaPath's configs, and read by no code.
SILENT = re.compile(
    "moe_.*|use_xmoe|bert_init|block_shift|checkpoint_activations|ddp_rank|flash_attention|fsdp|seq_parallel|img_size|"
    "in_chans|patch_size|max_source_positions|max_target_positions|share_all_embeddings|"
    "share_encoder_input_output_embed"
)
ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "swish": "silu"}


class _Words(dict[str, Any]):
    """A config of torchscale by its words, without the "encoder_" or "decoder_" in front of some."""

    side: str

    @classmethod
    def of(cls, config: Any, side: str) -> _Words:
        own = {f"{side}_{name}": default for name, default in ONE_SIDE.items()}
        known = own | DEFAULTS[side]
        if isinstance(config, Mapping):
            said = dict(config)
            _refuse_unknown(said, known, side)
        else:  # as torchscale's own `override` asks an object: for the words it knows
            said = {name: getattr(config, name) for name in known if hasattr(config, name)}
        if not said.keys() & own.keys():
            raise ArgumentError(f"config says nothing of {', '.join(own)}: is it the config of {side}s at all?")
        said = {name: value for name, value in said.items() if name in known and value is not None}
        words = cls((name.removeprefix(f"{side}_"), value) for name, value in {**known, **said}.items())
        words.side = side
        words._settle()
        return words

    def _settle(self) -> None:
        """What torchscale's configs settle among themselves; which for a decoder is not where its norms stand."""
        if self["deepnorm"]:
            self["subln"] = False
        if self.side == "encoder" and (self["deepnorm"] or self["subln"]):
            self["normalize_before"] = self["subln"]


def _config(words: _Words, max_length: int | None) -> LongNetConfig:
    _refuse_features(words)
    has_xpos = bool(words["xpos_rel_pos"])
    return LongNetConfig(
        vocab_size=words["vocab_size"] if words["vocab_size"] > 0 else None,
        dim=words["embed_dim"],
        layers=words["layers"],
        heads=words["attention_heads"],
        feedforward_dim=words["ffn_embed_dim"],
        segment_lengths=_numbers(words, "segment_length"),
        dilation_rates=_numbers(words, "dilated_ratio"),
        compat="torchscale",
        positions="xpos" if has_xpos else None,
        max_length=max_length,
        scale_base=words["xpos_scale_base"] if has_xpos else None,
        activation=ACTIVATIONS[words["activation_fn"]],
        sub_layernorm=bool(words["subln"]),
        eps=words["layernorm_eps"],
        tie_embeddings=bool(words.get("share_decoder_input_output_embed", True)),
        norm_first=bool(words["normalize_before"]),
        residual_scale=(2.0 * words["layers"]) ** 0.25 if words["deepnorm"] else 1.0,
        final_norm=bool(words["normalize_before"] and words.get("normalize_output", True)),
        embedding_scale=1.0 if words["no_scale_embedding"] else words["embed_dim"] ** 0.5,
        embedding_norm=bool(words["layernorm_embedding"]),
    )


def _numbers(words: _Words, name: str) -> tuple[int, ...]:
    """A list, or one written out, which torchscale would evaluate."""
    value = words[name]
    if isinstance(value, str):
        try:
            value = literal_eval(value)
        except (ValueError, SyntaxError):
            value = words[name]
    if not isinstance(value, list | tuple):
        raise ArgumentError(f"{name} must be a list of whole numbers or one written as '[1024, 2048]', got {value!r}")
    return tuple(value)


def _refuse_unknown(said: dict[str, Any], known: dict[str, Any], side: str) -> None:
    unknown = sorted(name for name in said if name not in known and not SILENT.fullmatch(name))
    if unknown:
        raise ArgumentError(
            f"{_some(unknown)}: no words of torchscale's {side.capitalize()}Config; leave out what is not its"
        )


def _refuse_features(words: _Words) -> None:
    for name in ("dropout", "activation_dropout", "drop_path_rate"):
        if words[name]:
            raise NotBuilt(f"{name}={words[name]}: dropout is not built; for evaluation, where it does nothing, say 0")
    if words["attention_dropout"]:
        raise NotBuilt(
            f"attention_dropout={words['attention_dropout']}: dropout is not built, and torchscale drops attention "
            "weights in evaluation, too; say 0 for what it gives without"
        )
    if words["moe_freq"]:
        raise NotBuilt(f"moe_freq={words['moe_freq']}: mixtures of experts are not built")
    if words["rel_pos_buckets"] > 0 and words["max_rel_pos"] > 0:
        raise NotBuilt("rel_pos_buckets: a bias by relative position is not built; dilated attention has none")
    if words["multiway"]:
        raise NotBuilt("multiway=True: two sets of weights for two parts of a sequence are not built")
    if words["activation_fn"] not in ACTIVATIONS:
        raise ArgumentError(f"activation_fn must be {', '.join(ACTIVATIONS)}; got {words['activation_fn']!r}")
    _refuse_other_ends(words)


def _refuse_other_ends(words: _Words) -> None:
    """An encoder of ours ends in embeddings, a decoder in logits. Layers alone have no vocabulary."""
    if words["vocab_size"] <= 0:
        return
    if words.side == "encoder" and not words["no_output_layer"]:
        raise NotBuilt(
            "an output layer behind an encoder is not built: say no_output_layer=True, leave output_projection.weight "
            "out of the state_dict, and multiply by it"
        )
    if words.side == "decoder" and words["no_output_layer"]:
        raise NotBuilt(
            "no_output_layer=True: a decoder of tokens without output layer is not built; leave vocab_size out, and "
            "load it layer by layer"
        )


# ----------------------------------------------------------------------------------------------------------- weights


def load(module: Module, state_dict: Mapping[str, Tensor], *, prefix: str = "") -> Module:
    """Put torchscale's weights into `module`, which is returned.

    module:      LongNet, LongNetLM, EncoderLayer or DecoderLayer (cross_attention=True among them), with
                 compat="torchscale".
    state_dict:  of LongNetEncoder, LongNetDecoder, LongNetEncoderLayer or LongNetDecoderLayer. All of it has to
                 have a place, and every place a weight of its shape.
    prefix:      what the names begin with, where the state_dict is that of a larger model; names that do not begin
                 so are left alone.
    """
    module.load_state_dict(translated(module, state_dict, prefix=prefix))
    return module


def translated(module: nn.Module, state_dict: Mapping[str, Tensor], *, prefix: str = "") -> dict[str, Tensor]:
    """The state_dict that `load` loads: torchscale's weights under our names."""
    _check_module(module)
    given = _beginning_with(prefix, state_dict)
    _refuse_parts(given, module)
    ours = module.state_dict()
    sources = {name: _their_names(name) for name in ours}
    wanted = {name for names in sources.values() for name in names} | {name for name, _ in _xpos(module)}
    _check_names(wanted, given.keys() - _tied(module, given))
    for name, names in sources.items():
        _check_shapes(names, given, ours[name].shape)
    for name, positions in _xpos(module):
        _check_scale(name, given[name], positions)
    return {
        name: given[names[0]] if len(names) == 1 else torch.cat([given[each] for each in names])
        for name, names in sources.items()
    }


PLACES = {  # ours: theirs
    "embedding": "embed_tokens",
    "stack.embedding_norm": "layernorm_embedding",
    "stack.norm": "layer_norm",
    "head": "output_projection",
    "attention": "self_attn",
    "attention.sub_norm": "self_attn.inner_attn_ln",
    "attention.out_proj": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "cross_attention": "encoder_attn",
    "cross_attention.out_proj": "encoder_attn.out_proj",
    "cross_attention_norm": "encoder_attn_layer_norm",
    "feedforward.up": "ffn.fc1",
    "feedforward.sub_norm": "ffn.ffn_layernorm",
    "feedforward.down": "ffn.fc2",
    "feedforward_norm": "final_layer_norm",
}
PARTS = {  # by which names give away what is refused
    r"(^|\.)moe_layer\.": "mixtures of experts are not built",
    r"relative_position\.": "a bias by relative position is not built",
    r"\.[AB]\.": "multiway networks, two sets of weights for two parts of a sequence, are not built",
    r"^embed_positions\.": "learned positions are not built: add them to the embeddings that LongNet is given",
}


def _their_names(name: str) -> tuple[str, ...]:
    """Of what a weight of ours is made: one of theirs, or those of q, k and v one after the other."""
    layer, place, leaf = re.fullmatch(r"((?:stack\.layers\.\d+\.)?)(?:(.*)\.)?([^.]*)", name).groups()  # type: ignore[union-attr]
    if place not in PLACES:
        raise ArgumentError(f"{name}: torchscale's layers have nothing of the kind")
    theirs = layer.removeprefix("stack.") + PLACES[place]
    if leaf.startswith("in_proj_"):
        return tuple(f"{theirs}.{each}_proj.{leaf.removeprefix('in_proj_')}" for each in "qkv")
    return (f"{theirs}.{leaf.replace('_proj_', '_proj.')}",)


def _layers(module: nn.Module) -> Iterator[tuple[str, EncoderLayer | DecoderLayer]]:
    """Layers, and what torchscale's names of their weights begin with."""
    for name, part in module.named_modules():
        if isinstance(part, EncoderLayer | DecoderLayer):
            yield f"{name}.".removeprefix("stack.") if name else "", part


def _xpos(module: nn.Module) -> list[tuple[str, XPos]]:
    """The numbers that xPos has in torchscale's state_dict, though they follow from the width of a head."""
    return [
        (f"{name}self_attn.xpos.scale", layer.attention.positions)
        for name, layer in _layers(module)
        if isinstance(layer.attention.positions, XPos)
    ]


def _tied(module: nn.Module, given: dict[str, Tensor]) -> set[str]:
    """A head that is the embedding is in the state_dict twice, or once."""
    name = "output_projection.weight"
    if not isinstance(module, LongNetLM) or module.head is not None or name not in given:
        return set()
    embedding = given.get("embed_tokens.weight")
    if embedding is not None and not torch.equal(embedding, given[name]):
        raise ArgumentError(
            f"{name} is not embed_tokens.weight, but the model has one for both; say "
            "share_decoder_input_output_embed=False, which is tie_embeddings=False"
        )
    return {name}


# ------------------------------------------------------------------------------------------------------------ checks


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, LongNet | LongNetLM | EncoderLayer | DecoderLayer):
        raise ArgumentError(
            f"module must be a LongNet, LongNetLM, EncoderLayer or DecoderLayer, got {type(module).__name__}"
        )
    for _, layer in _layers(module):
        own = layer.attention
        if not isinstance(own.attention, DilatedAttention) or own.attention.compat != "torchscale":
            raise ArgumentError(
                "module must have dilated attention with compat='torchscale', without which these weights have other "
                f"outputs; got {own.attention}"
            )
        if own.kv_heads != own.num_heads:
            raise ArgumentError(f"torchscale has a kv head for every head, but module has {own.kv_heads}")
        if own.positions is not None and not _is_theirs(own.positions):
            raise ArgumentError(f"torchscale has xPos (interleaved, base 10000) or no positions, got {own.positions}")


def _is_theirs(positions: Rotary) -> bool:
    return isinstance(positions, XPos) and positions.layout == "interleaved" and positions.base == 10000


def _beginning_with(prefix: str, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(state_dict, Mapping):
        raise ArgumentError(f"state_dict must map names to tensors, got {type(state_dict).__name__}")
    given = {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)}
    if not given:
        raise ArgumentError(f"no name begins with {prefix!r}; there are {_some(state_dict) or 'none at all'}")
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise ArgumentError(f"state_dict must map names to tensors, but {name!r} is of type {type(x).__name__}")
    return given


def _refuse_parts(given: dict[str, Tensor], module: nn.Module) -> None:
    for name in given:
        for pattern, reason in PARTS.items():
            if re.search(pattern, name):
                raise NotBuilt(f"{name}: {reason}")
    has_xpos = {name for name in given if name.endswith("self_attn.xpos.scale")}
    if has_xpos and not _xpos(module):
        raise ArgumentError(f"{_some(has_xpos)}: the weights know xPos, but module has no positions; xpos_rel_pos=True")
    if isinstance(module, LongNet) and "output_projection.weight" in given:
        raise NotBuilt(
            "output_projection.weight: an output layer behind an encoder is not built; leave it out of the state_dict, "
            "and multiply by it"
        )


def _check_names(wanted: set[str], given: set[str]) -> None:
    missing, unknown = sorted(wanted - given), sorted(given - wanted)
    said = [f"{what}: {_some(names)}" for what, names in (("missing", missing), ("without a place", unknown)) if names]
    if said:
        raise ArgumentError(f"the state_dict is not that of this module; {'; '.join(said)}")


def _check_shapes(names: tuple[str, ...], given: dict[str, Tensor], shape: torch.Size) -> None:
    want = [shape[0] // len(names), *shape[1:]]
    for name in names:
        if list(given[name].shape) != want:
            raise ArgumentError(f"{name} must be {want}, got {list(given[name].shape)}")


def _check_scale(name: str, scale: Tensor, positions: XPos) -> None:
    want = (torch.arange(0, positions.head_dim, 2) / positions.head_dim + GAMMA) / (1 + GAMMA)
    if scale.shape != want.shape or (scale.detach().cpu() - want).abs().max() > 0.01:  # which may be of bfloat16
        raise ArgumentError(f"{name} must be the {len(want)} numbers of xPos for heads of {positions.head_dim}")


def _some(names: Iterable[str], most: int = 6) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more
