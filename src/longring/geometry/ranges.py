"""Arithmetic of Python `range`s with a positive step, the only sets of positions longring knows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from math import gcd, inf, lcm
from operator import attrgetter, itemgetter


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


def as_ranges(positions: Sequence[int]) -> tuple[range, ...]:
    """A rising sequence of positions as few progressions, found greedily from the left."""
    if not positions:
        return ()
    steps = groupby(b - a for a, b in pairwise(positions))
    return _progressions(positions[0], [(step, len(list(alike))) for step, alike in steps])


def _progressions(first: int, steps: Sequence[tuple[int, int]]) -> tuple[range, ...]:
    """From the first position on by these steps, each so many times in a row and then another."""
    found: list[range] = []
    at, taken = first, 0  # times that the next step was taken already, to where the next progression begins
    for number, (step, times) in enumerate(steps):
        left, taken, is_last = times - taken, 0, number + 1 == len(steps)
        if not left:
            continue
        if left == 1 and not is_last:  # two make no progression: leave the second to its neighbours
            found.append(range(at, at + 1))
            at += step
            continue
        last = at + step * left
        found.append(range(at, last + 1, step))
        if is_last:
            return tuple(found)
        at, taken = last + steps[number + 1][0], 1
    return (*found, range(at, at + 1))


def united(parts: Iterable[range]) -> tuple[range, ...]:
    """Each position once, in rising order."""
    some = [r for r in parts if r]
    if len(some) <= 1:
        return tuple(some)
    if all(r.step == 1 for r in some):
        return united_intervals(some)
    distinct = sorted(set(some), key=lambda r: (r.start, -len(r)))
    if len(distinct) == 1:
        return tuple(distinct)
    apart = _apart(distinct)
    if apart is None:
        return as_ranges(sorted(set().union(*distinct)))
    return _progressions(apart[0].start, _steps_through(apart))


def _apart(sorted_combs: list[range]) -> list[range] | None:
    """The same positions as combs each of which ends before the next begins; None where they are woven together.

    LongNet's branches keep ever fewer of what a finer one keeps: of millions of positions a few combs are left.
    """
    found: list[range] = []  # each behind the one before
    for comb in sorted(_chained(sorted_combs), key=lambda r: r.step if len(r) > 1 else inf):
        if not _put_between(found, comb):
            return None
    return found


def _put_between(found: list[range], comb: range) -> bool:
    """What of the comb lies beside the finer ones; False if it has something in one of them which that one has not.

    Among thousands a comb meets few, so those are searched for, from its first position on.
    """
    while comb:
        at = bisect_left(found, comb[0], key=itemgetter(-1))
        ahead = found[at] if at < len(found) else None
        if ahead is None or comb[0] < ahead[0]:
            beside = comb if ahead is None else comb[: _count_up_to(comb, ahead[0] - 1)]
            found.insert(at, beside)
            comb = comb[len(beside) :]
        else:
            inside = comb[: _count_up_to(comb, ahead[-1])]
            if inside[0] not in ahead or (len(inside) > 1 and comb.step % ahead.step):
                return False
            comb = comb[len(inside) :]
    return True


def _count_up_to(comb: range, last: int) -> int:
    """How many of its positions lie no further than that, where its first does not."""
    return (last - comb.start) // comb.step + 1


def _chained(sorted_combs: Iterable[range]) -> list[range]:
    """One for all that continue each other."""
    found: dict[tuple[int, int], range] = {}  # by step, and where it goes on
    doubles: list[range] = []
    for r in sorted_combs:
        before = found.pop((r.step, r.start), r)
        place = r.step, r[-1] + r.step
        doubles += [found[place]] if place in found else []
        found[place] = range(before.start, r[-1] + 1, r.step)
    return [*found.values(), *doubles]


def _steps_through(apart: Iterable[range]) -> list[tuple[int, int]]:
    """(step, how many times in a row), from the first position of all to the last."""
    steps: list[tuple[int, int]] = []
    last: int | None = None
    for r in apart:
        steps += [] if last is None else [(r.start - last, 1)]
        steps += [(r.step, len(r) - 1)] if len(r) > 1 else []
        last = r[-1]
    return [(step, sum(times for _, times in some)) for step, some in groupby(steps, key=itemgetter(0))]


def united_intervals(parts: Iterable[range]) -> tuple[range, ...]:
    """The same for intervals: ranges whose step is 1."""
    some = [r for r in parts if r]
    if len(some) <= 1:
        return tuple(some)
    some.sort(key=attrgetter("start"))
    found = some[:1]
    for r in some[1:]:
        if r.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, r.stop))
        else:
            found.append(r)
    return tuple(found)


def shared(a: Iterable[range], b: Iterable[range]) -> tuple[range, ...]:
    """Positions in both of two unions of intervals."""
    b = tuple(b)
    return united_intervals([range(max(x.start, y.start), min(x.stop, y.stop)) for x in a for y in b])


def without(a: Iterable[range], b: Iterable[range]) -> tuple[range, ...]:
    """Positions of one union of intervals that are not in the other."""
    left = list(a)
    for cut_out in b:
        pieces = ((range(x.start, min(x.stop, cut_out.start)), range(max(x.start, cut_out.stop), x.stop)) for x in left)
        left = [piece for pair in pieces for piece in pair if piece]
    return united_intervals(left)
