"""Itineraries: in which order a rank meets whose keys, and what is sent and received on the way.

Schedules execute an itinerary and plan counts it, so the two cannot disagree. Steps are the same on all
ranks: what one sends in a step another receives in that step, and both post it at the same point of it,
so that messages between two ranks match one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Generic, NamedTuple, TypeVar, overload

from .layouts import Layout, Shard, size
from .needs import count_seen, rows_seen
from .parcels import Parcel, Share, needed
from .ranges import shared, without
from .routes import DoubleRing, Ring, Route, Star
from .task import Task, at_rank, runs_over_sources, tiles_between, tiles_over_all_keys
from .tiles import Tile

Rows = tuple[range, ...]

HOME = -1
"""The lane of a rank's own rows."""


class Visit(NamedTuple):
    """Rows of another rank at hand during a step, and the gradients that follow them."""

    lane: int
    owner: int
    tiles: tuple[tuple[Tile, ...], ...]  # by desk; columns are numbered within the frame of what arrived
    arrived: Parcel
    brings: Parcel | None  # gradients of the ranks before, there when the tiles are done
    takes: tuple[Parcel, ...]  # gradients that then leave: onward, or home


P = TypeVar("P")  # a Parcel, or a Delivery between desks
T = TypeVar("T")


class Post(NamedTuple, Generic[P]):
    """Parcels that start together, each with the lane it belongs to, and the step at which they must be there."""

    sends: tuple[tuple[int, P], ...]
    receives: tuple[tuple[int, P], ...]
    due: int


class Step(NamedTuple):
    visits: tuple[Visit, ...]
    posts: tuple[Post[Parcel], ...]  # of keys and values, before the tiles are computed
    gradients: Post[Parcel] | None  # behind the tiles


class Home(NamedTuple):
    """A rank's own block in two parts by its rows, so that a backward can compute one first and one last."""

    tiles: tuple[tuple[Tile, ...], ...]  # by desk, like the others
    split: int
    early: tuple[tuple[Tile, ...], ...]  # over rows before the split
    late: tuple[tuple[Tile, ...], ...]  # over rows from the split on, numbered from it


# ------------------------------------------------------------------------------------------------- lanes


@dataclass(frozen=True, eq=False)
class Lane:
    """Portions of the owners' rows, `task.keys`, on one route. One for all ranks, and it remembers what they ask."""

    number: int
    task: Task
    whole: Task  # its keys are all rows of every owner, in which rows are numbered
    route: Route
    seats: tuple[int, int] = (1, 0)  # (stride, first): the rank of the route's i-th member is stride * i + first

    def first_row(self, owner: int) -> int:
        """Where the portion begins among the owner's rows."""
        if self.task is self.whole:
            return 0
        portion, every = self.task.keys.shards[owner], self.whole.keys.shards[owner]
        before = 0
        for piece in every:
            if portion and portion[0].start in piece:
                return before + piece.index(portion[0].start)
            before += len(piece)
        return 0

    def tiles(self, owner: int, step: int) -> tuple[Tile, ...]:
        """What the host computes, in columns of the owner's rows."""
        tiles = _tiles_between(self.task, self.route.host(owner, step), owner)
        first = self.first_row(owner)
        return tuple(tile.shifted(first) for tile in tiles) if first else tiles

    def carried(self, owner: int, step: int) -> tuple[Share, ...]:
        """The rows that reach the host at this step, for itself and for those behind it."""
        if isinstance(self.route, Star):
            return needed(self.tiles(owner, step))
        return self._shares(_rows_seen(self, owner, self.route.served(step)))

    def onward(self, owner: int, step: int) -> tuple[Share, ...]:
        """The rows whose gradients go on to the next step of the chain: somebody added, and somebody will."""
        return self._shares(_rows_touched(self, owner, step)[0])

    def homeward(self, owner: int, step: int) -> tuple[Share, ...]:
        """The rows whose gradients are complete behind this step."""
        if isinstance(self.route, Star):
            return self.carried(owner, step)
        return self._shares(_rows_touched(self, owner, step)[1])

    def _shares(self, rows: Rows) -> tuple[Share, ...]:
        problem = self.task.problem
        return (Share(range(problem.batch), range(problem.kv_heads), rows),) if rows else ()

    # ---- parcels of one step, named by owner; both ends ask, and often

    def parcel(self, owner: int, step: int) -> Parcel | None:
        """Keys and values on their way to the host of this step."""
        return self._remembered(self._rows_parcel, owner, step)

    def following(self, owner: int, step: int) -> Parcel | None:
        """Gradients on their way from the host of this step to the next of the chain."""
        return self._remembered(self._following, owner, step)

    def returning(self, owner: int, step: int) -> Parcel | None:
        """Gradients on their way from the host of this step home."""
        return self._remembered(self._returning, owner, step)

    def _remembered(self, make: Callable[[int, int], Parcel | None], owner: int, step: int) -> Parcel | None:
        place = make.__name__, owner, step
        if place not in self._known:
            self._known[place] = make(owner, step)
        return self._known[place]

    @cached_property
    def _known(self) -> dict[tuple[str, int, int], Parcel | None]:
        return {}

    def _rows_parcel(self, owner: int, step: int) -> Parcel | None:
        sender, receiver = self.route.host(owner, self.route.origin(step)), self.route.host(owner, step)
        return self._parcel(sender, receiver, owner, self.carried(owner, step), "rows")

    def _following(self, owner: int, step: int) -> Parcel | None:
        if step + 1 not in self.route.chain(step):
            return None
        sender, receiver = self.route.host(owner, step), self.route.host(owner, step + 1)
        return self._parcel(sender, receiver, owner, self.onward(owner, step), "gradients")

    def _returning(self, owner: int, step: int) -> Parcel | None:
        return self._parcel(self.route.host(owner, step), owner, owner, self.homeward(owner, step), "gradients")

    def _parcel(self, sender: int, receiver: int, owner: int, shares: tuple[Share, ...], kind: str) -> Parcel | None:
        stride, first = self.seats
        return Parcel(stride * sender + first, stride * receiver + first, owner, shares, kind) if shares else None


@lru_cache(maxsize=4096)
def _rows_seen(lane: Lane, owner: int, steps: range) -> Rows:
    """Rows of the lane's portion that hosts of these steps see; rows and both ways of gradients ask it in turn."""
    first = lane.first_row(owner)
    seen = rows_seen(lane.task, owner, lane.route.hosts(owner, steps))
    return tuple([range(r.start + first, r.stop + first) for r in seen]) if first else seen


@lru_cache(maxsize=1024)
def _rows_touched(lane: Lane, owner: int, step: int) -> tuple[Rows, Rows]:
    """Rows at hand to whose gradients this step's host or one before it in the chain may have added.

    Those to which a later one of the chain will add, and those whose gradients are complete.
    """
    chain = lane.route.chain(step)
    before, behind, later = range(chain.start, step + 1), range(step, chain.stop), range(step + 1, chain.stop)
    touched = shared(_rows_seen(lane, owner, before), _rows_seen(lane, owner, behind))
    wanted = _rows_seen(lane, owner, later)
    onward = shared(touched, wanted)
    return onward, without(touched, wanted) if onward != touched else ()


@lru_cache(maxsize=1024)
def _tiles_between(task: Task, target: int, source: int) -> tuple[Tile, ...]:
    """Where limits alone decide, a few runs speak for thousands of ranks; elsewhere only this pair is cut."""
    if task.pattern.only_limits is None:
        return tiles_between(task, target, source)
    return at_rank(runs_over_sources(task, target), source)


# --------------------------------------------------------------------------------------------- itineraries


REMEMBERED = 128  # steps of an itinerary


class Itinerary(Sequence[Step]):
    """The steps of one member of a route, each made when it is asked for: thousands of ranks have millions of them."""

    def __init__(self, member: int, lanes: tuple[Lane, ...]) -> None:
        self.member, self.lanes = member, lanes
        self._made: dict[tuple[str, int], Any] = {}

    @property
    def task(self) -> Task:
        return self.lanes[0].whole

    def __len__(self) -> int:
        return self.lanes[0].route.steps

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        steps = range(len(self))[index]
        if isinstance(steps, range):
            return [self._remembered(self._step, step) for step in steps]
        return self._remembered(self._step, steps)

    def _remembered(self, make: Callable[[int], T], step: int) -> T:
        """Made once, where steps are few: a GPU computes one in less time than ten of them take to make."""
        if len(self) > REMEMBERED:
            return make(step)
        place = make.__name__, step
        if place not in self._made:
            self._made[place] = make(step)
        return self._made[place]

    @cached_property
    def home(self) -> Home:
        early, late = halves(self.task)
        own = self.member
        tiles, before, behind = (self.own_tiles(task) for task in (self.task, early, late))
        return Home(tiles, early.keys.sizes[own], before, behind)

    def own_tiles(self, task: Task) -> tuple[tuple[Tile, ...], ...]:
        """What each desk computes with the member's own keys, or with a part of them."""
        return (tiles_between(task, self.member, self.member),)

    def guest_tiles(self, lane: Lane, owner: int, step: int) -> tuple[tuple[Tile, ...], ...]:
        """What each desk computes with a guest's keys, in columns of its owner's rows."""
        return (lane.tiles(owner, step),)

    def forward(self) -> Iterator[Post[Parcel]]:
        """Everything a forward posts, in order; counted without cutting a tile."""
        for step in range(len(self)):
            yield from self._remembered(self._posts, step)

    def backward(self) -> Iterator[Post[Parcel]]:
        """Everything a backward posts, in order."""
        for step in range(len(self)):
            yield from self._remembered(self._posts, step)
            gradients = self._remembered(self._gradients, step)
            if gradients is not None:
                yield gradients

    def _step(self, step: int) -> Step:
        visits = tuple(self._visits(step)) if step else ()
        return Step(visits, self._remembered(self._posts, step), self._remembered(self._gradients, step))

    def _visits(self, step: int) -> Iterator[Visit]:
        for lane in self.lanes:
            owner = lane.route.guest(self.member, step)
            arrived = lane.parcel(owner, step)
            if arrived is None:
                continue
            cut = self.guest_tiles(lane, owner, step)
            tiles = tuple(tuple(tile.seen_through(arrived.frame) for tile in of_desk) for of_desk in cut)
            brings = lane.following(owner, step - 1) if step - 1 in lane.route.chain(step) else None
            yield Visit(lane.number, owner, tiles, arrived, brings, self._takes(lane, owner, step))

    def _takes(self, lane: Lane, owner: int, step: int) -> tuple[Parcel, ...]:
        """Gradients of a guest's rows that leave behind the step: onward, or home."""
        return tuple(filter(None, (lane.following(owner, step), lane.returning(owner, step))))

    def _posts(self, step: int) -> tuple[Post[Parcel], ...]:
        """One for all lanes that are due at the same step."""
        posts: list[Post[Parcel]] = []
        for due in sorted({later for lane in self.lanes for later in lane.route.leaving(step)}):
            sends: list[tuple[int, Parcel]] = []
            receives: list[tuple[int, Parcel]] = []
            for lane in self.lanes:
                if due not in lane.route.leaving(step):
                    continue
                given = lane.parcel(lane.route.guest(self.member, lane.route.origin(due)), due)
                if given is not None:
                    sends.append((HOME if given.owner == self.member else lane.number, given))
                expected = lane.parcel(lane.route.guest(self.member, due), due)
                if expected is not None:
                    receives.append((lane.number, expected))
            if sends or receives:
                posts.append(Post(tuple(sends), tuple(receives), due))
        return tuple(posts)

    def _gradients(self, step: int) -> Post[Parcel] | None:
        if not step:
            return None
        sends: list[tuple[int, Parcel]] = []
        receives: list[tuple[int, Parcel]] = []
        for lane in self.lanes:
            owner = lane.route.guest(self.member, step)
            if lane.parcel(owner, step) is not None:
                sends += [(lane.number, parcel) for parcel in self._takes(lane, owner, step)]
            following = lane.following(lane.route.guest(self.member, step + 1), step) if step + 1 < len(self) else None
            if following is not None:
                receives.append((lane.number, following))
            homecoming = lane.returning(self.member, step)
            if homecoming is not None:
                receives.append((HOME, homecoming))
        return Post(tuple(sends), tuple(receives), step + 1) if sends or receives else None


@lru_cache(maxsize=256)
def ring(task: Task, rank: int) -> Itinerary:
    """From neighbour to neighbour, the way round on which less has to go far."""
    return Itinerary(rank, _ring_lanes(task))


@lru_cache(maxsize=256)
def bidirectional(task: Task, rank: int) -> Itinerary:
    """Early rows up, late rows down, so that each link carries half in each direction.

    Not against the way that rows have to go: those of a window, or of a causal contiguous ring, go up, all of them.
    """
    return Itinerary(rank, _lanes_both_ways(task))


@lru_cache(maxsize=256)
def double_ring(task: Task, rank: int, node_ranks: int) -> Itinerary:
    """Rings inside nodes, a ring between them."""
    return Itinerary(rank, _double_ring_lanes(task, node_ranks))


@lru_cache(maxsize=256)
def exchange(task: Task, rank: int) -> Itinerary:
    """Needed rows only, directly from their owner; their gradients go straight back."""
    return Itinerary(rank, _direct_lanes(task))


Lanes = tuple[Lane, ...]


@lru_cache(maxsize=64)
def _ring_lanes(task: Task) -> Lanes:
    return (Lane(0, task, task, Ring(task.ranks, direction(task))),)


@lru_cache(maxsize=64)
def _lanes_both_ways(task: Task) -> Lanes:
    early, late = halves(task)
    up, down = (Ring(task.ranks, direction(half, tie)) for half, tie in ((early, +1), (late, -1)))
    return Lane(0, early, task, up), Lane(1, late, task, down)


@lru_cache(maxsize=64)
def _double_ring_lanes(task: Task, node_ranks: int) -> Lanes:
    up, down = (DoubleRing(task.ranks, node_ranks, way) for way in (+1, -1))
    return (Lane(0, task, task, up if _rows_of_some(task, up) <= _rows_of_some(task, down) else down),)


@lru_cache(maxsize=64)
def _direct_lanes(task: Task) -> Lanes:
    return (Lane(0, task, task, Star(task.ranks)),)


@lru_cache(maxsize=256)
def halves(task: Task) -> tuple[Task, Task]:
    """The task over the early rows of every owner, and over the late ones."""
    cut = [_halved(shard) for shard in task.keys.shards]
    early, late = (Layout(task.keys.length, tuple(pair[i] for pair in cut)) for i in range(2))
    return replace(task, keys=early), replace(task, keys=late)


def _halved(shard: Shard) -> tuple[Shard, Shard]:
    """At the border of two pieces if there are several, so that tiles stay whole."""
    if len(shard) == 1:
        middle = len(shard[0]) // 2
        return tuple(filter(len, (shard[0][:middle],))), tuple(filter(len, (shard[0][middle:],)))
    half = size(shard) / 2
    border = min(range(1, len(shard) + 1), key=lambda i: abs(size(shard[:i]) - half)) if shard else 0
    return shard[:border], shard[border:]


OWNERS_TO_ASK, STEPS_TO_ASK = 8, 32


@lru_cache(maxsize=256)
def direction(task: Task, tie: int = +1) -> int:
    """+1 or -1: in which direction fewer rows travel; a causal zigzag goes down, a causal contiguous ring up."""
    up, down = (_rows_of_some(task, Ring(task.ranks, way)) for way in (+1, -1))
    return tie if up == down else +1 if up < down else -1


def _rows_of_some(task: Task, route: Route) -> int:
    """Rows that travel, of a few owners and steps evenly spaced, which speak for all."""
    owners = range(0, task.ranks, -(-task.ranks // OWNERS_TO_ASK))
    steps = range(1, task.ranks, -(-task.ranks // STEPS_TO_ASK))
    return sum(count_seen(task, owner, [route.hosts(owner, route.served(step)) for step in steps]) for owner in owners)


# ------------------------------------------------------------------------------------------------- gather


class Gathering:
    """Everything to everybody, owner by owner; then tiles over all keys in the order of their positions."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank = task, rank

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        return tiles_over_all_keys(self.task, self.rank)

    def forward(self) -> Iterator[Post[Parcel]]:
        return self._direct("rows")

    def gradients(self) -> Iterator[Post[Parcel]]:
        return self._direct("gradients")

    def backward(self) -> Iterator[Post[Parcel]]:
        yield from self.forward()
        yield from self.gradients()

    def _direct(self, kind: str) -> Iterator[Post[Parcel]]:
        """In round i to the i-th rank after this one, from the i-th before it. Gradients: those of its own rows."""
        rank, ranks = self.rank, self.task.ranks
        for step in range(1, ranks):
            after, before = (rank + step) % ranks, (rank - step) % ranks
            sent, expected = (rank, before) if kind == "rows" else (after, rank)
            sends = self._whole(rank, after, sent, kind)
            receives = self._whole(before, rank, expected, kind)
            if sends or receives:
                yield Post(sends, receives, step)

    def _whole(self, sender: int, receiver: int, owner: int, kind: str) -> tuple[tuple[int, Parcel], ...]:
        problem, rows = self.task.problem, self.task.keys.sizes[owner]
        if not rows:
            return ()
        share = Share(range(problem.batch), range(problem.kv_heads), (range(rows),))
        return ((HOME, Parcel(sender, receiver, owner, (share,), kind)),)


@lru_cache(maxsize=256)
def gather(task: Task, rank: int) -> Gathering:
    return Gathering(task, rank)
