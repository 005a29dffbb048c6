"""Sequences: stacks that a kernel for packed sequences computes in one launch.

Such a kernel is told where each sequence of rows begins, those of queries and of keys apart, and one *window* for all
of them: how far before and behind its own key a row sees. A row's own key is on the diagonal that ends in the last row
and the last column. A hundred documents are sequences; so is any single stack, which may lie anywhere then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from .packs import Pack, Span, Whole, apart, is_solid, pack, spans
from .portions import MOST_AT_ONCE
from .stacks import Place, Stack


class Window(NamedTuple):
    """Keys before a row's own, and behind it, that it sees; None where there is no limit."""

    left: int | None
    right: int | None


def window_of(stack: Stack) -> Window:
    """Of a stack as tiles are cut: every row and every column of it takes part, so neither side is below 0."""
    (lo, hi), (rows, cols) = stack.limits, _sides(stack)
    left = None if lo is None or lo <= 1 - rows else cols - rows - lo
    right = None if hi is None or hi >= cols - 1 else hi - (cols - rows)
    assert min(left or 0, right or 0) >= 0
    return Window(left, right)


def in_sequence(stacks: Sequence[Stack], queries: Whole, keys: Whole) -> list[Pack]:
    """Packs: of those of one window the ones whose rows follow each other go together, others one by one."""
    found: list[Pack] = []
    for group in _by_window(stacks):
        runs, others = _in_runs(group, queries, keys)
        found += [pack(run, *_stretches(run, queries, keys)) for run in runs]
        found += [apart([part]) for stack in others for part in stack.in_batches(MOST_AT_ONCE)]
    return found


def _by_window(stacks: Sequence[Stack]) -> Iterator[list[Stack]]:
    """Each goes to the strictest window that leaves it as it is."""
    own = [window_of(stack) for stack in stacks]
    windows = sorted(set(own), key=_strictness)
    groups: dict[Window, list[Stack]] = {window: [] for window in windows}
    for stack, window in zip(stacks, own, strict=True):
        others = windows if None in window else [window]
        groups[next(one for one in others if _suits(stack, window, one))].append(stack)
    return filter(None, groups.values())


def _in_runs(group: list[Stack], queries: Whole, keys: Whole) -> tuple[list[list[Stack]], list[Stack]]:
    """(those whose rows follow each other, run by run; the others): where a rank's chunks end, runs do."""
    if sum(stack.queries.repeats for stack in group) == 1:
        return [], group
    if bounds(group, *_stretches(group, queries, keys)) is not None:
        return [group], []
    if queries.batch > 1 or _are_too_many(group):  # of several batch rows there is no stretch but all of them
        return [], group
    runs: list[list[_Piece]] = []
    for piece in sorted(_pieces(group, queries, keys)):
        if runs and piece.follows(runs[-1][-1]):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    cut = {piece.number for run in runs if len(run) > 1 for piece in run}
    taken = [[piece.stack for piece in run] for run in runs if run[0].number in cut]
    others = [stack for number, stack in enumerate(group) if number not in cut]
    return [run for run in taken if len(run) > 1], [*(run[0] for run in taken if len(run) == 1), *others]


MOST_PIECES = 4096  # to be put in order: of more, which are tiny, a launch for each stack is few launches


def _are_too_many(group: Sequence[Stack]) -> bool:
    return sum(stack.queries.repeats for stack in group) > MOST_PIECES


class _Piece(NamedTuple):
    """One of the repeats of a stack."""

    queries: Span
    keys: Span
    number: int  # the stack's
    stack: Stack

    def follows(self, other: _Piece) -> bool:
        return (self.queries[0], self.keys[0]) == (other.queries[1], other.keys[1])


def _pieces(group: Sequence[Stack], queries: Whole, keys: Whole) -> Iterator[_Piece]:
    for number, stack in enumerate(group):
        if is_solid(stack.queries, queries) and is_solid(stack.keys, keys):
            each = spans(stack.queries, queries), spans(stack.keys, keys), stack.in_batches(1)
            for of_queries, of_keys, one in zip(*each, strict=True):
                yield _Piece(of_queries, of_keys, number, one)


def _strictness(window: Window) -> tuple[int, ...]:
    """The strictest first, and always in the same order: what is merged in another has other bits."""
    return window.count(None), *(-1 if side is None else side for side in window)


def _stretches(stacks: Sequence[Stack], queries: Whole, keys: Whole) -> tuple[Whole, Whole]:
    places = [stack.queries for stack in stacks], [stack.keys for stack in stacks]
    return _stretch(places[0], queries), _stretch(places[1], keys)


def _stretch(places: Sequence[Place], whole: Whole) -> Whole:
    """From their first row to their last; everything of several batch rows: what is left out would lie between."""
    if whole.batch > 1:
        return whole
    extents = [place.extent for place in places]
    return whole._replace(rows=range(min(e.start for e in extents), max(e.stop for e in extents)))


def common_window(stacks: Sequence[Stack]) -> Window:
    """That of stacks which go together."""
    found = [window_of(stack) for stack in stacks]
    left, right = ({side for side in sides if side is not None} for sides in zip(*found, strict=True))
    assert len(left) < 2
    assert len(right) < 2
    return Window(next(iter(left), None), next(iter(right), None))


def _suits(stack: Stack, own: Window, window: Window) -> bool:
    """Whether the stack is the same with this window: what has no limit may be given one that it never reaches."""
    rows, cols = _sides(stack)
    reach = cols - 1, rows - 1
    return all(
        mine == given or (mine is None and given is not None and given >= most)
        for mine, given, most in zip(own, window, reach, strict=True)
    )


def _sides(stack: Stack) -> tuple[int, int]:
    return len(stack.queries.rows), len(stack.keys.rows)


class Bounds(NamedTuple):
    """Where sequences begin, and where the last of them ends, in rows of all batch rows one behind the other."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]


def bounds(stacks: Sequence[Stack], queries: Whole, keys: Whole) -> Bounds | None:
    """Of stacks that have every row of queries and of keys between them, each of them once and in order; else None."""
    if not all(is_solid(stack.queries, queries) and is_solid(stack.keys, keys) for stack in stacks):
        return None
    both = [(spans(stack.queries, queries), spans(stack.keys, keys)) for stack in stacks]
    pairs = sorted(pair for of_queries, of_keys in both for pair in zip(of_queries, of_keys, strict=True))
    found = Bounds(_ends([one for one, _ in pairs], queries), _ends([other for _, other in pairs], keys))
    return found if all(found) else None


def _ends(found: Sequence[Span], whole: Whole) -> tuple[int, ...]:
    """Nothing where they do not follow each other from the first row to the last."""
    follow = all(one[1] == other[0] for one, other in pairwise(found))
    is_all = (found[0][0], found[-1][1]) == (0, whole.batch * len(whole.rows))
    return (*(first for first, _ in found), found[-1][1]) if follow and is_all else ()
