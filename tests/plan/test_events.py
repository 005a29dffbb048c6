"""The event simulation against the slow and obvious one, and against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from event_by_event import simulate
from longring.errors import ArgumentError
from longring.geometry.layouts import deal
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.geometry.plans import PLANS
from longring.geometry.task import Task
from longring.plan import event_lists
from longring.plan.event_pace import Pace
from longring.plan.events import Played, play
from longring.plan.hardware import Hardware, Link, hardware
from longring.plan.links import Lines, Slow
from longring.plan.traffic import backward_bytes
from strategies import tasks


def machine(*, flops=1e9, inside=1e9, outside=1e8, latency=1e-6, launch=0.0, links_out=8) -> Hardware:
    """Slow enough that a handful of tokens takes microseconds."""
    return replace(
        hardware("h200"),
        forward_flops={"bf16": flops, "fp32": flops},
        backward_flops={"bf16": flops, "fp32": flops},
        half_rate_rows=1,
        memory_bytes_per_second=1e10,
        launch_seconds=launch,
        inside=Link("near", inside, latency, "made up"),
        outside=Link("far", outside, 3 * latency, "made up"),
        links_out=links_out,
    )


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    """From computing that hides everything to links that hold everything up."""
    return machine(
        flops=10.0 ** draw(st.integers(6, 12)),
        inside=10.0 ** draw(st.integers(6, 10)),
        outside=10.0 ** draw(st.integers(5, 9)),
        latency=draw(st.sampled_from([0.0, 1e-7, 1e-4])),
        launch=draw(st.sampled_from([0.0, 1e-5])),
        links_out=draw(st.integers(1, 4)),
    )


@st.composite
def stragglers(draw: st.DrawFn, ranks: int) -> Slow:
    rank = st.integers(0, ranks - 1)
    factor = st.sampled_from([0.5, 1.5, 7.0])
    return Slow(
        draw(st.dictionaries(rank, factor, max_size=2)),
        draw(st.dictionaries(st.tuples(rank, rank), factor, max_size=3)),
    )


@st.composite
def worlds(draw: st.DrawFn):
    task = draw(tasks(max_ranks=12))
    task = replace(task, heads=task.problem.kv_heads * draw(st.integers(1, 3)))
    nodes = draw(st.sampled_from([n for n in range(1, task.ranks + 1) if task.ranks % n == 0]))
    return task, nodes, draw(machines()), draw(st.just(Slow()) | stragglers(task.ranks))


def played_by(arithmetic: str, *args, **kwargs) -> Played:
    """With the arithmetic that so few ranks would not be given, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_lists, "MANY_RANKS", {"lists": 10**6, "arrays": 0}[arithmetic])
        return play(*args, **kwargs)


@pytest.mark.parametrize("arithmetic", ["lists", "arrays"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("schedule", list(PLANS))
@given(worlds())
@settings(max_examples=15)
def test_every_rank_is_done_when_the_obvious_simulator_says(schedule, phase, arithmetic, world):
    task, node_ranks, hardware, slow = world
    one = {"hardware": hardware, "head_dim": 8, "itemsize": 2, "node_ranks": node_ranks, "phase": phase, "slow": slow}
    played = played_by(arithmetic, task, schedule, **one)
    lines = Lines(hardware, task.ranks, node_ranks, slow)
    ends, computing = simulate(Pace(hardware, task, phase, 8, 2), lines, schedule)
    assert list(played.ends) == ends
    assert list(played.computing) == computing


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("schedule", list(PLANS))
@given(worlds())
@settings(max_examples=8)
def test_lists_and_arrays_tell_the_same_of_everything(schedule, phase, world):
    task, node_ranks, hardware, slow = world
    one = {"hardware": hardware, "head_dim": 8, "itemsize": 2, "node_ranks": node_ranks, "phase": phase, "slow": slow}
    lists, arrays = (played_by(arithmetic, task, schedule, **one) for arithmetic in ("lists", "arrays"))
    assert replace(lists, moving=0.0, utilisation=None) == replace(arrays, moving=0.0, utilisation=None)
    assert all(type(x) is float for x in (*arrays.ends, *arrays.computing, *arrays.per_step[0], arrays.seconds))
    assert (lists.moving, *lists.utilisation) == pytest.approx((arrays.moving, *arrays.utilisation))


# --------------------------------------------------------------------------------------------- by hand


def task_of(pattern, length, layout, ranks, kv_heads=1):
    dealt = deal(layout, length, ranks)
    return Task(pattern, Problem(1, length, length, kv_heads, 0), dealt, dealt)


def test_without_links_worth_mentioning_a_pass_takes_what_the_busiest_rank_computes():
    task = task_of(Dense(), 64, "zigzag", 4)
    fast = machine(flops=1e6, inside=1e15, outside=1e15, latency=0.0)
    for schedule in ("ring", "exchange", "bidirectional"):
        played = play(task, schedule, hardware=fast, head_dim=8, itemsize=2)
        assert played.seconds == pytest.approx(max(played.computing), rel=1e-6)
        assert played.hidden == pytest.approx(1.0, abs=0.01)


def test_without_anything_to_compute_a_ring_takes_its_hops():
    """Full attention over four ranks: three hops of a block of 16 keys and values of 8 numbers of 2 bytes."""
    task = task_of(Dense(causal=False), 64, "contiguous", 4)
    slow = machine(flops=1e18, inside=1e6, latency=1e-3)
    played = play(task, "ring", hardware=slow, head_dim=8, itemsize=2)
    assert played.seconds == pytest.approx(3 * (2 * 16 * 8 * 2 / 1e6 + 1e-3), rel=1e-3)
    assert played.hidden < 0.01


def test_a_message_hides_behind_tiles_that_take_longer():
    task = task_of(Dense(causal=False), 64, "contiguous", 2)
    even = machine(flops=1e8, inside=1e8, latency=0.0)
    played = play(task, "ring", hardware=even, head_dim=8, itemsize=2)
    assert max(played.computing) < played.seconds < max(played.computing) * 1.01 or played.hidden == 1.0


def test_a_slow_rank_holds_everybody_up():
    task = task_of(Dense(causal=False), 64, "contiguous", 4)
    one = {"hardware": machine(flops=1e7), "head_dim": 8, "itemsize": 2}
    plain, held_up = play(task, "ring", **one), play(task, "ring", **one, slow=Slow(ranks={2: 3.0}))
    assert held_up.seconds == pytest.approx(3 * plain.seconds, rel=0.05)
    assert held_up.critical_rank == 2
    assert held_up.waiting[0] > plain.waiting[0]


def test_a_slow_link_holds_the_ring_up_and_a_link_that_is_not_used_nobody():
    task = task_of(Dense(causal=False), 64, "contiguous", 4)
    one = {"hardware": machine(flops=1e15, inside=1e6, latency=0.0), "head_dim": 8, "itemsize": 2}
    plain = play(task, "ring", **one).seconds
    assert play(task, "ring", **one, slow=Slow(links={(1, 2): 5.0})).seconds == pytest.approx(5 * plain, rel=0.01)
    assert play(task, "ring", **one, slow=Slow(links={(0, 2): 5.0})).seconds == plain


def test_ranks_that_share_a_link_out_of_their_node_share_its_speed():
    task = task_of(Dense(causal=False), 256, "contiguous", 8)
    seconds = {}
    for links_out in (1, 2, 4):
        far = machine(flops=1e18, inside=1e18, outside=1e6, latency=0.0, links_out=links_out)
        seconds[links_out] = play(task, "double_ring", hardware=far, head_dim=8, itemsize=2, node_ranks=4).seconds
    assert seconds[1] == pytest.approx(2 * seconds[2], rel=0.01)
    assert seconds[2] == pytest.approx(2 * seconds[4], rel=0.01)


def test_spans_tell_the_same_time():
    task = task_of(Dense(), 64, "zigzag", 4)
    one = {"hardware": machine(flops=1e8), "head_dim": 8, "itemsize": 2, "phase": "backward", "node_ranks": 2}
    plain, told = play(task, "ring", **one), play(task, "ring", **one, keeps_spans=True)
    assert (plain.ends, plain.computing) == (told.ends, told.computing)
    for rank in range(4):
        mine = [span for span in told.spans if span.rank == rank and span.kind != "send"]
        assert sum(span.end - span.start for span in mine) == pytest.approx(told.ends[rank])
        assert all(a.end <= b.start for a, b in pairwise(mine))
    sent = sum(span.nbytes for span in told.spans if span.kind == "send" and span.rank == 1)
    assert sent == backward_bytes(task, "ring", 1, head_dim=8, itemsize=2)


LONGNET = Dilated([64, 256, 1024, 4096], [1, 4, 16, 64])


@pytest.mark.parametrize(
    ("pattern", "layout", "schedule"),
    [(Dense(), "zigzag", "ring")]
    + [(LONGNET, layout, schedule) for layout in ("contiguous", "zigzag") for schedule in PLANS]
    + [(Dense(), "striped", schedule) for schedule in ("gather", "ulysses", "hybrid")],
)
def test_dozens_of_ranks_are_done_when_the_obvious_simulator_says(pattern, layout, schedule):
    """Where ranks are told by what changes, and once for all that look alike."""
    task = replace(task_of(pattern, 4096, layout, 32, kv_heads=2), heads=4)
    hardware = machine(flops=1e8)
    pace, lines = Pace(hardware, task, "backward", 8, 2), Lines(hardware, 32, 8)
    one = {"hardware": hardware, "head_dim": 8, "itemsize": 2, "node_ranks": 8, "phase": "backward"}
    played = played_by("arrays", task, schedule, **one)
    assert (list(played.ends), list(played.computing)) == simulate(pace, lines, schedule)


@pytest.mark.parametrize(("phase", "inside"), [("forward", 1.7e5), ("backward", 3.4e5)])
def test_a_rank_that_falls_behind_a_little_at_every_step_is_noticed_in_time(phase, inside):
    """Nobody waits at first, until messages no longer hide what it lacks."""
    task = task_of(Dense(causal=False), 1024, "contiguous", 16)
    hardware, slow = machine(flops=4e7, inside=inside, latency=1e-5), Slow(ranks={3: 1.03, 9: 1.05})
    played = play(task, "ring", hardware=hardware, head_dim=8, itemsize=2, phase=phase, slow=slow)
    pace, lines = Pace(hardware, task, phase, 8, 2), Lines(hardware, 16, 16, slow)
    assert any(one.exposed == 0 for one in played.per_step[1:])
    assert max(played.waiting) > 0
    assert list(played.ends) == simulate(pace, lines, "ring")[0]


def test_what_cannot_be_played_is_refused():
    task = task_of(Dense(), 64, "zigzag", 4)
    one = {"hardware": machine(), "head_dim": 8, "itemsize": 2}
    with pytest.raises(ArgumentError, match="schedule must be one of ring"):
        play(task, "rign", **one)
    with pytest.raises(ArgumentError, match="4 ranks are not whole nodes of 3"):
        play(task, "ring", **one, node_ranks=3)
    with pytest.raises(ArgumentError, match="phase must be forward or backward"):
        play(task, "ring", **one, phase="both")
    with pytest.raises(ArgumentError, match="ranks from 0 to 3, got rank 4"):
        play(task, "ring", **one, slow=Slow(ranks={4: 2.0}))
    with pytest.raises(ArgumentError, match="factors above 0"):
        play(task, "ring", **one, slow=Slow(ranks={1: 0.0}))
