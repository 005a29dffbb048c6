"""Gather: every rank collects all keys and values, then computes alone; gradients are scattered and summed.

The classic collective. It holds all n keys and values on every rank, and in the backward their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..geometry.itinerary import Stop
from ..geometry.layouts import Shard
from ..kernels.contract import Gradients, Upstream, no_gradients
from ..numerics.online_softmax import Partial, accumulator_dtype, nothing_seen
from ..transport.contract import Pending, Transport
from .contract import Journey, Schedule


def forward(journey: Journey, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    all_k, all_v = _gathered(journey, k, v, phase="forward")
    tiles = journey.itinerary[-1].tiles
    if not tiles:
        return nothing_seen(q)
    return journey.kernel.forward(q, all_k, all_v, tiles, scale=journey.scale)


def backward(journey: Journey, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    all_k, all_v = _gathered(journey, k, v, phase="backward")
    tiles = journey.itinerary[-1].tiles
    if tiles:
        found = journey.kernel.backward(upstream, q, all_k, all_v, tiles, scale=journey.scale)
    else:
        found = no_gradients(q, all_k)
    return _scattered(journey, found, k)


def collect(
    transport: Transport,
    local: list[Tensor],
    shards: tuple[Shard, ...],
    *,
    what: str,
    terms: Mapping[str, object] | None = None,
    timeout: float | None = None,
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
        talk = transport.converse(terms or {}, timeout=timeout)
        pending = talk.post(sends, receives, what=f"{what}, rows of rank {source}")
        return pending, blocks, shards[source]

    arriving = ask(1) if size > 1 else None
    for step in range(1, size):
        assert arriving is not None
        pending, blocks, shard = arriving
        pending.wait()
        arriving = ask(step + 1) if step + 1 < size else None
        place_rows(whole, blocks, shard)
    return whole


def _gathered(journey: Journey, k: Tensor, v: Tensor, *, phase: str) -> list[Tensor]:
    shards = journey.task.keys.shards
    return collect(journey.transport, [k, v], shards, what=phase, terms=journey.terms, timeout=journey.timeout)


def _scattered(journey: Journey, found: Gradients, k: Tensor) -> Gradients:
    """Each rank's rows of dK and dV, summed over the ranks in a fixed order."""
    shards, dtype = journey.task.keys.shards, accumulator_dtype(k.dtype)
    own = [take_rows(x, shards[journey.transport.rank]) for x in (found.dk, found.dv)]
    for stop in journey.itinerary[:-1]:
        brought = [torch.empty(k.shape, dtype=dtype, device=k.device) for _ in range(2)]
        _swap(journey, stop, [take_rows(x, shards[stop.source]) for x in (found.dk, found.dv)], brought)
        for mine, theirs in zip(own, brought, strict=True):
            if stop.gradient_receives is not None:
                mine.add_(theirs)
    return Gradients(found.dq, *own)


def _swap(journey: Journey, stop: Stop, given: list[Tensor], brought: list[Tensor]) -> None:
    sends = [] if stop.gradient_sends is None else [(stop.gradient_sends.receiver, x) for x in given]
    receives = [] if stop.gradient_receives is None else [(stop.gradient_receives.sender, x) for x in brought]
    what = f"backward, gradients of rank {stop.source}'s rows"
    journey.post(sends, receives, what).wait()


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
