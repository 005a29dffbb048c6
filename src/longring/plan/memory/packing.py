"""What it takes to pack rows: nothing where they lie behind each other already."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...geometry.parcels import Parcel
from .room import Like, Room, Taken

Parts = Sequence[tuple[int, bool]]
"""Of so many vectors each, and whether they are a view."""


def packs(room: Room, component: str, x: Like, parcel: Parcel, within: range) -> Callable[[], Taken]:
    """Takes the copy that is sent, if the parcel's rows of x are not sent as they lie: of keys, and again of values.

    Row i of x is row within[i].
    """
    parts: list[tuple[int, bool]] = []
    for share in parcel.shares:
        batch, heads = share.batch, share.kv_heads
        for some in share.rows:
            rows = range(within.index(some[0]), within.index(some[-1]) + 1, max(1, some.step // within.step))
            parts.append((len(batch) * len(rows) * len(heads), lies_together(x, batch, rows, heads)))
    return lambda: copied(room, component, parts, x.d * x.itemsize, joins_one=False)


def copied(room: Room, component: str, parts: Parts, vector: int, *, joins_one: bool = True) -> Taken:
    """Parts, each copied unless it is a view, then joined; `joins_one`: even a single one."""
    apart = sum([size for size, is_view in parts if not is_view]) * vector
    if len(parts) == 1 and not joins_one:
        return room.take(component, apart)
    with room.take(component, apart):
        return room.take(component, sum([size for size, _ in parts]) * vector)


def lies_together(x: Like, batch: range, rows: range, heads: range) -> bool:
    """Whether x[batch, rows, heads] is one stretch of memory."""
    many, height, width = len(batch), len(rows), len(heads)
    return (
        (width <= 1 or heads.step == 1)
        and (height <= 1 or x.heads * rows.step == width)
        and (many <= 1 or x.rows * x.heads * batch.step == height * width)
    )


def is_one_block(parcel: Parcel, x: Like) -> bool:
    """Whether the parcel is the same rows of every batch row and head, so that it lies in place as it is."""
    share, *others = parcel.shares
    every = (len(share.batch), len(share.kv_heads)) == (x.batch, x.heads)
    return not others and len(share.rows) == 1 and every
