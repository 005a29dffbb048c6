"""A decoder language model of today: RMSNorm, rotary positions, SwiGLU, grouped heads; dense or dilated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Unpack

import torch

from ..errors import ArgumentError
from ..geometry.patterns import Dense
from ..nn.attention import Attention, DilatedAttention, Options
from ..nn.checks import check_bools
from ..nn.layers import DecoderLayer
from ..nn.norms import make_norm
from ..nn.positions import Rotary
from .stack import LanguageModel, Stack, check_config, check_sizes, normal_weights, reset_parts


@dataclass(frozen=True)
class DecoderConfig:
    """What a `Decoder` is; numbers and words only.

    kv_heads:         heads of keys and values, which divide heads; as many unless said.
    feedforward_dim:  8/3 * dim, rounded up to a multiple of 64, unless said: as many weights as 4 * dim without gate.
    window:           (left, right): attention no further than that; dense attention only.
    segment_lengths:  with dilation_rates, for dilated attention instead of dense; phase as for `longring.Dilated`.
    base:             of the rotary embedding.
    """

    vocab_size: int
    dim: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int | None = None
    feedforward_dim: int | None = None
    window: tuple[int | None, int | None] | None = None
    segment_lengths: tuple[int, ...] | None = None
    dilation_rates: tuple[int, ...] | None = None
    phase: str | None = None
    base: float = 10000.0
    eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "dim", "layers", "heads")
        check_bools(tie_embeddings=self.tie_embeddings)
        for name in ("window", "segment_lengths", "dilation_rates"):  # a list out of JSON is as good as a tuple
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        if (self.segment_lengths is None) != (self.dilation_rates is None):
            raise ArgumentError("segment_lengths and dilation_rates come together, or not at all for dense attention")
        if self.segment_lengths is not None and self.window is not None:
            raise ArgumentError(f"window={self.window} is for dense attention, and segment_lengths for dilated")
        if self.segment_lengths is None and self.phase is not None:
            raise ArgumentError(f"phase={self.phase!r} is for dilated attention, which needs segment_lengths")
        self.attention()  # which refuses what it cannot be made of

    def attention(self, **options: Unpack[Options]) -> Attention:
        if self.segment_lengths is None:
            return Attention(Dense(window=self.window), **options)
        return DilatedAttention(
            segment_lengths=self.segment_lengths, dilation_rates=self.dilation_rates, phase=self.phase, **options
        )

    @property
    def hidden(self) -> int:
        return -(-8 * self.dim // 3 // 64) * 64 if self.feedforward_dim is None else self.feedforward_dim


class Decoder(LanguageModel):
    """A causal language model over any number of ranks: `forward(tokens, sharding=...)` gives logits of these tokens.

    options are those of `longring.nn.Attention`: schedule, kernel, scale, deterministic, timeout. Weights are drawn
    anew in every process: seed alike on all ranks, or load the same.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        checkpoint_activations: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[Options],
    ) -> None:
        check_config(config, DecoderConfig)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        positions = Rotary(config.dim // config.heads, base=config.base)
        layers = (
            DecoderLayer(
                config.dim,
                config.heads,
                attention=config.attention(**options),
                feedforward_dim=config.hidden,
                kv_heads=config.kv_heads,
                positions=positions,
                norm="rms",
                activation="swiglu",
                bias=False,
                eps=config.eps,
                **made,
            )
            for _ in range(config.layers)
        )
        norm = make_norm("rms", config.dim, config.eps, **made)
        stack = Stack(layers, norm, positions=positions, checkpoint_activations=checkpoint_activations)
        super().__init__(
            stack, vocab_size=config.vocab_size, dim=config.dim, tie_embeddings=config.tie_embeddings, **made
        )
        self.config = config
        normal_weights(self, config.layers)

    def reset_parameters(self) -> None:
        reset_parts(self)
        normal_weights(self, self.config.layers)

    def extra_repr(self) -> str:
        return ", ".join(f"{field.name}={getattr(self.config, field.name)!r}" for field in fields(self.config))
