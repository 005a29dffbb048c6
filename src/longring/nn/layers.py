"""Transformer layers: attention and feed-forward with residuals, before or after norms, MAGNETO's among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import Dealing
from ..errors import ArgumentError, NotBuilt
from ..geometry.patterns import Dense
from ..sharding import Sharding
from .attention import Attention
from .cache import LayerCache
from .checks import check_bools, check_positive, check_size
from .multihead import Multihead
from .norms import make_norm
from .positions import Angles, Rotary

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "swiglu": F.silu}


class FeedForward(nn.Module):
    """Two linear maps with an activation between; "swiglu" has a third, whose activated result is a factor.

    sub_layernorm:  a LayerNorm before the last map (MAGNETO), with `eps`.
    gain:           of MAGNETO's initialisation; None initialises as torch.nn.Linear does.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: str = "gelu",
        bias: bool = True,
        sub_layernorm: bool = False,
        gain: float | None = None,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ArgumentError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
        for name, size in (("dim", dim), ("hidden", hidden)):
            check_size(name, size)
        check_bools(bias=bias, sub_layernorm=sub_layernorm)
        if gain is not None:
            check_positive("gain", gain)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.activation, self.gain = activation, gain
        self.gate = nn.Linear(dim, hidden, bias=bias, **made) if activation == "swiglu" else None
        self.up = nn.Linear(dim, hidden, bias=bias, **made)
        self.sub_norm = nn.LayerNorm(hidden, eps=eps, **made) if sub_layernorm else None
        self.down = nn.Linear(hidden, dim, bias=bias, **made)
        self._apply_gain()

    def reset_parameters(self) -> None:
        for part in (self.gate, self.up, self.sub_norm, self.down):
            if part is not None:
                part.reset_parameters()
        self._apply_gain()

    def _apply_gain(self) -> None:
        if self.gain is None:
            return
        for linear in (self.gate, self.up, self.down):
            if linear is not None:
                nn.init.xavier_normal_(linear.weight, gain=self.gain)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        activate = ACTIVATIONS[self.activation]
        hidden = activate(self.up(x)) if self.gate is None else activate(self.gate(x)) * self.up(x)
        return self.down(hidden if self.sub_norm is None else self.sub_norm(hidden))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class LayerWords(TypedDict, total=False):
    """What may be said to either layer; defaults in `_Layer`."""

    feedforward_dim: int | None
    kv_heads: int | None
    positions: Rotary | None
    norm: str
    norm_first: bool
    residual_scale: float
    activation: str
    bias: bool
    sub_layernorm: bool
    gain: float | None
    eps: float
    device: torch.device | str | None
    dtype: torch.dtype | None


class _Layer(nn.Module):
    """What encoder and decoder layers share."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        attention: Attention,
        feedforward_dim: int | None = None,
        kv_heads: int | None = None,
        positions: Rotary | None = None,
        norm: str = "layer",
        norm_first: bool = True,
        residual_scale: float = 1.0,
        activation: str = "gelu",
        bias: bool = True,
        sub_layernorm: bool = False,
        gain: float | None = None,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_bools(norm_first=norm_first)
        check_positive("residual_scale", residual_scale)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm_first, self.residual_scale = norm_first, float(residual_scale)
        self.attention_norm = make_norm(norm, embed_dim, eps, **made)
        self.attention = Multihead(
            embed_dim,
            num_heads,
            attention=attention,
            bias=bias,
            kv_heads=kv_heads,
            positions=positions,
            sub_layernorm=sub_layernorm,
            gain=gain,
            eps=eps,
            **made,
        )
        self.feedforward_norm = make_norm(norm, embed_dim, eps, **made)
        self.feedforward = FeedForward(
            embed_dim,
            4 * embed_dim if feedforward_dim is None else feedforward_dim,
            activation=activation,
            bias=bias,
            sub_layernorm=sub_layernorm,
            gain=gain,
            eps=eps,
            **made,
        )

    def _residual(self, x: Tensor, branch: Callable[[Tensor], Tensor], norm: nn.Module) -> Tensor:
        kept = x if self.residual_scale == 1 else self.residual_scale * x
        return kept + branch(norm(x)) if self.norm_first else norm(kept + branch(x))

    def extra_repr(self) -> str:
        said = "" if self.residual_scale == 1 else f", residual_scale={self.residual_scale:g}"
        return f"norm_first={self.norm_first}{said}"


class EncoderLayer(_Layer):
    """Attention of tokens with each other, then feed-forward.

    attention:        longring.nn.Attention, RingAttention or DilatedAttention; by default dense and not causal.
    feedforward_dim:  4 * embed_dim unless said.
    kv_heads:         heads of keys and values, which divide num_heads; as many as num_heads unless said.
    positions:        longring.nn.Rotary or XPos, at global positions.
    norm:             "layer" or "rms", with `eps`.
    norm_first:       norms before attention and feed-forward, or after the residual's sum.
    residual_scale:   what x is multiplied by where a branch is added to it; DeepNorm's alpha.
    activation:       "gelu", "relu", "silu" or "swiglu".
    sub_layernorm:    a LayerNorm before the last projection of each residual branch too (MAGNETO).
    gain:             of MAGNETO's initialisation, from `magneto_gain`.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, attention: Attention | None = None, **words: Unpack[LayerWords]
    ) -> None:
        super().__init__(embed_dim, num_heads, attention=attention or Attention(Dense(causal=False)), **words)

    def forward(
        self,
        x: Tensor,
        *,
        sharding: Sharding | None = None,
        documents: Any = None,
        lengths: Any = None,
        positions: Tensor | Angles | None = None,
    ) -> Tensor:
        """x [batch, n, embed_dim], this rank's tokens where there is a sharding; words as for `MultiheadAttention`."""

        def attend(x: Tensor) -> Tensor:
            told = {"sharding": sharding, "documents": documents, "lengths": lengths, "positions": positions}
            return self.attention(x, **told)[0]

        x = self._residual(x, attend, self.attention_norm)
        return self._residual(x, self.feedforward, self.feedforward_norm)


class DecoderLayer(_Layer):
    """Causal attention, attention to a memory where `cross_attention` asks for it, then feed-forward.

    cross_attention:  every token also attends to all of a memory, densely; without positions, sub-LayerNorm and gain.
    memory_dim:       the memory's width, embed_dim unless said.

    Further words are those of `EncoderLayer`; attention is dense and causal by default.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        attention: Attention | None = None,
        cross_attention: bool = False,
        memory_dim: int | None = None,
        **words: Unpack[LayerWords],
    ) -> None:
        check_bools(cross_attention=cross_attention)
        own = Attention() if attention is None else attention
        super().__init__(embed_dim, num_heads, attention=own, **words)
        if isinstance(own, Attention) and not own.pattern.causal:
            raise ArgumentError("a decoder's attention is causal; use EncoderLayer for one that is not")
        if memory_dim is not None and not cross_attention:
            raise ArgumentError(f"memory_dim={memory_dim} without cross_attention=True")
        if not cross_attention:
            self.cross_attention_norm = self.cross_attention = None
            return
        made: dict[str, Any] = {"device": words.get("device"), "dtype": words.get("dtype")}
        self.cross_attention_norm = make_norm(words.get("norm", "layer"), embed_dim, words.get("eps", 1e-5), **made)
        self.cross_attention = Multihead(
            embed_dim,
            num_heads,
            attention=Attention(Dense(causal=False), **own.options | {"schedule": "auto"}),
            bias=words.get("bias", True),
            kdim=memory_dim,
            vdim=memory_dim,
            kv_heads=words.get("kv_heads"),
            **made,
        )

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        sharding: Dealing | None = None,
        documents: Any = None,
        lengths: Any = None,
        positions: Tensor | Angles | None = None,
        memory_sharding: Sharding | None = None,
        memory_lengths: Any = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x [batch, n, embed_dim] and memory [batch, m, memory_dim], each this rank's tokens where it is sharded.

        With a `cache`, whose `Cache` has admitted x, keys and values are kept there; x that is "replicated" also
        attends to what was kept before.
        """

        def attend(x: Tensor) -> Tensor:
            told = {"sharding": sharding, "documents": documents, "lengths": lengths, "positions": positions}
            return self.attention(x, **told, cache=cache)[0]

        def look(x: Tensor) -> Tensor:
            told = {"sharding": sharding, "kv_sharding": memory_sharding, "lengths": memory_lengths}
            return self.cross_attention(x, memory, **told)[0]  # type: ignore[misc]

        if cache is not None and self.cross_attention is not None:
            raise NotBuilt("a cache for a layer with cross_attention=True is not built")
        self._check_memory(memory, memory_sharding, memory_lengths, sharding)
        x = self._residual(x, attend, self.attention_norm)
        if self.cross_attention_norm is not None:
            x = self._residual(x, look, self.cross_attention_norm)
        return self._residual(x, self.feedforward, self.feedforward_norm)

    def _check_memory(
        self, memory: Tensor | None, memory_sharding: Sharding | None, memory_lengths: Any, sharding: Dealing | None
    ) -> None:
        if self.cross_attention is None:
            if memory is not None or memory_sharding is not None or memory_lengths is not None:
                raise ArgumentError("memory was given to a layer made without cross_attention=True")
        elif memory is None:
            raise ArgumentError("cross_attention=True needs a memory to attend to")
        elif sharding is not None and memory_sharding is None:
            raise ArgumentError("sharding says how x is dealt; say memory_sharding= for the memory too")
