"""How many bytes each rank sends."""

from __future__ import annotations

from collections.abc import Iterable

from ..geometry.itinerary import ITINERARIES, Parcel, Task


def forward_bytes(task: Task, schedule: str, rank: int, *, head_dim: int, itemsize: int) -> int:
    """Keys and values that `rank` sends in the forward pass."""
    return _bytes((stop.sends for stop in ITINERARIES[schedule](task, rank)), head_dim, itemsize)


def backward_bytes(task: Task, schedule: str, rank: int, *, head_dim: int, itemsize: int) -> int:
    """Keys and values once more, and their gradients in at least float32."""
    gradients = (stop.gradient_sends for stop in ITINERARIES[schedule](task, rank))
    again = forward_bytes(task, schedule, rank, head_dim=head_dim, itemsize=itemsize)
    return again + _bytes(gradients, head_dim, max(4, itemsize))


def _bytes(parcels: Iterable[Parcel | None], head_dim: int, itemsize: int) -> int:
    return sum(2 * parcel.vectors * head_dim * itemsize for parcel in parcels if parcel is not None)
