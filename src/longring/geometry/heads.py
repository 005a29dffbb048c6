"""Heads: ranks that are close to each other change places, from some rows of all heads to all their rows of some.

A *desk* is some query heads, their kv heads and the query rows they are computed for. Inside a group of `inner`
ranks every rank gets an equal part of the work: whole heads, and where these do not come out even a part of the
rows of one. A kv head goes to every rank that has a query head of it. Between groups keys travel by a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd
from typing import Any, NamedTuple

from .itinerary import HOME, Itinerary, Lane, Post, direction
from .layouts import Layout, Shard, deal, size
from .parcels import Delivery, Piece, Share, asking, needed
from .patterns import Dilated, Pattern
from .ranges import meet, moved, united
from .routes import Ring
from .task import Task, tiles_between, tiles_of
from .tiles import Tile


class Desk(NamedTuple):
    """Query heads, the kv heads they read, and the positions of the queries."""

    heads: range
    kv_heads: range
    queries: Shard

    @property
    def share(self) -> int:
        """Query heads per kv head, here."""
        return len(self.heads) // len(self.kv_heads)


# -------------------------------------------------------------------------------------- who computes what


@lru_cache(maxsize=512)
def desks(task: Task, queries: Shard, inner: int, place: int) -> tuple[Desk, ...]:
    """The desks of one of `inner` ranks that hold these queries together."""
    common = gcd(task.heads, inner)
    parts, units = inner // common, task.heads // common
    rows = deal("zigzag" if task.pattern.causal else "contiguous", max(1, size(queries)), parts)
    by_head: dict[int, list[int]] = {}
    for unit in range(place * units, (place + 1) * units):
        by_head.setdefault(unit // parts, []).append(unit % parts)
    whole = [head for head, some in by_head.items() if len(some) == parts]
    found = [Desk(heads, kv_heads, queries) for heads, kv_heads in _by_kv_heads(whole, task.share)]
    for head, some in by_head.items():
        if len(some) < parts:
            mine = _positions(queries, united(r for part in some for r in rows.shards[part]))
            kv_head = head // task.share
            found.append(Desk(range(head, head + 1), range(kv_head, kv_head + 1), mine))
    return tuple(desk for desk in found if desk.queries)


def kv_heads_at(task: Task, inner: int, place: int) -> range:
    """The kv heads of the query heads of which one of `inner` ranks computes something."""
    common = gcd(task.heads, inner)
    parts, units = inner // common, task.heads // common
    first, last = place * units // parts, ((place + 1) * units - 1) // parts
    return range(first // task.share, last // task.share + 1)


def _by_kv_heads(heads: list[int], share: int) -> Iterator[tuple[range, range]]:
    """Consecutive query heads as (heads, kv heads): parts of one kv head's, or all of several's."""
    if not heads:
        return
    at, stop = heads[0], heads[-1] + 1
    while at < stop:
        inside = at % share or stop - at < share
        end = min(stop, at - at % share + share) if inside else stop - stop % share
        yield range(at, end), range(at // share, (end - 1) // share + 1)
        at = end


def _positions(shard: Shard, rows: tuple[range, ...]) -> Shard:
    """The positions of some local rows of a shard, in the order of where pieces begin."""
    found: list[range] = []
    before = 0
    for piece in shard:
        here = (range(max(r.start - before, 0), min(r.stop - before, len(piece))) for r in rows)
        found += [piece[r.start : r.stop] for r in here if r]
        before += len(piece)
    return tuple(sorted(found, key=lambda piece: piece.start))


def joined(shards: tuple[Shard, ...], length: int) -> Shard:
    """What several ranks hold together, as few pieces."""
    pieces = [piece for shard in shards for piece in shard]
    if sum(map(len, pieces)) == length:
        return (range(length),)
    if all(piece.step == 1 for piece in pieces):
        return united(pieces)
    return tuple(sorted(pieces, key=lambda piece: piece.start))  # side by side, where they were dealt like cards


@lru_cache(maxsize=512)
def overlaps(a: Shard, b: Shard) -> tuple[tuple[range, range], ...]:
    """Positions in both, as local rows of the one and of the other. A rank asks the same for each of its peers."""
    found: list[tuple[range, range]] = []
    before_a = 0
    for x in a:
        before_b = 0
        for y in b:
            if both := meet(x, y):
                found.append((_rows(x, both, before_a), _rows(y, both, before_b)))
            before_b += len(y)
        before_a += len(x)
    return tuple(found)


def _rows(piece: range, positions: range, before: int) -> range:
    first, last = before + piece.index(positions[0]), before + piece.index(positions[-1])
    return range(first, last + 1, max(1, positions.step // piece.step))


# --------------------------------------------------------------------------------------------- near and far


@lru_cache(maxsize=64)
def near_and_far(task: Task) -> tuple[Task | None, Task | None]:
    """LongNet's branches whose segments all lie within one rank each, which need nobody, and the rest."""
    pattern = task.pattern
    apart = pattern.documents is not None or task.queries != task.keys or task.problem.offset
    if not isinstance(pattern, Dilated) or apart:
        return None, task
    near, far = pattern.only(lambda w: _fits(task, w)), pattern.only(lambda w: not _fits(task, w))
    return _with_pattern(task, near), _with_pattern(task, far)


def _with_pattern(task: Task, pattern: Pattern | None) -> Task | None:
    return None if pattern is None else replace(task, pattern=pattern)


def _fits(task: Task, w: int) -> bool:
    pieces = [piece for shard in task.keys.shards for piece in shard]
    return all(r.step == 1 and r.start % w == 0 and (r.stop % w == 0 or r.stop == task.keys.length) for r in pieces)


# ------------------------------------------------------------------------------------------------- the plan


class _BetweenNodes(Itinerary):
    """A ring of the ranks with one place in every node, each with its desks."""

    def __init__(self, node: int, lanes: tuple[Lane, ...], far: Task, at: tuple[Desk, ...]) -> None:
        super().__init__(node, lanes)
        self._far, self._desks = far, at

    def own_tiles(self, task: Task) -> tuple[tuple[Tile, ...], ...]:
        return self._tiles(task.keys.shards[self.member])

    def guest_tiles(self, lane: Lane, owner: int, step: int) -> tuple[tuple[Tile, ...], ...]:
        return self._tiles(lane.task.keys.shards[owner])

    def _tiles(self, keys: Shard) -> tuple[tuple[Tile, ...], ...]:
        return tuple(_tiles_at(self._far, desk, keys) for desk in self._desks)


@lru_cache(maxsize=256)
def _lane_between(task: Task, inner: int, place: int) -> Lane:
    """One for the ranks with this place in all nodes, since it remembers what they ask."""
    return Lane(0, task, task, Ring(task.ranks, direction(task)), (inner, place))


_tiles_of_all_heads = lru_cache(maxsize=256)(tiles_of)  # the same for every rank with the same rows


@lru_cache(maxsize=512)
def _tiles_at(task: Task, desk: Desk, keys: Shard) -> tuple[Tile, ...]:
    """Tiles of the desk's heads alone, its first kv head numbered 0."""
    return of_heads(_tiles_of_all_heads(task, desk.queries, keys), desk.kv_heads)


@lru_cache(maxsize=512)
def _keys_seen(task: Task, at: tuple[Desk, ...], keys: Shard) -> tuple[Share, ...]:
    """What some desks see of these keys, by global kv heads: everybody who has some of them asks."""
    tiles = (
        tile.part(tile.batch, moved(tile.kv_heads, desk.kv_heads.start))
        for desk in at
        for tile in _tiles_at(task, desk, keys)
    )
    return needed(tuple(tiles))


def of_heads(tiles: tuple[Tile, ...], kv_heads: range) -> tuple[Tile, ...]:
    """What some kv heads, numbered from their first, have of tiles of all."""
    found = ((tile, meet(tile.kv_heads, kv_heads)) for tile in tiles)
    return tuple(tile.part(tile.batch, moved(heads, -kv_heads.start)) for tile, heads in found if heads)


@dataclass(frozen=True)
class ByHeads:
    """One rank's plan: change places inside the node, go round between nodes, change places back."""

    task: Task
    rank: int
    inner: int

    @property
    def node(self) -> int:
        return self.rank // self.inner

    @property
    def place(self) -> int:
        return self.rank % self.inner

    @property
    def members(self) -> range:
        return range(self.node * self.inner, (self.node + 1) * self.inner)

    @cached_property
    def near(self) -> tuple[Tile, ...]:
        """What the rank computes at home, of all heads."""
        near, _ = near_and_far(self.task)
        return () if near is None else tiles_between(near, self.rank, self.rank)

    @cached_property
    def far(self) -> Task | None:
        return near_and_far(self.task)[1]

    @cached_property
    def is_final(self) -> bool:
        """Whether desks see all of a row's keys, so that what comes back is rounded there, once."""
        return near_and_far(self.task)[0] is None

    @cached_property
    def nodes(self) -> tuple[Layout, Layout]:
        """(queries, keys) that the ranks of each node hold together."""
        return _by_nodes(self.task.queries, self.inner), _by_nodes(self.task.keys, self.inner)

    def desks_of(self, place: int) -> tuple[Desk, ...]:
        if self.far is None:
            return ()
        return desks(self.far, self.nodes[0].shards[self.node], self.inner, place)

    @cached_property
    def desks(self) -> tuple[Desk, ...]:
        return self.desks_of(self.place)

    @cached_property
    def kv_heads(self) -> range:
        """The kv heads of this place, in every node the same, whether or not anybody asks there."""
        return kv_heads_at(self.task, self.inner, self.place)

    @cached_property
    def key_rows(self) -> int:
        """Key rows of the node."""
        return self.nodes[1].sizes[self.node]

    @cached_property
    def between(self) -> Itinerary:
        far, (queries, keys) = self.far or self.task, self.nodes
        problem = replace(far.problem, kv_heads=len(self.kv_heads))
        around = Task(far.pattern, problem, queries, keys)
        return _BetweenNodes(self.node, (_lane_between(around, self.inner, self.place),), far, self.desks)

    # ---- who gives what to whom inside the node

    def queries(self, sender: int, receiver: int) -> Delivery:
        """Rows of the sender's queries for the desks of the receiver: those that see something."""
        return self._known("queries", self._query_pieces, sender, receiver)

    def keys(self, sender: int, receiver: int) -> Delivery:
        """Rows of the sender's keys for the desks of the receiver; all of them where they travel on."""
        return self._known("keys", self._key_pieces, sender, receiver)

    def _known(self, kind: str, pieces: Callable[[int, int], Iterator[Piece]], sender: int, receiver: int) -> Delivery:
        place = kind, sender, receiver
        if place not in self._deliveries_made:
            self._deliveries_made[place] = Delivery(sender, receiver, tuple(pieces(sender, receiver)), kind)
        return self._deliveries_made[place]

    @cached_property
    def _deliveries_made(self) -> dict[tuple[str, int, int], Delivery]:
        return {}

    def _query_pieces(self, sender: int, receiver: int) -> Iterator[Piece]:
        shard = self.task.queries.shards[sender]
        for number, desk in enumerate(self.desks_of(receiver % self.inner)):
            common = overlaps(shard, desk.queries)
            for share in self.asking(desk):
                for heads in _query_heads(desk, share.kv_heads):
                    for rows, at in _cut(common, share.rows):
                        yield Piece(number, share.batch, heads, rows, at)

    def _key_pieces(self, sender: int, receiver: int) -> Iterator[Piece]:
        shard, together = self.task.keys.shards[sender], self.nodes[1].shards[self.node]
        common = overlaps(shard, together)
        for share in self.keys_wanted(receiver % self.inner):
            for rows, at in _cut(common, share.rows):
                yield Piece(0, share.batch, share.kv_heads, rows, at)

    def asking(self, desk: Desk) -> tuple[Share, ...]:
        """Rows of the desk that take part; where keys come from several nodes, all."""
        if self._one_node:
            return asking(_tiles_at(self._far_task, desk, self.nodes[1].shards[0]))
        rows = size(desk.queries)
        return (Share(range(self.task.problem.batch), range(len(desk.kv_heads)), (range(rows),)),)

    def keys_wanted(self, place: int) -> tuple[Share, ...]:
        """Rows of the node's keys, by global kv heads."""
        if self._one_node:
            return _keys_seen(self._far_task, self.desks_of(place), self.nodes[1].shards[0])
        rows = (range(self.key_rows),) if self.key_rows else ()
        return (Share(range(self.task.problem.batch), kv_heads_at(self.task, self.inner, place), rows),)

    @property
    def _one_node(self) -> bool:
        return self.inner == self.task.ranks

    @property
    def _far_task(self) -> Task:
        assert self.far is not None
        return self.far

    # ---- what is posted

    def forward(self) -> Iterator[Post[Any]]:
        if self.far is None:
            return
        yield from _if_any(self._change_places("queries", "keys"))
        yield from self.between.forward()
        yield from _if_any(self._change_back("answers" if self.is_final else "partial answers"))

    def backward(self) -> Iterator[Post[Any]]:
        if self.far is None:
            return
        yield from _if_any(self._change_places("queries and gradients", "keys"))
        yield from self.between.backward()
        yield from _if_any(self._change_back("query gradients" if self.is_final else "partial gradients", "gradients"))

    def _change_places(self, of_queries: str, of_keys: str) -> Post[Delivery]:
        return Post(tuple(self._outgoing(of_queries, of_keys)), tuple(self._incoming(of_queries, of_keys)), 0)

    def _change_back(self, of_queries: str, of_keys: str | None = None) -> Post[Delivery]:
        sends = tuple((HOME, given.back(given.kind)) for _, given in self._incoming(of_queries, of_keys))
        receives = tuple((HOME, given.back(given.kind)) for _, given in self._outgoing(of_queries, of_keys))
        return Post(sends, receives, 0)

    def _outgoing(self, of_queries: str, of_keys: str | None) -> Iterator[tuple[int, Delivery]]:
        for other in self.others:
            yield from self._deliveries(self.rank, other, of_queries, of_keys)

    def _incoming(self, of_queries: str, of_keys: str | None) -> Iterator[tuple[int, Delivery]]:
        for other in self.others:
            yield from self._deliveries(other, self.rank, of_queries, of_keys)

    def _deliveries(
        self, sender: int, receiver: int, of_queries: str, of_keys: str | None
    ) -> Iterator[tuple[int, Delivery]]:
        found = [self.queries(sender, receiver)._replace(kind=of_queries)]
        if of_keys is not None:
            found.append(self.keys(sender, receiver)._replace(kind=of_keys))
        for delivery in found:
            if delivery.pieces:
                yield HOME, delivery

    @property
    def others(self) -> list[int]:
        return [member for member in self.members if member != self.rank]


def _if_any(post: Post[Delivery]) -> Iterator[Post[Any]]:
    if post.sends or post.receives:
        yield post


@lru_cache(maxsize=256)
def _by_nodes(layout: Layout, inner: int) -> Layout:
    shards = layout.shards
    return Layout(
        layout.length, tuple(joined(shards[i : i + inner], layout.length) for i in range(0, len(shards), inner))
    )


def _query_heads(desk: Desk, kv_heads: range) -> Iterator[range]:
    """The desk's query heads of some of its kv heads, which are numbered from its first."""
    if desk.share == 1:
        yield moved(kv_heads, desk.heads.start)
        return
    runs = [kv_heads] if kv_heads.step == 1 else [range(h, h + 1) for h in kv_heads]
    for run in runs:
        yield range(desk.heads.start + run.start * desk.share, desk.heads.start + run.stop * desk.share)


def _cut(common: tuple[tuple[range, range], ...], wanted: tuple[range, ...]) -> Iterator[tuple[range, range]]:
    """(sender's rows, desk's rows) of those overlaps that are wanted, by the desk's rows."""
    for rows, at in common:
        for some in wanted:
            if both := meet(at, some):
                yield _matching(rows, at, both), both


def _matching(rows: range, at: range, both: range) -> range:
    """The sender's rows that stand at `both`."""
    first, last = rows[at.index(both[0])], rows[at.index(both[-1])]
    return range(first, last + 1, max(1, both.step // at.step * rows.step))


@lru_cache(maxsize=256)
def by_heads(task: Task, rank: int, inner: int) -> ByHeads:
    return ByHeads(task, rank, inner)
