"""Looks: what a rank computes at each step of any plan, in global positions. For pictures, and to check plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from .heads import ByHeads
from .itinerary import Gathering, Itinerary
from .layouts import Shard
from .plans import Plan
from .tiles import Tile


class Look(NamedTuple):
    """Tiles, which positions their rows and columns stand for, and which query and kv heads they are of."""

    tiles: tuple[Tile, ...]
    queries: Sequence[int]
    keys: Sequence[int]
    heads: range  # of the queries
    kv_heads: range


def looks(plan: Plan) -> Iterator[list[Look]]:
    """By step."""
    if isinstance(plan, Gathering):
        task = plan.task
        queries, keys = positions(task.queries.shards[plan.rank]), range(task.problem.n_k)
        yield [Look(plan.tiles, queries, keys, range(task.heads), range(task.problem.kv_heads))]
    elif isinstance(plan, ByHeads):
        yield from _looks_by_heads(plan)
    else:
        assert isinstance(plan, Itinerary)
        task = plan.task
        everything = range(task.heads), range(task.problem.kv_heads)
        yield from _looks_of_relay(plan, [(positions(task.queries.shards[plan.member]), *everything)])


def _looks_by_heads(plan: ByHeads) -> Iterator[list[Look]]:
    task = plan.task
    own = positions(task.queries.shards[plan.rank]), positions(task.keys.shards[plan.rank])
    near = [Look(plan.near, *own, range(task.heads), range(task.problem.kv_heads))]
    if plan.far is None:
        yield near
        return
    desks = [(positions(desk.queries), desk.heads, desk.kv_heads) for desk in plan.desks]
    for number, found in enumerate(_looks_of_relay(plan.between, desks)):
        yield near + found if number == 0 else found


def _looks_of_relay(itinerary: Itinerary, desks: Sequence[tuple[Sequence[int], range, range]]) -> Iterator[list[Look]]:
    keys = [positions(shard) for shard in itinerary.task.keys.shards]
    for number, step in enumerate(itinerary):
        found = [] if number else [(itinerary.home.tiles, keys[itinerary.member])]
        found += [(visit.tiles, [keys[visit.owner][row] for row in visit.arrived.frame]) for visit in step.visits]
        yield [
            Look(tiles, queries, columns, heads, kv_heads)
            for by_desk, columns in found
            for tiles, (queries, heads, kv_heads) in zip(by_desk, desks, strict=True)
        ]


def positions(shard: Shard) -> list[int]:
    """The position of every local row."""
    return list(chain.from_iterable(shard))
