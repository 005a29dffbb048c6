"""No prediction is faster than the hardware, and work is counted on every rank."""

from random import Random

import pytest

from longring.errors import ArgumentError, PatternError
from longring.geometry.layouts import deal
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.geometry.plans import PLANS
from longring.geometry.task import Task
from longring.plan import forecast
from longring.plan.choose import estimates
from longring.plan.counts import looks
from longring.plan.event_pace import FLOPS_OF_A_PAIR
from longring.plan.hardware import DTYPES, all_hardware, hardware
from longring.plan.work import balance, head_pairs

HARDWARE = sorted(all_hardware())
ROUNDING = 1 + 1e-9


def boundaries(draw, n, documents):
    return [0, *sorted(draw.sample(range(1, n), min(n, documents) - 1)), n]


def drawn_pattern(draw, n):
    is_causal = draw.random() < 0.6
    return draw.choice(
        (
            lambda: Dense(causal=is_causal),
            lambda: Dense(causal=is_causal, window=(draw.randrange(2 * n), draw.randrange(2 * n))),
            lambda: Dense(causal=is_causal, documents=boundaries(draw, n, draw.randint(1, 20))),
            lambda: Dilated([max(1, n // 64), max(2, n // 9), n], [1, 2, draw.choice((4, 5))], causal=is_causal),
        )
    )()


def layouts_of(pattern):
    is_dealt = isinstance(pattern, Dense) and pattern.documents is not None
    return ("contiguous", "zigzag", "dealt") if is_dealt else ("contiguous", "zigzag")


def drawn_question(draw):
    ranks = draw.choice((1, 2, 3, 8, 16, 64))
    nodes = draw.choice([nodes for nodes in (1, 2, 8) if ranks % nodes == 0])
    n = round(2 ** draw.uniform(0, 11) * ranks)
    machine, kv_heads = hardware(draw.choice(HARDWARE)), draw.choice((1, 2, 6))
    dtype = draw.choice(list(machine.forward_flops))
    heads = kv_heads * draw.choice((1, 4))
    head_dim = draw.choice((32, 128, 256))
    pattern = drawn_pattern(draw, max(2, n))
    return forecast.Question(pattern, max(2, n), ranks, nodes, heads, kv_heads, head_dim, dtype, machine)


def assert_possible(one):
    question, machine = one.question, one.question.hardware
    for phase, rates in (("forward", machine.forward_flops), ("backward", machine.backward_flops)):
        told = getattr(one, phase)
        peak = max(flops for dtype, flops in rates.items() if DTYPES[dtype] == question.itemsize)
        assert told.flops_per_second <= peak * ROUNDING, (phase, "mean of all ranks")
        assert told.flops_per_second * one.balance <= peak * ROUNDING, (phase, "busiest rank")
        for way in (told.traffic.sent, told.traffic.received):
            for place, link in (("inside", machine.inside), ("outside", machine.outside)):
                assert way[place].bytes <= told.seconds * link.bytes_per_second * ROUNDING, (phase, place)


@pytest.mark.parametrize("seed", range(60))
def test_nothing_predicted_is_faster_than_the_hardware(seed):
    draw = Random(seed)
    question = drawn_question(draw)
    layout = draw.choice(layouts_of(question.pattern))
    for schedule in draw.sample(sorted(PLANS), 3):
        if schedule in forecast.OF_NODES and not 1 < question.node_ranks < question.ranks:
            continue
        choice = forecast.estimated(question, schedule, layout)
        assert_possible(choice)
        if question.ranks <= 8:
            assert_possible(forecast._played(choice))


def packed(ranks, seed=0):
    n = 8192 * ranks
    pattern = Dense(documents=boundaries(Random(seed), n, 12))
    return forecast.Question(pattern, n, ranks, max(1, ranks // 8), 64, 8, 128, "bf16", hardware("h100"))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "dealt"])
def test_documents_over_64_ranks_are_possible_and_their_balance_is_of_all_ranks(layout):
    question = packed(64)
    for choice in (forecast.estimated(question, name, layout) for name in ("ring", "exchange", "ulysses", "hybrid")):
        assert_possible(choice)
    task = question.task(layout)
    by_hand = [sum(often * share * sum(tile.pairs for tile in tiles) for often, tiles, share in found)
               for found in (looks(task, "ring", rank, 64) for rank in range(64))]  # fmt: skip
    told = forecast.estimated(question, "ring", layout)
    assert told.balance == pytest.approx(64 * max(by_hand) / sum(by_hand))
    assert told.balance < 1.1 if layout == "dealt" else told.balance > 2


def test_what_auto_says_of_documents_is_possible():
    question = packed(16)
    task = question.task("contiguous")
    busiest = max(head_pairs(task, "ring", rank, 16) for rank in range(16))
    flops = sum(FLOPS_OF_A_PAIR.values()) * 128 * busiest
    machine = question.hardware
    ring = next(
        one
        for one in estimates(task, head_dim=128, itemsize=2, node_ranks=8, machine=machine)
        if one.schedule == "ring"
    )
    assert flops / ring.seconds <= machine.forward_flops["bf16"]


@pytest.mark.parametrize("layout", ["auto", "all", "contiguous", "zigzag", "striped", "dealt"])
def test_documents_are_forecast_in_every_layout(layout):
    found = forecast.forecast(packed(4), layout=layout)
    assert {one.layout for one in found.choices} >= ({"dealt", "zigzag"} if layout in ("auto", "all") else {layout})
    assert found.auto is None or found.auto.schedule in PLANS


def test_what_documents_cannot_be_asked_is_said_by_name():
    with pytest.raises(ArgumentError, match="documents, which are of 32,768 tokens"):
        forecast.longest(packed(4), "ring", "dealt")
    with pytest.raises(ArgumentError, match=r"layout must be one of .* got 'dealt'"):
        forecast.forecast(forecast.replace(packed(4), pattern=Dense()), layout="dealt")
    with pytest.raises(PatternError, match="100"):
        forecast.replace(packed(4), tokens=100)


@pytest.mark.parametrize("seed", range(120))
def test_work_is_what_the_plan_computes_tile_by_tile(seed):
    """Counted in closed form, or over all keys at once, against every tile of every rank's own plan."""
    draw = Random(seed)
    n, ranks = draw.randint(2, 150), draw.choice((1, 2, 4, 8))
    pattern = drawn_pattern(draw, n)
    name = draw.choice((*layouts_of(pattern), "striped"))
    layout = deal(name, n, ranks, documents=pattern.documents if name == "dealt" else None)
    kv_heads = draw.choice((1, 2, 3))
    task = Task(
        pattern, Problem(draw.choice((1, 2)), n, n, kv_heads, 0), layout, layout, kv_heads * draw.choice((1, 3))
    )
    for schedule in ("ring", "gather", "ulysses", *(["hybrid"] if ranks > 2 else [])):
        node_ranks = 2 if schedule == "hybrid" else ranks
        work = [head_pairs(task, schedule, rank, node_ranks) for rank in range(ranks)]
        for rank, told in enumerate(work):
            found = looks(task, schedule, rank, node_ranks)
            assert told == sum(often * share * sum(tile.pairs for tile in tiles) for often, tiles, share in found)
        assert balance(task, schedule, node_ranks) == (ranks * max(work) / sum(work) if any(work) else 1)
