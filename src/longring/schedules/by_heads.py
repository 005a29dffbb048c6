"""By heads: ranks change places, from some rows of all heads to all their rows of some heads, and back.

Within one node this is the all-to-all known as Ulysses. Between nodes the keys of these heads go round in a ring.
LongNet's branches that fit a rank are computed at home meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry.heads import ByHeads
from ..geometry.layouts import size
from ..geometry.parcels import Delivery, Piece
from ..kernels.contract import Gradients, Upstream
from ..kernels.totals import Sum, Sums
from ..numerics.online_softmax import Partial, accumulator_dtype, merge_, nothing_seen
from ..transport.contract import Conversation
from .contract import Journey, Schedule
from .desk import BackwardDesk, Desk
from .labels import Doing, during, posted
from .relay import Trip, go_backward, go_forward


def forward(journey: Journey, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    plan: ByHeads = journey.plan
    near = Desk(journey.kernel, journey.scale, q)
    with journey.converse("forward", q) as talk:
        columns = [_of_queries(plan, q), _of_keys(plan, k), _of_keys(plan, v)] if plan.far else []
        leaving = Leaving(plan, talk, Doing(journey, "forward", "rows by heads"), columns)
        near.look(plan.near, k, v, Doing(journey, "forward", "own branches"))
        if not columns:
            return near.seen
        leaving.take_seats()
        queries, keys, values = columns
        desks = [
            Desk(journey.kernel, journey.scale, x, _slice(desk.kv_heads, plan.kv_heads))
            for desk, x in zip(plan.desks, queries.at_desks, strict=True)
        ]
        go_forward(Trip(journey, plan.between, talk), desks, keys.at_desks[0], values.at_desks[0])
        del leaving, columns, queries, keys, values  # used up
        out, lse = _nothing_answered(plan, q)
        seen = [_like(desk.seen, out, lse) for desk in desks]
        del desks
        answers = [_of_queries(plan, x, [one[i] for one in seen]) for i, x in enumerate((out, lse))]
        come_back(plan, talk, Doing(journey, "forward", "answers by rows"), answers)
    far = Partial(out, lse.squeeze(-1).mT)
    if near.total.is_empty:
        return far
    with during("merge", Doing(journey, "forward", "own branches and answers")):
        total = near.total.in_place()
        merge_(total.out, total.lse.mT, far.out, far.lse.mT)
    return total


def backward(journey: Journey, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    plan: ByHeads = journey.plan
    sums = Sums.of(q, k)
    near = BackwardDesk(journey.kernel, journey.scale, q, upstream, sums.dq)
    with journey.converse("backward", q) as talk:
        rows = [_of_queries(plan, x) for x in (q, *_as_columns(upstream))] if plan.far else []
        keys = [_of_keys(plan, x) for x in (k, v)] if plan.far else []
        leaving = Leaving(plan, talk, Doing(journey, "backward", "rows by heads"), [*rows, *keys])
        near.look(plan.near, k, v, sums.dk, sums.dv, Doing(journey, "backward", "own branches"))
        if not rows:
            return Gradients(*(one.result() for one in sums))
        leaving.take_seats()
        desks = [
            _backward_desk(journey, _slice(desk.kv_heads, plan.kv_heads), *(column.at_desks[number] for column in rows))
            for number, desk in enumerate(plan.desks)
        ]
        found = go_backward(Trip(journey, plan.between, talk), desks, keys[0].at_desks[0], keys[1].at_desks[0])
        del leaving, rows, keys  # used up
        dk, dv = sums.dk.in_place(), sums.dv.in_place()
        dtype = q.dtype if plan.is_final else accumulator_dtype(q.dtype)
        dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        columns = [_of_queries(plan, dq, [desk.dq.result().to(dtype) for desk in desks])]
        # one that nothing was added to is in q's dtype, and what travels is in the accumulator's
        columns += [_of_keys(plan, mine, [theirs.to(mine.dtype)]) for mine, theirs in zip((dk, dv), found, strict=True)]
        del desks, found
        come_back(plan, talk, Doing(journey, "backward", "gradients by rows"), columns)
    return Gradients(sums.dq.in_place().add_(dq) if plan.near else dq, dk, dv)


def _nothing_answered(plan: ByHeads, q: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse (with one more dimension) of rows that saw nothing: rounded where desks see all there is."""
    out, lse = nothing_seen(q)
    lse = lse.mT.unsqueeze(-1)
    if plan.is_final:
        out, lse = out.to(q.dtype), lse.to(accumulator_dtype(q.dtype))
    return out, lse.contiguous()


def _like(seen: Partial, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return seen.out.to(out.dtype), seen.lse.mT.unsqueeze(-1).to(lse.dtype)


def _as_columns(upstream: Upstream) -> list[Tensor]:
    """dout and out, and as columns lse and its gradient, which every rank sends alike, whether it has one or not."""
    dout, dlse, out, lse = upstream
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    return [dout, out, lse.mT.unsqueeze(-1), dlse.to(lse.dtype).mT.unsqueeze(-1)]


def _backward_desk(
    journey: Journey, kv_heads: slice, q: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor
) -> BackwardDesk:
    gradient_of_lse = dlse.squeeze(-1).mT if dlse.any() else None  # kernels are faster without
    upstream = Upstream(dout, gradient_of_lse, out, lse.squeeze(-1).mT)
    return BackwardDesk(journey.kernel, journey.scale, q, upstream, Sum(q), kv_heads)


# --------------------------------------------------------------------------------------- changing places


class Column(NamedTuple):
    """One tensor in both of its places: a rank's rows of all heads, and all rows of the heads of its desks."""

    deliveries: Callable[[int, int], Delivery]  # what goes from a rank to another's desks
    at_home: Tensor
    at_desks: list[Tensor]
    heads: list[range]  # of each desk
    adds_up: bool  # whether several desks find a part of the same row

    def room(self, delivery: Delivery) -> Tensor:
        return self.at_home.new_empty(delivery.vectors * self.at_home.shape[3])

    def leaving_home(self, delivery: Delivery) -> Tensor:
        return torch.cat([self._home(piece).reshape(-1) for piece in delivery.pieces])

    def leaving_desks(self, delivery: Delivery) -> Tensor:
        return torch.cat([self._desk(piece).reshape(-1) for piece in delivery.pieces])

    def seat(self, delivery: Delivery, flat: Tensor) -> None:
        for piece, part in _parts(flat, delivery.pieces):
            self._desk(piece).copy_(part)

    def accept(self, delivery: Delivery, flat: Tensor) -> None:
        for piece, part in _parts(flat, delivery.pieces):
            self._home(piece).add_(part) if self.adds_up else self._home(piece).copy_(part)

    def _home(self, piece: Piece) -> Tensor:
        return self.at_home[_slice(piece.batch), _slice(piece.rows), _slice(piece.heads)]

    def _desk(self, piece: Piece) -> Tensor:
        heads = _slice(piece.heads, self.heads[piece.desk])
        return self.at_desks[piece.desk][_slice(piece.batch), _slice(piece.at), heads]


def _of_queries(plan: ByHeads, x: Tensor, at_desks: list[Tensor] | None = None) -> Column:
    """x [batch, rows, query heads, d], and what desks have of it, or room for that."""
    made = [_zeros(x, size(desk.queries), desk.heads) for desk in plan.desks] if at_desks is None else at_desks
    return Column(plan.queries, x, made, [desk.heads for desk in plan.desks], adds_up=False)


def _of_keys(plan: ByHeads, x: Tensor, at_desks: list[Tensor] | None = None) -> Column:
    """x [batch, rows, kv heads, d]; all desks of a rank share what it has of that."""
    made = [_zeros(x, plan.key_rows, plan.kv_heads)] if at_desks is None else at_desks
    return Column(plan.keys, x, made, [plan.kv_heads], adds_up=True)


def _zeros(x: Tensor, rows: int, heads: range) -> Tensor:
    return x.new_zeros(x.shape[0], rows, len(heads), x.shape[3])


class Leaving:
    """Rows on their way to the desks that ask for them."""

    def __init__(self, plan: ByHeads, talk: Conversation, doing: Doing, columns: Sequence[Column]) -> None:
        self._rank, self._columns, self._doing = plan.rank, columns, doing
        sends = [
            (other, c.leaving_home(given)) for other in plan.others for c, given in _some(columns, plan.rank, other)
        ]
        self._expected = [
            (c, given, c.room(given)) for other in plan.others for c, given in _some(columns, other, plan.rank)
        ]
        receives = [(given.sender, flat) for _, given, flat in self._expected]
        what = f"{doing.phase}, rows to the ranks that compute their heads"
        self._pending = posted(talk, sends, receives, what=what, doing=doing) if sends or receives else None

    def take_seats(self) -> None:
        with during("merge", self._doing):
            for column, own in _some(self._columns, self._rank, self._rank):
                column.seat(own, column.leaving_home(own))
        if self._pending is not None:
            self._pending.wait()
        with during("merge", self._doing):
            for column, given, flat in self._expected:
                column.seat(given, flat)
        self._pending, self._expected = None, []  # what travelled is in its place


def come_back(plan: ByHeads, talk: Conversation, doing: Doing, columns: Sequence[Column]) -> None:
    """What desks found goes to where the rows came from."""
    sends = [(other, c.leaving_desks(lent)) for other in plan.others for c, lent in _some(columns, other, plan.rank)]
    expected = [(c, lent, c.room(lent)) for other in plan.others for c, lent in _some(columns, plan.rank, other)]
    receives = [(lent.receiver, flat) for _, lent, flat in expected]
    what = f"{doing.phase}, what was found for the rows of each rank"
    pending = posted(talk, sends, receives, what=what, doing=doing) if sends or receives else None
    with during("merge", doing):
        for column, own in _some(columns, plan.rank, plan.rank):
            column.accept(own, column.leaving_desks(own))
    if pending is not None:
        pending.wait()
    with during("merge", doing):
        for column, lent, flat in expected:
            column.accept(lent, flat)


def _some(columns: Sequence[Column], owner: int, desk: int) -> list[tuple[Column, Delivery]]:
    """What of each column an owner gives to a rank's desks, where it gives anything."""
    found = ((column, column.deliveries(owner, desk)) for column in columns)
    return [(column, delivery) for column, delivery in found if delivery.pieces]


def _parts(flat: Tensor, pieces: tuple[Piece, ...]) -> list[tuple[Piece, Tensor]]:
    width = flat.numel() // sum(piece.vectors for piece in pieces)
    parts = flat.split([piece.vectors * width for piece in pieces])
    return [
        (piece, part.view(len(piece.batch), len(piece.rows), len(piece.heads), width))
        for piece, part in zip(pieces, parts, strict=True)
    ]


def _slice(r: range, within: range = range(1)) -> slice:
    """A range as a slice, counted from where `within` begins."""
    first = r.start - within.start
    return slice(first, first + (len(r) - 1) * r.step + 1 if r else first, r.step)


BY_HEADS = Schedule(forward, backward)
