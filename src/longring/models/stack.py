"""What the models share: layers one after the other, and what lies before and behind them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..call import Dealing, is_replicated
from ..errors import ArgumentError
from ..nn.cache import Cache
from ..nn.checks import check_bools, check_positive, check_size
from ..nn.layers import DecoderLayer, EncoderLayer, FeedForward
from ..nn.multihead import Multihead, held_positions
from ..nn.positions import Angles, Rotary, XPos
from ..numerics.online_softmax import accumulator_dtype
from ..sharding import Sharding
from ..tensors import spoken
from .generation import Words, generate, last_token


class Stack(nn.Module):
    """Layers of one kind, then a norm if there is one. The angles of positions are computed once for all of them.

    embedding_scale:         what embeddings are multiplied by on their way in,
    embedding_norm:          and a norm that they then go through.
    checkpoint_activations:  keep each layer's input alone, and compute the rest again in the backward pass. Over
                             ranks that repeats the layer's communication, at the same place on every rank.
    """

    def __init__(
        self,
        layers: Iterable[EncoderLayer | DecoderLayer],
        norm: nn.Module | None,
        *,
        positions: Rotary | None,
        embedding_scale: float = 1.0,
        embedding_norm: nn.Module | None = None,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        check_bools(checkpoint_activations=checkpoint_activations)
        check_positive("embedding_scale", embedding_scale)
        self.embedding_scale = float(embedding_scale)
        self.embedding_norm = embedding_norm
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.positions = positions
        self.checkpoint_activations = checkpoint_activations

    def forward(
        self,
        x: Tensor,
        *,
        sharding: Dealing | None = None,
        documents: Any = None,
        lengths: Any = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        if cache is not None:
            self._admit(x, sharding, positions, cache)
        elif is_replicated(sharding):
            raise ArgumentError("sharding='replicated' is for tokens that add to a cache: pass a longring.nn.Cache")
        angles = self._angles(x, sharding, positions, cache)
        told = {"sharding": sharding, "documents": documents, "lengths": lengths, "positions": angles}
        x = x if self.embedding_scale == 1 else self.embedding_scale * x
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        for number, layer in enumerate(self.layers):
            if cache is not None:
                told["cache"] = cache.layer(number)
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False, **told)  # type: ignore[assignment]
            else:
                x = layer(x, **told)
        return x if self.norm is None else self.norm(x)

    def _admit(self, x: Tensor, sharding: Dealing | None, positions: Tensor | None, cache: Cache) -> None:
        if not isinstance(cache, Cache):
            raise ArgumentError(f"cache must be a longring.nn.Cache, got {type(cache).__name__}")
        if positions is not None:
            raise ArgumentError("positions were given with a cache, which knows where its tokens stand")
        cache.admit(x.shape[1], sharding)

    def _angles(
        self, x: Tensor, sharding: Dealing | None, positions: Tensor | None, cache: Cache | None
    ) -> Angles | None:
        if self.positions is None:
            if positions is not None:
                raise ArgumentError("positions were given, but this model has no rotary embedding to use them")
            return None
        if positions is None:
            length = _whole_length(x, sharding, cache)
            if self.longest is not None and length > self.longest:
                raise ArgumentError(f"{length:,} tokens, but xPos was made for a length of {self.longest:,}")
            positions = held_positions(x, sharding)
            if is_replicated(sharding):
                positions += length - x.shape[1]
        return self.positions.at(positions, dtype=accumulator_dtype(x.dtype))

    @property
    def longest(self) -> int | None:
        """The longest sequence that its positions were made for, if they end."""
        return self.positions.length if isinstance(self.positions, XPos) else None

    def extra_repr(self) -> str:
        return "checkpoint_activations=True" if self.checkpoint_activations else ""


def _whole_length(x: Tensor, sharding: Dealing | None, cache: Cache | None) -> int:
    if cache is not None:
        return cache.length
    return sharding.length if isinstance(sharding, Sharding) else x.shape[1]


class LanguageModel(nn.Module):
    """Tokens in, logits out; the embedding is the head too, unless `tie_embeddings` is False.

    forward(tokens) gives logits [batch, n, vocabulary] of these tokens, which are this rank's part of the sequence
    where `sharding` says so. `documents` are boundaries of packed documents and `lengths` how many tokens of each
    row are not padding, both of the whole sequence; `positions` are those of the sharding unless given.

    With a `cache`, a longring.nn.Cache, tokens are read into it: first a prompt, of which the logits [batch, 1,
    vocabulary] of its last token come out, the same on every rank; then, with sharding="replicated", tokens that every
    rank has, and their logits.
    """

    def __init__(
        self,
        stack: Stack,
        *,
        vocab_size: int,
        dim: int,
        tie_embeddings: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim, device=device, dtype=dtype)
        self.stack = stack
        self.head = None if tie_embeddings else nn.Linear(dim, vocab_size, bias=False, device=device, dtype=dtype)

    def forward(
        self,
        tokens: Tensor,
        *,
        sharding: Dealing | None = None,
        documents: Any = None,
        lengths: Any = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        check_tokens(tokens)
        told = {"sharding": sharding, "documents": documents, "lengths": lengths, "positions": positions}
        x = self.stack(self.embedding(tokens), **told, cache=cache)
        if cache is not None and not isinstance(sharding, str):
            x = last_token(x, sharding, timeout=self.timeout)
        # not one parameter under two names, which would be two after a stay on the meta device
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def generate(self, tokens: Tensor, **words: Unpack[Words]) -> Tensor:
        """Further tokens [batch, up to new_tokens], the same on every rank: words as for `longring.models.generate`."""
        return generate(self, tokens, **words)

    @property
    def longest(self) -> int | None:
        """The longest sequence that its positions were made for, if they end."""
        return self.stack.longest

    @property
    def timeout(self) -> float | None:
        """Seconds after which a silent rank is an error, as the layers have it."""
        return self.stack.layers[0].attention.attention.timeout  # type: ignore[union-attr]


def check_tokens(tokens: Tensor) -> None:
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"tokens must be whole numbers [batch, n], int64 or int32, got {spoken(tokens)}")


def reset_parts(model: nn.Module) -> None:
    """Every part to its own initial values, what is inside before what is around it, which may know better."""
    for module in reversed([part for part in model.modules() if part is not model]):
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def normal_weights(model: nn.Module, layers: int, std: float = 0.02) -> None:
    """GPT-2's initial values: normal, narrower where a residual branch ends by as much as there are branches."""
    narrow = std / (2 * layers) ** 0.5
    for module in reversed(list(model.modules())):  # what is inside first: a branch knows which of its maps is last
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Multihead):
            for weight in module.projecting:
                nn.init.normal_(weight, std=std)
            nn.init.normal_(module.out_proj.weight, std=narrow)
        if isinstance(module, FeedForward):
            nn.init.normal_(module.down.weight, std=narrow)


def check_config(config: Any, kind: type[Any]) -> None:
    if not isinstance(config, kind):
        raise ArgumentError(f"config must be a longring.models.{kind.__name__}, got {type(config).__name__}")


def check_sizes(config: Any, *names: str) -> None:
    for name in names:
        check_size(name, getattr(config, name))
