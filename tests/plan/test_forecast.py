"""Forecasts: what they count is what the engine does, and what they recommend follows from it."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import longring as lr
from longring.errors import ArgumentError
from longring.geometry.layouts import deal
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.geometry.plans import PLANS
from longring.geometry.task import Task
from longring.plan import counts, forecast
from longring.plan.event_pace import Pace
from longring.plan.forecast import Question, candidates, estimated, fewest, last_that_fits, longest
from longring.plan.hardware import hardware
from longring.plan.memory import held
from longring.plan.traffic import backward_bytes, forward_bytes
from longring.plan.work import balance, pairs
from strategies import tasks

H200 = hardware("h200")


def asked(**given):
    told = {"pattern": Dense(), "tokens": 1 << 16, "ranks": 8, "nodes": 1, "heads": 8, "kv_heads": 2}
    return Question(**{**told, "head_dim": 64, "dtype": "bf16", "hardware": H200, **given})


# ------------------------------------------------------------------------------------ counts are the engine's


def a_configuration(seed):
    """Some task that every schedule can run, small enough to run it."""
    draw = random.Random(seed)
    nodes, node_ranks = draw.choice([(1, 3), (1, 4), (2, 2), (2, 3), (3, 2)])
    kv_heads, length = draw.choice([1, 2, 3]), draw.randint(20, 90)
    causal = draw.random() < 0.7
    pattern = draw.choice(
        [
            Dense(causal=causal),
            Dense(causal=causal, window=(draw.randint(1, 40), 0 if causal else 5)),
            Dilated([8, 16, 64], [1, 2, 4], causal=causal),
        ]
    )
    return asked(
        pattern=pattern,
        tokens=length,
        ranks=nodes * node_ranks,
        nodes=nodes,
        heads=kv_heads * draw.choice([1, 2]),
        kv_heads=kv_heads,
        head_dim=draw.choice([4, 8]),
        batch=draw.choice([1, 2]),
        dtype=draw.choice(["fp32", "fp64"]),
    ), draw.choice(["zigzag", "contiguous", "striped"])


@pytest.mark.filterwarnings("ignore::longring.RowsLeftOut")
@pytest.mark.parametrize("seed", range(30))
def test_bytes_are_those_that_the_engine_sends(seed):
    question, layout = a_configuration(seed)
    schedule = list(PLANS)[seed % len(PLANS)]
    dtype = {"fp32": torch.float32, "fp64": torch.float64}[question.dtype]
    shape = question.batch, question.tokens
    q = torch.randn(*shape, question.heads, question.head_dim, dtype=dtype, requires_grad=True)
    k, v = torch.randn(2, *shape, question.kv_heads, question.head_dim, dtype=dtype, requires_grad=True).unbind(0)
    options = {"ranks": question.ranks, "node_ranks": question.node_ranks, "layout": layout, "schedule": schedule}
    sim = lr.simulate(q, k, v, pattern=question.pattern, **options)
    sim.out.sum().backward()
    every = [
        [forecast._traffic(question, schedule, layout, rank, phase) for rank in range(question.ranks)]
        for phase in forecast.PHASES
    ]
    assert tuple(one.bytes_sent for one in every[0]) == sim.forward.bytes_sent
    assert tuple(one.bytes_sent for one in every[1]) == sim.backward.bytes_sent
    assert all(one.is_exact for some in every for one in some)


@given(tasks(), st.sampled_from(list(PLANS)), st.data())
def test_what_is_sent_is_received(task, schedule, data):
    node_ranks = data.draw(st.sampled_from([n for n in range(1, task.ranks + 1) if task.ranks % n == 0]))
    size = {"head_dim": 4, "itemsize": 2, "node_ranks": node_ranks}
    for phase, total in (("forward", forward_bytes), ("backward", backward_bytes)):
        every = [counts.traffic(task, schedule, rank, **size, phase=phase) for rank in range(task.ranks)]
        assert [one.bytes_sent for one in every] == [total(task, schedule, rank, **size) for rank in range(task.ranks)]
        for where in ("inside", "outside"):
            for what in ("bytes", "messages"):
                sent, received = (
                    sum(getattr(getattr(one, way)[where], what) for one in every) for way in ("sent", "received")
                )
                assert sent == received
        if node_ranks == task.ranks:
            assert all(one.sent["outside"] == counts.Carried() for one in every)


@given(tasks(), st.sampled_from(list(PLANS)), st.data())
def test_all_ranks_work_together_is_the_tasks(task, schedule, data):
    node_ranks = data.draw(st.sampled_from([n for n in range(1, task.ranks + 1) if task.ranks % n == 0]))
    whole = 4 * 8 * task.share * sum(pairs(task, rank) for rank in range(task.ranks))
    size = {"head_dim": 8, "node_ranks": node_ranks, "phase": "forward"}
    assert sum(counts.flops(task, schedule, rank, **size) for rank in range(task.ranks)) == whole


def test_thousands_of_steps_are_counted_by_some_of_them():
    layout = deal("zigzag", 40_000, 400)
    task = Task(Dense(), Problem(1, 40_000, 40_000, 2, 0), layout, layout)
    for phase, total in (("forward", forward_bytes), ("backward", backward_bytes)):
        found = counts.traffic(task, "ring", 300, head_dim=8, itemsize=2, node_ranks=8, phase=phase)
        assert not found.is_exact
        assert found.bytes_sent == pytest.approx(total(task, "ring", 300, head_dim=8, itemsize=2), rel=0.01)


def test_moving_takes_the_busiest_line_by_hand():
    """48 GB/s out of a node that has a line a rank, 30 us a message."""
    quiet, busy = counts.Carried(), counts.Carried(48_000, 10, 4800, 1)
    found = counts.Traffic({"inside": quiet, "outside": busy}, {"inside": busy, "outside": quiet}, True)
    assert found.moving(H200, 8) == pytest.approx(1e-6 + 10 * 30e-6)
    assert found.moving(H200, 8, ["inside"]) == pytest.approx(48_000 / 360e9 + 10 * 10e-6)
    assert found.moving(H200, 16) == pytest.approx(2e-6 + 10 * 30e-6)  # two ranks share a line


# ------------------------------------------------------------------------------------------------ a question


def test_all_pairs_of_longnet_are_counted_on_some_periods(monkeypatch):
    monkeypatch.setattr(forecast, "LONG", 130)
    pattern = Dilated([8, 16, 64], [1, 2, 4])
    question = asked(pattern=pattern, tokens=640, kv_heads=4, ranks=5)
    layout = deal("contiguous", 640, 5)
    task = Task(pattern, Problem(1, 640, 640, 4, 0), layout, layout, 8)
    assert question.alone.tokens == 128
    assert question.pairs == sum(pairs(task, rank) for rank in range(5))
    assert question.flops("backward") == 10 * 64 * 2 * question.pairs


def test_what_a_layer_saves_by_hand():
    question = asked(tokens=100, ranks=8, batch=2, heads=8, kv_heads=2, head_dim=64, dtype="bf16")
    rows = 2 * 13  # the longest of eight shards
    assert question.saved_bytes == rows * (2 * 8 * 64 * 2 + 2 * 2 * 64 * 2 + 8 * 4)
    parts = held(question.task("zigzag"), "ring", 0, head_dim=64, itemsize=2, phase="backward").components
    assert question.saved_bytes == sum(parts[name] for name in ("q", "k", "v", "out", "lse"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"layers": -1}, "layers must be at least 1"),
        ({"heads": 8, "kv_heads": 3}, "multiple of kv_heads, got 8 and 3"),
        ({"ranks": 8, "nodes": 3}, "8 ranks cannot be spread evenly over 3 nodes"),
        ({"hardware": hardware("gtx1080")}, "'gtx1080' has no rate for bf16; it has fp32, fp64"),
        ({"reserve_bytes": 1 << 40}, "leave nothing of the 147,900,000,000"),
    ],
)
def test_impossible_questions_are_refused(wrong, said):
    with pytest.raises(ArgumentError, match=said):
        asked(**wrong)


# ----------------------------------------------------------------------------------------------- candidates


def test_schedules_of_nodes_are_left_out_where_there_are_none():
    for nodes in (1, 8):
        found, left_out = candidates(asked(nodes=nodes))
        assert {name for name, _ in found} == {"ring", "bidirectional", "exchange", "gather", "ulysses"}
        assert [line.split(":")[0] for line in left_out] == ["double_ring", "hybrid"]
    found, left_out = candidates(asked(nodes=2))
    assert [name for name, _ in found] == [*PLANS, "ring"]
    assert left_out == ()


def test_every_schedule_in_the_patterns_layout_and_the_ring_in_the_other():
    assert {layout for name, layout in candidates(asked())[0] if name != "ring"} == {"zigzag"}
    assert [layout for name, layout in candidates(asked())[0] if name == "ring"] == ["zigzag", "contiguous"]
    full = asked(pattern=Dense(causal=False))
    assert [layout for name, layout in candidates(full)[0] if name == "ring"] == ["contiguous", "zigzag"]
    assert len(candidates(asked(nodes=2), layout="all")[0]) == 2 * len(PLANS)
    assert candidates(asked(), schedule="hybrid", layout="striped") == ([("hybrid", "striped")], ())


def test_one_rank_is_one_choice():
    found = forecast.forecast(asked(ranks=1))
    assert [one.schedule for one in found.choices] == ["ring"]
    assert found.recommended.efficiency == pytest.approx(1, rel=0.01)
    assert found.recommended.forward.traffic.bytes_sent == 0
    assert "nothing moves" in found.reason


def test_more_ranks_than_tokens_is_fine():
    found = forecast.forecast(asked(tokens=3, ranks=8))
    assert all(one.seconds > 0 for one in found.choices)


@pytest.mark.parametrize("name", ["ulyses", "", "auto "])
def test_unknown_names_are_refused(name):
    with pytest.raises(ArgumentError, match="schedule must be one of auto, ring, "):
        candidates(asked(), schedule=name)
    with pytest.raises(ArgumentError, match="layout must be one of auto, all, contiguous, "):
        candidates(asked(), layout=name)


# ------------------------------------------------------------------------------------------------- one choice


@pytest.fixture(scope="module")
def million():
    return forecast.forecast(asked(tokens=1 << 20, ranks=32, nodes=4, heads=32, kv_heads=8, head_dim=128, layers=4))


def of(found, schedule, layout="zigzag"):
    return next(one for one in found.choices if (one.schedule, one.layout) == (schedule, layout))


def test_a_layers_flops_by_hand(million):
    n = 1 << 20
    for one in million.choices:
        assert one.forward.flops == 4 * 128 * 32 * (n * (n + 1) // 2) // 32
        assert one.backward.flops == 10 * 128 * 32 * (n * (n + 1) // 2) // 32


def test_balance_is_that_of_the_layout(million):
    assert of(million, "ring").balance == pytest.approx(1, abs=1e-4)
    assert of(million, "ring", "contiguous").balance == pytest.approx(63 / 32, rel=1e-3)
    layout = deal("contiguous", 1 << 20, 32)
    task = Task(Dense(), Problem(1, 1 << 20, 1 << 20, 8, 0), layout, layout)
    assert of(million, "ring", "contiguous").balance == pytest.approx(balance(task), rel=1e-6)


def test_efficiency_is_the_speed_up_over_ranks(million):
    question, one = million.question, million.recommended
    pace = {phase: Pace(H200, question.alone.task("contiguous"), phase, 128, 2) for phase in forecast.PHASES}
    alone = sum(
        counts.computing(question.alone.task("contiguous"), "ring", 0, node_ranks=1, pace=pace[phase])
        for phase in forecast.PHASES
    )
    assert one.efficiency == pytest.approx(alone / (32 * one.seconds))
    assert 0.9 < one.efficiency <= 1


def test_the_leading_one_is_played_and_leads(million):
    best = million.recommended
    assert best.is_played
    assert best.forward.hidden is not None
    assert all(best.seconds <= 1.02 * one.seconds for one in million.choices)
    assert not all(one.is_played for one in million.choices)
    assert of(million, "gather").forward.hidden is None


def test_estimates_are_near_what_playing_gives():
    """Where computing rules, as here; waits that come from the order of things are what playing is for."""
    question = asked(tokens=1 << 20, ranks=16, nodes=2, heads=32, kv_heads=8, head_dim=128)
    for name in ("ring", "double_ring", "exchange", "ulysses", "hybrid"):
        guess = estimated(question, name, "zigzag")
        played = forecast._played(guess)
        assert guess.forward.seconds == pytest.approx(played.forward.seconds, rel=0.05)
        assert guess.backward.seconds == pytest.approx(played.backward.seconds, rel=0.05)


def test_a_ring_hides_from_the_length_that_it_says():
    """Twice that length a rank and computing rules, half of it and moving does."""
    question = asked(tokens=1 << 17, ranks=16, nodes=2, heads=32, kv_heads=8, head_dim=128)
    border = estimated(question, "ring", "zigzag").forward.hides_from
    longer, shorter = (
        estimated(replace(question, tokens=int(16 * border * factor)), "ring", "zigzag").forward for factor in (2, 0.5)
    )
    assert longer.computing > longer.moving
    assert shorter.computing < shorter.moving
    gathered = estimated(question, "gather", "zigzag").forward
    assert gathered.waiting == pytest.approx(gathered.unhidden)
    assert gathered.hides_from == pytest.approx(8192 * 49 * gathered.unhidden / gathered.computing, abs=1)


def test_memory_is_what_a_rank_holds_and_what_other_layers_keep(million):
    question, one = million.question, of(million, "ring")
    size = {"head_dim": 128, "itemsize": 2, "node_ranks": 8, "device": "cuda"}
    forward, backward = (held(question.task("zigzag"), "ring", one.asked, **size, phase=p) for p in forecast.PHASES)
    assert one.memory.forward == forward.components
    assert one.memory.backward == backward.components
    assert one.memory.peak_bytes == 3 * question.saved_bytes + max(forward.peak_bytes, backward.peak_bytes)


def test_a_choice_that_does_not_fit_is_not_recommended(million):
    needs = sorted(one.memory.peak_bytes for one in million.choices)
    fastest = million.recommended
    tight = replace(million.question, reserve_bytes=H200.memory_bytes - (fastest.memory.peak_bytes - 1))
    found = forecast.forecast(tight)
    assert found.recommended.fits
    assert (found.recommended.schedule, found.recommended.layout) != (fastest.schedule, fastest.layout)
    assert f"{fastest.schedule} would be faster, but does not fit" in found.reason
    none = forecast.forecast(replace(tight, reserve_bytes=H200.memory_bytes - needs[0] + 1))
    assert none.recommended.memory.peak_bytes == needs[0]
    assert "nothing fits" in none.reason


def test_of_alike_ones_it_is_the_ring(million):
    """Exchange and ring compute the same and hide what they move; hybrid makes larger tiles, and is left out here."""
    only = [of(million, name) for name in ("ring", "bidirectional", "exchange")]
    assert forecast._best(only).schedule == "ring"


def test_dilated_takes_what_moves_and_holds_less():
    segments = [2048 << i for i in range(5)]
    question = asked(
        pattern=Dilated(segments, [1, 2, 4, 8, 16]), tokens=1 << 20, ranks=64, nodes=8, heads=16, kv_heads=16
    )
    found = forecast.forecast(question)
    assert found.recommended.layout == "contiguous"
    assert found.recommended.forward.traffic.bytes_sent <= of(found, "ring", "contiguous").forward.traffic.bytes_sent
    assert any(line.startswith("ulysses: ") for line in found.left_out)


# ------------------------------------------------------------------------------------- how long, and how many


@given(
    steps=st.lists(st.integers(0, 50), min_size=1, max_size=60),
    limit=st.integers(0, 1500),
    first=st.integers(1, 80),
)
def test_the_last_that_fits_is_found_wherever_one_begins(steps, limit, first):
    """Of needs that only ever rise: by steps, then by one each."""
    total = [sum(steps[:count]) for count in range(len(steps) + 1)]

    def needs(count):
        return total[count] if count < len(total) else total[-1] + count - len(steps)

    found, at, beyond = last_that_fits(needs, limit, first_guess=first)
    assert at == needs(found) <= limit < beyond == needs(found + 1)


def test_few_questions_find_a_length():
    questions = []

    def needs(count):
        questions.append(count)
        return 1000 + 37 * count

    assert last_that_fits(needs, 10**9, first_guess=5)[0] == (10**9 - 1000) // 37
    assert len(questions) <= 8


@pytest.mark.parametrize("schedule", PLANS)
def test_the_longest_fits_and_a_block_more_does_not(schedule):
    question = asked(hardware=hardware("rtx4090"), layers=8, ranks=4, nodes=2, reserve_bytes=10 << 30)
    found = longest(question, schedule, "zigzag")
    assert found.granule == 4 * 128
    at, beyond = (replace(question, tokens=found.tokens + more) for more in (0, found.granule))
    assert estimated(at, schedule, "zigzag").fits
    assert not estimated(beyond, schedule, "zigzag").fits
    assert found.bytes_at <= question.memory_bytes < found.bytes_beyond


def test_rows_that_are_named_one_by_one_are_not_counted_for_minutes():
    question = asked(pattern=Dilated([16, 32], [1, 2]), tokens=1 << 10)
    found = longest(question, "ulysses", "contiguous")
    assert found.is_at_least
    assert found.tokens >= 1 << 13
    assert found.bytes_at == forecast.memory(replace(question, tokens=found.tokens), "ulysses", "contiguous").peak_bytes


@pytest.mark.parametrize(
    "pattern",
    [Dense(window=(0, 0)), Dense(window=(63, 0)), Dilated([64], [2]), Dilated([16], [16]), Dilated([10, 50], [1, 3])],
)
def test_what_repeats_is_one_tile_to_count_however_often(pattern):
    found = longest(asked(pattern=pattern), "exchange", "contiguous")
    assert not found.is_at_least
    assert found.tokens >= 1 << 27


def test_segments_of_a_few_tokens_are_counted_up_to_a_limit():
    found = longest(asked(pattern=Dilated([5], [9]), heads=9, kv_heads=3, head_dim=1), "ring", "contiguous")
    assert found.is_at_least
    assert found.tokens >= 1 << 20


@pytest.mark.parametrize(
    ("schedule", "ranks", "nodes"), [("ring", 24, 3), ("exchange", 24, 3), ("ulysses", 17, 1), ("hybrid", 32, 4)]
)
def test_the_longest_fits_every_one_of_many_ranks(schedule, ranks, nodes):
    """Of which one was asked first, and would have promised more."""
    question = asked(ranks=ranks, nodes=nodes, heads=32, kv_heads=8, head_dim=128, hardware=hardware("h200"))
    found = longest(question, schedule, "zigzag")
    at = replace(question, tokens=found.tokens)
    held = [forecast._memory_of(at, schedule, "zigzag", rank).peak_bytes for rank in range(ranks)]
    assert max(held) == found.bytes_at <= question.memory_bytes < found.bytes_beyond
    rough = longest(question, schedule, "zigzag", is_rough=True)
    assert rough.tokens >= found.tokens


def test_where_memory_is_short_the_fullest_of_many_ranks_decides():
    question = asked(ranks=17, heads=32, kv_heads=8, head_dim=128, tokens=19_451_264, hardware=hardware("h200"))
    assert not estimated(question, "ulysses", "zigzag").fits
    assert forecast._memory_of(question, "ulysses", "zigzag", 1).peak_bytes <= question.memory_bytes


def test_what_is_held_is_held_by_the_rank_that_is_named():
    found = estimated(asked(ranks=8, tokens=20_000, heads=4, kv_heads=2, head_dim=64), "ring", "zigzag").memory
    question = asked(ranks=8, tokens=20_000, heads=4, kv_heads=2, head_dim=64)
    assert found == forecast._memory_of(question, "ring", "zigzag", found.rank)
    assert found.rank != 1


@pytest.mark.parametrize(("ranks", "most"), [(1, None), (8, 64), (64, 8)])
def test_dilated_rows_dealt_like_cards_are_counted_as_far_as_that_takes_moments(ranks, most):
    """Each of them meets those of every other rank in every segment, and none stands for another."""
    question = asked(pattern=Dilated([4096, 4096], [1, 3]), tokens=2, ranks=ranks, nodes=1)
    found = longest(question, "ring", "striped", is_rough=True)
    assert found.is_at_least == (most is not None)
    assert most is None or 4096 * most // 2 <= found.tokens <= 4096 * most


@pytest.mark.parametrize("layers", [1, 32])
@pytest.mark.parametrize("pattern", [Dense(), Dense(window=(999, 0)), Dilated([2048, 8192, 1 << 20], [1, 4, 512])])
def test_how_long_one_can_go_does_not_depend_on_how_long_one_asked_to_go(pattern, layers):
    question = asked(pattern=pattern, layers=layers)
    layout = forecast.choose_layout(pattern, 1 << 16)[0]
    lengths = (replace(question, tokens=tokens) for tokens in (1000, 1 << 16, 3_000_001))
    found = {longest(one, "exchange", layout) for one in lengths}
    assert len(found) == 1
    taken = found.pop()
    assert taken.granule == 8 * (8192 if isinstance(pattern, Dilated) else 128)
    assert taken.granule <= taken.tokens / 50


@pytest.mark.parametrize("schedule", ["ring", "exchange", "ulysses", "gather"])
@pytest.mark.parametrize("pattern", [Dense(), Dense(window=(20_000, 0)), Dilated([1 << 14], [1])])
def test_a_forecast_is_of_the_fullest_of_few_ranks(schedule, pattern):
    question = asked(pattern=pattern, heads=4, kv_heads=4)
    layout = "zigzag" if pattern == Dense() else "contiguous"
    size = {"head_dim": 64, "itemsize": 2, "node_ranks": 8, "device": "cuda"}
    found = forecast.memory(question, schedule, layout)
    for phase, components in (("forward", found.forward), ("backward", found.backward)):
        every = [held(question.task(layout), schedule, r, **size, phase=phase).peak_bytes for r in range(8)]
        assert sum(components.values()) <= max(every)
        if phase == "backward":
            assert sum(components.values()) == max(every)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_where_ranks_outnumber_tokens_a_rank_that_has_some_is_asked(tokens):
    question = asked(tokens=tokens, ranks=64, nodes=8)
    for layout in ("zigzag", "contiguous"):
        assert estimated(question, "ring", layout).memory.peak_bytes > 0


@pytest.mark.parametrize("pattern", [Dense(), Dilated([2048, 4096, 8192], [1, 2, 4])])
def test_one_rank_wastes_nothing(pattern):
    question = asked(pattern=pattern, ranks=1)
    assert forecast.forecast(question).recommended.efficiency == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("schedule", ["ring", "bidirectional"])
def test_ranks_that_do_not_send_out_of_a_node_leave_its_link_to_those_that_do(schedule):
    question = asked(
        tokens=1 << 18, ranks=32, nodes=8, heads=32, kv_heads=8, head_dim=128, hardware=hardware("rtx4090")
    )
    about = estimated(question, schedule, "zigzag")
    played = forecast.forecast(question, schedule=schedule, layout="zigzag", plays_all=True).recommended
    for one, other in ((about.forward, played.forward), (about.backward, played.backward)):
        assert one.seconds == pytest.approx(other.seconds, rel=0.25)


def test_the_fewest_ranks_fit_and_a_step_fewer_do_not():
    question = asked(tokens=4 << 20, heads=32, kv_heads=8, head_dim=128, layers=32)
    found = fewest(question)
    assert found.question.ranks % 8 == 0
    assert found.question.nodes == found.question.ranks // 8
    assert found.fewer == found.question.ranks - 8
    assert forecast.forecast(found.question).recommended.fits
    assert not any(
        one.fits
        for one in forecast.forecast(replace(found.question, ranks=found.fewer, nodes=found.fewer // 8)).choices
    )
    assert found.bytes_fewer > question.memory_bytes


def test_one_rank_may_be_enough():
    found = fewest(asked(tokens=1000))
    assert (found.question.ranks, found.fewer, found.bytes_fewer) == (1, 0, 0)


def test_inside_a_node_ranks_double_and_then_come_nodes():
    assert [forecast._sizes(8)(i) for i in range(7)] == [1, 2, 4, 8, 16, 24, 32]
    assert [forecast._sizes(6)(i) for i in range(6)] == [1, 2, 4, 6, 12, 18]
    assert [forecast._sizes(1)(i) for i in range(3)] == [1, 2, 3]


def test_what_no_number_of_ranks_holds_is_refused():
    """All keys on every rank: more ranks do not help."""
    with pytest.raises(ArgumentError, match="ranks: each would hold"):
        fewest(asked(tokens=1 << 30, heads=32, kv_heads=32, head_dim=128), schedule="gather")
