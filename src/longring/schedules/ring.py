"""Ring: queries stay, keys and values travel from neighbour to neighbour, their gradients follow them home.

Besides its own, at most two blocks of K and V are on a rank: the one it computes with, which is at the
same time on its way onward, and the one that is arriving.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..geometry.itinerary import Parcel, Stop
from ..kernels.contract import Gradients, Upstream, no_gradients, with_other_keys
from ..numerics.online_softmax import Partial, accumulator_dtype, nothing_seen
from ..transport.contract import Pending
from .contract import Journey, Schedule

Block = tuple[Tensor, Tensor]


def forward(journey: Journey, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    total: Partial | None = None
    for stop, (their_k, their_v) in visitors(journey, k, v, phase="forward"):
        if stop.tiles:
            total = journey.kernel.forward(q, their_k, their_v, stop.tiles, scale=journey.scale, total=total)
    return nothing_seen(q) if total is None else total


def backward(journey: Journey, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """dQ stays; the gradients of a visiting block are added to what follows it.

    The rank's own block is computed last, while its gradients are on the last hop home.
    """
    home = journey.itinerary[0]
    if len(journey.itinerary) == 1:
        return _add_tiles(journey, upstream, q, k, v, home, None)
    dq = no_gradients(q, k[:, :0]).dq
    following = Follower(journey, k)
    for stop, (their_k, their_v) in visitors(journey, k, v, phase="backward"):
        if stop.source != home.source:
            found = _add_tiles(journey, upstream, q, their_k, their_v, stop, with_other_keys(dq, their_k))
            following.send_on(stop, found)
    own = _add_tiles(journey, upstream, q, k, v, home, with_other_keys(dq, k))
    following.add_home(own)
    return own


def _add_tiles(
    journey: Journey, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor, stop: Stop, total: Gradients | None
) -> Gradients:
    if not stop.tiles:
        return no_gradients(q, k) if total is None else total
    return journey.kernel.backward(upstream, q, k, v, stop.tiles, scale=journey.scale, total=total)


def visitors(journey: Journey, k: Tensor, v: Tensor, *, phase: str) -> Iterator[tuple[Stop, Block]]:
    """Every stop with its block, own first. A block is on its way onward while the caller computes with it."""
    buffers = _Buffers(journey, k)
    block: Block = (k, v)
    for step, stop in enumerate(journey.itinerary):
        following = journey.itinerary[step + 1] if step + 1 < len(journey.itinerary) else None
        if following is None:
            yield stop, block
            return
        arriving = buffers.block(following.receives)
        what = f"{phase}, step {step + 1} of {len(journey.itinerary) - 1}"
        pending = _post(journey, following.sends, block, following.receives, arriving, what)
        yield stop, block
        pending.wait()
        block = arriving


class Follower:
    """The gradients of the block that was here last, on their way to the next rank and in the end home.

    A rank adds its part when they arrive, behind its own computation, so that they travel while it computes.
    """

    def __init__(self, journey: Journey, k: Tensor) -> None:
        self._journey, self._k = journey, k
        self._pending: Pending | None = None
        self._arriving: Block | None = None
        self._steps = 0

    def send_on(self, stop: Stop, contribution: Gradients) -> None:
        block = (contribution.dk, contribution.dv)
        self._add_arrived(block)
        self._steps += 1
        self._arriving = self._empty(stop.gradient_receives)
        what = f"backward, gradients of step {self._steps}"
        self._pending = _post(self._journey, stop.gradient_sends, block, stop.gradient_receives, self._arriving, what)

    def add_home(self, own: Gradients) -> None:
        self._add_arrived((own.dk, own.dv))

    def _add_arrived(self, block: Block) -> None:
        if self._pending is None or self._arriving is None:
            return
        self._pending.wait()
        for ours, theirs in zip(block, self._arriving, strict=True):
            ours.add_(theirs)
        self._pending = self._arriving = None  # frees what was sent and what was added, before more is made

    def _empty(self, parcel: Parcel | None) -> Block:
        batch, _, heads, d = self._k.shape
        rows = 0 if parcel is None else len(parcel.frame)
        dtype = accumulator_dtype(self._k.dtype)
        dk, dv = (torch.empty(batch, rows, heads, d, dtype=dtype, device=self._k.device) for _ in range(2))
        return dk, dv


class _Buffers:
    """Two blocks, used in turn; made once, large enough for the longest shard."""

    def __init__(self, journey: Journey, k: Tensor) -> None:
        self._k = k
        longest = max((len(stop.receives.frame) for stop in journey.itinerary if stop.receives), default=0)
        numbers = longest * k.shape[0] * k.shape[2] * k.shape[3]
        kinds = min(2, len(journey.itinerary) - 1)
        self._flat = [[k.new_empty(numbers) for _ in range(2)] for _ in range(kinds)]
        self._turn = 0

    def block(self, parcel: Parcel | None) -> Block:
        batch, _, heads, d = self._k.shape
        rows = 0 if parcel is None else len(parcel.frame)
        k, v = (flat[: batch * rows * heads * d].view(batch, rows, heads, d) for flat in self._flat[self._turn])
        self._turn = (self._turn + 1) % len(self._flat)
        return k, v


def _post(
    journey: Journey, sent: Parcel | None, outgoing: Block, expected: Parcel | None, incoming: Block, what: str
) -> Pending:
    sends = [] if sent is None else [(sent.receiver, tensor.contiguous()) for tensor in outgoing]
    receives = [] if expected is None else [(expected.sender, buffer) for buffer in incoming]
    return journey.post(sends, receives, what)


RING = Schedule(forward, backward)
