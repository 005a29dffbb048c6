"""Rounds: of a ring of rings, how many of its vectors every owner sends at a step, for all owners at once.

From round to round an owner's rows visit other nodes, and inside of a node fewer and fewer of its ranks are still to
come: nearly everything changes at every step, and so it is told step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple, Protocol

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
    return _Horizons(lane, arithmetic) if sees_all_before else _Pieces(lane, arithmetic)


class _Round(NamedTuple):
    """Of one round, by hop and piece: its vectors where some host from there on, or up to there, sees all of it."""

    from_hop: list[list[Row]]
    until_hop: list[list[Row]]
    asked: list[int]  # owners of a piece of which somebody sees a part


class _Pieces:
    """Most ranks see all of a piece of an owner's rows, or nothing. Who has one that is seen in part is asked."""

    def __init__(self, lane: Lane, arithmetic: Arithmetic) -> None:
        assert isinstance(lane.route, DoubleRing)
        self._lane, self._arithmetic, self._route = lane, arithmetic, lane.route
        task = lane.task
        views, each = Views(task), task.problem.batch * task.problem.kv_heads
        seen = [[*views.of(rank)] for rank in range(task.ranks)]
        held = [[(piece[0], piece[-1], each * len(piece)) for piece in shard] for shard in task.keys.shards]
        self._views = self._columns(seen, (task.problem.n_k, -1))
        self._pieces = self._columns(held, (0, -1, 0))
        self._nothing = arithmetic.full(0, task.ranks)
        self._latest: tuple[int, _Round] | None = None

    def _columns(self, by_rank: Sequence[Sequence[tuple[int, ...]]], nothing: tuple[int, ...]) -> list[tuple[Row, ...]]:
        """By number; who has fewer has nothing."""
        by_number = zip_longest(*by_rank, fillvalue=nothing)
        return [tuple(map(self._arithmetic.of, zip(*some, strict=True))) for some in by_number]

    def rows(self, step: int) -> Row:
        round_, hop = divmod(step, self._route.inner)
        if not hop:
            return self._from_round_on[round_]
        here = self._round(round_)
        return self._told(self._lane.carried, step, self._together(here.from_hop[hop]), here.asked)

    def following(self, step: int) -> Row:
        round_, hop = divmod(step, self._route.inner)
        here = self._round(round_)
        both = self._both(here.until_hop[hop], here.from_hop[hop + 1])
        return self._told(self._lane.onward, step, self._together(both), here.asked)

    def returning(self, step: int) -> Row:
        """Of what somebody added to, what nobody behind will."""
        round_, hop = divmod(step, self._route.inner)
        here = self._round(round_)
        touched = self._both(here.until_hop[hop], here.from_hop[hop])
        awaited = self._both(touched, here.from_hop[hop + 1])
        left = self._arithmetic.weighed([(1, self._together(touched)), (-1, self._together(awaited))], self._route.size)
        return self._told(self._lane.homeward, step, left, here.asked)

    def _told(
        self, ask: Callable[[int, int], tuple[Share, ...]], step: int, vectors: Row, owners: Iterable[int]
    ) -> Row:
        for owner in owners:
            vectors[owner] = _vectors(ask(owner, step))
        return vectors

    @cached_property
    def _from_round_on(self) -> list[Row]:
        """What is due at the first step of every round: for those who are asked it stays while nobody sees any."""
        found = [self._nothing]
        whole = [self._nothing] * len(self._pieces)
        told: dict[int, int] = {}
        for round_ in reversed(range(1, self._route.nodes)):
            here = self._round(round_)
            whole = self._either(whole, here.from_hop[0])
            asked = {*here.asked, *(owner for owner in told if any(row[owner] for row in here.from_hop[0]))}
            told |= {owner: _vectors(self._lane.carried(owner, round_ * self._route.inner)) for owner in asked}
            row = self._together(whole)
            for owner, vectors in told.items():
                row[owner] = vectors
            found.append(row)
        return [self._nothing, *found[:0:-1]]

    # ---- one round

    def _round(self, round_: int) -> _Round:
        if self._latest is None or self._latest[0] != round_:
            self._latest = round_, self._found(round_)
        return self._latest[1]

    def _found(self, round_: int) -> _Round:
        """At home nobody but the owner is its first host, and that one adds nothing to what travels."""
        nobody = [self._nothing] * len(self._pieces)
        partly, at_hop = self._nothing, [nobody]
        for hop in range(0 if round_ else 1, self._route.inner):
            whole, part = self._seen(round_, hop)
            at_hop[hop:] = [whole]
            partly = self._arithmetic.larger(partly, part)
        from_hop, until_hop = [nobody], at_hop[:1]
        for some in reversed(at_hop):
            from_hop.append(self._either(from_hop[-1], some))
        for some in at_hop[1:]:
            until_hop.append(self._either(until_hop[-1], some))
        return _Round(from_hop[::-1], until_hop, self._arithmetic.numbers(partly))

    def _seen(self, round_: int, hop: int) -> tuple[list[Row], Row]:
        """By owner: vectors of those of its pieces of which its host sees all, and whether it sees a part of one."""
        rows, way = self._arithmetic, self._route.direction
        to_owner = Move(self._route.size, self._route.inner, -way * round_, -way * hop)
        found, partly = [self._nothing] * len(self._pieces), self._nothing
        for view in self._views:
            firsts, lasts = map(to_owner.moved, view)
            for number, piece in enumerate(self._pieces):
                whole, part = rows.covered(piece, firsts, lasts)
                found[number], partly = rows.larger(found[number], whole), rows.larger(partly, part)
        return found, partly

    # ---- by piece

    def _either(self, a: list[Row], b: list[Row]) -> list[Row]:
        return [self._arithmetic.larger(x, y) for x, y in zip(a, b, strict=True)]

    def _both(self, a: list[Row], b: list[Row]) -> list[Row]:
        return [self._arithmetic.smaller(x, y) for x, y in zip(a, b, strict=True)]

    def _together(self, pieces: list[Row]) -> Row:
        return self._arithmetic.weighed([(1, row) for row in pieces], self._route.size)


def _vectors(shares: tuple[Share, ...]) -> int:
    return sum(share.vectors for share in shares)


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
