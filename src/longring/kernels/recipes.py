"""Recipes: which operation computes which stacks, and which of them one launch takes together.

All of it are integers and names, found once for a kind of call and then followed as often as it is made: to ask the
geometry and every operation again would take the host longer than a GPU needs for a small tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import inf
from typing import NamedTuple

import torch

from ..geometry.packs import Pack, Whole
from ..geometry.portions import (
    MOST_AT_ONCE,
    PACKED,
    PACKED_IN_ANY_CASE,
    PADDED_IN_ANY_CASE,
    has_most,
    portions,
    stretches,
    with_bands,
)
from ..geometry.slabs import Slab
from ..geometry.stacks import Stack
from ..geometry.tiles import Tile, pairs_in_band
from .built_plans import Built, BuiltPlans
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
    may_build: bool = True  # plans of operations that build one for each size (cuDNN)


STACKS_KEPT = 1 << 14  # of all recipes: some dozens of megabytes


def recipe(operations: tuple[Operation, ...], tiles: tuple[Tile, ...], asked: Asked) -> tuple[Leg, ...]:
    """What computes these tiles; the latest are remembered."""
    return _recipes.find((operations, tiles, asked), lambda: _Remembered(operations, tiles, asked)).legs()


def forget() -> None:
    """After which operations are asked again, as when others were installed."""
    _recipes.clear()
    _plans.clear()
    willing_for.cache_clear()


class _Remembered:
    """The recipe of a kind of call: at first without building plans, later with them, once they are worth it.

    cuDNN builds a plan for every size it has not seen, which takes as long as hundreds of small calls. So a kind of
    call that is new goes without, and one that comes again gets them as `BuiltPlans` allows. Lengths or documents that
    are never the same twice build none.
    """

    def __init__(self, operations: tuple[Operation, ...], tiles: tuple[Tile, ...], asked: Asked) -> None:
        self._kind = operations, tiles, asked
        can_wait = len(operations) > 1 and any(operation.builds_plans for operation in operations)
        self._is_settled = not can_wait or asked.device.type == "cpu"
        self._legs = settled_recipe(operations, tiles, asked._replace(may_build=self._is_settled))
        self._quicker: tuple[Leg, ...] | None = None
        self._saves = 0.0  # seconds a call, as estimated
        self._calls = 0
        self._owed = 0.0  # seconds that were spent in advance

    def legs(self) -> tuple[Leg, ...]:
        if self._is_settled or _is_capturing(self._kind[2].device):
            return self._legs
        self._calls += 1
        if self._owed:
            self._pay_back()
        elif self._calls > 1:
            self._weigh()
        return self._legs

    def _weigh(self) -> None:
        if self._quicker is None:
            self._quicker = settled_recipe(*self._kind)
            asked = self._kind[2]
            self._saves = _seconds(self._legs, asked) - _seconds(self._quicker, asked)
        if self._saves <= 0:
            self._is_settled = True
            return
        price = _plans.bought(_built_by(self._quicker, self._kind[2]), self._saves * self._calls)
        if price is not None:
            self._legs, self._owed, self._is_settled = self._quicker, price, price == 0

    def _pay_back(self) -> None:
        seconds = min(self._owed, self._saves)
        self._owed -= seconds
        self._is_settled = self._owed <= 0
        _plans.paid_back(seconds)

    @property
    def weight(self) -> int:
        return 1 + sum(len(step.stacks) for leg in self._legs for step in leg.steps)


def _is_capturing(device: torch.device) -> bool:
    """Into a CUDA graph, where no plan can be built."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _built_by(legs: Sequence[Leg], asked: Asked) -> set[Built]:
    """The plans that these legs need."""
    steps = [step for leg in legs for step in leg.steps if isinstance(step, Alone)]
    found = (step.stack for step in steps if step.operation is not None and step.operation.builds_plans)
    return {_plan_of(asked, size_of(stack, asked.q[3])) for stack in found}


def _plan_of(asked: Asked, size: Size) -> Built:
    return asked.which, asked.dtype, asked.has_dlse, asked.q[2] // asked.k[2], size


def _seconds(legs: Sequence[Leg], asked: Asked) -> float:
    """What all launches of the legs take, as estimated."""
    host = device = 0.0
    for step in (step for leg in legs for step in leg.steps):
        if isinstance(step, Together):
            device += _time_of([step.stacks], step.operation, asked)
        else:
            cost = _cost(step, asked)
            host, device = host + cost.host, device + cost.device
    return max(host, device)


_plans = BuiltPlans()
_recipes: Shelf[_Remembered] = Shelf(STACKS_KEPT, lambda remembered: remembered.weight)


def settled_recipe(operations: tuple[Operation, ...], tiles: tuple[Tile, ...], asked: Asked) -> tuple[Leg, ...]:
    """What computes these tiles in a call that comes often enough for plans to be worth building."""
    q, k = _Shape(asked.q), _Shape(asked.k)
    slabs = stretches(tiles, q, k, can_be_done=asked.can_be_done)
    if len(slabs) > 1 and _has_rows_once(tiles, asked):  # so that little waits; at once, where nothing has to
        everything = Slab(range(asked.q[1]), tiles)
        steps = _steps(operations, everything, asked)
        if _is_the_result(steps, everything, asked) and not _needs_room(steps, asked):
            return (Leg(everything.rows, steps),)
    return tuple(Leg(slab.rows, _steps(operations, slab, asked)) for slab in slabs)


def _has_rows_once(tiles: Sequence[Tile], asked: Asked) -> bool:
    """Whether all have together as many rows as there are, as documents have and LongNet's branches have not."""
    each = (len(tile.rows) * tile.repeat.count * len(tile.kv_heads) * len(tile.batch) for tile in tiles)
    return sum(each) == asked.q[0] * asked.q[1] * asked.k[2]


def _steps(operations: tuple[Operation, ...], slab: Slab, asked: Asked) -> tuple[Alone | Together, ...]:
    cut = portions(slab, _Shape(asked.q), _Shape(asked.k), is_first=asked.is_first, is_lazy=asked.is_lazy)
    found = tuple(part for stack in cut for part in _with_room(stack, slab, asked))
    alone = [_alone(operations, stack, slab, len(found) > 1, asked) for stack in found]
    steps = tuple(_gathered(operations, alone, slab, asked))
    assert sum(stack.pairs for step in steps for stack in step.stacks) == sum(tile.pairs for tile in slab.tiles)
    return steps


def _needs_room(steps: Sequence[Alone | Together], asked: Asked) -> bool:
    """Whether an operation holds float32 sums of its own meanwhile, as flash-attn-4's backward does."""
    return asked.which == "backward" and not all(isinstance(s, Together) and s.operation.takes_anything for s in steps)


def _is_the_result(steps: Sequence[Alone | Together], slab: Slab, asked: Asked) -> bool:
    """Whether one launch leaves everything where it is to be."""
    if len(steps) != 1 or not isinstance(steps[0], Together):
        return False
    trays = [(steps[0].pack.queries.trays, _queries(slab, asked))]
    trays += [(steps[0].pack.keys.trays, _keys(slab, asked))] * (asked.which == "backward")
    return all(len(some) == 1 and some[0].is_full and some[0].place == whole.place for some, whole in trays)


def _with_room(stack: Stack, slab: Slab, asked: Asked) -> Iterator[Stack]:
    """As it is; of many that are shorter than a block, which a backward holds in whole ones, so many at a time."""
    is_short = asked.is_lazy and len(stack.queries.rows) < BLOCK
    return stack.in_batches(_most_sequences(slab, asked)) if is_short else iter((stack,))


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
    if not asked.may_build and _plan_of(asked, size) not in _plans:
        willing = {name: one for name, one in willing.items() if not one.builds_plans} or willing
    if len(willing) < 2 or asked.device.type == "cpu":
        return next(iter(willing.values()), None)
    sparing = tuple(name for name, one in willing.items() if is_home and isinstance(one, WritesInPlace))
    return willing[by_speed(tuple(willing), asked.which, size, _kind(asked), sparing)[0]]


@lru_cache(maxsize=256)
def willing_for(
    operations: tuple[Operation, ...], dtype: torch.dtype, device: torch.device, d: int, has_dlse: bool
) -> tuple[Operation, ...]:
    """Those that do not refuse such tensors; remembered, since they are slow to ask."""
    like = torch.empty(0, dtype=dtype, device=device)
    wide = [d + (one.columns_for_dlse(d) if has_dlse else 0) for one in operations]
    return tuple(one for one, columns in zip(operations, wide, strict=True) if one.refusal(like, columns) is None)


@lru_cache(maxsize=32)
def _generation(device: torch.device) -> str:
    return generation(torch.cuda.get_device_capability(device))


# ------------------------------------------------------------------------------------------------- together

WORTH_IT = 0.9  # of the time otherwise: estimates of another operation are not better than that
AS_GOOD = 0.95  # where fewer launches take it, without copies or merging: less memory is held


class _Way(NamedTuple):
    """How the stacks of a slab may be computed, and the seconds that takes at least, as estimated.

    Its steps are found only if no other way is known to be quicker: lists of a thousand documents are long.
    """

    at_least: float
    found: Callable[[], _Steps]


class _Steps(NamedTuple):
    seconds: float  # as estimated; inf where an operation does not take what the way would give it
    steps: Sequence[Alone | Together]


def _gathered(
    operations: tuple[Operation, ...], alone: Sequence[Alone], slab: Slab, asked: Asked
) -> list[Alone | Together]:
    """The quickest way: every stack by itself, the smallest of them in one launch, or everything, bands uncut."""
    able = willing_for(operations, asked.dtype, asked.device, asked.q[3], asked.has_dlse)
    together = _who_take_many(able, asked.has_dlse)
    if not together or not asked.is_lazy or _is_simple(alone):
        return list(alone)
    uncut = with_bands(slab.tiles, asked.q[2] // asked.k[2])
    for operation in together:
        if operation.takes_anything and all(one.operation is operation for one in alone):
            return list(_in_packs(uncut, operation, slab, asked))
    costs = [_cost(one, asked) for one in alone]
    seconds = max(sum(one.host for one in costs), sum(one.device for one in costs))
    seconds += _merging(False, slab, asked)
    ways = [_Way(seconds, lambda: _Steps(seconds, alone))]
    for operation in together:
        of = _of_anything if operation.takes_anything else _of_sequences
        ways += of(operation, alone, costs, uncut, slab, asked)
    best = _Steps(inf, ())
    for way in sorted(ways, key=lambda way: way.at_least):
        if best.seconds <= way.at_least:
            break
        best = min(best, way.found(), key=lambda found: found.seconds)
    return list(best.steps)


def _who_take_many(able: Sequence[Operation], has_dlse: bool) -> list[TakesMany]:
    """Of those that want sequences the first: they want the same ones, and the faster generation stands before."""
    found = [one for one in able if isinstance(one, TakesMany) and one.takes_many(has_dlse)]
    of_sequences = [one for one in found if not one.takes_anything]
    return [*of_sequences[:1], *(one for one in found if one.takes_anything)]


def _is_simple(alone: Sequence[Alone]) -> bool:
    """Whether there is nothing to choose: no stack, or one that is read and written as it lies."""
    return not alone or (len(alone) == 1 and alone[0].stack.queries.repeats == 1 and not _is_copied(alone))


def _is_copied(alone: Sequence[Alone]) -> bool:
    return any(one.stack.shape == "flipped" for one in alone)


def _of_sequences(
    operation: TakesMany, alone: Sequence[Alone], _: object, uncut: Sequence[Stack], slab: Slab, asked: Asked
) -> Iterator[_Way]:
    """Everything in as few launches as there can be, if these are fewer, or spare copies or merging."""
    few = _few_at_a_time(uncut, operation, slab, asked)
    if len(few) >= len(alone) and not _is_all(uncut, slab, asked) and not _is_copied(alone):
        return

    def found() -> _Steps:
        packs = _in_packs(uncut, operation, slab, asked)
        is_done = _is_the_result(packs, slab, asked)
        if not packs or not (len(packs) < len(alone) or is_done or _is_copied(alone)):
            return _Steps(inf, ())
        time = _time_of([step.stacks for step in packs], operation, asked)
        return _Steps((time + _merging(is_done, slab, asked)) * AS_GOOD, packs)

    merging = _merging(_is_all(uncut, slab, asked), slab, asked)
    yield _Way((_time_of(few, operation, asked) + merging) * AS_GOOD, found)


def _of_anything(
    operation: TakesMany,
    alone: Sequence[Alone],
    costs: Sequence[Cost],
    uncut: Sequence[Stack],
    slab: Slab,
    asked: Asked,
) -> Iterator[_Way]:
    """Everything in one launch; or of all choices of the smallest, whose launches cost more than they compute, one."""
    if len(alone) == 1 and not _is_copied(alone):
        return
    time = _time_of(_few_at_a_time(uncut, operation, slab, asked), operation, asked)
    merging = _merging(_is_all(uncut, slab, asked), slab, asked)
    yield _in_one_launch((time + merging) / WORTH_IT, (), uncut, operation, slab, asked)
    if len(alone) == 1:
        return
    with_others = [_cost_in_pack(operation, one.stack, asked) for one in alone]
    order = sorted(range(len(alone)), key=lambda i: costs[i].device)
    times = _times([costs[i] for i in order], [with_others[i] for i in order])
    best = min(range(2, len(times)), key=lambda many: times[many])
    few = set(order[:best])
    some = [one.stack for i, one in enumerate(alone) if i in few]
    others = [one for i, one in enumerate(alone) if i not in few]
    merging = _merging(not others and _is_all(some, slab, asked), slab, asked)
    yield _in_one_launch((times[best] + merging) / WORTH_IT, others, some, operation, slab, asked)


def _in_one_launch(
    seconds: float, others: Sequence[Alone], stacks: Sequence[Stack], operation: TakesMany, slab: Slab, asked: Asked
) -> _Way:
    return _Way(seconds, lambda: _Steps(seconds, [*others, *_in_packs(stacks, operation, slab, asked)]))


def _is_all(stacks: Sequence[Stack], slab: Slab, asked: Asked) -> bool:
    """Whether they have as many rows as there are: side by side, as documents are, they leave nothing to be merged."""
    return sum(stack.queries.lines for stack in stacks) == _whole(slab, asked)


def _merging(is_done: bool, slab: Slab, asked: Asked) -> float:
    """Seconds that what is not done takes afterwards."""
    return 0.0 if is_done else cost_of_merging(asked.which, _whole(slab, asked) * asked.q[3], _kind(asked))


def _time_of(launches: Sequence[Sequence[Stack]], operation: TakesMany, asked: Asked) -> float:
    host = device = 0.0
    for stacks in launches:
        costs = [_cost_in_pack(operation, stack, asked) for stack in stacks]
        host += costs[0].host
        device += max(sum(one.device for one in costs), max(one.longest for one in costs))
    return max(host, device)


def _cost_in_pack(operation: TakesMany, stack: Stack, asked: Asked) -> Cost:
    """A band counts as the columns that a block of its rows sees; what was measured alone takes no longer here."""
    size, (lo, hi) = size_of(stack, asked.q[3]), stack.limits
    if stack.shape != "band":
        known = cost_together(operation.name, asked.which, size, _kind(asked))
        if operation.takes_anything:
            return known
        return known._replace(device=min(known.device, _cost(Alone(stack, operation, False), asked).device))
    seen = min(size.cols, pairs_in_band(size.rows, size.cols, lo, hi) // size.rows + BLOCK)
    return cost_together(operation.name, asked.which, size._replace(cols=seen, causal=False), _kind(asked))


def _kind(asked: Asked) -> str:
    return _generation(asked.device) if asked.device.type == "cuda" else "hopper"


def _cost(one: Alone, asked: Asked) -> Cost:
    if one.operation is None:
        return Cost(0.0, 0.0)  # the reference's: nobody else takes it
    flips = (6 if asked.which == "forward" else 12) if one.stack.shape == "flipped" else 0
    return cost_alone(one.operation.name, asked.which, size_of(one.stack, asked.q[3]), _kind(asked), copies=flips)


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


def _few_at_a_time(stacks: Sequence[Stack], operation: TakesMany, slab: Slab, asked: Asked) -> list[list[Stack]]:
    """So many that their results, which all wait at once, are not much more than the whole; those of keys as well."""
    always = PACKED_IN_ANY_CASE // (asked.q[3] * asked.dtype.itemsize)
    most = max(PACKED * _whole(slab, asked), always)
    most_keys = max(PACKED * _keys(slab, asked).lines, always) if asked.which == "backward" else inf
    most_sequences = inf if operation.takes_anything else _most_sequences(slab, asked)
    if sum(stack.queries.many for stack in stacks) > most_sequences:
        parts = (part for stack in stacks for part in _in_a_row(stack, int(most_sequences)))
        stacks = sorted(parts, key=lambda part: (part.queries.batch.start, part.queries.rows.start))
    found: list[list[Stack]] = []
    lines = keys = sequences = inf
    for stack in stacks:
        mine = stack.queries.lines, stack.keys.lines, stack.queries.many
        lines, keys, sequences = lines + mine[0], keys + mine[1], sequences + mine[2]
        if lines > most or keys > most_keys or sequences > most_sequences:
            found.append([])
            lines, keys, sequences = mine
        found[-1].append(stack)
    return found


UNCUT = 8  # times as much: sequences of several batch rows go all at once, or one by one
FEW = 64  # repeats: of more, which something lies between, a launch of their own is worth it


def _in_a_row(stack: Stack, most: int) -> Iterator[Stack]:
    """In stacks of at most so many, and between whose repeats nothing lies, where these are few."""
    place = stack.queries
    has_gaps = place.repeats > 1 and place.spacing != len(place.rows)
    return stack.in_batches(1 if has_gaps and place.repeats <= FEW else most)


def _most_sequences(slab: Slab, asked: Asked) -> int:
    """As a grid has room for; and in a backward, of which each is held in whole blocks of float32, as memory has."""
    if asked.which == "forward":
        return MOST_AT_ONCE
    padded = max(_whole(slab, asked), PADDED_IN_ANY_CASE // (4 * asked.q[3]))
    padded *= UNCUT if asked.q[0] > 1 else 1
    return max(1, min(MOST_AT_ONCE, padded // (BLOCK * asked.q[2])))


def _in_packs(stacks: Sequence[Stack], operation: TakesMany, slab: Slab, asked: Asked) -> list[Together]:
    """Everything, or nothing where some of it is not taken."""
    whole = _queries(slab, asked), _keys(slab, asked)
    found = [operation.in_packs(few, *whole) for few in _few_at_a_time(stacks, operation, slab, asked)]
    return [Together(pack, operation) for packs in found for pack in packs] if all(found) else []


def _whole(slab: Slab, asked: Asked) -> int:
    """Lines of the slab's rows."""
    return _queries(slab, asked).lines


def _queries(slab: Slab, asked: Asked) -> Whole:
    batch, _, heads, _ = asked.q
    return Whole(batch, slab.rows, asked.k[2], heads // asked.k[2])


def _keys(slab: Slab, asked: Asked) -> Whole:
    is_everything = len(slab.rows) == asked.q[1]  # else the problem is square, and keys are cut as queries are
    return Whole(asked.k[0], range(asked.k[1]) if is_everything else slab.rows, asked.k[2], 1)
