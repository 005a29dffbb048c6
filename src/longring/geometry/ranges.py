"""Arithmetic of Python `range`s with a positive step, the only sets of positions longring knows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import gcd, lcm


def cut(length: int, parts: int) -> list[range]:
    """`length` positions in `parts` consecutive pieces; the first (length mod parts) are one longer."""
    size, longer = divmod(length, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def meet(a: range, b: range) -> range:
    """The positions in both, by the Chinese remainder theorem."""
    if not a or not b or a[-1] < b.start or b[-1] < a.start:
        return range(0)
    if a.step == b.step == 1:
        return range(max(a.start, b.start), min(a.stop, b.stop))
    common = gcd(a.step, b.step)
    if (b.start - a.start) % common:
        return range(0)
    step = lcm(a.step, b.step)
    turns = (b.start - a.start) // common * pow(a.step // common, -1, b.step // common) % (b.step // common)
    shared = a.start + a.step * turns  # some position in both progressions, continued in both directions
    first = shared + -(-(max(a.start, b.start) - shared) // step) * step
    return range(first, min(a[-1], b[-1]) + 1, step)


def moved(r: range, by: int) -> range:
    return range(r.start + by, r.stop + by, r.step)


def look(r: range) -> range:
    """The same for ranges that differ in where they start, also for single positions, whose step has no meaning."""
    return moved(r, -r.start)


def chain(parts: Iterable[range]) -> range | None:
    """The one range that runs through the parts in turn, if there is one."""
    flat = [r for r in parts if r]
    if len(flat) == 1:
        return flat[0]
    steps = {r.step for r in flat if len(r) > 1} | {b.start - a[-1] for a, b in pairwise(flat)}
    if len(steps) != 1 or (step := steps.pop()) < 1:
        return None
    return range(flat[0].start, flat[-1][-1] + 1, step)


def strands(r: range, step: int) -> list[range]:
    """The range unravelled into progressions of the given step, a multiple of its own."""
    return [r[start :: step // r.step] for start in range(min(step // r.step, len(r)))]


def as_ranges(positions: Sequence[int]) -> tuple[range, ...]:
    """A rising sequence of positions as few progressions, found greedily from the left."""
    found: list[range] = []
    at = 0
    while at < len(positions):
        end = at + 1
        if end < len(positions):
            step = positions[end] - positions[at]
            while end < len(positions) and positions[end] - positions[end - 1] == step:
                end += 1
            if end - at == 2 and end < len(positions):  # two make no progression: leave the second to its neighbours
                end = at + 1
        step = positions[at + 1] - positions[at] if end - at > 1 else 1
        found.append(range(positions[at], positions[end - 1] + 1, step))
        at = end
    return tuple(found)


def united(parts: Iterable[range]) -> tuple[range, ...]:
    """Each position once, in rising order."""
    distinct = sorted({r for r in parts if r}, key=lambda r: (r.start, -len(r)))
    if len(distinct) <= 1:
        return tuple(distinct)
    if all(r.step == 1 for r in distinct):
        return _united_intervals(distinct)
    return as_ranges(sorted(set().union(*distinct)))


def _united_intervals(sorted_intervals: list[range]) -> tuple[range, ...]:
    found: list[range] = []
    for r in sorted_intervals:
        if found and r.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, r.stop))
        else:
            found.append(r)
    return tuple(found)


def shared(a: Iterable[range], b: Iterable[range]) -> tuple[range, ...]:
    """Positions in both of two unions of intervals."""
    b = tuple(b)
    return united(range(max(x.start, y.start), min(x.stop, y.stop)) for x in a for y in b)


def without(a: Iterable[range], b: Iterable[range]) -> tuple[range, ...]:
    """Positions of one union of intervals that are not in the other."""
    left = list(a)
    for cut_out in b:
        pieces = ((range(x.start, min(x.stop, cut_out.start)), range(max(x.start, cut_out.stop), x.stop)) for x in left)
        left = [piece for pair in pieces for piece in pair if piece]
    return united(left)
