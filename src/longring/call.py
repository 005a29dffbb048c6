"""One call of attention made ready: arguments checked, choices made, forward and backward in hand."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .errors import (
    ArgumentError,
    HeadsForTokens,
    LayoutError,
    NotBuilt,
    PatternError,
    RowsLeftOut,
    ScheduleRefusal,
    naming_rank,
)
from .geometry.layouts import Layout, replicated
from .geometry.patterns import Dilated, Pattern, Problem, with_known_tables
from .geometry.plans import REPLICATED, plan
from .geometry.task import Task
from .kernels.contract import Gradients, Kernel, Upstream
from .kernels.select import select_kernel
from .numerics.online_softmax import Partial, accumulator_dtype
from .plan.choose import choose_schedule
from .schedules.contract import Journey
from .schedules.select import check_schedule, schedule_of
from .sharding import Sharding
from .tensors import MANY_HEADS, TRANSPOSE, check_real, check_tensors, spoken
from .transport.alone import Alone
from .transport.contract import Transport, check_timeout
from .transport.select import transport_for, world_size

PATTERN_INSTEAD = "; causal, windows, documents and lengths (padding) are said by pattern=longring.Dense(...)"
NOT_BUILT = {  # feature: (its names elsewhere, what to say instead)
    "dropout": (("dropout", "dropout_p"), ""),
    "a bias": (("bias", "attn_bias", "alibi_slopes"), ""),
    "a mask given as a tensor": (("attn_mask", "attention_mask", "key_padding_mask", "mask"), PATTERN_INSTEAD),
    "softcap": (("softcap", "logit_cap"), ""),
    "attention sinks": (("sinks", "sink"), ""),
}
OFF_AT_ZERO = ("dropout", "softcap")
SPELLED = {"is_causal": "causal", "window_size": "window", "cu_seqlens": "documents", "softmax_scale": "scale"}
OF_PATTERNS = ("causal", "window", "documents", "lengths")

_log = logging.getLogger("longring")

Dealing = Sharding | Literal["replicated"]
"""How queries are dealt: or they are not, and every rank has all of them."""


class Options(NamedTuple):
    """What `attention` takes besides tensors and pattern; the defaults are the user's."""

    sharding: Dealing | None = None
    kv_sharding: Sharding | None = None
    group: Any = None
    layout: str | None = None
    query_offset: int | None = None
    schedule: str = "auto"
    kernel: str = "auto"
    scale: float | None = None
    deterministic: bool = False
    timeout: float | None = None


class Choice(NamedTuple):
    """What was taken, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Call:
    """One rank's part of a call."""

    journey: Journey
    schedule: Choice
    kernel: Choice

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Partial:
        return schedule_of(self.schedule.name).forward(self.journey, q, k, v)

    def backward(self, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        return schedule_of(self.schedule.name).backward(self.journey, upstream, q, k, v)


def prepare(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: Options, *, dry: bool = False) -> Call:
    """Refuse what cannot be honoured, choose what was left to `auto`. A dry call will not be made by anybody."""
    transport = _transport(options)
    try:
        with naming_rank(transport.rank, transport.size):
            return _prepare(q, k, v, with_known_tables(pattern), options, transport)
    except ArgumentError as error:
        if not dry:
            transport.decline(error)
        raise


def _prepare(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: Options, transport: Transport) -> Call:
    check_real(q, k, v)
    check_tensors(q, k, v)
    queries, keys = _layouts(q, k, options)
    offset = check_offset(options.query_offset, queries.length, keys.length)
    problem = Problem(q.shape[0], queries.length, keys.length, k.shape[2], offset)
    check_places(q, k, problem)
    check_pattern(pattern, problem)
    task = Task(pattern, problem, queries, keys, q.shape[2])
    kernel, kernel_choice = choose_kernel(options.kernel, q, k, options.deterministic)
    if is_replicated(options.sharding):
        schedule = _schedule_for_replicated(options.schedule)
    else:
        schedule = pick_schedule(options.schedule, task, q, transport.node_ranks)
    journey = make_journey(
        task,
        transport,
        kernel,
        schedule.name,
        check_scale(options.scale, q),
        check_timeout(options.timeout),
        deterministic=options.deterministic,
    )
    return Call(journey, schedule, kernel_choice)


def make_journey(
    task: Task,
    transport: Transport,
    kernel: Kernel,
    schedule: str,
    scale: float,
    timeout: float | None,
    *,
    deterministic: bool = False,
) -> Journey:
    made = plan(schedule, task, transport.rank, transport.node_ranks)
    return Journey(task, made, transport, kernel, schedule, scale, timeout, deterministic)


# ---------------------------------------------------------------------------------------------------- choices


def choose_kernel(name: str, q: Tensor, k: Tensor, deterministic: bool) -> tuple[Kernel, Choice]:
    if not isinstance(deterministic, bool):
        raise ArgumentError(f"deterministic must be True or False, got {deterministic!r}")
    kernel, reason = select_kernel(name, q, k, deterministic=deterministic)
    return kernel, Choice(kernel.name, reason)


def pick_schedule(name: str, task: Task, q: Tensor, node_ranks: int) -> Choice:
    check_schedule(name)
    if name != "auto":
        return Choice(name, "asked for by name")
    size = {"head_dim": q.shape[3], "itemsize": q.element_size()}
    chosen = Choice(*_chosen_schedule(task, **size, node_ranks=node_ranks, machine=q.device.type))
    _log.debug("schedule %s: %s", *chosen)
    return chosen


def _schedule_for_replicated(name: str) -> Choice:
    check_schedule(name)
    if name != "auto":
        raise ScheduleRefusal(
            f"schedule {name!r} brings keys to queries that are dealt, but sharding='replicated' says that every rank "
            "has all queries, and no key moves; leave schedule='auto'"
        )
    return Choice(REPLICATED, "every rank has all queries: each asks its own keys, and answers are merged")


_chosen_schedule = lru_cache(maxsize=256)(choose_schedule)


# --------------------------------------------------------------------------------------------- who holds what


def is_replicated(sharding: object) -> bool:
    return isinstance(sharding, str) and sharding == REPLICATED


def _transport(options: Options) -> Transport:
    if is_replicated(options.sharding):
        if not isinstance(options.kv_sharding, Sharding):
            raise ArgumentError(
                "sharding='replicated' says that every rank has all queries; pass kv_sharding, a longring.Sharding, to "
                f"say who holds which keys; got {options.kv_sharding!r}"
            )
        return options.kv_sharding.transport
    _refuse_forgotten_group(options)
    if options.sharding is not None:
        if not isinstance(options.sharding, Sharding):
            raise ArgumentError(
                f"sharding must be a longring.Sharding, got {options.sharding!r}; or 'replicated', for queries that "
                "every rank has whole"
            )
        return options.sharding.transport
    if options.kv_sharding is not None:
        raise ArgumentError("kv_sharding was given without sharding, which says how the queries are dealt")
    if options.group is not None:
        return transport_for(options.group)
    return Alone()


def _refuse_forgotten_group(options: Options) -> None:
    """A ring that was asked for by name must not become attention of one rank, for want of a word."""
    check_schedule(options.schedule)
    given = options.group if options.sharding is None else getattr(options.sharding, "group", options.sharding)
    if given is not None or options.schedule == "auto" or (size := world_size()) == 1:
        return
    asked = f"schedule {options.schedule!r} was asked for in a world of {size} ranks"
    alone = "schedule='auto' for attention on this rank alone"
    if options.sharding is None:
        raise ScheduleRefusal(f"{asked} with neither sharding nor group; pass one of them, or {alone}")
    raise ScheduleRefusal(f"{asked} with a sharding that has no group; make it with group=..., or pass {alone}")


def _layouts(q: Tensor, k: Tensor, options: Options) -> tuple[Layout, Layout]:
    if options.sharding is None:
        queries, keys = _implied_shardings(q, k, options)
        return queries.dealt, keys.dealt
    if options.group is not None or options.layout is not None:
        raise ArgumentError("sharding already says group and layout; pass it, or them, not both")
    if isinstance(options.sharding, str):
        return _replicated(q, k, options)
    queries, keys = _shardings(q, k, options.sharding, options)
    return queries.dealt, keys.dealt


def _replicated(q: Tensor, k: Tensor, options: Options) -> tuple[Layout, Layout]:
    keys = options.kv_sharding
    assert keys is not None  # or there would be no transport
    if q.shape[1] == 0:
        raise ArgumentError("q has no tokens; queries that every rank has are at least one")
    if k.shape[1] != keys.local_length:
        raise LayoutError(
            f"k holds {k.shape[1]} tokens, but kv_sharding ({keys.layout}) deals {keys.local_length} of {keys.length} "
            "to this rank; where a cache has grown, say so with Sharding.extend"
        )
    return replicated(q.shape[1], keys.ranks), keys.dealt


def _shardings(q: Tensor, k: Tensor, queries: Sharding, options: Options) -> tuple[Sharding, Sharding]:
    keys = queries if options.kv_sharding is None else options.kv_sharding
    if not isinstance(keys, Sharding):
        raise ArgumentError(f"kv_sharding must be a longring.Sharding, got {keys!r}")
    if keys.ranks != queries.ranks or keys.rank != queries.rank:
        raise LayoutError(f"kv_sharding is over {keys.ranks} ranks and sharding over {queries.ranks}; use one group")
    if keys.transport.members != queries.transport.members:
        mine, theirs = queries.transport.members, keys.transport.members
        raise LayoutError(f"kv_sharding is over ranks {list(theirs)} of the world and sharding over {list(mine)}")
    for name, x, sharding in (("q", q, queries), ("k", k, keys)):
        if x.shape[1] != sharding.local_length:
            raise LayoutError(
                f"{name} holds {x.shape[1]} tokens, but {sharding.layout} deals {sharding.local_length} of "
                f"{sharding.length} to this rank; shard with Sharding.shard"
                + ("" if options.kv_sharding is not None or name == "q" else ", and pass kv_sharding if keys differ")
                + (TRANSPOSE if x.shape[2] == sharding.local_length else "")
            )
    return queries, keys


def _implied_shardings(q: Tensor, k: Tensor, options: Options) -> tuple[Sharding, Sharding]:
    """The whole here, or equal parts on every rank of the group."""
    if options.group is None and options.layout is not None:
        raise ArgumentError(f"layout={options.layout!r} needs group=..., whose ranks hold the parts")
    if options.group is not None and options.layout is None:
        raise ArgumentError("group needs layout=..., which says how the tokens were dealt to its ranks")
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] == 0:
            raise ArgumentError(f"{name} has no tokens; a sequence has at least one")
    if options.group is None:
        return _alone(q.shape[1]), _alone(k.shape[1])
    ranks = transport_for(options.group).size
    made = (Sharding(x.shape[1] * ranks, options.group, options.layout or "") for x in (q, k))
    queries, keys = made
    return queries, keys


@lru_cache(maxsize=256)
def _alone(length: int) -> Sharding:
    return Sharding(length, layout="contiguous")


def check_offset(offset: int | None, n_q: int, n_k: int) -> int:
    """By default the last query meets the last key."""
    if offset is None:
        return n_k - n_q
    if not isinstance(offset, Integral) or isinstance(offset, bool):
        raise ArgumentError(f"query_offset must be a whole number, got {spoken(offset)}")
    return int(offset)


# ------------------------------------------------------------------------------------------ what users got wrong


def check_places(q: Tensor, k: Tensor, problem: Problem) -> None:
    """Warn of tensors that look like [batch, heads, tokens, d]: computed as they are, they mean something else.

    Queries and keys both have more heads than the whole sequence has tokens, and there are more kv heads than most
    models have. Neither decoding (one query, many keys) nor a short prompt looks like that, nor a rank's few tokens.
    """
    if k.shape[2] >= MANY_HEADS and k.shape[2] > problem.n_k and q.shape[2] > problem.n_q and not _suspected:
        _suspected.append(True)
        warnings.warn(
            f"q is {list(q.shape)} and k {list(k.shape)}: {problem.n_k} keys with {k.shape[2]} heads each look like "
            f"heads and tokens in each other's place{TRANSPOSE}",
            HeadsForTokens,
            stacklevel=_level_of_the_caller(),
        )


_suspected: list[bool] = []  # what one process is warned of once


def check_pattern(pattern: Pattern, problem: Problem) -> None:
    if not isinstance(pattern, Pattern):
        raise PatternError(f"pattern must be longring.Dense(...) or longring.Dilated(...), got {spoken(pattern)}")
    pattern.check(problem)
    if isinstance(pattern, Dilated) and pattern.leaves_rows_out:
        _warn_of_rows_left_out(pattern.mixed_rates)


@lru_cache(maxsize=256)  # once for each list of rates
def _warn_of_rows_left_out(rates: tuple[int, ...]) -> None:
    warnings.warn(
        f"every dilation rate of {list(rates)} is above 1, so each head has rows that no branch keeps: they see "
        "nothing, and their output is 0; a branch of rate 1 reaches every row",
        RowsLeftOut,
        stacklevel=_level_of_the_caller(),
    )


def _level_of_the_caller() -> int:
    """How many frames up longring was called from outside."""
    level, frame = 1, sys._getframe(1)
    # calls go through torch where a module is called, and where the compiler has been loaded
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("longring.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level


def check_scale(scale: float | None, q: Tensor) -> float:
    if scale is None:
        return q.shape[3] ** -0.5
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not is_number or not abs(scale) <= torch.finfo(accumulator_dtype(q.dtype)).max:
        raise ArgumentError(f"scale must be a finite number, got {spoken(scale)}")
    return float(scale)


def refuse_unknown(
    function: str, given: Mapping[str, Any], known: Container[str] = (), takes: Container[str] = ()
) -> None:
    """Refuse words that are not `known`, by name, unless the value says to do without (dropout_p=0.0, attn_mask=None).

    `takes` are the words of patterns that the function has itself, for the hint. That of a module begins in a capital.
    """
    for name, value in given.items():
        if name not in known:
            _refuse_word(function, name, value, takes)


def _refuse_word(function: str, name: str, value: Any, takes: Container[str]) -> None:
    for feature, (names, instead) in NOT_BUILT.items():
        if name not in names:
            continue
        if value is None or (feature in OFF_AT_ZERO and isinstance(value, (int, float)) and value == 0):
            return
        raise NotBuilt(f"{name}={spoken(value)}: {feature} is not built yet, and is never silently ignored{instead}")
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{_hint(function, name, takes)}")


def _hint(function: str, name: str, takes: Container[str]) -> str:
    """Where to say what is known by another name, or is not for this function."""
    here = SPELLED.get(name, name)
    if name == "enable_gqa":
        return "; query heads may be any multiple of kv heads without it"
    if here in takes:
        return f"; it is {here}= here"
    if function[0].isupper() and here in ("pattern", *OF_PATTERNS, *Options._fields):
        return f"; {here}= is said when the module is made"
    if here == "pattern":
        return "; pattern= is for longring.attention"
    if here in OF_PATTERNS:
        return f"; {here}= is for pattern=longring.Dense(...), for longring.ring_attention and for modules"
    return "" if here == name else f"; it is {here}= here"
