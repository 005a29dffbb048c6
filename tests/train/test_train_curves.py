"""The loss of every step is that of one process, whatever the ranks, the layout, the schedule and the rest of it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from training_curves import STEPS, launched, losses, norms, settings, write_corpus

pytestmark = pytest.mark.processes

EXACT = 1e-9  # between float64 runs, whose rounding grows over steps of an optimiser; a wrong factor shows at once
SLACK = 4.0  # float32 sums in another order, for each rank and layout; as for other runs over ranks
LAYOUTS, SCHEDULES = ("zigzag", "contiguous"), ("ring", "gather", "ulysses", "hybrid")


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """(ranks, settings of each run) -> losses, then norms of gradients of each, in order; float64 unless said."""
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "text")

    def of(ranks: int, *words: dict) -> list[list[float]]:
        outs: list[Path] = [tmp_path_factory.mktemp("run") for _ in words]
        launched([settings(ranks, out, data=str(corpus), **one) for out, one in zip(outs, words, strict=True)])
        return [[*losses(out), *norms(out)] for out in outs]

    return of


@pytest.fixture(scope="module")
def alone(curves):
    """Of one process: dense in float64 and float32, LongNet's, and those of a window."""
    names = ("float64", "float32", "longnet", "window")
    words = ({}, {"dtype": "fp32"}, {"model": "longnet"}, {"window": 9})
    return dict(zip(names, curves(1, *words), strict=True))


def check(found: list[float], want: list[float], allowed: float) -> None:
    assert len(found) == len(want) == 2 * STEPS
    assert max(abs(a - b) for a, b in zip(found, want, strict=True)) <= allowed


def test_one_process_learns(alone):
    for curve in alone.values():
        assert curve[STEPS - 1] < curve[0] - 0.5
        assert max(curve[STEPS:]) > 1, "or nothing is ever cut down to it"


def float32_budget(alone) -> float:
    """What one process in float32 is off, at its worst: nothing that ranks do may be much worse."""
    return SLACK * max(abs(a - b) for a, b in zip(alone["float32"], alone["float64"], strict=True))


# A launch of ranks runs several settings, one after the other.
SAMPLE = {
    2: [
        {"layout": "zigzag", "schedule": "ring"},
        {"layout": "contiguous", "schedule": "gather", "micro_batch": 2},
        {"context_ranks": 1, "fsdp": True},
    ],
    4: [
        {"layout": "zigzag", "schedule": "hybrid", "node_ranks": 2},
        {"layout": "contiguous", "schedule": "ulysses", "activation_checkpointing": True},
        {"context_ranks": 2, "fsdp": True, "batch": 4, "micro_batch": 2},
        {"batch": 4},
        {"layout": "dealt", "schedule": "exchange"},
    ],
}


def test_two_ranks_have_the_curve_of_one_process(curves, alone):
    others = ({"dtype": "fp32"}, {"dtype": "bf16"}, {"window": 9, "layout": "contiguous"})
    *exact, rounded, rough, window = curves(2, *SAMPLE[2], *others)
    for curve in exact:
        check(curve, alone["float64"], EXACT)
    check(rounded, alone["float32"], float32_budget(alone))
    check(rough, alone["float64"], 0.05)
    assert max(abs(a - b) for a, b in zip(rough, alone["float64"], strict=True)) > float32_budget(alone), "not 16 bits"
    check(window, alone["window"], EXACT)


def test_four_ranks_have_the_curve_of_one_process(curves, alone):
    hybrid, ulysses, dealt_twice, together, exchange, longnet = curves(4, *SAMPLE[4], {"model": "longnet"})
    check(hybrid, alone["float64"], EXACT)
    check(ulysses, alone["float64"], EXACT)
    check(longnet, alone["longnet"], EXACT)
    check(dealt_twice, together, EXACT)  # two rings of two, or one of four
    check(exchange, alone["float64"], EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_and_schedule_has_the_curve_of_one_process(curves, alone, ranks, dtype):
    pairs = [
        {"layout": layout, "schedule": schedule, "dtype": dtype}
        | ({"node_ranks": ranks // 2} if schedule == "hybrid" else {})
        for layout, schedule in product(LAYOUTS, SCHEDULES)
    ]
    allowed, want = (float32_budget(alone), "float32") if dtype == "fp32" else (EXACT, "float64")
    for curve in curves(ranks, *pairs):
        check(curve, alone[want], allowed)
