"""What a user calls for exact attention, on one device or over the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Required, TypedDict, Unpack, overload

import torch
from torch import Tensor

from .autograd import ExactAttention, not_compiled
from .branches import (
    Branch,
    Part,
    branches_of,
    mixed,
    mixed_as_released,
    refuse_contradictions,
    released_branches,
    rows_here,
)
from .call import OF_PATTERNS, Call, Choice, Dealing, Options, is_replicated, prepare, refuse_unknown
from .errors import ArgumentError, NotBuilt
from .geometry.patterns import Dense, Dilated, Pattern, Table
from .geometry.plans import REPLICATED
from .geometry.task import Run, runs_over_sources
from .sharding import Sharding
from .tensors import spoken

CAUSAL = Dense(causal=True)


class CallOptions(TypedDict, total=False):
    """The options of `attention` that are the same for every pattern."""

    kv_sharding: Sharding | None
    group: Any
    layout: str | None
    query_offset: int | None
    kernel: str
    scale: float | None
    deterministic: bool
    timeout: float | None


class AttentionOptions(CallOptions, total=False):
    pattern: Pattern
    sharding: Dealing | None
    schedule: str


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = CAUSAL,
    sharding: Dealing | None = None,
    kv_sharding: Sharding | None = None,
    group: Any = None,
    layout: str | None = None,
    query_offset: int | None = None,
    schedule: str = "auto",
    kernel: str = "auto",
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    timeout: float | None = None,
    **not_built: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of q over k and v: out, or (out, lse) with `return_lse`. Differentiable, lse included.

    q is [batch, n_q, heads, d]; k and v are [batch, n_k, kv_heads, d], heads a multiple of kv_heads; out is
    like q, lse [batch, heads, n_q]. The default pattern is causal.

    sharding:       q, k and v are this rank's part of the whole, as `Sharding.shard` gives it; kv_sharding
                    where keys are dealt otherwise. Or group= and layout=, for equal parts on every rank.
                    Neither: this process alone. "replicated" (with kv_sharding): q is whole, and the same on every
                    rank, as in decoding; no key moves, and every rank gets the same bits of the whole out.
    query_offset:   query i stands at position i + query_offset; by default the last query meets the last key.
    schedule:       "ring", "bidirectional", "double_ring", "exchange", "gather", "ulysses", "hybrid", or "auto":
                    what an estimate of work and bytes says is fastest.
    kernel:         "auto", "sdpa", "reference", or one of a GPU: "cudnn", "flash", "efficient", "flash_attn_4",
                    "flash_attn_3", "flash_attn_2", "triton"; `longring.explain` says what auto takes, and why.
    deterministic:  bit-identical results from run to run.
    timeout:        seconds after which a silent peer is an error.

    >>> q, k, v = torch.randn(1, 300, 8, 16), torch.randn(1, 300, 2, 16), torch.randn(1, 300, 2, 16)
    >>> out, lse = attention(q, k, v, pattern=Dense(window=(31, 0)), return_lse=True)
    >>> list(out.shape), list(lse.shape)
    ([1, 300, 8, 16], [1, 8, 300])
    """
    refuse_unknown("attention", not_built)
    if not isinstance(return_lse, bool):
        raise ArgumentError(f"return_lse must be True or False, got {return_lse!r}")
    options = Options(
        sharding, kv_sharding, group, layout, query_offset, schedule, kernel, scale, deterministic, timeout
    )
    out, lse = _attend(q, k, v, pattern, options)
    return (out, lse) if return_lse else out


def _attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: Options) -> tuple[Tensor, Tensor]:
    """In the graph that somebody makes of this, where there is one, or at once."""
    if torch.compiler.is_compiling():
        from .compiled import can_be_spelled, traced  # here, since to register operations takes milliseconds

        if can_be_spelled(q, k, v, pattern, options):
            return traced(q, k, v, pattern, options)
    return not_compiled(_attend_at_once)(q, k, v, pattern, options)


def _attend_at_once(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: Options) -> tuple[Tensor, Tensor]:
    return ExactAttention.apply(q, k, v, prepare(q, k, v, pattern, options))  # type: ignore[return-value]


def tabled(numbers: Any) -> Any:
    """Documents or lengths for a pattern; in compiled code a tensor of them is looked at only when the code runs."""
    return Table(numbers) if torch.compiler.is_compiling() and isinstance(numbers, Tensor) else numbers


class RingOptions(CallOptions, total=False):
    causal: bool
    window: tuple[int | None, int | None] | None
    documents: Any
    lengths: Any
    sharding: Dealing | None
    schedule: Literal["ring"]


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[RingOptions]
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[RingOptions]
) -> tuple[Tensor, Tensor]: ...
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    documents: Any = None,
    lengths: Any = None,
    sharding: Dealing | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Dense attention by the ring schedule; further options as for `attention`."""
    refuse_unknown("ring_attention", options, Options._fields, OF_PATTERNS)
    schedule = options.pop("schedule", "ring")
    if not isinstance(schedule, str) or schedule != "ring":
        raise ArgumentError(f"ring_attention is the ring; for schedule={spoken(schedule)} use attention")
    if is_replicated(sharding):
        raise ArgumentError("ring_attention moves keys round, and with sharding='replicated' none move; use attention")
    pattern = Dense(causal=causal, window=window, documents=tabled(documents), lengths=tabled(lengths))
    return attention(q, k, v, pattern=pattern, sharding=sharding, schedule="ring", return_lse=return_lse, **options)


class DilatedOptions(CallOptions, total=False):
    segment_lengths: Required[Any]
    dilation_rates: Required[Any]
    causal: bool
    phase: str | None
    documents: Any
    mixing_gradient: bool | None
    compat: str | None
    sharding: Dealing | None
    schedule: str


@overload
def dilated_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[DilatedOptions]
) -> Tensor: ...
@overload
def dilated_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[DilatedOptions]
) -> tuple[Tensor, Tensor]: ...
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segment_lengths: Any,
    dilation_rates: Any,
    causal: bool = True,
    phase: str | None = None,
    documents: Any = None,
    mixing_gradient: bool | None = None,
    compat: str | None = None,
    sharding: Dealing | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """LongNet's dilated attention, its branches mixed by one softmax; further options as for `attention`.

    phase:            "mod", the paper's and the default, or "block", as in the authors' code.
    mixing_gradient:  False keeps gradients from flowing through the mixing weights: each branch is computed on its
                      own, and weighed as if by constants. lse, if returned, keeps its true derivative.
    compat:           "torchscale" for what LongNet's released code computes on one device, for models trained with
                      it: docs/torchscale.md.

    >>> q = k = v = torch.randn(1, 300, 4, 16)
    >>> dilated_attention(q, k, v, segment_lengths=[64, 256], dilation_rates=[1, 4]).shape
    torch.Size([1, 300, 4, 16])
    """
    if not isinstance(return_lse, bool):
        raise ArgumentError(f"return_lse must be True or False, got {return_lse!r}")
    refuse_unknown("dilated_attention", options, Options._fields, ("causal", "documents"))
    if not isinstance(mixing_gradient, bool | None):
        raise ArgumentError(f"mixing_gradient must be True or False, got {mixing_gradient!r}")
    refuse_contradictions(compat, phase, documents, mixing_gradient, return_lse)
    if phase is None:
        phase = "mod" if compat is None else "block"
    pattern = Dilated(segment_lengths, dilation_rates, causal=causal, phase=phase, documents=tabled(documents))
    options["sharding"] = sharding
    if compat is not None:
        return _as_released(q, k, v, pattern, options)
    if mixing_gradient is False:
        out, lse = mixed(_by_branches(q, k, v, branches_of(pattern), options))
        return (out, lse) if return_lse else out
    return attention(q, k, v, pattern=pattern, return_lse=return_lse, **options)


def _as_released(q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, options: dict[str, Any]) -> Tensor:
    if is_replicated(options["sharding"]):
        raise NotBuilt("compat='torchscale' with sharding='replicated': what it computes depends on the whole length")
    branches = released_branches(pattern, q)
    parts = _by_branches(q, k, v, branches, options)
    rows = rows_here(q, options["sharding"], options.get("group"), options.get("layout"))
    return mixed_as_released(branches, parts, *rows)


def _by_branches(q: Tensor, k: Tensor, v: Tensor, branches: Sequence[Branch], options: dict[str, Any]) -> list[Part]:
    return [Part(*attention(q, k, v, pattern=branch, return_lse=True, **options)) for branch in branches]


@dataclass(frozen=True)
class Explanation:
    """What a call would do on this rank: print it, or read its fields."""

    kernel: Choice
    schedule: Choice
    ranks: int
    stops: int
    tiles: int
    pairs: int

    def __str__(self) -> str:
        return (
            f"kernel   {self.kernel.name}: {self.kernel.reason}\n"
            f"schedule {self.schedule.name}: {self.schedule.reason}\n"
            f"work     {self.tiles} tiles at {self.stops} of {self.ranks} ranks, {self.pairs:,} pairs of query and key"
        )


def explain(q: Tensor, k: Tensor, v: Tensor, *, pattern: Pattern = CAUSAL, **options: Any) -> Explanation:
    """What `attention` with the same arguments would take, and why. Computes and sends nothing.

    >>> q = k = v = torch.randn(1, 300, 4, 16)
    >>> explain(q, k, v).pairs  # of query and key, in all heads
    180600
    """
    options.pop("return_lse", None)
    refuse_unknown("explain", options, Options._fields)
    taken = {name: value for name, value in options.items() if name in Options._fields}
    call = prepare(q, k, v, pattern, Options(**taken), dry=True)
    journey = call.journey
    runs = _runs(call)
    return Explanation(
        call.kernel,
        call.schedule,
        ranks=journey.transport.size,
        stops=sum(len(run.ranks) for run in runs if run.tiles),
        tiles=sum(len(run.ranks) * len(run.tiles) for run in runs),
        pairs=sum(len(run.ranks) * tile.pairs for run in runs for tile in run.tiles) * (q.shape[2] // k.shape[2]),
    )


def _runs(call: Call) -> tuple[Run, ...]:
    """What this rank computes, and with whose keys."""
    task, rank = call.journey.task, call.journey.transport.rank
    if call.schedule.name == REPLICATED:
        return (Run(range(rank, rank + 1), call.journey.plan.tiles),)
    return runs_over_sources(task, rank)
