"""Estimates against the event simulation, over shapes, worlds and machines: `auto` and `longring plan` agree.

Both are predicted. The simulation knows who waits for whom, which estimates leave out.
"""

import random
from functools import lru_cache

import pytest

from longring.geometry.patterns import Dense, Dilated
from longring.plan.choose import choose_layout, choose_schedule, fastest
from longring.plan.cost import CHOSEN_BY_AUTO, estimate, estimates
from longring.plan.events import play
from longring.plan.forecast import PHASES, Question, forecast
from longring.plan.hardware import hardware

PATTERNS = {
    "causal": Dense(),
    "full": Dense(causal=False),
    "window": Dense(window=(4095, 0)),
    "longnet": Dilated([2048, 8192, 32768], [1, 4, 16]),
}
WORLDS = [(4, 1), (8, 1), (16, 2), (32, 8), (64, 8)]
GRID = [
    (pattern, tokens, world, heads, machine)
    for pattern in PATTERNS
    for tokens in (1 << 13, 1 << 16, 1 << 20)
    for world in WORLDS
    for heads in ((32, 8), (8, 8), (12, 2))
    for machine in ("h200", "a100", "rtx4090", "cpu")
    if pattern != "longnet" or tokens < 1 << 20  # whose rows ulysses names one by one
]
SAMPLE = random.Random(7).sample(GRID, 24)


def asked(pattern, tokens, world, heads, machine):
    return Question(
        pattern=PATTERNS[pattern],
        tokens=tokens,
        ranks=world[0],
        nodes=world[1],
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=128,
        dtype="bf16",
        hardware=hardware(machine),
    )


@lru_cache
def played(*place):
    """Seconds, forward and backward together, of every schedule that `auto` may take."""
    question = asked(*place)
    task, of_nodes = question.task(layout(question)), 1 < question.node_ranks < question.ranks
    size = {"head_dim": 128, "itemsize": 2, "node_ranks": question.node_ranks, "hardware": question.hardware}
    return {
        name: sum(play(task, name, phase=phase, **size).seconds for phase in PHASES)
        for name in CHOSEN_BY_AUTO
        if of_nodes or name not in ("double_ring", "hybrid")
    }


def layout(question):
    return choose_layout(question.pattern, question.tokens)[0]


def about(question):
    size = {"head_dim": 128, "itemsize": 2, "node_ranks": question.node_ranks}
    return estimates(question.task(layout(question)), **size, machine=question.hardware)


@pytest.mark.parametrize("place", SAMPLE, ids=str)
def test_what_auto_takes_is_hardly_slower_than_the_fastest(place):
    """By the estimates of the machine that is asked about, and by the simulation: less than a tenth.

    Where a node has one slow line out, who waits for whom on it is known to the simulation alone.
    """
    taken = fastest(about(asked(*place)))
    most = 1.1 if place[-1] != "rtx4090" else 1.25
    assert played(*place)[taken.schedule] <= most * min(played(*place).values())


@pytest.mark.parametrize("place", SAMPLE, ids=str)
def test_by_heads_estimates_are_close(place):
    """Else ulysses and hybrid would be passed over without being played."""
    for one in about(asked(*place)):
        if one.schedule in ("ulysses", "hybrid"):
            assert 1 / 1.3 <= one.seconds / played(*place)[one.schedule] <= 1.3


def test_most_estimates_are_close():
    ratios = [one.seconds / played(*place)[one.schedule] for place in SAMPLE for one in about(asked(*place))]
    close = [ratio for ratio in ratios if 1 / 1.15 <= ratio <= 1.15]
    assert len(close) >= 0.85 * len(ratios)


@pytest.mark.parametrize("place", [place for place in SAMPLE if place[-1] in ("h200", "cpu")][:6], ids=str)
def test_auto_and_plan_have_one_opinion_or_plan_says_how_they_differ(place):
    question = asked(*place)
    found = forecast(question)
    taken = choose_schedule(
        question.task(found.recommended.layout),
        head_dim=128,
        node_ranks=question.node_ranks,
        machine=question.hardware.device,
    )[0]
    assert found.auto is not None
    assert found.auto.schedule == taken
    assert found.auto.slower <= 0.1
    one = next(c for c in found.choices if (c.schedule, c.layout) == (taken, found.recommended.layout))
    assert one.is_played == found.recommended.is_played
    assert found.auto.slower == pytest.approx(max(0.0, one.seconds / found.recommended.seconds - 1))


def test_of_another_machine_than_auto_knows_plan_says_what_is_lost():
    found = forecast(asked("full", 1 << 16, (32, 8), (8, 8), "rtx4090"))
    assert found.auto is not None
    assert found.auto.machine == "h200"


@pytest.mark.parametrize("place", SAMPLE[:8], ids=str)
def test_what_hides_hides_from_where_it_stands_and_what_does_not_from_further_on(place):
    question = asked(*place)
    for plays_all in (False, True):
        for one in forecast(question, plays_all=plays_all).choices:
            for each in (one.forward, one.backward):
                assert each.is_hidden == (each.waiting <= 0.02 * each.seconds + 1e-9)
                assert each.hides_from is not None
                assert each.is_hidden == (each.hides_from <= question.local_tokens)


def test_estimates_are_remembered():
    question = asked("causal", 1 << 16, (16, 2), (32, 8), "h200")
    pace = question.pace("forward", "zigzag")
    assert estimate("ring", pace, node_ranks=8) is estimate("ring", question.pace("forward", "zigzag"), node_ranks=8)
