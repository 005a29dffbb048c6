"""Replicated: every rank asks its own keys all queries, and partial answers are merged by everybody alike.

One round of messages, each an answer of [batch, n_q, heads] vectors: p - 1 sent and received by a rank. To add up on
the way, by recursive doubling, would send log2(p) of them, one waiting for the other; where an answer is a few
kilobytes it is the waiting that costs. All ranks merge the same numbers in the same order, and so have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..geometry.replicated import Answers
from ..kernels.contract import Gradients, Upstream
from ..kernels.totals import Sums
from ..numerics.online_softmax import Partial, log_dtype, merged, nothing_seen
from ..transport.contract import Conversation
from .contract import Journey, Schedule
from .desk import BackwardDesk, Desk
from .labels import Doing, during, posted


def forward(journey: Journey, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    plan: Answers = journey.plan
    desk = Desk(journey.kernel, journey.scale, q)
    with journey.converse("forward", q) as talk:
        desk.look(plan.tiles, k, v, Doing(journey, "forward", "own keys"))
        if journey.transport.size == 1:
            return desk.seen
        told = _told(journey, talk, "forward", _in_one(desk.total.in_place()), "answers")
    with during("merge", Doing(journey, "forward", "answers")):
        return merged(*_apart(told, q.shape[3])) if len(told) else nothing_seen(q)


def backward(journey: Journey, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Queries and their gradient are everybody's: dq is the sum over all ranks, on each of them."""
    plan: Answers = journey.plan
    sums = Sums.of(q, k)
    desk = BackwardDesk(journey.kernel, journey.scale, q, upstream, sums.dq)
    with journey.converse("backward", q) as talk:
        desk.look(plan.tiles, k, v, sums.dk, sums.dv, Doing(journey, "backward", "own keys"))
        dq = sums.dq.in_place()
        if journey.transport.size > 1:
            dq = _told(journey, talk, "backward", dq.contiguous(), "gradients of queries").sum(0)
    return Gradients(dq, sums.dk.result(), sums.dv.result())


def _told(journey: Journey, talk: Conversation, phase: str, mine: Tensor, what: str) -> Tensor:
    """What every rank with something to tell has told, in order of rank: [ranks, *mine]."""
    plan: Answers = journey.plan
    told = mine.new_empty(len(plan.speakers), *mine.shape)
    places = dict(zip(plan.speakers, told, strict=True))
    if plan.rank in places:
        places[plan.rank].copy_(mine)
    for post in getattr(plan, phase)():
        sends = [(delivery.receiver, mine) for _, delivery in post.sends]
        receives = [(delivery.sender, places[delivery.sender]) for _, delivery in post.receives]
        posted(talk, sends, receives, what=f"{phase}, {what}", doing=Doing(journey, phase, what)).wait()
    return told


def _in_one(found: Partial) -> Tensor:
    """out and lse as one message, [batch, n, heads, d and as many numbers as an lse takes]."""
    lse = found.lse.mT.contiguous().unsqueeze(-1).view(found.out.dtype)
    return torch.cat((found.out, lse), -1)


def _apart(told: Tensor, d: int) -> tuple[Tensor, Tensor]:
    lse = told[..., d:].contiguous().view(log_dtype(told.device)).squeeze(-1)
    return told[..., :d], lse.mT


REPLICATED = Schedule(forward, backward)
