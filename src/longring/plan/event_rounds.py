"""Rounds: of a ring of rings, how many of its vectors every owner sends at a step, for all owners at once.

From round to round an owner's rows visit other nodes, and inside of a node fewer and fewer of its ranks are still to
come: nearly everything changes at every step, and so it is told step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Protocol

from ..geometry.itinerary import Lane
from ..geometry.parcels import Share
from ..geometry.routes import DoubleRing
from .event_lists import Arithmetic, Row
from .event_rows import Move
from .event_views import Views


class Rounds(Protocol):
    """Vectors by owner."""

    def rows(self, step: int) -> Row:
        """Keys and values that are due at this step."""
        ...

    def following(self, step: int) -> Row:
        """Gradients that go on behind this step."""
        ...

    def returning(self, step: int) -> Row:
        """Gradients that go home behind this step."""
        ...


def rounds(lane: Lane, arithmetic: Arithmetic) -> Rounds:
    limits = lane.task.pattern.only_limits
    sees_all_before = limits is not None and limits[0] is None
    return _Horizons(lane, arithmetic) if sees_all_before else _Asked(lane, arithmetic)


class _Asked:
    """Owners are asked, step by step, but for those of whose rows nobody in the node they are in could see any."""

    def __init__(self, lane: Lane, arithmetic: Arithmetic) -> None:
        assert isinstance(lane.route, DoubleRing)
        self._lane, self._arithmetic, self._route = lane, arithmetic, lane.route

    def rows(self, step: int) -> Row:
        round_, hop = divmod(step, self._route.inner)
        return self._of(self._lane.carried, (self._seen if hop else self._still_to_be_seen)[round_], step)

    def following(self, step: int) -> Row:
        return self._of(self._lane.onward, self._seen[step // self._route.inner], step)

    def returning(self, step: int) -> Row:
        return self._of(self._lane.homeward, self._seen[step // self._route.inner], step)

    def _of(self, asked: Callable[[int, int], tuple[Share, ...]], owners: Iterable[int], step: int) -> Row:
        found = self._arithmetic.full(0, self._route.size)
        for owner in owners:
            found[owner] = sum(share.vectors for share in asked(owner, step))
        return found

    @cached_property
    def _seen(self) -> list[set[int]]:
        """For every round the owners of whose rows somebody in the round's node might see some."""
        route = self._route
        found: list[set[int]] = [set() for _ in range(route.nodes)]
        views = Views(self._lane.task)
        for rank in range(route.size):
            for owner in views.owners(rank):
                found[route.direction * (rank // route.inner - owner // route.inner) % route.nodes].add(owner)
        return found

    @cached_property
    def _still_to_be_seen(self) -> list[set[int]]:
        """Likewise, in the node of this round or of one behind it."""
        found: list[set[int]] = [set()]
        for owners in reversed(self._seen):
            found.append(found[-1] | owners)
        return found[:0:-1]


class _Horizons:
    """Where ranks see everything up to a horizon, rows that several see are those up to the furthest of theirs."""

    def __init__(self, lane: Lane, arithmetic: Arithmetic) -> None:
        assert isinstance(lane.route, DoubleRing)
        self._layout, self._route, self._arithmetic = lane.task.keys, lane.route, arithmetic
        self._each = lane.task.problem.batch * lane.task.problem.kv_heads
        self._horizons = arithmetic.of(map(Views(lane.task).horizon, range(lane.route.size)))
        self._nothing = arithmetic.of([-1] * lane.route.size)

    def rows(self, step: int) -> Row:
        round_, hop = divmod(step, self._route.inner)
        return self._up_to(self._from(round_, hop) if hop else self._from_round_on[round_])

    def following(self, step: int) -> Row:
        round_, hop = divmod(step, self._route.inner)
        return self._up_to(self._both(self._until(round_, hop), self._from(round_, hop + 1)))

    def returning(self, step: int) -> Row:
        """Of what somebody added to, those that nobody behind will."""
        round_, hop = divmod(step, self._route.inner)
        touched = self._both(self._until(round_, hop), self._from(round_, hop))
        awaited = self._both(touched, self._from(round_, hop + 1))
        return self._arithmetic.weighed([(1, self._up_to(touched)), (-1, self._up_to(awaited))], self._route.size)

    def _both(self, a: Row, b: Row) -> Row:
        return self._arithmetic.smaller(a, b)

    def _up_to(self, horizons: Row) -> Row:
        rows = self._arithmetic.before(self._layout, horizons)
        return self._arithmetic.weighed([(self._each, rows)], self._route.size)

    # ---- by owner, how far hosts see: in its own node first, and from there in that of a round

    def _from(self, round_: int, hop: int) -> Row:
        return self._in_round(round_, self._from_hop[hop])

    def _until(self, round_: int, hop: int) -> Row:
        """At home nobody but the owner is its first host, and that one adds nothing to what travels."""
        return self._in_round(round_, (self._until_hop if round_ else self._until_hop_at_home)[hop])

    def _in_round(self, round_: int, row: Row) -> Row:
        return Move(self._route.size, self._route.inner, -self._route.direction * round_).moved(row)

    @cached_property
    def _at_hop(self) -> list[Row]:
        size, inner, way = self._route.size, self._route.inner, self._route.direction
        return [Move(size, inner, 0, -way * hop).moved(self._horizons) for hop in range(inner)]

    @cached_property
    def _from_hop(self) -> list[Row]:
        found = [self._nothing]
        for row in reversed(self._at_hop):
            found.append(self._arithmetic.larger(row, found[-1]))
        return found[::-1]

    @cached_property
    def _until_hop(self) -> list[Row]:
        return self._until_hop_of(self._at_hop)

    @cached_property
    def _until_hop_at_home(self) -> list[Row]:
        return self._until_hop_of([self._nothing, *self._at_hop[1:]])

    def _until_hop_of(self, at_hop: list[Row]) -> list[Row]:
        found = [at_hop[0]]
        for row in at_hop[1:]:
            found.append(self._arithmetic.larger(row, found[-1]))
        return found

    @cached_property
    def _from_round_on(self) -> list[Row]:
        found: list[Row] = [self._nothing]
        for round_ in reversed(range(self._route.nodes)):
            found.append(self._arithmetic.larger(self._from(round_, 0), found[-1]))
        return found[:0:-1]
