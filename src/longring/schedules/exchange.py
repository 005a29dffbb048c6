"""Exchange: the rows a rank's tiles name come straight from their owner, and their gradients go straight back.

While the tiles of one source are computed, the rows of the next are on their way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ..geometry.itinerary import Parcel, Stop
from ..geometry.tiles import Tile
from ..kernels.contract import Gradients, Upstream, no_gradients, with_other_keys
from ..numerics.online_softmax import Partial, accumulator_dtype, nothing_seen
from ..transport.contract import Pending
from .contract import Journey, Schedule
from .parcels import add_parcel, empty_parcel, pack, unpack


def forward(journey: Journey, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    total: Partial | None = None
    for visit in visits(journey, k, v, phase="forward"):
        if visit.tiles:
            total = journey.kernel.forward(q, visit.k, visit.v, visit.tiles, scale=journey.scale, total=total)
    return nothing_seen(q) if total is None else total


def backward(journey: Journey, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    own: Gradients | None = None
    returning: Returning | None = None
    for visit in visits(journey, k, v, phase="backward"):
        if own is None:
            own = _own_gradients(journey, upstream, q, k, v, visit)
            continue
        found = with_other_keys(own.dq, visit.k)
        if visit.tiles:
            found = journey.kernel.backward(
                upstream, q, visit.k, visit.v, visit.tiles, scale=journey.scale, total=found
            )
        if returning is not None:
            returning.add_to(own)
        returning = send_back(journey, visit.stop, found, k)
    assert own is not None  # the first stop is at home
    if returning is not None:
        returning.add_to(own)
    return own


class Visit(NamedTuple):
    """A source's rows at hand, and the tiles as seen through them."""

    stop: Stop
    tiles: tuple[Tile, ...]
    k: Tensor
    v: Tensor


def visits(journey: Journey, k: Tensor, v: Tensor, *, phase: str) -> Iterator[Visit]:
    """Every stop with the rows its tiles need, own first; those of the next stop are under way meanwhile."""
    home, *abroad = journey.itinerary
    arriving = _ask(journey, abroad[0], k, v, phase) if abroad else None
    yield Visit(home, home.tiles, k, v)
    for number, stop in enumerate(abroad, start=1):
        assert arriving is not None
        their_k, their_v = arriving.open(k)
        arriving = _ask(journey, abroad[number], k, v, phase) if number < len(abroad) else None
        yield Visit(stop, _through_frame(stop), their_k, their_v)


def _through_frame(stop: Stop) -> tuple[Tile, ...]:
    if stop.receives is None:
        return ()
    frame = stop.receives.frame
    return tuple(tile.seen_through(frame) for tile in stop.tiles)


class Arriving(NamedTuple):
    pending: Pending
    parcel: Parcel | None
    flat: list[Tensor]

    def open(self, k: Tensor) -> tuple[Tensor, Tensor]:
        self.pending.wait()
        if self.parcel is None:
            return k[:, :0], k[:, :0]
        their_k, their_v = (unpack(flat, self.parcel, k.shape[0], k.shape[2]) for flat in self.flat)
        return their_k, their_v


def _ask(journey: Journey, stop: Stop, k: Tensor, v: Tensor, phase: str) -> Arriving:
    sends = []
    if stop.sends is not None:
        sends = [(stop.sends.receiver, pack(x, stop.sends, range(x.shape[1]))) for x in (k, v)]
    flat = [] if stop.receives is None else [empty_parcel(k, stop.receives, k.dtype) for _ in range(2)]
    receives = [] if stop.receives is None else [(stop.receives.sender, buffer) for buffer in flat]
    what = f"{phase}, rows of rank {stop.source}"
    pending = journey.post(sends, receives, what)
    return Arriving(pending, stop.receives, flat)


def _own_gradients(journey: Journey, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor, visit: Visit) -> Gradients:
    if not visit.tiles:
        return no_gradients(q, k)
    return journey.kernel.backward(upstream, q, k, v, visit.tiles, scale=journey.scale)


class Returning(NamedTuple):
    """Gradients of visiting rows on their way home, and those of our rows on their way here."""

    pending: Pending
    parcel: Parcel | None
    flat: list[Tensor]

    def add_to(self, own: Gradients) -> None:
        self.pending.wait()
        if self.parcel is not None:
            for mine, brought in zip((own.dk, own.dv), self.flat, strict=True):
                add_parcel(mine, brought, self.parcel)


def send_back(journey: Journey, stop: Stop, found: Gradients, k: Tensor) -> Returning:
    sends = []
    if (given := stop.gradient_sends) is not None:
        sends = [(given.receiver, pack(x, given, given.frame)) for x in (found.dk, found.dv)]
    expected, dtype = stop.gradient_receives, accumulator_dtype(k.dtype)
    flat = [] if expected is None else [empty_parcel(k, expected, dtype) for _ in range(2)]
    receives = [] if expected is None else [(expected.sender, buffer) for buffer in flat]
    what = f"backward, gradients of rank {stop.source}'s rows"
    pending = journey.post(sends, receives, what)
    return Returning(pending, expected, flat)


EXCHANGE = Schedule(forward, backward)
