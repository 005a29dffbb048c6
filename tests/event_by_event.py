"""The slow and obvious simulator: every rank runs its own program, every message is an event, nothing is shared.

Programs are read off the plans of the engine, rank by rank and post by post. It is what `longring.plan.events` must
agree with, tick for tick.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from longring.geometry.itinerary import Itinerary
from longring.geometry.plans import plan
from longring.plan.event_pace import Pace
from longring.plan.links import Lines, ticked


class Work(NamedTuple):
    seconds: float


class Post(NamedTuple):
    """Messages of one point of the program, which all ranks pass in the same order."""

    key: Any  # what is waited for
    point: Any
    sends: list[tuple[int, int]]  # receiver, bytes
    receives: list[int]  # senders


class Wait(NamedTuple):
    key: Any


# ------------------------------------------------------------------------------------------- programs


class Programs:
    def __init__(self, pace: Pace, lines: Lines) -> None:
        self.pace, self.lines, self.task = pace, lines, pace.task

    def of(self, schedule: str, rank: int) -> Iterator[Work | Post | Wait]:
        found = plan(schedule, self.task, rank, self.lines.node_ranks)
        if schedule == "gather":
            yield from self.gather(found, rank)
        elif schedule in ("ulysses", "hybrid"):
            yield from self.by_heads(found, rank)
        else:
            yield from self.relay(found, rank, [self.task.share])

    def work(self, rank: int, seconds: float) -> Work:
        return Work(ticked(self.lines.slow.ranks.get(rank, 1.0) * seconds))

    def look(self, rank: int, visits: list[Any], shares: list[int], *, is_first: bool = False) -> Work:
        looks = [(t, share) for tiles in visits for t, share in zip(tiles, shares, strict=True)]
        return self.work(rank, sum(self.pace.looking(t, share, is_first=is_first) for t, share in looks))

    def size(self, parcel: Any) -> int:
        return self.pace.bytes_of(parcel.kind, parcel.vectors)

    def relay(self, itinerary: Itinerary, rank: int, shares: list[int]) -> Iterator[Work | Post | Wait]:
        if self.pace.phase == "forward":
            yield from self.relay_forward(itinerary, rank, shares)
        elif len(itinerary) == 1:
            yield self.look(rank, [itinerary.home.tiles], shares, is_first=True)
        else:
            yield from self.relay_backward(itinerary, rank, shares)

    def relay_forward(self, itinerary: Itinerary, rank: int, shares: list[int]) -> Iterator[Work | Post | Wait]:
        for number, step in enumerate(itinerary):
            yield from self.rows(itinerary, number, rank)
            tiles = [visit.tiles for visit in step.visits] if number else [itinerary.home.tiles]
            yield self.look(rank, tiles, shares, is_first=not number)
            yield Wait(("rows", number + 1))

    def relay_backward(self, itinerary: Itinerary, rank: int, shares: list[int]) -> Iterator[Work | Post | Wait]:
        for number, step in enumerate(itinerary):
            yield from self.rows(itinerary, number, rank)
            tiles = [visit.tiles for visit in step.visits] if number else [itinerary.home.late]
            yield self.look(rank, tiles, shares, is_first=not number)
            if number:
                yield Wait(("gradients", number - 1))
                if step.gradients is not None:
                    yield from self.gradients(itinerary, number, rank)
            yield Wait(("rows", number + 1))
        yield self.look(rank, [itinerary.home.early], shares)
        yield Wait(("gradients", len(itinerary) - 1))

    def rows(self, itinerary: Itinerary, number: int, rank: int) -> Iterator[Post]:
        for post in itinerary[number].posts:
            for lane in itinerary.lanes:
                # a rank's own rows are sent under the lane HOME, whichever they go along: told apart by who gets them
                sends = [p for _, p in post.sends if self._goes_along(lane, p, post.due)]
                receives = [p.sender for n, p in post.receives if n == lane.number]
                point = 1, number, 0, post.due, lane.number
                yield Post(("rows", post.due), point, [(p.receiver, self.size(p)) for p in sends], receives)

    def _goes_along(self, lane: Any, parcel: Any, due: int) -> bool:
        expected = lane.parcel(parcel.owner, due)
        return expected is not None and expected is parcel

    def gradients(self, itinerary: Itinerary, number: int, rank: int) -> Iterator[Post]:
        post = itinerary[number].gradients
        key = "gradients", number
        for lane in itinerary.lanes:
            for which, at in (("following", number), ("returning", number)):
                ask = getattr(lane, which)
                sends = [p for n, p in post.sends if n == lane.number and ask(p.owner, at) is p]
                owners = range(len(itinerary))
                receives = [p.sender for _, p in post.receives if any(ask(owner, at) is p for owner in owners)]
                point = 1, number, 1, lane.number, which
                yield Post(key, point, [(p.receiver, self.size(p)) for p in sends], receives)

    def gather(self, found: Any, rank: int) -> Iterator[Work | Post | Wait]:
        ranks = self.task.ranks
        rows = {post.due: post for post in found.forward()}
        for step in range(1, ranks):
            if step == 1:
                yield from self.as_post(rows.get(1), ("rows", 1), (0, 1))
            yield Wait(("rows", step))
            yield from self.as_post(rows.get(step + 1), ("rows", step + 1), (0, step + 1))
            yield self.work(rank, self.copying("rows", (rank - step) % ranks))
        yield self.look(rank, [(found.tiles,)], [self.task.share], is_first=True)
        if self.pace.phase == "backward":
            back = {post.due: post for post in found.gradients()}
            for step in range(1, ranks):
                yield self.work(rank, self.copying("gradients", (rank + step) % ranks))
                yield from self.as_post(back.get(step), ("gradients", step), (1, step))
                yield Wait(("gradients", step))
                yield self.work(rank, self.copying("gradients", rank))

    def copying(self, kind: str, owner: int) -> float:
        problem = self.task.problem
        vectors = self.task.keys.sizes[owner] * problem.batch * problem.kv_heads
        return self.pace.copying(self.pace.bytes_of(kind, vectors))

    def as_post(self, post: Any, key: Any, point: Any) -> Iterator[Post]:
        if post is not None:
            sends = [(p.receiver, self.size(p)) for _, p in post.sends]
            yield Post(key, point, sends, [p.sender for _, p in post.receives])

    def by_heads(self, found: Any, rank: int) -> Iterator[Work | Post | Wait]:
        near = self.look(rank, [(found.near,)], [self.task.share], is_first=True)
        if found.far is None:
            yield near
            return
        posts = list(found.forward() if self.pace.phase == "forward" else found.backward())
        inside = [post for post in posts if any(hasattr(p, "pieces") for _, p in (*post.sends, *post.receives))]
        first = [post for post in inside if {p.kind for _, p in (*post.sends, *post.receives)} & THERE]
        last = [post for post in inside if post not in first]
        yield from self.places(first, "there", 0, found.inner)
        yield near
        yield Wait("there")
        yield self.seating(first, rank)
        yield from self.relay(found.between, rank, [desk.share for desk in found.desks])
        yield from self.places(last, "back", 2, found.inner)
        yield Wait("back")
        yield self.seating(last, rank)

    def places(self, posts: list[Any], key: str, section: int, inner: int) -> Iterator[Post]:
        for post in posts:
            for place in range(inner):
                sends: dict[int, int] = defaultdict(int)
                for _, p in post.sends:
                    if p.receiver % inner == place:
                        sends[p.receiver] += self.size(p)
                receives = {p.sender for _, p in post.receives if p.receiver % inner == place}
                if sends or receives:
                    yield Post(key, (section, place), list(sends.items()), list(receives))

    def seating(self, posts: list[Any], rank: int) -> Work:
        return self.work(rank, self.pace.copying(sum(self.size(p) for post in posts for _, p in post.receives)))


THERE = {"queries", "keys", "queries and gradients"}


# --------------------------------------------------------------------------------------------- the world


class Line:
    """Serves points in the order of the program, and messages of a point as they become ready."""

    def __init__(self) -> None:
        self.free = 0.0
        self.left: dict[Any, int] = defaultdict(int)  # messages still to come, by point
        self.ready: list[tuple[float, int, int, int, Any]] = []


def simulate(pace: Pace, lines: Lines, schedule: str) -> tuple[list[float], list[float]]:
    """When each rank is done, and how long it computed."""
    programs = Programs(pace, lines)
    todo = [list(programs.of(schedule, rank)) for rank in range(lines.ranks)]
    at, computed = [0.0] * lines.ranks, [0.0] * lines.ranks
    wires: dict[int, Line] = defaultdict(Line)
    waiting: dict[tuple[int, Any], int] = defaultdict(int)  # messages of a rank's post that are not done
    done: dict[tuple[int, Any], float] = defaultdict(lambda: float("-inf"))
    posted: dict[tuple[Any, int, int], float] = {}
    sizes: dict[tuple[Any, int, int], int] = {}
    keys: dict[tuple[Any, int, int, int], Any] = {}
    for rank, program in enumerate(todo):
        for one in program:
            if isinstance(one, Post):
                for receiver, nbytes in one.sends:
                    wires[lines.line(rank, receiver)].left[one.point] += 1
                    sizes[one.point, rank, receiver] = nbytes
                    keys[one.point, rank, receiver, rank] = one.key
                for sender in one.receives:
                    keys[one.point, sender, rank, rank] = one.key
    assert {k[:3] for k in keys} == set(sizes), "what one sends another receives, at the same point"

    RESUME, READY, PICK = range(3)
    events: list[tuple[float, int, int, Any]] = []
    count = 0

    def push(time: float, kind: int, what: Any) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (time, kind, count, what))

    place = [0] * lines.ranks
    blocked: list[Any] = [None] * lines.ranks

    def announce(point: Any, sender: int, receiver: int, now: float) -> None:
        message = point, sender, receiver
        if message in posted:
            push(now, READY, message)
        posted[message] = now

    def go_on(rank: int) -> None:
        while place[rank] < len(todo[rank]):
            one = todo[rank][place[rank]]
            if isinstance(one, Wait) and waiting[rank, one.key]:
                blocked[rank] = one.key
                return
            place[rank] += 1
            if isinstance(one, Wait):
                if done[rank, one.key] > at[rank]:
                    at[rank] = done[rank, one.key]
                    push(at[rank], RESUME, rank)
                    return
            elif isinstance(one, Work):
                at[rank] += one.seconds
                computed[rank] += one.seconds
                push(at[rank], RESUME, rank)
                return
            else:
                waiting[rank, one.key] += len(one.sends) + len(one.receives)
                for receiver, _ in one.sends:
                    announce(one.point, rank, receiver, at[rank])
                for sender in one.receives:
                    announce(one.point, sender, rank, at[rank])

    def finish(rank: int, key: Any, when: float) -> None:
        waiting[rank, key] -= 1
        done[rank, key] = max(done[rank, key], when)
        if blocked[rank] == key and not waiting[rank, key]:
            blocked[rank] = None
            push(max(at[rank], done[rank, key]), RESUME, rank)

    def pick(number: int, now: float) -> None:
        wire = wires[number]
        if now < wire.free or not wire.ready:
            return
        point = min(point for point, left in wire.left.items() if left)
        mine = [m for m in wire.ready if m[4] == point]
        if not mine:
            return
        chosen = min(mine)
        wire.ready.remove(chosen)
        _, sender, receiver, nbytes, _ = chosen
        wire.left[point] -= 1
        wire.free = now + lines.carrying(sender, receiver, nbytes)
        arrival = wire.free + lines.latency(is_inside=lines.is_inside(sender, receiver))
        finish(sender, keys[point, sender, receiver, sender], wire.free)
        finish(receiver, keys[point, sender, receiver, receiver], arrival)
        push(wire.free, PICK, number)

    for rank in range(lines.ranks):
        push(0.0, RESUME, rank)
    while events:
        now, kind, _, what = heapq.heappop(events)
        if kind == RESUME:
            go_on(what)
        elif kind == READY:
            point, sender, receiver = what
            number = lines.line(sender, receiver)
            wires[number].ready.append((now, sender, receiver, sizes[what], point))
            push(now, PICK, number)
        else:
            pick(what, now)
    assert all(place[rank] == len(todo[rank]) for rank in range(lines.ranks)), "somebody waits for ever"
    return at, computed
