"""Which rows are looked at."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

from ...geometry.layouts import Shard, size
from ...geometry.parcels import Parcel
from ...geometry.patterns import Dense, Dilated
from ...geometry.ranges import meet
from ...geometry.task import Task
from .gradients import Gradients, is_loud
from .pairs import phase_of
from .places import Vector, own_queries, position_of, vector_of

FEW_HEADS = 4  # of which rows are drawn branch by branch
CANDIDATES = 4  # for each one that is wanted, where not every one is of the kind

T = TypeVar("T")


def sampled_rows(task: Task, shard: Shard, samples: int, seed: int) -> list[Vector]:
    """At least so many rows of a shard: the first and last of every piece, and random ones.

    Dense: with all heads. Dilated: of one kv head each; half of them are drawn branch by branch, since of those whose
    rate is high a random row sees nothing.
    """
    if not shard:
        return []
    chance = random.Random(seed)
    rows = range(size(shard))
    drawn = {position_of(shard, row) for row in chance.sample(rows, min(len(rows), samples))}
    drawn |= {position for piece in shard for position in (piece[0], piece[-1])}
    batch, kv_heads = range(task.problem.batch), range(task.problem.kv_heads)
    if isinstance(task.pattern, Dense):
        some = {position: chance.choice(batch) for position in sorted(drawn)}
        return [Vector(b, position, head) for position, b in some.items() for head in kv_heads]
    found = {Vector(chance.choice(batch), position, chance.choice(kv_heads)) for position in sorted(drawn)}
    kept = list(_kept(task.pattern, shard, len(kv_heads)))
    for number in range(samples // 2 if kept else 0):
        head, ranges = kept[number % len(kept)]
        found.add(Vector(chance.choice(batch), chance.choice(chance.choice(ranges)), head))
    return sorted(found)


def _kept(pattern: Dilated, shard: Shard, kv_heads: int) -> Iterator[tuple[int, list[range]]]:
    """(kv head, some positions of the shard that it keeps) for a few heads, of every branch each."""
    for kv_head in range(min(kv_heads, FEW_HEADS)):
        for w, r in pattern.branches:
            phase = phase_of(pattern, r, kv_head, kv_heads)
            segments = ((piece, index) for piece in shard for index in _first_middle_last(piece, w))
            found = [meet(piece, range(index * w + phase, (index + 1) * w, r)) for piece, index in segments]
            if any(found):
                yield kv_head, [some for some in found if some]


def _first_middle_last(piece: range, w: int) -> list[int]:
    first, last = piece[0] // w, piece[-1] // w
    return sorted({first, (first + last) // 2, last})


def sampled_numbers(count: int, samples: int, seed: int) -> list[int]:
    """Of things numbered from 0: the first, the last and random ones."""
    if not count:
        return []
    chance = random.Random(seed)
    return sorted({0, count - 1, *chance.sample(range(count), min(count, samples))})


def sampled_own(
    task: Task, rank: int, gradients: Gradients, arriving: Sequence[Parcel], samples: int, seed: int
) -> list[Vector]:
    """Own keys: so many rows for which nothing comes home, and as many vectors for which something does."""
    drawn = sampled_rows(task, task.keys.shards[rank], CANDIDATES * samples, seed)
    brought = gradients.brought(arriving, drawn)["dk"].any(-1).tolist()
    alone = [key for key, some in zip(drawn, brought, strict=True) if not some]
    kept = set(_few(sorted({key.position for key in alone}), samples, seed))
    home = [parcel for parcel in arriving if parcel.owner == rank]
    numbers = sampled_numbers(sum(parcel.vectors for parcel in home), CANDIDATES * samples, seed)
    loud = sorted({key for _, key in _numbered(task, home, numbers) if is_loud(key.position)})
    return [key for key in alone if key.position in kept] + _few(loud, samples, seed)


def sampled_sent(task: Task, rank: int, leaving: Sequence[Parcel], samples: int, seed: int) -> list[int]:
    """Numbers of vectors of gradients: so many to which the rank adds something, as many that it only passes on."""
    numbers = sampled_numbers(sum(parcel.vectors for parcel in leaving), CANDIDATES * samples, seed)
    groups: dict[bool, list[int]] = {True: [], False: []}
    for number, key in _numbered(task, leaving, numbers):
        groups[bool(own_queries(task, rank, key.position, key.kv_head))].append(number)
    return sorted(number for group in groups.values() for number in _few(group, samples, seed))


def _numbered(task: Task, parcels: Sequence[Parcel], numbers: Sequence[int]) -> Iterator[tuple[int, Vector]]:
    """(number, vector) of some of all vectors, counted from the first of the first parcel; numbers increase."""
    before, left = 0, list(reversed(numbers))
    for parcel in parcels:
        while left and left[-1] < before + parcel.vectors:
            number = left.pop()
            yield number, vector_of(task, parcel, number - before)
        before += parcel.vectors


def _few(some: Sequence[T], most: int, seed: int) -> list[T]:
    """The first, the last and random ones, in order."""
    if len(some) <= most:
        return list(some)
    return [some[number] for number in sampled_numbers(len(some), most, seed)]
