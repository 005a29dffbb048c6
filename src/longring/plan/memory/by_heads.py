"""What changing places by heads holds: every tensor in both of its places, and what travels between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ...geometry.heads import ByHeads, kv_heads_at
from ...geometry.layouts import size
from ...geometry.parcels import Delivery, Piece
from .desk import BackwardDesk, Desk, Setting
from .packing import copied, lies_together
from .relay import Trip, go_backward, go_forward
from .room import Like, Room, Taken
from .totals import DK, DQ, DV, LOG, LSE, OUT, Total, merge

AT_DESKS, KEYS_AT_DESKS = "queries at desks", "K/V at desks"
FOUND_AT_DESKS = "results at desks"
SENT, RECEIVED = "leaving for desks or home", "arriving at desks or home"
MOST_PEERS = 256  # to look at one by one; of more, all rows count as travelling, those that stay and see nothing too


def forward(setting: Setting, plan: ByHeads, q: Like, k: Like) -> Total:
    room = setting.room
    near = Desk(setting, q, k.heads, setting.seen(q))
    if plan.far is None:
        near.look(plan.near, k)
        return near.total.result()
    columns = [_of_queries(room, plan, q), _of_keys(room, plan, k), _of_keys(room, plan, k)]
    leaving = Leaving(room, plan, columns)
    near.look(plan.near, k)
    leaving.take_seats()
    desks = [
        Desk(setting, like, len(desk.kv_heads), setting.seen(like))
        for desk, like in zip(plan.desks, columns[0].at_desks, strict=True)
    ]
    go_forward(Trip(setting, plan.between, _keys_at_desks(plan, k)), desks)
    room.begin("back home")
    for column in columns[1:]:
        column.give()
    (out, lse), answers = _nothing_answered(room, plan, q)
    totals = [desk.total.result() for desk in desks]
    seen: list[Taken] = []
    for desk, total in zip(desks, totals, strict=True):
        for found, like in ((total.out, out), (total.lse, lse)):
            found.become(FOUND_AT_DESKS)
            seen.append(_like(room, found, desk.q.vectors * like.d * like.itemsize))
    columns[0].give()
    for total in totals:
        total.give()
    come_back(room, plan, [_column_of_queries(plan, one) for one in (out, lse)])
    for one in seen:
        one.give()
    if near.total.is_empty:
        return answers
    total = near.total.in_place()
    merge(room, q.vectors, q.accumulator.itemsize)
    answers.give()
    return total


def _like(room: Room, found: Taken, size: int) -> Taken:
    """What was found as it is, or in another dtype."""
    return found.shared() if found.size == size else room.take(FOUND_AT_DESKS, size)


def _nothing_answered(room: Room, plan: ByHeads, q: Like) -> tuple[tuple[Like, Like], Total]:
    """out and lse of rows that saw nothing, which answers are laid into."""
    sums, logs = q.accumulator, q._replace(d=1, itemsize=LOG)
    out = room.take(OUT, sums.nbytes)
    lse = room.take(LSE, logs.nbytes)
    if not plan.is_final:
        room.briefly(LSE, logs.nbytes)  # made contiguous the other way round
        return (sums, logs), Total(out, lse)
    like = q._replace(d=1, itemsize=sums.itemsize)
    rounded = out.shared() if q.itemsize == sums.itemsize else room.take(OUT, q.nbytes)
    final = room.take(LSE, like.nbytes)
    out.give()
    lse.give()
    return (q, like), Total(rounded, final)


def backward(setting: Setting, plan: ByHeads, q: Like, k: Like) -> tuple[Taken, Taken, Taken]:
    room = setting.room
    dq, dk, dv = setting.sum(q, DQ), setting.sum(k, DK), setting.sum(k, DV)
    near = BackwardDesk(setting, q, k.heads, dq)
    if plan.far is None:
        near.look(plan.near, k, dk, dv)
        return dq.result(), dk.result(), dv.result()
    logs = q._replace(d=1, itemsize=q.accumulator.itemsize)
    room.take(LSE, logs.nbytes)  # its gradient, of zeros
    rows = [_of_queries(room, plan, x) for x in (q, q, q, logs, logs)]
    keys = [_of_keys(room, plan, k) for _ in "kv"]
    leaving = Leaving(room, plan, [*rows, *keys])
    near.look(plan.near, k, dk, dv)
    leaving.take_seats()
    desks = [
        BackwardDesk(setting, like, len(desk.kv_heads), setting.sum(like, FOUND_AT_DESKS))
        for desk, like in zip(plan.desks, rows[0].at_desks, strict=True)
    ]
    at_desks = _keys_at_desks(plan, k)
    found = go_backward(Trip(setting, plan.between, at_desks), desks)
    room.begin("back home")
    for column in keys:
        column.give()
    own = dk.summed(), dv.summed()
    like = q if plan.is_final else q.accumulator
    answers = room.take(DQ, like.nbytes)
    results = [desk.dq.result() for desk in desks]
    rounded = [_like(room, one, desk.q.vectors * q.d * like.itemsize) for one, desk in zip(results, desks, strict=True)]
    for one in results:
        one.give()
    for column in rows:
        column.give()
    raised = [_like(room, one, at_desks.accumulator.nbytes) for one in found]
    for one in found:
        one.give()
    columns = [_column_of_queries(plan, like), *(_column_of_keys(plan, k.accumulator) for _ in "kv")]
    come_back(room, plan, columns)
    for one in (*rounded, *raised):
        one.give()
    if not plan.near:
        return answers, *own
    total = dq.summed()
    answers.give()
    return total, *own


# --------------------------------------------------------------------------------------- changing places


class Column(NamedTuple):
    """One tensor in both of its places."""

    deliveries: Callable[[int, int], Delivery]
    at_home: Like
    at_desks: list[Like]
    heads_read: int  # by all places together: a kv head goes to every place that reads it
    taken: tuple[Taken, ...] = ()  # what it takes at the desks

    @property
    def vector(self) -> int:
        return self.at_home.d * self.at_home.itemsize

    def give(self) -> None:
        for one in self.taken:
            one.give()

    @property
    def all_at_home(self) -> int:
        """Bytes of all rows at home, for all who read them."""
        return self.at_home.nbytes * self.heads_read // self.at_home.heads

    @property
    def all_at_desks(self) -> int:
        return sum(like.nbytes for like in self.at_desks)

    def at(self, delivery: Delivery) -> int:
        return delivery.vectors * self.vector

    def leaving_home(self, room: Room, delivery: Delivery) -> Taken:
        return self._joined(room, delivery, lambda piece: (self.at_home, piece.rows, piece.heads))

    def leaving_desks(self, room: Room, delivery: Delivery) -> Taken:
        return self._joined(room, delivery, lambda piece: (self.at_desks[piece.desk], piece.at, piece.heads))

    def _joined(self, room: Room, delivery: Delivery, place: Callable[[Piece], tuple[Like, range, range]]) -> Taken:
        parts = []
        for piece in delivery.pieces:
            x, rows, heads = place(piece)
            parts.append((piece.vectors, lies_together(x, piece.batch, rows, heads)))
        return copied(room, SENT, parts, self.vector)


def _of_queries(room: Room, plan: ByHeads, x: Like) -> Column:
    column = _column_of_queries(plan, x)
    return column._replace(taken=tuple(room.take(AT_DESKS, like.nbytes) for like in column.at_desks))


def _of_keys(room: Room, plan: ByHeads, x: Like) -> Column:
    column = _column_of_keys(plan, x)
    return column._replace(taken=tuple(room.take(KEYS_AT_DESKS, like.nbytes) for like in column.at_desks))


def _column_of_queries(plan: ByHeads, x: Like) -> Column:
    desks = [x._replace(rows=size(desk.queries), heads=len(desk.heads)) for desk in plan.desks]
    return Column(plan.queries, x, desks, x.heads)


def _column_of_keys(plan: ByHeads, x: Like) -> Column:
    read = sum(len(kv_heads_at(plan.task, plan.inner, place)) for place in range(plan.inner))
    return Column(plan.keys, x, [_keys_at_desks(plan, x)], read)


def _keys_at_desks(plan: ByHeads, x: Like) -> Like:
    return x._replace(rows=plan.key_rows, heads=len(plan.kv_heads))


class Leaving:
    """Rows on their way to the desks that ask for them."""

    def __init__(self, room: Room, plan: ByHeads, columns: Sequence[Column]) -> None:
        room.begin("to desks")
        self._room, self._plan, self._columns = room, plan, columns
        others, rank = plan.others, plan.rank
        if len(others) > MOST_PEERS:
            self._under_way = [room.take(SENT, c.all_at_home) for c in columns]
            self._under_way += [room.take(RECEIVED, c.all_at_desks) for c in columns]
            return
        self._under_way = [c.leaving_home(room, given) for other in others for c, given in _some(columns, rank, other)]
        self._under_way += [
            room.take(RECEIVED, c.at(given)) for other in others for c, given in _some(columns, other, rank)
        ]

    def take_seats(self) -> None:
        for column, own in _some(self._columns, self._plan.rank, self._plan.rank):
            column.leaving_home(self._room, own).give()
        for one in self._under_way:
            one.give()


def come_back(room: Room, plan: ByHeads, columns: Sequence[Column]) -> None:
    """What desks found goes to where the rows came from."""
    others, rank = plan.others, plan.rank
    if len(others) > MOST_PEERS:
        under_way = [room.take(SENT, c.all_at_desks) for c in columns]
        under_way += [room.take(RECEIVED, c.all_at_home) for c in columns]
    else:
        under_way = [c.leaving_desks(room, lent) for other in others for c, lent in _some(columns, other, rank)]
        under_way += [room.take(RECEIVED, c.at(lent)) for other in others for c, lent in _some(columns, rank, other)]
    for column, own in _some(columns, plan.rank, plan.rank):
        column.leaving_desks(room, own).give()
    for one in under_way:
        one.give()


def _some(columns: Sequence[Column], owner: int, desk: int) -> Iterator[tuple[Column, Delivery]]:
    for column in columns:
        delivery = column.deliveries(owner, desk)
        if delivery.pieces:
            yield column, delivery
