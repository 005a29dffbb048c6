"""Multi-head attention with parameters: torch.nn.MultiheadAttention's words and state_dict, on a pattern of ours."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import Dealing, check_offset, is_replicated
from ..errors import ArgumentError, NotBuilt
from ..geometry.patterns import Dense
from ..sharding import Sharding
from ..tensors import check_kind
from .attention import Attention, DilatedAttention, Options
from .cache import LayerCache
from .checks import check_bools, check_positive, check_size
from .positions import Angles, Rotary


class Multihead(nn.Module):
    """Projections around an attention without parameters, under the names that torch.nn.MultiheadAttention has.

    attention:      longring.nn.Attention, RingAttention or DilatedAttention.
    kdim, vdim:     widths of key and value, embed_dim unless said.
    kv_heads:       heads of keys and values, which divide num_heads; as many as num_heads unless said.
    positions:      longring.nn.Rotary or XPos, applied to queries and keys at their global positions.
    sub_layernorm:  a LayerNorm before out_proj (MAGNETO), with `eps`.
    gain:           of MAGNETO's initialisation (`magneto_gain`); None initialises as torch does.

    Dropout, add_bias_kv, add_zero_attn and batch_first=False are torch's words for what is refused here.
    """

    # torch's encoder layer then calls us, instead of its own kernel with our weights
    _qkv_same_embed_dim = False
    batch_first = True

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        attention: Attention,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        kv_heads: int | None = None,
        positions: Rotary | None = None,
        sub_layernorm: bool = False,
        gain: float | None = None,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        _refuse(dropout, add_bias_kv, add_zero_attn, batch_first)
        kv_heads = num_heads if kv_heads is None else kv_heads
        kdim, vdim = (embed_dim if width is None else width for width in (kdim, vdim))
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kv_heads": kv_heads, "kdim": kdim, "vdim": vdim}
        _check_sizes(sizes)
        _check_parts(attention, positions, embed_dim // num_heads)
        check_bools(bias=bias, sub_layernorm=sub_layernorm)
        if gain is not None:
            check_positive("gain", gain)
        check_positive("eps", eps)
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.kdim, self.vdim = kdim, vdim
        self.gain = gain
        self.attention = attention
        self.positions = positions
        made = {"device": device, "dtype": dtype}
        self._make_projections(made)
        self.register_parameter("in_proj_bias", nn.Parameter(torch.empty(sum(self._widths), **made)) if bias else None)
        self.sub_norm = nn.LayerNorm(embed_dim, eps=eps, **made) if sub_layernorm else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **made)
        self._reset_projections()

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Of queries, keys and values of all heads."""
        return self.embed_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    def _make_projections(self, made: dict[str, Any]) -> None:
        """One packed weight where query, key and value have one width, three otherwise: torch's own rule."""
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        inputs = (self.embed_dim, self.kdim, self.vdim)
        packed = len(set(inputs)) == 1
        weight = nn.Parameter(torch.empty(sum(self._widths), self.embed_dim, **made)) if packed else None
        self.register_parameter("in_proj_weight", weight)
        for name, outs, ins in zip(names, self._widths, inputs, strict=True):
            self.register_parameter(name, None if packed else nn.Parameter(torch.empty(outs, ins, **made)))

    # ------------------------------------------------------------------------------------------- initial values

    def reset_parameters(self) -> None:
        self.out_proj.reset_parameters()
        if self.sub_norm is not None:
            self.sub_norm.reset_parameters()
        self._reset_projections()

    def _reset_projections(self) -> None:
        """As torch does, draw for draw; or, with a gain, by MAGNETO: v and out by it, q and k by 1."""
        if self.gain is None:
            for weight in self.projecting:
                nn.init.xavier_uniform_(weight)
        else:
            gains = (1.0, 1.0, self.gain)
            if self.in_proj_weight is not None:
                _xavier_by_rows(self.in_proj_weight, self._widths, gains)
            else:
                for weight, gain in zip(self.projecting, gains, strict=True):
                    nn.init.xavier_normal_(weight, gain=gain)
            nn.init.xavier_normal_(self.out_proj.weight, gain=self.gain)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    @property
    def projecting(self) -> list[nn.Parameter]:
        """The parameters that make q, k and v: one, or three."""
        found = (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        return [parameter for parameter in found if parameter is not None]

    @property
    def projections(self) -> tuple[Tensor, Tensor, Tensor]:
        """The weights of q, k and v, which may be views of one: to be read, since of a sharded one they are copies."""
        weights = self.projecting if self.in_proj_weight is None else self.in_proj_weight.split(self._widths)
        return tuple(weights)  # type: ignore[return-value]

    # ----------------------------------------------------------------------------------------------- computation

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        sharding: Dealing | None = None,
        kv_sharding: Sharding | None = None,
        documents: Any = None,
        lengths: Any = None,
        query_offset: int | None = None,
        positions: Tensor | Angles | None = None,
        key_positions: Tensor | Angles | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, None]:
        """(out, None) for query [batch, n, embed_dim]; key and value are the query unless given.

        key_padding_mask:  True (or -inf) where a key is padding, [batch, n_k] of the whole sequence, padding on the
                           right; it is read on the host. `lengths`, one number for each row, says the same.
        attn_mask:         none but torch's causal mask, with is_causal=True.
        is_causal:         this call is causal, whatever the module is.
        sharding:          query (and kv_sharding: key and value) is this rank's part, as `Sharding.shard` gives it;
                           "replicated" where every rank has the same, whole query.
        documents:         boundaries of packed documents.
        query_offset:      query i stands at position i + query_offset; by default the last query meets the last key.
        positions:         where queries stand, for rotary embeddings, instead of their places in the whole sequence;
                           key_positions likewise, and the same as the queries' where there is no key.
        cache:             of this layer, whose `Cache` has admitted these tokens: keys and values are kept there, and
                           tokens that are "replicated" also attend to what was kept before.
        """
        try:
            check_bools(is_causal=is_causal)
            if need_weights:
                raise NotBuilt("need_weights=True: weights are never in memory, all at once or otherwise; pass False")
            if cache is not None:
                self._check_cache(key, documents, lengths, query_offset)
                kv_sharding = cache.sharding if is_replicated(sharding) else None
            key, value = self._check_inputs(query, key, value)
            whole = _Whole.of(query, key, sharding, kv_sharding)
            lengths = _understood_masks(key_padding_mask, attn_mask, is_causal, lengths, query.shape[0], whole)
            q, k, v = self._project(query, key, value)
            if key_positions is None and key is query:
                key_positions = positions
            offset = check_offset(query_offset, whole.queries, whole.keys)
            q = self._turned(q, positions, sharding, offset)
            if cache is None:
                k = self._turned(k, key_positions, kv_sharding or sharding, 0, keys=True)
            else:
                k = self._turned(k, key_positions, sharding, offset, keys=True)
                cache.take(k, v)
                k, v = (cache.keys, cache.values) if is_replicated(sharding) else (k, v)
        except ArgumentError as error:
            dealt = kv_sharding if is_replicated(sharding) else sharding
            if isinstance(dealt, Sharding):
                dealt.transport.decline(error)  # or the others would wait for this rank's attention
            raise
        out = self.attention(
            q,
            k,
            v,
            documents=documents,
            lengths=lengths,
            causal=True if is_causal else None,
            sharding=sharding,
            kv_sharding=kv_sharding,
            query_offset=query_offset,
        )
        out = out.flatten(-2)
        return self.out_proj(out if self.sub_norm is None else self.sub_norm(out)), None

    def _turned(
        self,
        x: Tensor,
        positions: Tensor | Angles | None,
        sharding: Dealing | None,
        offset: int,
        *,
        keys: bool = False,
    ) -> Tensor:
        """At these positions, by default where the pattern sees the tokens."""
        if self.positions is None:
            if positions is not None:
                raise ArgumentError("positions were given, but this module has no rotary embedding to use them")
            return x
        at = held_positions(x, sharding) + offset if positions is None else positions
        return self.positions(x, at, keys=keys)

    def _check_cache(self, key: Tensor | None, documents: Any, lengths: Any, query_offset: int | None) -> None:
        if key is not None:
            raise ArgumentError("a cache keeps the keys of the queries themselves, but a key was given")
        given = {"documents": documents, "lengths": lengths, "query_offset": query_offset}
        for name, value in given.items():
            if value is not None:
                raise NotBuilt(f"{name}={value!r} with a cache is not built: it holds one document, from its start on")
        if getattr(self.attention, "compat", None) is not None:
            raise NotBuilt("compat='torchscale' with a cache: what it computes depends on the whole length")

    def _check_inputs(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
        if key is None and value is not None:
            raise ArgumentError("value was given without key; both, or neither for self-attention")
        key = query if key is None else key
        value = key if value is None else value
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            check_kind(name, x, fake=True)
            if not isinstance(x, Tensor):
                raise ArgumentError(f"{name} must be a tensor [batch, n, {width}], got {type(x).__name__}")
            if x.ndim != 3 or x.shape[2] != width:
                raise ArgumentError(f"{name} must be [batch, n, {width}], got shape {list(x.shape)}")
            self._check_weights_fit(name, x)
        if key.shape[:2] != value.shape[:2]:
            raise ArgumentError(f"key and value differ in tokens: {list(key.shape)} and {list(value.shape)}")
        return key, value

    def _check_weights_fit(self, name: str, x: Tensor) -> None:
        weight = self.projecting[0]
        if x.dtype == weight.dtype and x.device == weight.device:
            return
        if x.device != weight.device:
            raise ArgumentError(f"{name} is on {x.device}, but the weights are on {weight.device}; move one of them")
        cast = x.is_floating_point() and torch.float64 not in (x.dtype, weight.dtype)  # as autocast does
        if not cast or not torch.is_autocast_enabled(x.device.type):
            raise ArgumentError(f"{name} is {x.dtype}, but the weights are {weight.dtype}; they must be of one dtype")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if query is key and key is value and self.in_proj_weight is not None:
            found = F.linear(query, self.in_proj_weight, self.in_proj_bias).split(self._widths, -1)
        else:
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(self._widths)
            triples = zip((query, key, value), self.projections, biases, strict=True)
            found = [F.linear(x, weight, bias) for x, weight, bias in triples]
        return [x.unflatten(-1, (-1, self.head_dim)) for x in found]

    def extra_repr(self) -> str:
        said = [f"{self.embed_dim}, {self.num_heads}"]
        if self.kv_heads != self.num_heads:
            said.append(f"kv_heads={self.kv_heads}")
        said += [f"{name}={width}" for name in ("kdim", "vdim") if (width := getattr(self, name)) != self.embed_dim]
        said += ["bias=False"] if self.in_proj_bias is None else []
        said += [f"gain={self.gain:g}"] if self.gain is not None else []
        return ", ".join(said)


class Words(Options, total=False):
    """What may be said to either of the two below: words of `Multihead`, and options of `Attention`."""

    add_bias_kv: bool
    add_zero_attn: bool
    kdim: int | None
    vdim: int | None
    batch_first: bool
    device: torch.device | str | None
    dtype: torch.dtype | None
    kv_heads: int | None
    positions: Rotary | None
    sub_layernorm: bool
    gain: float | None
    eps: float


class MultiheadAttention(Multihead):
    """torch.nn.MultiheadAttention with batch_first=True, over any number of ranks: same words, same state_dict.

    Attention is not causal unless said so, as in torch; `window` limits it. Further words are those of `Multihead`
    and of `Attention`. Weights are never returned: the answer is (out, None).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        **words: Unpack[Words],
    ) -> None:
        options, rest = _apart(words)
        attention = Attention(Dense(causal=causal, window=window), **options)
        super().__init__(embed_dim, num_heads, dropout, bias, attention=attention, **rest)


class MultiheadDilatedAttention(Multihead):
    """The same with LongNet's dilated attention; not causal unless said so, like `MultiheadAttention`."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        segment_lengths: Any,
        dilation_rates: Any,
        causal: bool = False,
        phase: str | None = None,
        mixing_gradient: bool | None = None,
        compat: str | None = None,
        **words: Unpack[Words],
    ) -> None:
        options, rest = _apart(words)
        attention = DilatedAttention(
            segment_lengths=segment_lengths,
            dilation_rates=dilation_rates,
            causal=causal,
            phase=phase,
            mixing_gradient=mixing_gradient,
            compat=compat,
            **options,
        )
        super().__init__(embed_dim, num_heads, dropout, bias, attention=attention, **rest)


def _apart(words: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options of the attention, words of the projections)."""
    options = {name: value for name, value in words.items() if name in Options.__annotations__}
    return options, {name: value for name, value in words.items() if name not in options}


def magneto_gain(*, encoder_layers: int = 0, decoder_layers: int = 0, of: str = "decoder") -> float:
    """The gain by which MAGNETO initialises values, output projections and feed-forward weights.

    Of a stack that stands alone with L layers: sqrt(log 2L). With N encoder and M decoder layers:
    sqrt(log(3M) log(2N) / 3) in the encoder and sqrt(log 3M) in the decoder.
    """
    if of not in ("encoder", "decoder"):
        raise ArgumentError(f"of must be 'encoder' or 'decoder', got {of!r}")
    here, there = (encoder_layers, decoder_layers) if of == "encoder" else (decoder_layers, encoder_layers)
    if here < 1 or there < 0:
        raise ArgumentError(
            f"the {of} must have layers, got {encoder_layers} encoder and {decoder_layers} decoder layers"
        )
    if there == 0:
        return math.sqrt(math.log(2 * here))
    if of == "decoder":
        return math.sqrt(math.log(3 * decoder_layers))
    return math.sqrt(math.log(3 * decoder_layers) * math.log(2 * encoder_layers) / 3)


@torch.no_grad()
def _xavier_by_rows(weight: Tensor, rows: tuple[int, ...], gains: tuple[float, ...]) -> None:
    """Xavier's normal draws for several weights that lie one under the other in one, which FSDP may have sharded."""
    stds = [gain * math.sqrt(2 / (outs + weight.shape[1])) for outs, gain in zip(rows, gains, strict=True)]
    made: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    column = torch.cat([torch.full((outs, 1), std, **made) for outs, std in zip(rows, stds, strict=True)])
    if hasattr(weight, "device_mesh"):
        from torch.distributed.tensor import DTensor, Replicate

        mesh = weight.device_mesh  # type: ignore[attr-defined]
        column = DTensor.from_local(column, mesh, [Replicate()] * mesh.ndim, run_check=False)
    weight.normal_().mul_(column)


# ------------------------------------------------------------------------------------------------ who stands where


class _Whole(NamedTuple):
    """How many queries and keys there are on all ranks together."""

    queries: int
    keys: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor, sharding: Dealing | None, kv_sharding: Sharding | None) -> _Whole:
        if sharding is None:
            return cls(query.shape[1], key.shape[1])
        if is_replicated(sharding):
            if not isinstance(kv_sharding, Sharding):
                raise ArgumentError("sharding='replicated' needs kv_sharding, for who holds which keys, or a cache")
            return cls(query.shape[1], kv_sharding.length)
        keys = sharding if kv_sharding is None else kv_sharding
        if not isinstance(sharding, Sharding):
            raise ArgumentError(f"sharding must be a longring.Sharding, got {sharding!r}")
        if not isinstance(keys, Sharding):
            raise ArgumentError(f"kv_sharding must be a longring.Sharding, got {keys!r}")
        return cls(sharding.length, keys.length)


def held_positions(x: Tensor, sharding: Dealing | None) -> Tensor:
    """Places of x's tokens in the whole sequence, on x's device."""
    if not isinstance(sharding, Sharding):
        return torch.arange(x.shape[1], device=x.device)
    if sharding.local_length != x.shape[1]:  # the attention refuses that, and tells other ranks
        return torch.arange(x.shape[1], device=x.device)
    return sharding.positions.to(x.device)


# ------------------------------------------------------------------------------------------------ masks of torch


def lengths_of(mask: Tensor, batch: int, keys: int) -> list[int]:
    """How many keys of each row are not padding, by a mask that is True or -inf where they are."""
    if list(mask.shape) != [batch, keys]:
        raise ArgumentError(
            f"key_padding_mask must be [{batch}, {keys}], one row for all keys of the sequence whoever holds them; "
            f"got shape {list(mask.shape)}"
        )
    padding = _as_bool("key_padding_mask", mask)
    lengths = (~padding).sum(1)
    at = torch.arange(keys, device=mask.device)
    if not torch.equal(padding, at >= lengths.unsqueeze(1)):
        raise NotBuilt("key_padding_mask must have its padding on the right of each row; other masks are not built")
    return lengths.tolist()


def _understood_masks(
    padding: Tensor | None, mask: Tensor | None, is_causal: bool, lengths: Any, batch: int, whole: _Whole
) -> Any:
    """The lengths that a padding mask stands for, or those given; another mask is refused."""
    if mask is not None:
        _check_causal_mask(mask, is_causal, whole)
    if padding is None:
        return lengths
    if lengths is not None:
        raise ArgumentError("key_padding_mask and lengths say the same; pass one of them")
    return lengths_of(padding, batch, whole.keys)


def _check_causal_mask(mask: Tensor, is_causal: bool, whole: _Whole) -> None:
    n = whole.keys
    square = list(mask.shape) == [n, n] and whole.queries == n
    if not is_causal or not square:
        raise NotBuilt(
            f"attn_mask of shape {list(mask.shape)}: masks given as tensors are not built; is_causal=True with torch's "
            f"square causal mask of the {n} keys, or with none, is causal attention"
        )
    future = torch.ones(n, n, dtype=torch.bool, device=mask.device).triu(1)
    if not torch.equal(_as_bool("attn_mask", mask), future):
        raise NotBuilt("attn_mask is not the causal mask that is_causal=True says; other masks are not built")


def _as_bool(name: str, mask: Tensor) -> Tensor:
    """True where torch would let nothing through."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ArgumentError(f"{name} must be bool or float, got {mask.dtype}")
    closed = mask == -torch.inf
    if bool((closed | (mask == 0)).all()):
        return closed
    raise NotBuilt(f"{name} adds numbers to the scores; a bias is not built, only 0 and -inf are understood")


# ------------------------------------------------------------------------------------------------ what is refused


def _refuse(dropout: float, add_bias_kv: bool, add_zero_attn: bool, batch_first: bool) -> None:
    if dropout:
        raise NotBuilt(f"dropout={dropout!r}: dropout is not built yet, and is never silently ignored")
    if add_bias_kv:
        raise NotBuilt("add_bias_kv=True: a key and value of bias are not built")
    if add_zero_attn:
        raise NotBuilt("add_zero_attn=True: a key of zeros is not built")
    if not batch_first:
        raise NotBuilt("batch_first=False: tensors are [batch, n, embed_dim] here; transpose(0, 1) before and after")


def _check_sizes(sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        check_size(name, size)
    for whole, part in (("embed_dim", "num_heads"), ("num_heads", "kv_heads")):
        if sizes[whole] % sizes[part]:
            raise ArgumentError(f"{whole} must be a multiple of {part}, got {sizes[whole]} and {sizes[part]}")


def _check_parts(attention: Attention, positions: Rotary | None, head_dim: int) -> None:
    if not isinstance(attention, Attention):
        raise ArgumentError(f"attention must be a longring.nn.Attention, got {type(attention).__name__}")
    if positions is None:
        return
    if not isinstance(positions, Rotary):
        raise ArgumentError(f"positions must be a longring.nn.Rotary or XPos, got {type(positions).__name__}")
    if positions.head_dim != head_dim:
        raise ArgumentError(f"positions are of head_dim {positions.head_dim}, but embed_dim / num_heads is {head_dim}")
