"""What the event simulation does for all ranks at once, against the same asked one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longring.geometry.heads import by_heads
from longring.geometry.itinerary import Lane, double_ring
from longring.geometry.layouts import Layout, deal
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.geometry.routes import DoubleRing
from longring.geometry.task import Task
from longring.plan.event_arrays import Arrays
from longring.plan.event_lists import Lists, Messages
from longring.plan.event_pace import Pace
from longring.plan.event_places import Places
from longring.plan.event_rounds import rounds
from longring.plan.event_score import _by_steps
from longring.plan.hardware import hardware
from longring.plan.links import NEVER, Lines, Slow
from strategies import tasks

BOTH = pytest.mark.parametrize("kind", [Lists, Arrays])
H200 = hardware("h200")


def lines_of(ranks, node_ranks, links_out=8, links=None) -> Lines:
    return Lines(replace(H200, links_out=links_out), ranks, node_ranks, Slow(links=links or {}))


@BOTH
@given(tasks(max_ranks=12), st.data())
@settings(max_examples=60)
def test_a_ring_of_rings_is_told_as_each_owner_tells_it(kind, task, data):
    inner = data.draw(st.sampled_from([n for n in range(1, task.ranks + 1) if task.ranks % n == 0]))
    check_rounds(task, inner, kind(lines_of(task.ranks, inner)))


@BOTH
@pytest.mark.parametrize("inner", [2, 4, 8])
def test_who_held_rows_at_home_added_nothing_that_travels(kind, inner):
    """Ranks in no order: the next host sees nothing of them, and one behind it everything."""
    order = (2, 0, 3, 1, 6, 4, 7, 5)
    mixed = Layout(64, tuple((range(8 * place, 8 * place + 8),) for place in order))
    check_rounds(Task(Dense(), Problem(1, 64, 64, 1, 0), mixed, mixed), inner, kind(lines_of(8, inner)))


def check_rounds(task, inner, rows):
    lane = double_ring(task, 0, inner).lanes[0]
    told = rounds(lane, rows)
    for step in range(1, task.ranks):
        for what, ask in ((told.rows, lane.carried), (told.following, lane.onward), (told.returning, lane.homeward)):
            asked = [sum(share.vectors for share in ask(owner, step)) for owner in range(task.ranks)]
            assert rows.told(what(step)) == asked, (what, step)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("pattern", [Dense(), Dense(causal=False), Dense(window=(7, 0))])
def test_rings_of_rings_do_not_ask_for_every_pair_of_ranks(layout, pattern, monkeypatch):
    """Dense ones ask nobody; those with a window, whoever is near."""
    dealt, asked = deal(layout, 240, 48), []
    monkeypatch.setattr(Lane, "carried", lambda lane, owner, step: asked.append(owner) or ())
    lane = double_ring(Task(pattern, Problem(1, 240, 240, 2, 0), dealt, dealt), 0, 4).lanes[0]
    asked.clear()
    told = rounds(lane, Lists(lines_of(48, 4)))
    for step in range(1, 48):
        told.rows(step)
    most = {"contiguous": 8, "zigzag": 24, "striped": 48}[layout] if pattern.window else 0
    assert len(asked) <= 48 * most


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("segments", "most"), [([8, 64, 512], 0), ([7, 49, 343], 2)])
def test_rings_of_rings_ask_only_whose_shards_segments_cut(layout, segments, most, monkeypatch):
    dealt, asked = deal(layout, 512, 32), []
    task = Task(Dilated(segments, [1, 2, 4]), Problem(1, 512, 512, 2, 0), dealt, dealt)
    lane = double_ring(task, 0, 4).lanes[0]
    monkeypatch.setattr(Lane, "carried", lambda lane, owner, step: asked.append(owner) or ())
    told = rounds(lane, Arrays(lines_of(32, 4)))
    for step in range(1, 32):
        told.rows(step)
    assert len(asked) <= 32 * most


@given(st.sampled_from([(12, 4), (12, 3), (8, 1), (8, 8), (6, 2)]), st.sampled_from([+1, -1]), st.data())
def test_what_is_computed_in_a_ring_of_rings_changes_where_its_guest_does(shape, way, data):
    route = DoubleRing(*shape, way)
    member = data.draw(st.integers(0, route.size - 1))
    cuts = sorted({0, member, member + 1, route.size, *data.draw(st.sets(st.integers(0, route.size)))})
    runs = [(range(a, b), float(data.draw(st.integers(0, 2)))) for a, b in pairwise(cuts)]
    by_source = {source: value for sources, value in runs for source in sources}
    told, now, changes = [], None, dict(_by_steps(route, member, runs))
    for step in range(1, route.size):
        now = changes.get(step, now)
        told.append(now)
    assert told == [by_source[route.guest(member, step)] for step in range(1, route.size)]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@BOTH
@given(tasks(max_ranks=8), st.data())
@settings(max_examples=30)
def test_places_are_given_what_deliveries_hold(kind, phase, task, data):
    task = replace(task, heads=task.problem.kv_heads * data.draw(st.integers(1, 3)))
    inner = data.draw(st.sampled_from([n for n in range(1, task.ranks + 1) if task.ranks % n == 0]))
    pace, rows = Pace(H200, task, phase, 8, 2), kind(lines_of(task.ranks, inner))
    if by_heads(task, 0, inner).far is None:
        return
    places = Places(pace, rows, inner)
    for way, messages in (("there", places.there), ("back", places.back)):
        found = {}
        for place in range(inner):
            for sender, receiver, nbytes in zip(*map(rows.told, messages(place)), strict=True):
                if nbytes:
                    found[sender, receiver] = nbytes
        assert found == delivered(pace, inner, way)


def delivered(pace: Pace, inner: int, way: str) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    there = {"queries", "keys", "queries and gradients"}
    for rank in range(pace.task.ranks):
        plan = by_heads(pace.task, rank, inner)
        for post in plan.forward() if pace.phase == "forward" else plan.backward():
            for _, parcel in post.sends:
                if hasattr(parcel, "pieces") and (parcel.kind in there) == (way == "there"):
                    nbytes = pace.bytes_of(parcel.kind, parcel.vectors)
                    found[parcel.sender, parcel.receiver] = found.get((parcel.sender, parcel.receiver), 0) + nbytes
    return {pair: nbytes for pair, nbytes in found.items() if nbytes}


combs = st.builds(
    lambda a, n, step: range(a, a + n * step, step), st.integers(0, 40), st.integers(0, 9), st.integers(1, 4)
)


@BOTH
@given(st.lists(st.lists(combs, max_size=3).map(tuple), min_size=4, max_size=4), combs, st.integers(0, 3))
def test_positions_are_counted_where_they_are_held(kind, shards, wanted, first):
    rows, members = kind(lines_of(4, 2)), range(first, 4)
    expected = [sum(position in piece for piece in shards[rank] for position in wanted) for rank in members]
    assert rows.told(rows.held(Layout(100, tuple(shards)), [wanted], members)) == expected


@given(st.data())
def test_lines_serve_the_same_messages_at_the_same_time(data):
    """Several of one rank, some of nothing, some on slow links, and ranks that share a line."""
    rank = st.integers(0, 7)
    lines = lines_of(
        8, 4, data.draw(st.integers(1, 4)), data.draw(st.dictionaries(st.tuples(rank, rank), st.just(3.0)))
    )
    pairs = st.tuples(rank, rank).filter(lambda pair: pair[0] != pair[1])
    told = data.draw(st.lists(st.tuples(pairs, st.integers(0, 10**9)), min_size=1, unique_by=lambda one: one[0]))
    at = data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5]), min_size=8, max_size=8))
    results = []
    for kind in (Lists, Arrays):
        rows = kind(lines)
        messages = rows.messages((sender, receiver, nbytes) for (sender, receiver), nbytes in told)
        free = rows.full(0.125, lines.count)
        ends = rows.queued(rows.of(at), free, messages)
        results.append((rows.told(ends), rows.told(rows.done(messages, ends)), rows.told(free), rows.carried(messages)))
    assert results[0] == results[1]


@BOTH
def test_what_nobody_sends_never_leaves(kind):
    rows = kind(lines_of(4, 2))
    messages = Messages(rows.everybody, rows.of_place(2, 0), rows.messages([(0, 0, 0)] * 4).nbytes)
    assert rows.told(rows.queued(rows.full(1.0, 4), rows.full(0.0, 8), messages)) == [NEVER] * 4
    assert not any(rows.carried(messages))
