"""Modules by the names that users of dilated-attention-pytorch know, each made from one frozen config.

What a name meant there is told in docs/migration.md. Here it stands for a pattern, a schedule and those who take
part; names other than "auto" say by a DeprecationWarning what to write instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from .errors import ArgumentError, NotBuilt
from .geometry.head_split import HeadSplit
from .geometry.patterns import Dense, Problem
from .nn import Attention, DilatedAttention, Multihead, MultiheadDilatedAttention, RingAttention, Rotary
from .nn.attention import Options

# ------------------------------------------------------------------------------------------------------- configs


@dataclass(frozen=True, kw_only=True)
class DilatedAttentionConfig:
    """What `create_dilated_attention` makes: words of longring.nn.DilatedAttention.

    Lengths, rates and `causal` are by default what they were in dilated-attention-pytorch.

    head_split:  every head has one branch alone, instead of all of them mixed. Branch b of m has a run of the heads,
                 in order, the first (heads mod m) branches one more, and keeps of each segment the positions
                 b % rate, b % rate + rate, ... Where kv heads are fewer, they are shared out, and query heads follow.
    dropout:     0: it is not built.
    """

    segment_lengths: Sequence[int] = (2048, 4096, 8192)
    dilation_rates: Sequence[int] = (1, 2, 4)
    causal: bool = False
    head_split: bool = False
    phase: str | None = None
    mixing_gradient: bool | None = None
    compat: str | None = None
    dropout: float = 0.0
    schedule: str = "auto"
    kernel: str = "auto"
    scale: float | None = None
    deterministic: bool = False
    timeout: float | None = None

    def __post_init__(self) -> None:
        _refuse_dropout(self.dropout)
        if not isinstance(self.head_split, bool):
            raise ArgumentError(f"head_split must be True or False, got {self.head_split!r}")
        for name, value in self._mixing.items():
            if self.head_split and value is not None:
                raise ArgumentError(
                    f"{name}={value!r} is about branches that a head mixes; with head_split=True it has one alone"
                )
        _keep_as_cleaned(self, "segment_lengths", "dilation_rates")

    def attention(self) -> Attention:
        branches: dict[str, Any] = {
            "segment_lengths": self.segment_lengths,
            "dilation_rates": self.dilation_rates,
            "causal": self.causal,
        }
        if self.head_split:
            return Attention(HeadSplit(**branches), **_options(self))
        return DilatedAttention(**branches, **self._mixing, **_options(self))

    @property
    def _mixing(self) -> dict[str, Any]:
        return {"phase": self.phase, "mixing_gradient": self.mixing_gradient, "compat": self.compat}


@dataclass(frozen=True, kw_only=True)
class MultiheadDilatedAttentionConfig(DilatedAttentionConfig):
    """What `create_multihead_dilated_attention` makes: words of longring.nn.MultiheadDilatedAttention.

    Sizes, the LayerNorm before the output projection and a gain of 1 are by default what they were.
    """

    embed_dim: int = 768
    num_heads: int = 12
    bias: bool = True
    kv_heads: int | None = None
    positions: Rotary | None = None
    sub_layernorm: bool = True
    gain: float | None = 1.0
    eps: float = 1e-5
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        made = self._multihead("meta")  # where weights take no memory, and draw no random numbers
        if self.head_split:
            made.attention.pattern.check(Problem(1, 1, 1, made.kv_heads, 0))

    def multihead(self) -> Multihead:
        return self._multihead(self.device)

    def _multihead(self, device: torch.device | str | None) -> Multihead:
        words: dict[str, Any] = {
            "bias": self.bias,
            "kv_heads": self.kv_heads,
            "positions": self.positions,
            "sub_layernorm": self.sub_layernorm,
            "gain": self.gain,
            "eps": self.eps,
            "device": device,
            "dtype": self.dtype,
        }
        if self.head_split:
            return Multihead(self.embed_dim, self.num_heads, attention=self.attention(), **words)
        return MultiheadDilatedAttention(
            self.embed_dim,
            self.num_heads,
            segment_lengths=self.segment_lengths,
            dilation_rates=self.dilation_rates,
            causal=self.causal,
            **self._mixing,
            **_options(self),
            **words,
        )


@dataclass(frozen=True, kw_only=True)
class RingAttentionConfig:
    """What `create_ring_attention` makes: words of longring.nn.RingAttention, not causal unless said.

    schedule:  "auto" is the ring; with another by name the module is a longring.nn.Attention of the same pattern.
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    dropout: float = 0.0
    schedule: str = "auto"
    kernel: str = "auto"
    scale: float | None = None
    deterministic: bool = False
    timeout: float | None = None

    def __post_init__(self) -> None:
        _refuse_dropout(self.dropout)
        _keep_as_cleaned(self, "window")

    def attention(self) -> Attention:
        options = _options(self)
        if self.schedule in ("auto", "ring"):
            del options["schedule"]
            return RingAttention(causal=self.causal, window=self.window, **options)
        return Attention(Dense(causal=self.causal, window=self.window), **options)


Config = TypeVar("Config", DilatedAttentionConfig, MultiheadDilatedAttentionConfig, RingAttentionConfig)


def _keep_as_cleaned(config: DilatedAttentionConfig | RingAttentionConfig, *names: str) -> None:
    """A module without parameters is made to check every word; its pattern has lists as tuples, that values compare."""
    pattern = config.attention().pattern
    for name in names:
        object.__setattr__(config, name, getattr(pattern, name))


def _options(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in Options.__annotations__}


def _refuse_dropout(dropout: float) -> None:
    if dropout:
        raise NotBuilt(f"dropout={dropout!r}: dropout is not built yet, and is never silently ignored")


# --------------------------------------------------------------------------------------------------- what is made


def create_dilated_attention(
    type: str = "auto", *by_position: Any, config: DilatedAttentionConfig | None = None, **words: Any
) -> Attention:
    """LongNet's dilated attention as a module without parameters, by a config or by the words of one.

    The answer is a longring.nn.DilatedAttention; with head_split=True a longring.nn.Attention of that pattern. It is
    called with q, k, v [batch, n, heads, d], and over ranks with sharding=longring.Sharding(...).
    """
    _refuse_by_position(by_position)
    name, words = _modern(type, words, WITHOUT_PARAMETERS)
    return _settled(_config(DilatedAttentionConfig, config, words), name, DILATED).attention()


def create_multihead_dilated_attention(
    type: str = "auto", *by_position: Any, config: MultiheadDilatedAttentionConfig | None = None, **words: Any
) -> Multihead:
    """The same between projections: a longring.nn.MultiheadDilatedAttention, or with head_split=True a Multihead."""
    _refuse_by_position(by_position)
    name, words = _modern(type, words, WITH_PARAMETERS)
    return _settled(_config(MultiheadDilatedAttentionConfig, config, words), name, DILATED).multihead()


def create_ring_attention(
    type: str = "auto", *by_position: Any, config: RingAttentionConfig | None = None, **words: Any
) -> Attention:
    """Dense attention over a ring as a module without parameters: a longring.nn.RingAttention.

    Named "collective" it gathers keys and values instead of passing them on, as longring.nn.Attention.
    """
    _refuse_by_position(by_position)
    if segments := [name for name in ("segment_lengths", "dilation_rates") if name in words]:
        raise ArgumentError(
            f"{' and '.join(segments)}: ring attention is dense here, without segments; for dilated attention around "
            "a ring use create_dilated_attention(segment_lengths=..., dilation_rates=..., schedule='ring')"
        )
    name, words = _modern(type, words, WITHOUT_PARAMETERS)
    return _settled(_config(RingAttentionConfig, config, words), name, DENSE).attention()


def _config(kind: type[Config], config: Config | None, words: dict[str, Any]) -> Config:
    if config is None:
        return kind(**words)
    if type(config) is not kind:
        raise ArgumentError(f"config must be a longring.factory.{kind.__name__}, got {config!r}")
    if words:
        raise ArgumentError(f"{', '.join(words)} beside config=, which has every word; dataclasses.replace changes one")
    return config


def _settled(config: Config, name: str, meanings: dict[str, Meaning]) -> Config:
    """The config with the schedule that the name stands for."""
    schedule = _meaning(name, meanings, type(config)).schedule
    if schedule == "auto":
        return config
    if config.schedule not in ("auto", schedule):
        raise ArgumentError(f"schedule={config.schedule!r} contradicts type={name!r}, which is schedule={schedule!r}")
    return replace(config, schedule=schedule)


# ------------------------------------------------------------------------------------------------- names they know


class Meaning(NamedTuple):
    """What a name stands for. Transport "group" is that of a sharding, "any" also this process alone."""

    pattern: str
    schedule: str
    transport: str
    besides: str = ""


ONE_BRANCH_EACH = "; there a head had one branch alone, which is head_split=True"
DEEPSPEED = "; DeepSpeed's groups are groups of torch.distributed, which a Sharding takes"
FAIRSCALE = "; instead of FairScale's FullyShardedDataParallel use torch.distributed.fsdp.fully_shard"

# A schedule by name is refused where a group has been forgotten, so names that meant several ranks never turn into
# attention of each rank with itself.
DILATED = {
    "auto": Meaning("dilated", "auto", "any"),
    "standard": Meaning("dilated", "auto", "any", ONE_BRANCH_EACH),
    "improved": Meaning("dilated", "auto", "any"),
    "ring": Meaning("dilated", "ring", "group"),
    "ring_distributed": Meaning("dilated", "ring", "group"),
    "distributed": Meaning("dilated", "exchange", "group"),
    "improved_distributed": Meaning("dilated", "exchange", "group"),
    "collective": Meaning("dilated", "gather", "group"),
    "production": Meaning("dilated", "exchange", "group"),
    "robust": Meaning("dilated", "exchange", "group"),
    "deepspeed": Meaning("dilated", "exchange", "group", DEEPSPEED),
    "fairscale": Meaning("dilated", "exchange", "group", FAIRSCALE),
}
DENSE = {
    "auto": Meaning("dense", "auto", "any"),
    "standard": Meaning("dense", "auto", "any"),
    "improved": Meaning("dense", "auto", "any"),
    "ring": Meaning("dense", "ring", "group"),
    "ring_distributed": Meaning("dense", "ring", "group"),
    "distributed": Meaning("dense", "ring", "group"),
    "improved_distributed": Meaning("dense", "ring", "group"),
    "collective": Meaning("dense", "gather", "group"),
    "production": Meaning("dense", "ring", "group"),
    "robust": Meaning("dense", "ring", "group"),
    "deepspeed": Meaning("dense", "ring", "group", DEEPSPEED),
    "fairscale": Meaning("dense", "ring", "group", FAIRSCALE),
}
APPROXIMATE = "which leaves pairs out by estimates, is not built: attention is exact here"
NOT_BUILT = {
    "block_sparse": APPROXIMATE,
    "block_sparse_ring": APPROXIMATE,
    "block_sparse_ring_distributed": APPROXIMATE,
    "hilbert": "which puts tokens in another order, is not built: results do not depend on where tokens are stored",
}


def _meaning(name: Any, meanings: dict[str, Meaning], kind: type[Any]) -> Meaning:
    if isinstance(name, str) and name in NOT_BUILT:
        raise NotBuilt(f"type={name!r}, {NOT_BUILT[name]}; known are {', '.join(meanings)}")
    if not isinstance(name, str) or name not in meanings:
        raise ArgumentError(f"type must be one of {', '.join(meanings)}; got {name!r}")
    meaning = meanings[name]
    if name != "auto":
        sharding = ", and give sharding=longring.Sharding(length, group) with each call"
        _deprecated(
            f"type={name!r} is a name of dilated-attention-pytorch: write {_spelling(meaning, kind)}"
            + (sharding if meaning.transport == "group" else "")
            + meaning.besides,
            frames=3,
        )
    return meaning


def _spelling(meaning: Meaning, kind: type[Any]) -> str:
    if meaning.pattern == "dense" and meaning.schedule in ("auto", "ring"):
        return "longring.nn.RingAttention(...)"
    if meaning.pattern == "dense":
        return f"longring.nn.Attention(longring.Dense(...), schedule={meaning.schedule!r})"
    module = "DilatedAttention" if kind is DilatedAttentionConfig else "MultiheadDilatedAttention"
    schedule = "" if meaning.schedule == "auto" else f", schedule={meaning.schedule!r}"
    return f"longring.nn.{module}(...{schedule})"


# ------------------------------------------------------------------------------------------------- words they know

RENAMED = {
    "attention_type": "type",
    "implementation": "type",
    "is_causal": "causal",
    "softmax_scale": "scale",
    "attention_scale": "scale",
    "attention_dropout": "dropout",
}
WITHOUT_PARAMETERS = RENAMED
WITH_PARAMETERS = {**RENAMED, "layer_norm": "sub_layernorm", "layer_norm_eps": "eps", "gamma_init": "gain"}

SAID_ELSEWHERE = {
    "the sharding given with each call says who takes part": (
        "ring_size world_size rank sequence_parallel model_parallel data_parallel backend communication_backend"
    ),
    "buffers and plans are kept by shape, and longring.release_buffers() frees them": (
        "enable_memory_pool lightweight_pool use_memory_pool memory_pool_size memory_pool_threshold_mb "
        "max_cached_buffers enable_buffer_manager preallocate_buffers aggressive_memory_cleanup use_pattern_cache"
    ),
    "kernel= names a kernel, which cuts its own blocks": (
        "op use_flash_attention flash_chunk_size block_size chunk_size_kv use_fused_kernels"
    ),
    "torch.compile takes any module": "compile_mode compile_model",
    "what can overlap does": "overlap_communication communication_optimization enable_async_communication",
    "torch.utils.checkpoint recomputes any module": (
        "use_checkpointing use_gradient_checkpointing gradient_checkpointing"
    ),
    "results do not depend on where tokens are stored": "use_hilbert hilbert_curve_level",
    "torch.set_float32_matmul_precision and torch.autocast say it for every module": "use_tf32 mixed_precision",
    "DeepSpeed's own config says it": "use_deepspeed enable_deepspeed zero_stage cpu_offload use_8bit_optimizer",
    "timeout= bounds every wait, and errors name the rank and the step; LONGRING_DEBUG=1 keeps a record": (
        "enable_error_recovery max_retry_attempts retry_delay enable_watchdog watchdog_timeout enable_monitoring "
        "enable_profiling log_memory_usage log_communication_stats validate_gradients"
    ),
    "one config= has the words of both": "multihead_config attention_config",
}
SPARSE = ("sparsity_ratio", "pattern_type", "sparse_config", "enable_adaptive", "min_sparsity", "max_sparsity")


def _modern(name: str, words: dict[str, Any], renamed: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """(type, words) as they are spelled here; what is said elsewhere, or not offered, is refused."""
    _refuse_old_words(words, without_parameters=renamed is WITHOUT_PARAMETERS)
    found: dict[str, Any] = {} if name == "auto" else {"type": name}
    for word, value in words.items():
        new = renamed.get(word, word)
        if new in found or (new != word and new in words):
            raise ArgumentError(f"{new} was said twice, once as {word}={value!r}")
        if new != word:
            _deprecated(f"{word} is a word of dilated-attention-pytorch: write {new}={value!r}", frames=2)
        found[new] = value
    return found.pop("type", name), found


def _refuse_old_words(words: dict[str, Any], *, without_parameters: bool) -> None:
    for word, value in words.items():
        for reason, old in SAID_ELSEWHERE.items():
            if word in old.split():
                raise ArgumentError(f"{word}={value!r} is not said here: {reason}")
        if word in SPARSE:
            raise NotBuilt(f"{word}={value!r}: sparsity by estimates is not built; attention is exact here")
        if without_parameters and word in ("device", "dtype"):
            raise ArgumentError(f"{word}={value!r}: a module without parameters has none; it takes that of q, k and v")


def _refuse_by_position(given: tuple[Any, ...]) -> None:
    if given:
        raise ArgumentError(
            f"everything but the type goes by name, got {len(given)} more by position: of dilated-attention-pytorch's "
            "classes some took segment_lengths first and some dilation_rates, which swaps them unseen"
        )


def _deprecated(text: str, *, frames: int) -> None:
    """Said to the caller, who is so many frames above whoever asks for it."""
    warnings.warn(text, DeprecationWarning, stacklevel=2 + frames)
