"""Recipes: which operation computes which stacks, and which of them one launch takes together.

All of it are integers and names, found once for a kind of call and then followed as often as it is made: to ask the
geometry and every operation again would take the host longer than a GPU needs for a small tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import NamedTuple

import torch

from ..geometry.packs import Pack, Whole, pack
from ..geometry.portions import PACKED, PACKED_IN_ANY_CASE, has_most, portions, stretches, with_bands
from ..geometry.slabs import Slab
from ..geometry.stacks import Stack
from ..geometry.tiles import Tile
from .operations.contract import Operation, TakesMany, WritesInPlace
from .rates import BLOCK, Cost, Pass, Size, by_speed, cost_alone, cost_of_merging, cost_together, generation
from .shelf import Shelf


class Alone(NamedTuple):
    """A stack, and what computes it: None where it is beyond the limits of every operation."""

    stack: Stack
    operation: Operation | None
    is_home: bool  # it may be written where it belongs, and others are merged into it

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return (self.stack,)


class Together(NamedTuple):
    """Stacks of one launch."""

    pack: Pack
    operation: TakesMany

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return self.pack.stacks


class Leg(NamedTuple):
    """A stretch of rows, and what is computed for them."""

    rows: range
    steps: tuple[Alone | Together, ...]


class Asked(NamedTuple):
    """What a recipe depends on, besides the tiles."""

    which: Pass
    q: torch.Size
    k: torch.Size
    dtype: torch.dtype
    device: torch.device
    is_lazy: bool  # parts may wait for each other
    is_first: bool  # nothing was computed before
    can_be_done: bool  # and nothing will be afterwards
    has_dlse: bool = False
    has_sign: bool = False  # q is negated, and dq has to be


STACKS_KEPT = 1 << 14  # of all recipes: some dozens of megabytes


def recipe(operations: tuple[Operation, ...], tiles: tuple[Tile, ...], asked: Asked) -> tuple[Leg, ...]:
    """What computes these tiles; the latest are remembered."""
    return _recipes.find((operations, tiles, asked), lambda: _written(operations, tiles, asked))


def forget() -> None:
    """After which operations are asked again, as when others were installed."""
    _recipes.clear()
    willing_for.cache_clear()


def _stacks_in(legs: tuple[Leg, ...]) -> int:
    return 1 + sum(len(step.stacks) for leg in legs for step in leg.steps)


_recipes: Shelf[tuple[Leg, ...]] = Shelf(STACKS_KEPT, _stacks_in)


def _written(operations: tuple[Operation, ...], tiles: tuple[Tile, ...], asked: Asked) -> tuple[Leg, ...]:
    q, k = _Shape(asked.q), _Shape(asked.k)
    legs = []
    for slab in stretches(tiles, q, k, can_be_done=asked.can_be_done):
        found = tuple(portions(slab, q, k, is_first=asked.is_first, is_lazy=asked.is_lazy))
        alone = [_alone(operations, stack, slab, len(found) > 1, asked) for stack in found]
        legs.append(Leg(slab.rows, tuple(_gathered(operations, alone, slab, asked))))
    return tuple(legs)


class _Shape(NamedTuple):
    shape: torch.Size


# ---------------------------------------------------------------------------------------------- one by one


def _alone(operations: tuple[Operation, ...], stack: Stack, slab: Slab, has_others: bool, asked: Asked) -> Alone:
    is_home = asked.can_be_done and has_others and has_most(stack.queries, slab, _Shape(asked.q))
    if asked.which == "backward":
        is_home = is_home and not asked.has_sign and has_most(stack.keys, slab, _Shape(asked.k))
    operation = picked(operations, asked, size_of(stack, asked.q[3]), is_home)
    return Alone(stack, operation, is_home and stack.shape != "flipped" and isinstance(operation, WritesInPlace))


def size_of(stack: Stack, d: int) -> Size:
    place = stack.queries
    return Size(d, place.many * place.heads, len(place.rows), len(stack.keys.rows), stack.shape != "full")


def picked(operations: tuple[Operation, ...], asked: Asked, size: Size, is_home: bool = False) -> Operation | None:
    """The fastest of the operations that take such a stack."""
    able = willing_for(operations, asked.dtype, asked.device, size.d, asked.has_dlse)
    willing = {operation.name: operation for operation in able if operation.takes(size.rows, size.cols)}
    if len(willing) < 2 or asked.device.type != "cuda":
        return next(iter(willing.values()), None)
    sparing = tuple(name for name, one in willing.items() if is_home and isinstance(one, WritesInPlace))
    return willing[by_speed(tuple(willing), asked.which, size, _generation(asked.device), sparing)[0]]


@lru_cache(maxsize=256)
def willing_for(
    operations: tuple[Operation, ...], dtype: torch.dtype, device: torch.device, d: int, has_dlse: bool
) -> tuple[Operation, ...]:
    """Those that do not refuse such tensors; remembered, since they are slow to ask."""
    like = torch.empty(0, dtype=dtype, device=device)
    wide = [d + (one.columns_for_dlse(d) if has_dlse else 0) for one in operations]
    return tuple(one for one, columns in zip(operations, wide, strict=True) if one.refusal(like, columns) is None)


def _generation(device: torch.device) -> str:
    return generation(torch.cuda.get_device_capability(device))


# ------------------------------------------------------------------------------------------------- together

WORTH_IT = 0.9  # of the time otherwise: estimates are not better than that


def _gathered(
    operations: tuple[Operation, ...], alone: Sequence[Alone], slab: Slab, asked: Asked
) -> list[Alone | Together]:
    """What is worth a launch of its own, then what goes into one with others; or all of it, bands uncut."""
    able = willing_for(operations, asked.dtype, asked.device, asked.q[3], asked.has_dlse)
    operation = next((one for one in able if isinstance(one, TakesMany)), None)
    if operation is None or not asked.is_lazy or len(alone) < 2:
        return list(alone)
    uncut = with_bands(slab.tiles, asked.q[2] // asked.k[2])
    small = _worth_together(alone, operation, uncut, slab, asked)
    if small is None:
        return _in_packs(uncut, operation, slab, asked)
    some = [one.stack for i, one in enumerate(alone) if i in small]
    return [*(one for i, one in enumerate(alone) if i not in small), *_in_packs(some, operation, slab, asked)]


def _worth_together(
    alone: Sequence[Alone], operation: TakesMany, uncut: Sequence[Stack], slab: Slab, asked: Asked
) -> set[int] | None:
    """The stacks whose launches cost more than they compute: of all choices of the smallest, the quickest.

    None where nothing is as quick as everything in one launch, with bands as they are.
    """
    if all(one.operation is operation for one in alone):
        return None
    kind = _generation(asked.device) if asked.device.type == "cuda" else "hopper"
    by_itself = [_cost(one, asked, kind) for one in alone]
    with_others = [_cost_in_pack(one.stack, asked, kind) for one in alone]
    order = sorted(range(len(alone)), key=lambda i: by_itself[i].device)
    times = _times([by_itself[i] for i in order], [with_others[i] for i in order])
    everything = _times([Cost(0, 0)] * len(uncut), [_cost_in_pack(stack, asked, kind) for stack in uncut])[-1]
    times[-1] -= _saved([one.stack for one in alone], slab, asked, kind)
    everything -= _saved(uncut, slab, asked, kind)
    best = min((many for many in range(len(times)) if many != 1), key=lambda many: times[many])
    if everything < times[best] and everything < WORTH_IT * times[0]:
        return None
    return set(order[:best]) if times[best] < WORTH_IT * times[0] else set()


def _saved(stacks: Sequence[Stack], slab: Slab, asked: Asked, kind: str) -> float:
    """Seconds, if these are all, and no row is in two of them: then nothing is left to be merged."""
    whole = _whole(slab, asked)
    is_side_by_side = sum(stack.queries.lines for stack in stacks) <= whole
    return cost_of_merging(asked.which, whole * asked.q[3], kind) if is_side_by_side else 0.0


def _cost_in_pack(stack: Stack, asked: Asked, kind: str) -> Cost:
    """A band counts as the columns that a block of its rows sees."""
    size, (lo, hi) = size_of(stack, asked.q[3]), stack.limits
    if stack.shape == "band":
        seen = size.cols if lo is None or hi is None else min(size.cols, hi - lo + BLOCK)
        size = size._replace(cols=seen, causal=False)
    return cost_together(asked.which, size, kind)


def _cost(one: Alone, asked: Asked, kind: str) -> Cost:
    if one.operation is None:
        return Cost(0.0, 0.0)  # the reference's: nobody else takes it
    flips = (6 if asked.which == "forward" else 12) if one.stack.shape == "flipped" else 0
    return cost_alone(one.operation.name, asked.which, size_of(one.stack, asked.q[3]), kind, copies=flips)


def _times(by_itself: Sequence[Cost], with_others: Sequence[Cost]) -> list[float]:
    """By how many of them go together. Host and device work beside each other, and whoever is slower decides."""
    host, device = sum(one.host for one in by_itself), sum(one.device for one in by_itself)
    packed = longest = 0.0
    times = [max(host, device)]
    for one, other in zip(by_itself, with_others, strict=True):
        host, device = host - one.host, device - one.device
        packed, longest = packed + other.device, max(longest, other.longest)
        times.append(max(host + other.host, device + max(packed, longest)))
    return times


def _few_at_a_time(stacks: Sequence[Stack], slab: Slab, asked: Asked) -> list[list[Stack]]:
    """So many that their results, which all wait at once, are not much more than the whole; those of keys as well."""
    always = PACKED_IN_ANY_CASE // (asked.q[3] * asked.dtype.itemsize)
    most = max(PACKED * _whole(slab, asked), always)
    most_keys = max(PACKED * _keys(slab, asked).lines, always) if asked.which == "backward" else inf
    found: list[list[Stack]] = []
    lines = keys = inf
    for stack in stacks:
        lines, keys = lines + stack.queries.lines, keys + stack.keys.lines
        if lines > most or keys > most_keys:
            found.append([])
            lines, keys = stack.queries.lines, stack.keys.lines
        found[-1].append(stack)
    return found


def _in_packs(stacks: Sequence[Stack], operation: TakesMany, slab: Slab, asked: Asked) -> list[Alone | Together]:
    return [Together(_packed(few, slab, asked), operation) for few in _few_at_a_time(stacks, slab, asked)]


def _whole(slab: Slab, asked: Asked) -> int:
    """Lines of the slab's rows."""
    return asked.q[0] * len(slab.rows) * asked.q[2]


def _packed(stacks: Sequence[Stack], slab: Slab, asked: Asked) -> Pack:
    (batch, _, heads, _), kv_heads = asked.q, asked.k[2]
    return pack(stacks, Whole(batch, slab.rows, kv_heads, heads // kv_heads), _keys(slab, asked))


def _keys(slab: Slab, asked: Asked) -> Whole:
    is_everything = len(slab.rows) == asked.q[1]  # else the problem is square, and keys are cut as queries are
    return Whole(asked.k[0], range(asked.k[1]) if is_everything else slab.rows, asked.k[2], 1)
