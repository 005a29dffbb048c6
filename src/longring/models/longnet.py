"""LongNet: an encoder and a causal language model with dilated attention."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..nn.attention import DilatedAttention, Options
from ..nn.checks import check_bools
from ..nn.layers import DecoderLayer, EncoderLayer
from ..nn.multihead import magneto_gain
from ..nn.norms import make_norm
from ..nn.positions import Rotary, XPos
from ..sharding import Sharding
from ..tensors import spoken
from .stack import LanguageModel, Stack, check_config, check_sizes, check_tokens, normal_weights, reset_parts

POSITIONS = ("xpos", "rotary", None)


@dataclass(frozen=True)
class LongNetConfig:
    """What a LongNet is; numbers and words only. The branches are those of the paper's language models.

    vocab_size:      None for an encoder of embeddings.
    phase:           as for `longring.Dilated`; mixing_gradient and compat as for `longring.dilated_attention`.
    positions:       "xpos" (for causal attention), "rotary", or None for none.
    max_length:      what xPos is made for; needed by it alone. scale_base is its, too, as for `longring.nn.XPos`.
    sub_layernorm:   MAGNETO's norms and initial values; without it, GPT-2's initial values.
    norm_first:      and residual_scale, as for `longring.nn.EncoderLayer`.
    final_norm:      a norm behind the last layer.
    embedding_scale: what embeddings are multiplied by, before they go through a norm if embedding_norm is True.
    """

    vocab_size: int | None = None
    dim: int = 768
    layers: int = 12
    heads: int = 12
    kv_heads: int | None = None
    feedforward_dim: int | None = None
    segment_lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768)
    dilation_rates: tuple[int, ...] = (1, 2, 4, 6, 12)
    phase: str | None = None
    mixing_gradient: bool | None = None
    compat: str | None = None
    positions: str | None = "rotary"
    max_length: int | None = None
    activation: str = "gelu"
    sub_layernorm: bool = True
    eps: float = 1e-5
    tie_embeddings: bool = True
    norm_first: bool = True
    residual_scale: float = 1.0
    final_norm: bool = True
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    scale_base: float | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "dim", "layers", "heads", *(["vocab_size"] if self.vocab_size is not None else []))
        for name in ("segment_lengths", "dilation_rates"):  # a list out of JSON is as good as a tuple
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        if self.positions not in POSITIONS:
            raise ArgumentError(f"positions must be 'xpos', 'rotary' or None, got {self.positions!r}")
        if (self.positions == "xpos") != (self.max_length is not None):
            raise ArgumentError(
                f"max_length is what xPos needs, and nothing else: got positions={self.positions!r} and "
                f"max_length={self.max_length}"
            )
        if self.scale_base is not None and self.positions != "xpos":
            raise ArgumentError(f"scale_base={self.scale_base!r} is xPos's, but positions={self.positions!r}")
        flags = ("sub_layernorm", "tie_embeddings", "norm_first", "final_norm", "embedding_norm")
        check_bools(**{name: getattr(self, name) for name in flags})
        self.attention(causal=True)  # which refuses what it cannot be made of

    def attention(self, *, causal: bool, **options: Unpack[Options]) -> DilatedAttention:
        return DilatedAttention(
            segment_lengths=self.segment_lengths,
            dilation_rates=self.dilation_rates,
            causal=causal,
            phase=self.phase,
            mixing_gradient=self.mixing_gradient,
            compat=self.compat,
            **options,
        )

    def rotary(self) -> Rotary | None:
        if self.positions is None:
            return None
        head_dim = self.dim // self.heads
        if self.max_length is None:
            return Rotary(head_dim)
        return XPos(head_dim, length=self.max_length, scale_base=self.scale_base)

    def words(self) -> dict[str, Any]:
        """Of a layer, the same for encoder and decoder."""
        return {
            "feedforward_dim": self.feedforward_dim,
            "kv_heads": self.kv_heads,
            "activation": self.activation,
            "sub_layernorm": self.sub_layernorm,
            "norm_first": self.norm_first,
            "residual_scale": self.residual_scale,
            "eps": self.eps,
        }

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))


class LongNet(nn.Module):
    """LongNet's encoder, over any number of ranks: tokens or embeddings in, embeddings out.

    options are those of `longring.nn.Attention`: schedule, kernel, scale, deterministic, timeout. Weights are drawn
    anew in every process: seed alike on all ranks, or load the same.
    """

    def __init__(
        self,
        config: LongNetConfig,
        *,
        checkpoint_activations: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        check_config(config, LongNetConfig)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        if config.vocab_size is not None:
            self.embedding = nn.Embedding(config.vocab_size, config.dim, **made)
        else:
            self.embedding = None
        gain = magneto_gain(encoder_layers=config.layers, of="encoder") if config.sub_layernorm else None
        self.config = config
        self.stack = _stack(config, EncoderLayer, False, gain, checkpoint_activations, made, options)
        _draw(self, config)

    def forward(
        self,
        x: Tensor,
        *,
        sharding: Sharding | None = None,
        documents: Any = None,
        lengths: Any = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Embeddings [batch, n, dim] for tokens [batch, n], or for embeddings where there is no vocabulary.

        x is this rank's part where `sharding` says so; `documents` and `lengths` are of the whole sequence.
        """
        told = {"sharding": sharding, "documents": documents, "lengths": lengths, "positions": positions}
        if self.embedding is not None:
            check_tokens(x)
            return self.stack(self.embedding(x), **told)
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != self.config.dim or not x.is_floating_point():
            raise ArgumentError(f"x must be embeddings [batch, n, {self.config.dim}], got {spoken(x)}")
        return self.stack(x, **told)

    def reset_parameters(self) -> None:
        reset_parts(self)
        _draw(self, self.config)

    def extra_repr(self) -> str:
        return str(self.config)


class LongNetLM(LanguageModel):
    """LongNet's causal language model, over any number of ranks: tokens in, logits out. Words as for `LongNet`."""

    def __init__(
        self,
        config: LongNetConfig,
        *,
        checkpoint_activations: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[Options],
    ) -> None:
        check_config(config, LongNetConfig)
        if config.vocab_size is None:
            raise ArgumentError("a language model needs vocab_size")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        gain = magneto_gain(decoder_layers=config.layers) if config.sub_layernorm else None
        stack = _stack(config, DecoderLayer, True, gain, checkpoint_activations, made, options)
        super().__init__(
            stack, vocab_size=config.vocab_size, dim=config.dim, tie_embeddings=config.tie_embeddings, **made
        )
        self.config = config
        _draw(self, config)

    def reset_parameters(self) -> None:
        reset_parts(self)
        _draw(self, self.config)

    def extra_repr(self) -> str:
        return str(self.config)


def _stack(
    config: LongNetConfig,
    kind: type[EncoderLayer] | type[DecoderLayer],
    causal: bool,
    gain: float | None,
    checkpoint_activations: bool,
    made: dict[str, Any],
    options: Options,
) -> Stack:
    positions = config.rotary()
    words = {**config.words(), **made, "gain": gain, "positions": positions}
    layers = (
        kind(config.dim, config.heads, attention=config.attention(causal=causal, **options), **words)
        for _ in range(config.layers)
    )
    first, last = (
        make_norm("layer", config.dim, config.eps, **made) if asked else None
        for asked in (config.embedding_norm, config.final_norm)
    )
    return Stack(
        layers,
        last,
        positions=positions,
        embedding_scale=config.embedding_scale,
        embedding_norm=first,
        checkpoint_activations=checkpoint_activations,
    )


def _draw(model: LongNet | LongNetLM, config: LongNetConfig) -> None:
    """MAGNETO's layers have drawn their own weights; embeddings and head, and other layers, as GPT-2's."""
    if not config.sub_layernorm:
        normal_weights(model, config.layers)
        return
    for module in (model.embedding, getattr(model, "head", None)):
        if module is not None:
            nn.init.normal_(module.weight, std=0.02)
