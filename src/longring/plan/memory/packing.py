"""What it takes to pack rows: nothing where they lie behind each other already."""

from __future__ import annotations

from collections.abc import Iterable

from ...geometry.parcels import Parcel
from .room import Like, Room, Taken


def pack(room: Room, component: str, x: Like, parcel: Parcel, within: range) -> Taken:
    """The copy that is sent, if the parcel's rows of x are not sent as they lie. Row i of x is row within[i]."""
    places = [
        (share.batch, range(within.index(rows[0]), within.index(rows[-1]) + 1, max(1, rows.step // within.step)), share)
        for share in parcel.shares
        for rows in share.rows
    ]
    sizes = [len(batch) * len(rows) * len(share.kv_heads) for batch, rows, share in places]
    views = [lies_together(x, batch, rows, share.kv_heads) for batch, rows, share in places]
    return copied(room, component, zip(sizes, views, strict=True), x.d * x.itemsize, joins_one=False)


def copied(
    room: Room, component: str, parts: Iterable[tuple[int, bool]], vector: int, *, joins_one: bool = True
) -> Taken:
    """Parts of so many vectors, each copied unless it is a view, then joined; `joins_one`: even a single one."""
    every = list(parts)
    apart = sum(size for size, is_view in every if not is_view) * vector
    if len(every) == 1 and not joins_one:
        return room.take(component, apart)
    with room.holding(component, apart):
        return room.take(component, sum(size for size, _ in every) * vector)


def lies_together(x: Like, batch: range, rows: range, heads: range) -> bool:
    """Whether x[batch, rows, heads] is one stretch of memory."""
    sizes = len(batch), len(rows), len(heads)
    strides = x.rows * x.heads * batch.step, x.heads * rows.step, heads.step
    together = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride != together:
            return False
        together *= size
    return True


def is_one_block(parcel: Parcel, x: Like) -> bool:
    """Whether the parcel is the same rows of every batch row and head, so that it lies in place as it is."""
    share, *others = parcel.shares
    every = (len(share.batch), len(share.kv_heads)) == (x.batch, x.heads)
    return not others and len(share.rows) == 1 and every
