"""What changing places by heads holds: every tensor in both of its places, and what travels between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ...geometry.heads import ByHeads
from ...geometry.layouts import size
from ...geometry.parcels import Delivery, Piece
from .desk import BackwardDesk, Desk, Setting
from .packing import copied, lies_together
from .relay import DK, DV, Trip, go_backward, go_forward
from .room import Like, Room, Taken
from .totals import LOG, LSE, OUT, merge

AT_DESKS, KEYS_AT_DESKS = "queries at desks", "K/V at desks"
FOUND_AT_DESKS = "results at desks"
SENT, RECEIVED = "leaving for desks or home", "arriving at desks or home"
DQ = "dq"


def forward(setting: Setting, plan: ByHeads, q: Like, k: Like) -> None:
    room = setting.room
    near = Desk(setting, q, k.heads, setting.seen(q))
    if plan.far is None:
        near.look(plan.near, k)
        near.total.result()
        return
    columns = [_of_queries(room, plan, q), _of_keys(room, plan, k), _of_keys(room, plan, k)]
    leaving = Leaving(room, plan, columns)
    near.look(plan.near, k)
    leaving.take_seats()
    desks = []
    for desk, like in zip(plan.desks, columns[0].at_desks, strict=True):
        desks.append(Desk(setting, like, len(desk.kv_heads), setting.seen(like)))
    go_forward(Trip(setting, plan.between, _keys_at_desks(plan, k)), desks)
    room.begin("back home")
    answers = _nothing_answered(room, plan, q)
    for desk in desks:
        total = desk.total.result()
        room.take(FOUND_AT_DESKS, desk.q.vectors * desk.q.d * answers[0].itemsize if plan.is_final else 0)
        del total
    home = [_back_of_queries(plan, one) for one in answers]
    come_back(room, plan, home)
    if not near.total.is_empty:
        near.total.in_place()
        merge(room, q.vectors, q.accumulator.itemsize)


def _nothing_answered(room: Room, plan: ByHeads, q: Like) -> tuple[Like, Like]:
    """out and lse of rows that saw nothing, which answers are laid into."""
    sums, logs = q.accumulator, q._replace(d=1, itemsize=LOG)
    out = room.take(OUT, sums.nbytes)
    lse = room.take(LSE, logs.nbytes)
    if not plan.is_final:
        room.briefly(LSE, logs.nbytes)  # made contiguous the other way round
        return sums, logs
    if q.itemsize != sums.itemsize:
        room.take(OUT, q.nbytes)
        out.give()
    rounded = q._replace(d=1, itemsize=sums.itemsize)
    room.take(LSE, rounded.nbytes)
    lse.give()
    return q, rounded


def backward(setting: Setting, plan: ByHeads, q: Like, k: Like) -> None:
    room = setting.room
    sums = setting.sum(q, DQ), setting.sum(k, DK), setting.sum(k, DV)
    near = BackwardDesk(setting, q, k.heads, sums[0])
    if plan.far is None:
        near.look(plan.near, k, *sums[1:])
        for one in sums:
            one.result()
        return
    logs = q._replace(d=1, itemsize=q.accumulator.itemsize)
    room.take(LSE, logs.nbytes)  # its gradient, of zeros
    columns = [_of_queries(room, plan, x) for x in (q, q, q, logs, logs)]
    columns += [_of_keys(room, plan, k) for _ in "kv"]
    leaving = Leaving(room, plan, columns)
    near.look(plan.near, k, *sums[1:])
    leaving.take_seats()
    desks = []
    for desk, like in zip(plan.desks, columns[0].at_desks, strict=True):
        dq = setting.sum(like, FOUND_AT_DESKS)
        desks.append(BackwardDesk(setting, like, len(desk.kv_heads), dq))
    go_backward(Trip(setting, plan.between, _keys_at_desks(plan, k)), desks)
    room.begin("back home")
    for one in sums:
        one.in_place()
    like = q if plan.is_final else q.accumulator
    room.take(DQ, like.nbytes)
    for desk in desks:
        desk.dq.result()
        if like.itemsize != desk.q.accumulator.itemsize:
            room.take(FOUND_AT_DESKS, desk.q.vectors * q.d * like.itemsize)
    home = [_back_of_queries(plan, like)]
    home += [_back_of_keys(plan, k.accumulator) for _ in "kv"]
    come_back(room, plan, home)


# --------------------------------------------------------------------------------------- changing places


class Column(NamedTuple):
    """One tensor in both of its places."""

    deliveries: Callable[[int, int], Delivery]
    at_home: Like
    at_desks: list[Like]
    first_heads: list[int]

    @property
    def vector(self) -> int:
        return self.at_home.d * self.at_home.itemsize

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
    column = _back_of_queries(plan, x)
    for like in column.at_desks:
        room.take(AT_DESKS, like.nbytes)
    return column


def _of_keys(room: Room, plan: ByHeads, x: Like) -> Column:
    column = _back_of_keys(plan, x)
    for like in column.at_desks:
        room.take(KEYS_AT_DESKS, like.nbytes)
    return column


def _back_of_queries(plan: ByHeads, x: Like) -> Column:
    desks = [x._replace(rows=size(desk.queries), heads=len(desk.heads)) for desk in plan.desks]
    return Column(plan.queries, x, desks, [desk.heads.start for desk in plan.desks])


def _back_of_keys(plan: ByHeads, x: Like) -> Column:
    return Column(plan.keys, x, [_keys_at_desks(plan, x)], [plan.kv_heads.start])


def _keys_at_desks(plan: ByHeads, x: Like) -> Like:
    return x._replace(rows=plan.key_rows, heads=len(plan.kv_heads))


class Leaving:
    """Rows on their way to the desks that ask for them."""

    def __init__(self, room: Room, plan: ByHeads, columns: Sequence[Column]) -> None:
        room.begin("to desks")
        self._room, self._plan, self._columns = room, plan, columns
        others = plan.others
        self._sent = [c.leaving_home(room, given) for other in others for c, given in _some(columns, plan.rank, other)]
        self._expected = [
            room.take(RECEIVED, c.at(given)) for other in others for c, given in _some(columns, other, plan.rank)
        ]

    def take_seats(self) -> None:
        for column, own in _some(self._columns, self._plan.rank, self._plan.rank):
            column.leaving_home(self._room, own).give()
        for one in (*self._sent, *self._expected):
            one.give()


def come_back(room: Room, plan: ByHeads, columns: Sequence[Column]) -> None:
    """What desks found goes to where the rows came from."""
    others = plan.others
    sent = [c.leaving_desks(room, lent) for other in others for c, lent in _some(columns, other, plan.rank)]
    for other in others:
        for column, lent in _some(columns, plan.rank, other):
            room.take(RECEIVED, column.at(lent))
    for column, own in _some(columns, plan.rank, plan.rank):
        column.leaving_desks(room, own).give()
    for one in sent:
        one.give()


def _some(columns: Sequence[Column], owner: int, desk: int) -> Iterator[tuple[Column, Delivery]]:
    for column in columns:
        delivery = column.deliveries(owner, desk)
        if delivery.pieces:
            yield column, delivery
