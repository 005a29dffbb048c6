"""The event simulation against the slow and obvious one, and against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from event_by_event import simulate
from longring.geometry.plans import PLANS
from longring.plan.event_pace import Pace
from longring.plan.events import play
from longring.plan.hardware import Hardware, Link, hardware
from longring.plan.links import Lines, Slow
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


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("schedule", list(PLANS))
@given(worlds())
@settings(max_examples=25)
def test_every_rank_is_done_when_the_obvious_simulator_says(schedule, phase, world):
    task, node_ranks, hardware, slow = world
    played = play(
        task, schedule, hardware=hardware, head_dim=8, itemsize=2, node_ranks=node_ranks, phase=phase, slow=slow
    )
    lines = Lines(hardware, task.ranks, node_ranks, slow)
    ends, computing = simulate(Pace(hardware, task, phase, 8, 2), lines, schedule)
    assert list(played.ends) == ends
    assert list(played.computing) == computing
