"""Attention as a module without parameters: a pattern and the options of a call, kept for every call."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from ..branches import refuse_contradictions
from ..call import Dealing, check_scale, is_replicated, refuse_unknown
from ..errors import ArgumentError, PatternError
from ..functional import CAUSAL, attention, dilated_attention, tabled
from ..geometry.patterns import Dense, Dilated, PaddingApart, Pattern
from ..kernels.select import check_kernel
from ..schedules.select import check_schedule
from ..sharding import Sharding
from ..tensors import spoken
from ..transport.contract import check_timeout
from ..transport.select import transport_for


class Where(TypedDict, total=False):
    """Which tokens these are: what differs from call to call, as `longring.attention` takes it."""

    sharding: Dealing | None
    kv_sharding: Sharding | None
    group: Any
    layout: str | None
    query_offset: int | None
    return_lse: bool


OF_A_CALL = tuple(Where.__annotations__)


class Options(TypedDict, total=False):
    """How a module computes, call by call the same; as `longring.attention` takes it."""

    schedule: str
    kernel: str
    scale: float | None
    deterministic: bool
    timeout: float | None


class Attention(nn.Module):
    """`longring.attention` with this pattern and these options; no parameters.

    Called with q [batch, n, heads, d] and k, v [batch, n_k, kv_heads, d] as `longring.attention` is; besides:

    documents:  boundaries of packed documents, where they change from call to call.
    lengths:    how many tokens of each batch row are not padding on the right. No token sees padding. In dilated
                attention padding is a document of its own, so that rows of padding see each other: what comes out
                of them means nothing, as everywhere.
    causal:     for this call alone, instead of what the pattern says.
    """

    def __init__(
        self,
        pattern: Pattern = CAUSAL,
        *,
        schedule: str = "auto",
        kernel: str = "auto",
        scale: float | None = None,
        deterministic: bool = False,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(pattern, Pattern):
            raise PatternError(f"pattern must be longring.Dense(...) or longring.Dilated(...), got {spoken(pattern)}")
        check_schedule(schedule)
        check_kernel(kernel)
        if scale is not None:
            check_scale(scale, torch.empty(0, dtype=torch.float64))
        if not isinstance(deterministic, bool):
            raise ArgumentError(f"deterministic must be True or False, got {deterministic!r}")
        self.pattern = pattern
        self.schedule = schedule
        self.kernel = kernel
        self.scale = scale
        self.deterministic = deterministic
        self.timeout = check_timeout(timeout)

    @property
    def options(self) -> Options:
        return {name: getattr(self, name) for name in Options.__annotations__}  # type: ignore[return-value]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        documents: Any = None,
        lengths: Any = None,
        causal: bool | None = None,
        **where: Unpack[Where],
    ) -> Any:
        refuse_unknown(type(self).__name__, where, OF_A_CALL, ("causal", "documents", "lengths"))
        pattern = self.pattern if causal is None else replace(self.pattern, causal=causal)
        if documents is not None:
            pattern = _with_documents(pattern, tabled(documents))
        if lengths is not None:
            pattern = _with_lengths(pattern, tabled(lengths), q, k, where)
        return self._attend(q, k, v, pattern, where)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, where: Where) -> Any:
        return attention(q, k, v, pattern=pattern, **where, **self._options_for(where))

    def _options_for(self, where: Where) -> Options:
        """A schedule says how keys come to queries that are dealt; to those that every rank has, none come."""
        return {**self.options, "schedule": "auto"} if is_replicated(where.get("sharding")) else self.options

    def extra_repr(self) -> str:
        usual = {"schedule": "auto", "kernel": "auto", "scale": None, "deterministic": False, "timeout": None}
        said = {name: value for name, value in self.options.items() if value != usual[name]}
        return ", ".join(f"{name}={value!r}" for name, value in {**self._words(), **said}.items())

    def _words(self) -> dict[str, Any]:
        """The pattern's words that say something, `causal` always."""
        said = {field.name: getattr(self.pattern, field.name) for field in fields(self.pattern)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in said.items()
            if value is not None
        }


class RingAttention(Attention):
    """`longring.ring_attention` as a module: dense attention by the ring schedule.

    Without a sharding it is plain attention in one process, and an error in a world of several ranks: a forgotten
    sharding never turns into attention of each rank with itself.
    """

    def __init__(
        self,
        *,
        causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        kernel: str = "auto",
        scale: float | None = None,
        deterministic: bool = False,
        timeout: float | None = None,
    ) -> None:
        super().__init__(
            Dense(causal=causal, window=window),
            schedule="ring",
            kernel=kernel,
            scale=scale,
            deterministic=deterministic,
            timeout=timeout,
        )


class DilatedAttention(Attention):
    """`longring.dilated_attention` as a module: LongNet's branches, mixed by one softmax.

    phase, mixing_gradient and compat are those of the function.
    """

    pattern: Dilated

    def __init__(
        self,
        *,
        segment_lengths: Any,
        dilation_rates: Any,
        causal: bool = True,
        phase: str | None = None,
        mixing_gradient: bool | None = None,
        compat: str | None = None,
        schedule: str = "auto",
        kernel: str = "auto",
        scale: float | None = None,
        deterministic: bool = False,
        timeout: float | None = None,
    ) -> None:
        refuse_contradictions(compat, phase, None, mixing_gradient, False)
        if not isinstance(mixing_gradient, bool | None):
            raise ArgumentError(f"mixing_gradient must be True or False, got {mixing_gradient!r}")
        if phase is None:
            phase = "mod" if compat is None else "block"
        super().__init__(
            Dilated(segment_lengths, dilation_rates, causal=causal, phase=phase),
            schedule=schedule,
            kernel=kernel,
            scale=scale,
            deterministic=deterministic,
            timeout=timeout,
        )
        self.mixing_gradient = mixing_gradient
        self.compat = compat

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, where: Where) -> Any:
        words = {field.name: getattr(pattern, field.name) for field in fields(pattern)}
        mixing = {"mixing_gradient": self.mixing_gradient, "compat": self.compat}
        return dilated_attention(q, k, v, **words, **mixing, **where, **self._options_for(where))  # type: ignore[call-overload]

    def _words(self) -> dict[str, Any]:
        mixing = {"mixing_gradient": self.mixing_gradient, "compat": self.compat}
        return super()._words() | {name: value for name, value in mixing.items() if value is not None}


def _with_documents(pattern: Pattern, documents: Any) -> Pattern:
    if pattern.documents is not None:
        raise PatternError(f"documents were given with the call, and to the module already: {pattern.documents}")
    return replace(pattern, documents=documents)


def _with_lengths(pattern: Pattern, lengths: Any, q: Tensor, k: Tensor, where: Where) -> Pattern:
    if isinstance(pattern, Dense):
        if pattern.lengths is not None:
            raise PatternError(f"lengths were given with the call, and to the module already: {pattern.lengths}")
        return replace(pattern, lengths=lengths)
    if where.get("kv_sharding") is not None or q.shape[1] != k.shape[1] or where.get("query_offset") is not None:
        raise PatternError("lengths in dilated attention are for queries and keys that are the same tokens")
    return replace(pattern, documents=PaddingApart(pattern.documents, lengths, k.shape[0], _tokens(k, where)))


def _tokens(x: Tensor, where: Where) -> int:
    """How many tokens the whole sequence has of which this rank's part is here."""
    sharding, group = where.get("sharding"), where.get("group")
    if isinstance(sharding, Sharding):
        return sharding.length
    return x.shape[1] * (1 if group is None else transport_for(group).size)
