"""Few looks that speak for thousands of ranks: each against what its ranks are told one by one."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from event_by_event import simulate
from longring.geometry import task as geometry
from longring.geometry.head_split import HeadSplit
from longring.geometry.heads import by_heads
from longring.geometry.itinerary import gather, halves
from longring.geometry.layouts import deal, from_ranges, replicated
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.geometry.plans import PLANS
from longring.geometry.task import Task, segments_of, tiles_of
from longring.plan.event_gather import Gathered
from longring.plan.event_pace import Pace
from longring.plan.event_sources import Nodes, Sources
from longring.plan.events import play
from longring.plan.hardware import hardware
from longring.plan.links import Lines, Slow
from strategies import tasks

H200 = hardware("h200")


@st.composite
def longnets(draw: st.DrawFn, length: int, kv_heads: int) -> Dilated:
    """Segments within segments, as LongNet has them, or any; now and then each head has a branch of its own."""
    branches = draw(st.integers(1, 4))
    w, times = draw(st.integers(1, 8)), draw(st.sampled_from([2, 3, 4]))
    nested = [(w * times**i, times**i) for i in range(branches)]
    wild = st.lists(st.tuples(st.integers(1, length + 4), st.integers(1, 7)), min_size=branches, max_size=branches)
    segments, rates = zip(*draw(st.just(nested) | wild), strict=True)
    causal = draw(st.booleans())
    if branches <= kv_heads and draw(st.booleans()):
        return HeadSplit(segments, rates, causal=causal)
    return Dilated(segments, rates, causal=causal, phase=draw(st.sampled_from(["mod", "block"])))


@st.composite
def dilated_tasks(draw: st.DrawFn, max_ranks: int = 12) -> Task:
    """Over runs of positions: equal ones, so that many look alike, or uneven ones, or dealt in any order."""
    ranks, kv_heads = draw(st.integers(1, max_ranks)), draw(st.integers(1, 5))
    length = ranks * draw(st.integers(1, 16)) + draw(st.just(0) | st.integers(0, ranks))
    name = draw(st.sampled_from(["contiguous", "zigzag", "in any order"]))
    if name == "in any order":
        random = Random(draw(st.integers(0, 2**16)))
        places = [0, *sorted(random.sample(range(1, length), min(length - 1, 2 * ranks))), length]
        pieces = [range(a, b) for a, b in pairwise(places)]
        owners = random.choices(range(ranks), k=len(pieces))
        layout = from_ranges([p for p, owner in zip(pieces, owners, strict=True) if owner == r] for r in range(ranks))
    else:
        layout = deal(name, length, ranks, align=draw(st.none() | st.sampled_from([2, 4])))
    pattern = draw(longnets(length, kv_heads))
    problem = Problem(draw(st.integers(1, 2)), length, length, kv_heads, 0)
    return Task(pattern, problem, layout, layout, kv_heads * draw(st.integers(1, 3)))


def longnet_of(ranks: int, layout: str = "contiguous", tokens: int = 1 << 10) -> Task:
    pattern = Dilated([tokens // 16 * 4**k for k in range(6)], [4**k for k in range(6)])
    dealt = deal(layout, ranks * tokens, ranks)
    return Task(pattern, Problem(1, dealt.length, dealt.length, 4, 0), dealt, dealt, 8)


# ------------------------------------------------------------------------------------------------- segments


@given(dilated_tasks())
@settings(max_examples=80)
def test_runs_of_segments_are_the_tiles_of_every_pair(task):
    """Of whole shards, and of the halves of them that go round both ways."""
    for some in (task, *halves(task)):
        segments = segments_of(some)
        found = {}
        for rank in range(task.ranks):
            runs = list(segments.runs(rank))
            assert [source for sources in runs for source in sources] == list(range(task.ranks))
            for sources in runs:
                cut = [tiles_of(some, some.queries.shards[rank], some.keys.shards[source]) for source in sources]
                assert cut == [cut[0]] * len(sources)
                assert found.setdefault(segments.look(rank, sources[0]), cut[0]) == cut[0]


@given(dilated_tasks(max_ranks=24), st.integers(1, 24))
def test_those_that_look_alike_by_turns_are_told_together(task, turn):
    segments = segments_of(task)
    for rank in range(task.ranks):
        combs = list(segments.combs(rank, turn))
        assert sorted(source for sources in combs for source in sources) == list(range(task.ranks))
        assert all(turn % sources.step == 0 for sources in combs)
        for sources in combs:
            assert len({segments.look(rank, source) for source in sources}) == 1


def test_rates_wider_than_shards_make_every_other_rank_look_alike():
    """Of a branch of rate 32 over ranks of 16 tokens each, only every other one keeps a row."""
    dealt = deal("contiguous", 64 * 16, 64)
    task = Task(Dilated([16, 1024], [1, 32]), Problem(1, 1024, 1024, 1, 0), dealt, dealt)
    assert len(list(segments_of(task).combs(40, 64))) == 7
    assert Sources(task, 64).period() == 2
    assert len(list(segments_of(task).runs(40))) == 64


@given(dilated_tasks())
def test_ranks_with_one_look_compute_the_same_with_their_own_keys(task):
    segments = segments_of(task)
    found = {}
    for rank in range(task.ranks):
        own = [tiles_of(some, some.queries.shards[rank], some.keys.shards[rank]) for some in (task, *halves(task))]
        assert found.setdefault(segments.own_look(rank), own) == own


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_thousand_ranks_are_a_handful_of_runs_and_looks(layout):
    segments = segments_of(longnet_of(1024, layout))
    assert max(len(list(segments.combs(rank, 1024))) for rank in range(0, 1024, 100)) < 60
    assert len({segments.own_look(rank) for rank in range(1024)}) < 20


def test_segments_do_not_speak_for_queries_among_the_keys_of_others():
    keys, pattern = deal("contiguous", 64, 4), Dilated([16], [2])
    assert segments_of(Task(pattern, Problem(1, 64, 64, 1, 0), replicated(64, 4), keys)) is None
    assert segments_of(Task(pattern, Problem(1, 64, 64, 1, 0), deal("zigzag", 64, 4), keys)) is None
    assert segments_of(Task(pattern, Problem(1, 64, 64, 1, 0), *[deal("striped", 64, 4)] * 2)) is None
    assert segments_of(Task(pattern, Problem(1, 64, 64, 1, 8), keys, keys)) is None
    assert segments_of(Task(Dilated([16], [2], documents=[0, 9, 64]), Problem(1, 64, 64, 1, 0), keys, keys)) is None


@pytest.mark.parametrize("schedule", list(PLANS))
@given(dilated_tasks(max_ranks=24), st.data())
@settings(max_examples=12)
def test_longnet_is_played_as_the_obvious_simulator_plays_it(schedule, task, data):
    nodes = data.draw(st.sampled_from([n for n in range(1, task.ranks + 1) if task.ranks % n == 0]))
    phase = data.draw(st.sampled_from(["forward", "backward"]))
    lines = Lines(H200, task.ranks, nodes, Slow({task.ranks // 2: 1.5}))
    one = {"hardware": H200, "head_dim": 8, "itemsize": 2, "node_ranks": nodes, "phase": phase, "slow": lines.slow}
    played = play(task, schedule, **one)
    assert (list(played.ends), list(played.computing)) == simulate(Pace(H200, task, phase, 8, 2), lines, schedule)


# ---------------------------------------------------------------------------------------------------- nodes


@given(dilated_tasks() | tasks(), st.data())
@settings(max_examples=80)
def test_desks_are_told_what_they_compute_with_every_node(task, data):
    inner = data.draw(st.sampled_from([n for n in range(1, task.ranks + 1) if task.ranks % n == 0]))
    if by_heads(task, 0, inner).far is None:
        return
    nodes, at_home = Nodes(task, inner), {}
    for rank in range(task.ranks):
        plan = by_heads(task, rank, inner)
        lane = plan.between.lanes[0]
        for sources, work in nodes.desks(rank):
            for node in sources:
                if node != plan.node:
                    cut = plan.between.guest_tiles(lane, node, 0)
                    assert work == tuple((some, desk.share) for some, desk in zip(cut, plan.desks, strict=True))
        assert nodes.shares(rank) == tuple(desk.share for desk in plan.desks)
        own = [plan.between.own_tiles(some) for some in (lane.task, *halves(lane.task))], nodes.shares(rank)
        assert at_home.setdefault(nodes.own_look(rank), own) == own


# ------------------------------------------------------------------------------------------------- gathered


@pytest.mark.parametrize("phase", ["forward", "backward"])
@given(dilated_tasks(max_ranks=24) | tasks(max_ranks=24))
@settings(max_examples=80)
def test_a_gather_takes_what_its_tiles_take_one_by_one(phase, task):
    pace = Pace(H200, task, phase, 8, 2)
    gathered = Gathered(pace)
    for rank in range(task.ranks):
        assert gathered.seconds(rank) == pace.looking(gather(task, rank).tiles, is_first=True)


@pytest.mark.parametrize("window", [None, (0, 0), (40, 0), (3, 5), (None, 2)])
@pytest.mark.parametrize("tokens", [384, 391, 96, 40, 33])
def test_so_does_one_of_striped_shards(window, tokens):
    """A tile for every strand of the keys, told in a few lines, and not where strands have one position."""
    causal = window in (None, (40, 0))
    dealt = deal("striped", tokens, 32)
    task = Task(Dense(causal=causal, window=window), Problem(2, tokens, tokens, 3, 0), dealt, dealt, 6)
    pace = Pace(H200, task, "backward", 8, 2)
    for rank in range(32):
        assert Gathered(pace).seconds(rank) == pace.looking(gather(task, rank).tiles, is_first=True)


# ------------------------------------------------------------------------------------------ few tiles are cut


@pytest.mark.parametrize("schedule", list(PLANS))
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_longnet_over_hundreds_of_ranks_is_played_without_cutting_for_every_pair(layout, schedule, monkeypatch):
    """65,536 pairs; wide segments look different to each of their ranks, by their own width alone."""
    cut, cut_tiles = [], geometry.cut_tiles
    monkeypatch.setattr(geometry, "cut_tiles", lambda *args: cut.append(args) or cut_tiles(*args))
    task = longnet_of(256, layout, tokens=1 << 9)
    play(task, schedule, hardware=H200, head_dim=8, itemsize=2, node_ranks=8, phase="backward")
    assert len(cut) < 1000
