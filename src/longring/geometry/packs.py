"""Packs: stacks that one launch computes, and where each leaves its results.

Results lie on *trays*, one behind the other in one stretch of memory. A stack has a tray of its own, compact, or shares
one with others that have none of its rows: such a tray is laid out like the whole tensor, so that a hundred documents,
though each is a stack, are one part to be merged, or simply the result.

Memory is counted in *lines*: a line is the numbers of one row of one head.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .stacks import Place, Stack


class Whole(NamedTuple):
    """Rows of all heads that a shared tray has lines for."""

    batch: int
    rows: range
    kv_heads: int
    share: int  # heads to a kv head

    @property
    def place(self) -> Place:
        return Place(range(self.batch), 1, 0, range(self.kv_heads), 0, self.rows, self.share)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.share

    @property
    def lines(self) -> int:
        return self.batch * len(self.rows) * self.heads


class Berth(NamedTuple):
    """Lines of a place: the first of all, and how far it is to the next of its many, its heads and its rows."""

    first: int
    by_many: int
    by_head: int
    by_row: int


class Tray(NamedTuple):
    """Some results: [many, heads, rows] of a place, or, where it is shared, [batch, rows, heads] of a whole."""

    place: Place
    first: int  # line
    is_shared: bool
    is_full: bool  # no line is left that nobody writes

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.place.many, self.place.heads, len(self.place.rows)

    @property
    def lines(self) -> int:
        return self.place.lines


class Trays(NamedTuple):
    """All results of a kind, such as out, or dq, or dk, and where each stack leaves its own."""

    trays: tuple[Tray, ...]
    berths: tuple[Berth, ...]  # by stack, for what has rows before heads, as out has
    berths_by_head: tuple[Berth, ...]  # for what has heads before rows, as lse has
    lines: int


@dataclass(frozen=True)
class Pack:
    """Stacks that are computed together, the results of their queries, and those of their keys."""

    stacks: tuple[Stack, ...]
    queries: Trays
    keys: Trays

    @cached_property
    def _hash(self) -> int:
        return hash((self.stacks, self.queries.trays, self.keys.trays))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        """Without its hash, which is another in another process."""
        return Pack, (self.stacks, self.queries, self.keys)


def pack(stacks: Sequence[Stack], queries: Whole, keys: Whole) -> Pack:
    """Together, and laid out like the whole what is all of it, or has more than half of it side by side."""
    places = [stack.queries for stack in stacks], [stack.keys for stack in stacks]
    return Pack(tuple(stacks), _trays(places[0], queries), _trays(places[1], keys))


def apart(stacks: Sequence[Stack]) -> Pack:
    """Together, each on a tray of its own, in order."""
    places = [stack.queries for stack in stacks], [stack.keys for stack in stacks]
    queries, keys = (_laid(some, [_Group([i], place.lines) for i, place in enumerate(some)]) for some in places)
    return Pack(tuple(stacks), queries, keys)


def _trays(places: Sequence[Place], whole: Whole) -> Trays:
    groups: list[_Group] = []
    for some in _layers(places, whole):
        lines = sum(places[i].lines for i in some)
        is_shared = lines == whole.lines or (len(some) > 1 and 2 * lines > whole.lines)
        groups += [_Group(some, lines, whole)] if is_shared else [_Group([i], places[i].lines) for i in some]
    return _laid(places, groups)


class _Group(NamedTuple):
    """Numbers of places that have a tray together: one like the whole, if that is given."""

    members: Sequence[int]
    lines: int
    whole: Whole | None = None


def _laid(places: Sequence[Place], groups: Sequence[_Group]) -> Trays:
    trays: list[Tray] = []
    berths: dict[int, tuple[Berth, Berth]] = {}
    first = 0
    for members, lines, whole in groups:
        if whole is None:
            (number,) = members
            trays.append(Tray(places[number], first, is_shared=False, is_full=True))
            berths[number] = _own_berths(places[number], first)
        else:
            trays.append(Tray(whole.place, first, is_shared=True, is_full=lines == whole.lines))
            berths |= {i: _shared_berths(places[i], first, whole) for i in members}
        first += trays[-1].lines
    found = [berths[i] for i in range(len(places))]
    return Trays(tuple(trays), tuple(one for one, _ in found), tuple(one for _, one in found), first)


def _own_berths(place: Place, first: int) -> tuple[Berth, Berth]:
    rows = len(place.rows)
    berth = Berth(first, place.heads * rows, rows, 1)
    return berth, berth


def _shared_berths(place: Place, first: int, whole: Whole) -> tuple[Berth, Berth]:
    """As a view of the place would have them, of a dense [batch, rows, heads] and of a dense [batch, heads, rows]."""
    rows, heads = len(whole.rows), whole.heads
    berths = []
    for by_batch, by_row, by_head in ((rows * heads, heads, 1), (rows * heads, 1, rows)):
        _, (by_many, between, down), start = place.strided(by_batch, by_row, by_head)
        berths.append(Berth(first + start - whole.rows.start * by_row, by_many, between, down))
    return berths[0], berths[1]


# ---------------------------------------------------------------------------------------- who can lie side by side


def _layers(places: Sequence[Place], whole: Whole) -> list[list[int]]:
    """Numbers of places: together those that have no row in common, each in the first layer that has room for it."""
    layers: list[_Layer] = []
    by_themselves: list[list[int]] = []
    for number, place in enumerate(places):
        if not is_solid(place, whole):
            by_themselves.append([number])
            continue
        stretches = list(spans(place, whole))
        layer = next((one for one in layers if one.has_room_for(stretches)), None)
        if layer is None:
            layer = _Layer([], [])
            layers.append(layer)
        layer.take(number, stretches)
    return [*(layer.members for layer in layers), *by_themselves]


Span = tuple[int, int]  # (first, end), those of a batch row counted behind those of the one before


class _Layer(NamedTuple):
    """Places that have no row in common, and what they have, in order."""

    members: list[int]
    taken: list[Span]

    def has_room_for(self, stretches: Sequence[Span]) -> bool:
        return all(_is_free(self.taken, one) for one in stretches)

    def take(self, number: int, stretches: Sequence[Span]) -> None:
        self.members.append(number)
        for one in stretches:
            insort(self.taken, one)


def is_solid(place: Place, whole: Whole) -> bool:
    """Whether it has every head, and its rows follow each other, each of them once."""
    is_dense = place.rows.step == 1 or len(place.rows) == 1
    is_once = place.repeats == 1 or place.spacing >= len(place.rows)
    return is_dense and is_once and not place.skew and place.kv_heads == range(whole.kv_heads)


def spans(place: Place, whole: Whole) -> Iterator[Span]:
    for batch in place.batch:
        for repeat in range(place.repeats):
            first = batch * len(whole.rows) + place.rows.start - whole.rows.start + repeat * place.spacing
            yield first, first + len(place.rows)


def _is_free(taken: Sequence[Span], stretch: Span) -> bool:
    after = bisect_left(taken, stretch)
    is_before_next = after == len(taken) or stretch[1] <= taken[after][0]
    return is_before_next and (after == 0 or taken[after - 1][1] <= stretch[0])
