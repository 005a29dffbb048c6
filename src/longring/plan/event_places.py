"""Places: what ranks of a node give to each other where they change from rows of all heads to all rows of some.

Who gives how much to whom is counted for all givers of a place at once: of the rows that its desks ask for, how many
each of them holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

from ..geometry.heads import ByHeads, by_heads
from ..geometry.layouts import Layout, Shard
from ..geometry.ranges import meet
from .event_lists import Arithmetic, Messages, Row
from .event_pace import Pace

Wanted = tuple[int, tuple[range, ...]]  # vectors for each of these positions


class Places:
    """The messages of all nodes, by the place that they go to."""

    def __init__(self, pace: Pace, rows: Arithmetic, inner: int) -> None:
        self._pace, self._rows, self._inner = pace, rows, inner
        self._known: dict[tuple[int, tuple[Wanted, ...], range], Row] = {}
        self._to_desk: dict[tuple[object, ...], tuple[Row, Row]] = {}

    def there(self, place: int) -> Messages:
        """To the desks of the place."""
        of_queries = "queries" if self._pace.phase == "forward" else "queries and gradients"
        asked, given = self._to_desks
        return self._messages(place, (of_queries, asked[place]), ("keys", given[place]))

    def back(self, place: int) -> Messages:
        """From all desks to who has the place: what it gave has become what it gets."""
        is_final = by_heads(self._pace.task, 0, self._inner).is_final
        asked, given = self._from_desks
        if self._pace.phase == "forward":
            return self._messages(place, ("answers" if is_final else "partial answers", asked(place)))
        of_queries = "query gradients" if is_final else "partial gradients"
        return self._messages(place, (of_queries, asked(place)), ("gradients", given(place)))

    def _messages(self, place: int, *vectors: tuple[str, Row]) -> Messages:
        """From everybody to who has the place in its node, but for what is there."""
        rows, inner = self._rows, self._inner
        parts = [(self._pace.bytes_of(kind, 1), row) for kind, row in vectors]
        nbytes = rows.weighed(parts, rows.lines.ranks)
        nbytes[place::inner] = rows.full(0, rows.lines.ranks // inner)
        return Messages(rows.everybody, rows.of_place(inner, place), nbytes)

    # ---- vectors of queries, and of keys

    @cached_property
    def _from_desks(self) -> tuple[Callable[[int], Row], Callable[[int], Row]]:
        """For a place, by whose desks they come from."""
        asked, given = (self._rows.turned_over(row, self._inner) for row in self._to_desks)
        return asked, given

    @cached_property
    def _to_desks(self) -> tuple[list[Row], list[Row]]:
        """For every place, by who gives them."""
        both = [self._vectors_to(place) for place in range(self._inner)]
        return [asked for asked, _ in both], [given for _, given in both]

    def _vectors_to(self, place: int) -> tuple[Row, Row]:
        task, inner = self._pace.task, self._inner
        asked: list[Row] = []
        given: list[Row] = []
        for node in range(task.ranks // inner):
            to_queries, to_keys = self._vectors_to_desks(by_heads(task, node * inner + place, inner))
            asked.append(to_queries)
            given.append(to_keys)
        return self._rows.joined(asked), self._rows.joined(given)

    def _vectors_to_desks(self, plan: ByHeads) -> tuple[Row, Row]:
        """Query heads of one kv head ask for the same."""
        key = plan.node, plan.kv_heads, *((desk.queries, desk.kv_heads, desk.share) for desk in plan.desks)
        if key not in self._to_desk:
            asked = self._given(plan.task.queries, tuple(_queries_wanted(plan)), plan.members)
            given = self._given(plan.task.keys, tuple(_keys_wanted(plan)), plan.members)
            self._to_desk[key] = asked, given
        return self._to_desk[key]

    def _given(self, layout: Layout, wanted: tuple[Wanted, ...], members: range) -> Row:
        """Desks of several heads ask for the same."""
        key = id(layout), wanted, members
        if key not in self._known:
            parts = ((many, self._rows.held(layout, positions, members)) for many, positions in wanted)
            self._known[key] = self._rows.weighed(parts, len(members))
        return self._known[key]


def _queries_wanted(plan: ByHeads) -> Iterator[Wanted]:
    for desk in plan.desks:
        for share in plan.asking(desk):
            heads = len(share.kv_heads) * desk.share
            yield len(share.batch) * heads, _positions(desk.queries, share.rows)


def _keys_wanted(plan: ByHeads) -> Iterator[Wanted]:
    together = plan.nodes[1].shards[plan.node]
    for share in plan.keys_wanted(plan.place):
        yield len(share.batch) * len(share.kv_heads), _positions(together, share.rows)


def _positions(shard: Shard, rows: tuple[range, ...]) -> tuple[range, ...]:
    """Of some local rows of a shard."""
    found: list[range] = []
    before = 0
    for piece in shard:
        here = range(before, before + len(piece))
        for some in rows:
            if both := meet(here, some):
                found.append(piece[both.start - before : both.stop - before : both.step])
        before += len(piece)
    return tuple(found)
