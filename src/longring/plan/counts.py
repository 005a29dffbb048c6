"""What one rank computes and sends under a schedule, counted on the plan that it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..geometry.heads import ByHeads
from ..geometry.itinerary import Gathering, Itinerary, Post
from ..geometry.plans import plan
from ..geometry.task import Task, runs_over_sources
from ..geometry.tiles import Tile
from .cost import few
from .event_pace import FLOPS_OF_A_PAIR, Pace
from .hardware import Hardware, Phase
from .traffic import BYTES
from .work import head_pairs

STEPS_TO_COUNT = 256
"""Of a longer itinerary so many are counted, the first and last ones and some between, which speak for the rest."""

Looked = tuple[int, tuple[Tile, ...], int]
"""How often, which tiles, and of how many query heads to a kv head."""


# ------------------------------------------------------------------------------------------------ computing


def looks(task: Task, schedule: str, rank: int, node_ranks: int) -> Iterator[Looked]:
    """Everything the rank computes, alike looks together."""
    one = plan(schedule, task, rank, node_ranks)
    if isinstance(one, Gathering):
        yield 1, one.tiles, task.share
    elif isinstance(one, ByHeads):
        yield 1, one.near, task.share
        if one.far is not None:
            yield from _at_desks(one)
    else:
        for run in runs_over_sources(task, rank):
            yield len(run.ranks), run.tiles, task.share


def _at_desks(one: ByHeads) -> Iterator[Looked]:
    between = one.between
    found = [between.home.tiles, *(visit.tiles for step in between for visit in step.visits)]
    for by_desk in found:
        for desk, tiles in zip(one.desks, by_desk, strict=True):
            yield 1, tiles, desk.share


def flops(task: Task, schedule: str, rank: int, *, head_dim: int, node_ranks: int, phase: Phase) -> int:
    """Of the rank: multiplications and additions of the pairs that count."""
    return FLOPS_OF_A_PAIR[phase] * head_dim * head_pairs(task, schedule, rank, node_ranks)


def computing(task: Task, schedule: str, rank: int, *, node_ranks: int, pace: Pace) -> float:
    """Seconds, if nothing ever had to be waited for."""
    found = [look for look in looks(task, schedule, rank, node_ranks) if look[1]]
    seconds = sum(often * pace.looking(tiles, share) for often, tiles, share in found)
    for _, tiles, share in found[:1]:  # there is nothing yet to bring its first stack to
        seconds += pace.looking(tiles, share, is_first=True) - pace.looking(tiles, share)
    return seconds


# --------------------------------------------------------------------------------------------------- sending


class Carried(NamedTuple):
    """Over one kind of link, one way."""

    bytes: int = 0
    messages: int = 0
    most_bytes: int = 0  # of one step
    most_messages: int = 0


@dataclass(frozen=True)
class Traffic:
    """What one rank sends and receives in one pass, by where it goes: "inside" its node or "outside"."""

    sent: dict[str, Carried]
    received: dict[str, Carried]
    is_exact: bool  # or from some of very many steps

    @property
    def bytes_sent(self) -> int:
        return sum(carried.bytes for carried in self.sent.values())

    @property
    def messages_sent(self) -> int:
        return sum(carried.messages for carried in self.sent.values())

    @property
    def busier(self) -> dict[str, Carried]:
        """What is sent or what is received, whichever is more."""
        return max(self.sent, self.received, key=lambda way: sum(carried.bytes for carried in way.values()))

    def moving(self, hardware: Hardware, sharing: int, where: Iterable[str] = ("inside", "outside")) -> float:
        """Seconds that the busiest of the rank's lines needs for it, if nothing else delays it.

        sharing: ranks of the node that send out of it at a time.
        """
        return max(
            (_on_line(way[place], place, hardware, sharing) for way in (self.sent, self.received) for place in where),
            default=0.0,
        )


def _on_line(carried: Carried, where: str, hardware: Hardware, sharing: int) -> float:
    link = hardware.inside if where == "inside" else hardware.outside
    speed = link.bytes_per_second if where == "inside" else hardware.out_of_node(sharing)
    return carried.bytes / speed + carried.messages * link.latency_seconds


def traffic(
    task: Task, schedule: str, rank: int, *, head_dim: int, itemsize: int, node_ranks: int, phase: Phase
) -> Traffic:
    """Post by post, to the byte, where steps are not thousands."""
    one = plan(schedule, task, rank, node_ranks)
    size = head_dim, itemsize, max(4, itemsize)
    if isinstance(one, Itinerary) and len(one) > STEPS_TO_COUNT:
        return _sampled(one, size, node_ranks, phase)
    posts = list(one.forward() if phase == "forward" else one.backward())
    return _counted(posts, size, node_ranks)


def _counted(posts: list[Post[Any]], size: tuple[int, int, int], node_ranks: int, often: float = 1) -> Traffic:
    ways = [[post.sends for post in posts], [post.receives for post in posts]]
    sent, received = (_by_link(way, size, node_ranks, often) for way in ways)
    return Traffic(sent, received, is_exact=often == 1)


def _by_link(
    posts: list[tuple[tuple[int, Any], ...]], size: tuple[int, int, int], node_ranks: int, often: float
) -> dict[str, Carried]:
    found = {"inside": Carried(), "outside": Carried()}
    bytes_of = {kind: of_a_vector(*size) for kind, of_a_vector in BYTES.items()}
    for parcels in posts:
        here: dict[str, list[int]] = {}
        for _, parcel in parcels:
            where = "inside" if parcel.sender // node_ranks == parcel.receiver // node_ranks else "outside"
            here.setdefault(where, []).append(parcel.vectors * bytes_of[parcel.kind])
        for where, each in here.items():
            found[where] = _joined(found[where], Carried(sum(each), len(each), sum(each), len(each)))
    return {
        where: carried._replace(bytes=round(often * carried.bytes), messages=round(often * carried.messages))
        for where, carried in found.items()
    }


def _joined(a: Carried, b: Carried) -> Carried:
    most = max(a.most_bytes, b.most_bytes), max(a.most_messages, b.most_messages)
    return Carried(a.bytes + b.bytes, a.messages + b.messages, *most)


def _sampled(one: Itinerary, size: tuple[int, int, int], node_ranks: int, phase: Phase) -> Traffic:
    """The ends of an itinerary differ, as a window's do; between them steps change little from one to the next."""
    at_ends, between = STEPS_TO_COUNT // 4, STEPS_TO_COUNT // 2
    inner = range(at_ends, len(one) - at_ends)
    ends = [*range(at_ends), *range(inner.stop, len(one))]
    some = [inner[i] for i in few(len(inner), between)]
    parts = [
        _counted([post for step in steps for post in _posted(one, step, phase)], size, node_ranks, often)
        for steps, often in ((ends, 1.0), (some, len(inner) / between))
    ]
    sent, received = (
        {where: _joined(*(getattr(part, way)[where] for part in parts)) for where in ("inside", "outside")}
        for way in ("sent", "received")
    )
    return Traffic(sent, received, is_exact=False)


def _posted(one: Itinerary, number: int, phase: Phase) -> Iterator[Post[Any]]:
    step = one[number]
    yield from step.posts
    if phase == "backward" and step.gradients is not None:
        yield step.gradients
