"""How many bytes each rank sends, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..geometry.itinerary import Post
from ..geometry.plans import plan
from ..geometry.task import Task

LOG = 8  # bytes of an lse that is still to be merged

# Bytes of one vector of d numbers and what goes with it, by kind of parcel: (d, item, accumulator) -> bytes.
BYTES: dict[str, Callable[[int, int, int], int]] = {
    "rows": lambda d, item, total: 2 * d * item,  # k and v
    "gradients": lambda d, item, total: 2 * d * total,  # dk and dv
    "queries": lambda d, item, total: d * item,
    "keys": lambda d, item, total: 2 * d * item,
    "answers": lambda d, item, total: d * item + total,  # out and lse
    "partial answers": lambda d, item, total: d * total + LOG,
    "queries and gradients": lambda d, item, total: 3 * d * item + 2 * total,  # q, dout, out, lse, dlse
    "query gradients": lambda d, item, total: d * item,
    "partial gradients": lambda d, item, total: d * total,
}


def forward_bytes(
    task: Task, schedule: str, rank: int, *, head_dim: int, itemsize: int, node_ranks: int | None = None
) -> int:
    """What `rank` sends in the forward pass."""
    posts = plan(schedule, task, rank, node_ranks).forward()
    return sum(bytes_of(post, head_dim, itemsize) for post in posts)


def backward_bytes(
    task: Task, schedule: str, rank: int, *, head_dim: int, itemsize: int, node_ranks: int | None = None
) -> int:
    """What `rank` sends in the backward pass: keys and values once more, and gradients in at least float32."""
    posts = plan(schedule, task, rank, node_ranks).backward()
    return sum(bytes_of(post, head_dim, itemsize) for post in posts)


def bytes_of(post: Post[Any], head_dim: int, itemsize: int) -> int:
    """What one post sends."""
    accumulator = max(4, itemsize)
    return sum(parcel.vectors * BYTES[parcel.kind](head_dim, itemsize, accumulator) for _, parcel in post.sends)
