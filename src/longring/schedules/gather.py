"""Gather: every rank collects all keys and values, then computes alone; gradients are scattered and summed.

The classic collective. It holds all n keys and values on every rank, and in the backward their gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..geometry.itinerary import Gathering, Post
from ..geometry.layouts import Shard
from ..kernels.contract import Gradients, Upstream
from ..kernels.totals import Sums
from ..numerics.online_softmax import Partial, accumulator_dtype
from ..transport.contract import Conversation, Pending, Transport
from .contract import Journey, Schedule
from .desk import BackwardDesk, Desk
from .labels import Doing, during, posted


def forward(journey: Journey, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    with journey.converse("forward", q) as talk:
        all_k, all_v = _all_keys(journey, talk, "forward", k, v)
    desk = Desk(journey.kernel, journey.scale, q, is_one_look=True)
    desk.look(journey.plan.tiles, all_k, all_v, Doing(journey, "forward", "all keys"))
    with during("merge", Doing(journey, "forward", "results")):
        return desk.seen


def backward(journey: Journey, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    with journey.converse("backward", q) as talk:
        all_k, all_v = _all_keys(journey, talk, "backward", k, v)
        found = Sums.of(q, all_k)
        desk = BackwardDesk(journey.kernel, journey.scale, q, upstream, found.dq)
        desk.look(journey.plan.tiles, all_k, all_v, found.dk, found.dv, Doing(journey, "backward", "all keys"))
        return _scattered(journey, talk, Gradients(found.dq.result(), found.dk.in_place(), found.dv.in_place()), k)


def _all_keys(journey: Journey, talk: Conversation, phase: str, k: Tensor, v: Tensor) -> list[Tensor]:
    doing = Doing(journey, phase, "keys and values")
    return collect(journey.transport, talk, [k, v], journey.task.keys.shards, what=phase, doing=doing)


def collect(
    transport: Transport,
    talk: Conversation,
    local: list[Tensor],
    shards: tuple[Shard, ...],
    *,
    what: str,
    doing: Doing | None = None,
) -> list[Tensor]:
    """Whole tensors from every rank's rows of them, [batch, n, ...], in the order of their positions."""
    rank, size, batch = transport.rank, transport.size, local[0].shape[0]
    length = sum(len(r) for shard in shards for r in shard)
    whole = [x.new_empty(batch, length, *x.shape[2:]) for x in local]
    place_rows(whole, local, shards[rank])
    mine = [x.contiguous() for x in local]

    def ask(step: int) -> tuple[Pending, list[Tensor], Shard]:
        source, target = (rank - step) % size, (rank + step) % size
        rows = sum(map(len, shards[source]))
        blocks = [x.new_empty(batch, rows, *x.shape[2:]) for x in local]
        sends = [(target, x) for x in mine if x.numel()]
        receives = [(source, x) for x in blocks if x.numel()]
        said = f"{what}, rows of rank {source}"
        now = doing and doing._replace(step=step, owner=source)
        return posted(talk, sends, receives, what=said, doing=now), blocks, shards[source]

    arriving = ask(1) if size > 1 else None
    for step in range(1, size):
        assert arriving is not None
        pending, blocks, shard = arriving
        pending.wait()
        arriving = ask(step + 1) if step + 1 < size else None
        with during("merge", doing and doing._replace(step=step)):
            place_rows(whole, blocks, shard)
    return whole


def _scattered(journey: Journey, talk: Conversation, found: Gradients, k: Tensor) -> Gradients:
    """Each rank's rows of dK and dV, summed over the ranks in a fixed order."""
    shards = journey.task.keys.shards
    own = [take_rows(x, shards[journey.transport.rank]) for x in (found.dk, found.dv)]
    plan: Gathering = journey.plan
    for step, post in enumerate(plan.gradients(), 1):
        doing = Doing(journey, "backward", "gradients", step)
        _add(own, _swap(talk, post, found, shards, k, doing), doing)
    return Gradients(found.dq, *own)


def _add(own: list[Tensor], brought: list[Tensor], doing: Doing) -> None:
    with during("merge", doing):
        for mine, theirs in zip(own, brought, strict=False):
            mine.add_(theirs)


def _swap(
    talk: Conversation, post: Post, found: Gradients, shards: tuple[Shard, ...], k: Tensor, doing: Doing
) -> list[Tensor]:
    """Another rank's sums for its own rows against this rank's sums for theirs."""
    sends = [
        (parcel.receiver, take_rows(x, shards[parcel.receiver]))
        for _, parcel in post.sends
        for x in (found.dk, found.dv)
    ]
    senders = [parcel.sender for _, parcel in post.receives]
    brought = [torch.empty(k.shape, dtype=accumulator_dtype(k.dtype), device=k.device) for _ in senders for _ in "kv"]
    receives = [(sender, x) for sender in senders for x in brought]
    peers = sorted({peer for peer, _ in (*sends, *receives)})
    what = f"backward, gradients between this rank and {peers}"
    posted(talk, sends, receives, what=what, doing=doing).wait()
    return brought


def place_rows(whole: list[Tensor], local: list[Tensor], shard: Shard) -> None:
    for into, x in zip(whole, local, strict=True):
        first = 0
        for r in shard:
            into[:, r.start : r.stop : r.step] = x[:, first : first + len(r)]
            first += len(r)


def take_rows(whole: Tensor, shard: Shard) -> Tensor:
    """The shard's rows of a tensor [batch, n, ...], always as a tensor of its own."""
    parts = [whole[:, r.start : r.stop : r.step] for r in shard]
    return torch.cat(parts, dim=1) if parts else whole[:, :0].clone()


GATHER = Schedule(forward, backward)
