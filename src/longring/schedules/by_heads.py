"""By heads: ranks change places, from some rows of all heads to all their rows of some heads, and back.

Within one node this is the all-to-all known as Ulysses. Between nodes the keys of these heads go round in a ring.
LongNet's branches that fit a rank are computed at home meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..geometry.heads import ByHeads
from ..geometry.layouts import size
from ..geometry.parcels import Delivery, Piece
from ..kernels.contract import Gradients, Upstream, no_gradients
from ..numerics.online_softmax import Partial, accumulator_dtype, merge_, nothing_seen
from ..transport.contract import Conversation, Pending
from .contract import Journey, Schedule
from .desk import BackwardDesk, Desk
from .relay import Trip, go_backward, go_forward


def forward(journey: Journey, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    plan: ByHeads = journey.plan
    near = Desk(journey.kernel, journey.scale, q)
    with journey.converse("forward", q) as talk:
        if plan.far is None:
            near.look(plan.near, k, v, f"{journey.name}, forward, own branches")
            return near.seen
        leaving = Leaving(plan, talk, "forward", [q], [k, v])
        near.look(plan.near, k, v, f"{journey.name}, forward, own branches")
        (queries,), (their_k, their_v) = leaving.arrived()
        desks = [
            Desk(journey.kernel, journey.scale, x, _slice(desk.kv_heads, plan.kv_heads))
            for desk, x in zip(plan.desks, queries, strict=True)
        ]
        go_forward(Trip(journey, plan.between, talk), desks, their_k, their_v)
        far = _answers(plan, q)
        found = [_as(desk.seen, far) for desk in desks]
        come_back(plan, talk, "forward", far, [[part[i] for part in found] for i in range(2)], [], [])
    total = Partial(far[0], far[1].squeeze(-1).mT)
    if near.total is None:
        return total
    merge_(near.total.out, near.total.lse.mT, total.out, total.lse.mT)
    return near.total


def backward(journey: Journey, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    plan: ByHeads = journey.plan
    own = no_gradients(q, k)
    near = BackwardDesk(journey.kernel, journey.scale, q, upstream, own.dq)
    with journey.converse("backward", q) as talk:
        if plan.far is None:
            near.look(plan.near, k, v, own.dk, own.dv, f"{journey.name}, backward, own branches")
            return own
        leaving = Leaving(plan, talk, "backward", [q, *_columns(upstream)], [k, v])
        near.look(plan.near, k, v, own.dk, own.dv, f"{journey.name}, backward, own branches")
        queries, (their_k, their_v) = leaving.arrived()
        desks = [
            BackwardDesk(
                journey.kernel,
                journey.scale,
                x[0],
                _upstream(*x[1:]),
                _sums(x[0]),
                _slice(desk.kv_heads, plan.kv_heads),
            )
            for desk, *x in zip(plan.desks, *queries, strict=True)
        ]
        their_gradients = go_backward(Trip(journey, plan.between, talk), desks, their_k, their_v)
        far = torch.zeros(q.shape, dtype=q.dtype if plan.is_final else own.dq.dtype, device=q.device)
        found = [desk.dq.to(far.dtype) for desk in desks]
        come_back(plan, talk, "backward", [far], [found], [own.dk, own.dv], list(their_gradients))
    return Gradients(own.dq.add_(far) if plan.near else far, own.dk, own.dv)


def _answers(plan: ByHeads, q: Tensor) -> list[Tensor]:
    """Room for out and lse (with one more dimension), of rows that saw nothing: rounded if that is all there is."""
    nothing = nothing_seen(q)
    lse = nothing.lse.mT.unsqueeze(-1)
    if not plan.is_final:
        return [nothing.out, lse.contiguous()]
    return [nothing.out.to(q.dtype), lse.to(accumulator_dtype(q.dtype)).contiguous()]


def _as(seen: Partial, like: Sequence[Tensor]) -> list[Tensor]:
    return [seen.out.to(like[0].dtype), seen.lse.mT.unsqueeze(-1).to(like[1].dtype)]


def _columns(upstream: Upstream) -> list[Tensor]:
    """dout and out, and as columns lse and its gradient, which every rank sends alike, whether it has one or not."""
    dout, dlse, out, lse = upstream
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    return [dout, out, lse.mT.unsqueeze(-1), dlse.to(lse.dtype).mT.unsqueeze(-1)]


def _upstream(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor) -> Upstream:
    has_gradient = bool(dlse.any())
    return Upstream(dout, dlse.squeeze(-1).mT if has_gradient else None, out, lse.squeeze(-1).mT)


def _sums(x: Tensor) -> Tensor:
    return no_gradients(x, x[:, :0]).dq


# --------------------------------------------------------------------------------------- changing places


class Leaving:
    """Rows on their way to the desks that ask for them."""

    def __init__(
        self, plan: ByHeads, talk: Conversation, phase: str, queries: Sequence[Tensor], keys: Sequence[Tensor]
    ) -> None:
        self._plan, self._queries, self._keys = plan, queries, keys
        sends = [
            (other, _packed(x, delivery.pieces))
            for other in plan.others
            for delivery, tensors in self._between(plan.rank, other)
            for x in tensors
        ]
        self._expected = [
            (delivery, [_room(x, delivery) for x in tensors])
            for other in plan.others
            for delivery, tensors in self._between(other, plan.rank)
        ]
        receives = [(delivery.sender, flat) for delivery, flats in self._expected for flat in flats]
        self._pending = _post(talk, sends, receives, f"{phase}, rows to the ranks that compute their heads")

    def _between(self, sender: int, receiver: int) -> list[tuple[Delivery, Sequence[Tensor]]]:
        both = (self._plan.queries(sender, receiver), self._queries), (self._plan.keys(sender, receiver), self._keys)
        return [(delivery, tensors) for delivery, tensors in both if delivery.pieces]

    def arrived(self) -> tuple[list[list[Tensor]], list[Tensor]]:
        """(every query-like tensor by desk, every key-like tensor)."""
        plan = self._plan
        by_desk = [[_at_desk(x, size(desk.queries), desk.heads) for desk in plan.desks] for x in self._queries]
        together = [_at_desk(x, plan.key_rows, plan.kv_heads) for x in self._keys]
        for delivery, tensors in self._between(plan.rank, plan.rank):
            self._seat(delivery, [_packed(x, delivery.pieces) for x in tensors], by_desk, together)
        if self._pending is not None:
            self._pending.wait()
        for delivery, flats in self._expected:
            self._seat(delivery, flats, by_desk, together)
        return by_desk, together

    def _seat(
        self, delivery: Delivery, flats: Sequence[Tensor], by_desk: list[list[Tensor]], together: list[Tensor]
    ) -> None:
        for number, flat in enumerate(flats):
            for piece, part in _parts(flat, delivery.pieces):
                if delivery.kind == "queries":
                    into, heads = by_desk[number][piece.desk], self._plan.desks[piece.desk].heads
                else:
                    into, heads = together[number], self._plan.kv_heads
                _place(into, piece, piece.at, heads).copy_(part)


def come_back(
    plan: ByHeads,
    talk: Conversation,
    phase: str,
    rows: Sequence[Tensor],
    found_rows: Sequence[Sequence[Tensor]],
    keys: Sequence[Tensor],
    found_keys: Sequence[Tensor],
) -> None:
    """What desks found goes to where the rows came from: of queries it is placed, of keys it is added up."""

    def between(owner: int, desk: int) -> list[tuple[Delivery, Sequence[Tensor], Sequence[object]]]:
        both = (plan.queries(owner, desk), rows, found_rows), (plan.keys(owner, desk), keys, found_keys)
        return [(delivery, mine, found) for delivery, mine, found in both if delivery.pieces and mine]

    def packed(delivery: Delivery, found: object) -> Tensor:
        if delivery.kind == "queries":
            assert isinstance(found, (list, tuple))
            parts = [_place(found[p.desk], p, p.at, plan.desks[p.desk].heads).reshape(-1) for p in delivery.pieces]
        else:
            assert isinstance(found, Tensor)
            parts = [_place(found, p, p.at, plan.kv_heads).reshape(-1) for p in delivery.pieces]
        return torch.cat(parts)

    def accept(delivery: Delivery, mine: Tensor, flat: Tensor) -> None:
        for piece, part in _parts(flat, delivery.pieces):
            place = _place(mine, piece, piece.rows, range(mine.shape[2]))
            place.copy_(part) if delivery.kind == "queries" else place.add_(part)

    sends = [
        (other, packed(delivery, x))
        for other in plan.others
        for delivery, _, found in between(other, plan.rank)
        for x in found
    ]
    expected = [
        (delivery, mine, [_room(x, delivery) for x in mine])
        for other in plan.others
        for delivery, mine, _ in between(plan.rank, other)
    ]
    receives = [(delivery.receiver, flat) for delivery, _, flats in expected for flat in flats]
    pending = _post(talk, sends, receives, f"{phase}, what was found for the rows of each rank")
    for delivery, mine, found in between(plan.rank, plan.rank):
        for x, y in zip(mine, found, strict=True):
            accept(delivery, x, packed(delivery, y))
    if pending is not None:
        pending.wait()
    for delivery, mine, flats in expected:
        for x, flat in zip(mine, flats, strict=True):
            accept(delivery, x, flat)


def _post(
    talk: Conversation, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], what: str
) -> Pending | None:
    return talk.post(sends, receives, what=what) if sends or receives else None


def _at_desk(x: Tensor, rows: int, heads: range) -> Tensor:
    return x.new_zeros(x.shape[0], rows, len(heads), x.shape[3])


def _room(x: Tensor, delivery: Delivery) -> Tensor:
    return x.new_empty(delivery.vectors * x.shape[3])


def _packed(x: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
    return torch.cat([_place(x, piece, piece.rows, range(x.shape[2])).reshape(-1) for piece in pieces])


def _parts(flat: Tensor, pieces: tuple[Piece, ...]) -> list[tuple[Piece, Tensor]]:
    width = flat.numel() // sum(piece.vectors for piece in pieces)
    parts = flat.split([piece.vectors * width for piece in pieces])
    return [
        (piece, part.view(len(piece.batch), len(piece.rows), len(piece.heads), width))
        for piece, part in zip(pieces, parts, strict=True)
    ]


def _place(x: Tensor, piece: Piece, rows: range, heads: range) -> Tensor:
    """The piece's part of x, whose rows are numbered from 0 and whose heads are `heads`."""
    return x[_slice(piece.batch), _slice(rows), _slice(piece.heads, heads)]


def _slice(r: range, within: range = range(1)) -> slice:
    first = r.start - within.start
    return slice(first, first + (len(r) - 1) * r.step + 1 if r else first, r.step)


BY_HEADS = Schedule(forward, backward)
