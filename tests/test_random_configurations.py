"""Random configurations on the CPU; that the judge of them catches what is planted; and the record of runs."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import random_configurations
from longring.sources import sources
from random_configurations import (
    CRASH,
    HANG,
    REFUSED,
    RIGHT,
    Configuration,
    Limits,
    computed,
    draw,
    flops_of,
    judged,
    run,
    sampled,
)

SEED = 23
HERE = Limits.of("cpu", 120)


@pytest.mark.parametrize("part", range(6))
def test_random_configurations_are_right(part):
    found = [run(draw(SEED, index, HERE), "cpu") for index in range(10 * part, 10 * part + 10)]
    assert [one for one in found if one.outcome not in (RIGHT, REFUSED)] == []
    assert sum(one.outcome == RIGHT for one in found) > 5


# ------------------------------------------------------------------------------------------------------ drawing


def test_the_same_is_drawn_again_and_travels_as_json():
    for limits in (HERE, Limits(), Limits().sanitized):
        for index in range(50):
            drawn = draw(SEED, index, limits)
            assert draw(SEED, index, limits) == drawn
            assert Configuration.from_json(drawn.to_json()) == drawn


def test_all_there_is_gets_drawn_within_the_limits():
    limits = Limits()
    drawn = [draw(SEED, index, limits) for index in range(1500)]
    assert sum(one.is_far for one in drawn) >= 130  # of which 100 are to be right
    assert max(one.n_k for one in drawn) > 150_000
    for one in drawn:
        one.pattern.check(random_configurations.lr.geometry.patterns.Problem(one.batch, one.n_q, one.n_k, 1, 0))
        assert one.heads % one.kv_heads == 0
        assert flops_of(one) <= limits.flops
        assert max(one.n_q, one.n_k) <= limits.most_tokens
        assert one.node_ranks is None or one.ranks % one.node_ranks == 0
    by_fact = {fact: Counter(one.facts[fact] for one in drawn) for fact in drawn[0].facts}
    assert len(by_fact["schedule"]) == 9  # and "one device"
    assert len(by_fact["pattern"]) == 7
    assert len(by_fact["dtype"]) == 3
    assert len(by_fact["kernel"]) == 7
    assert len(by_fact["tokens"]) == 6
    assert len(by_fact["ranks"]) == 17
    assert len(by_fact["layout"]) == 6
    assert min(min(counts.values()) for counts in by_fact.values()) > 10
    tells = {"deterministic", "with_dlse", "dout_expanded", "scale", "query_offset", "align", "lengths", "window"}
    assert all(any(getattr(one, name) not in (None, False) for one in drawn) for name in tells)
    assert {one.memory for one in drawn} == set(random_configurations.MEMORY)
    assert sum(one.n_q != one.n_k for one in drawn) > 150


# ------------------------------------------------------------------------------------------------------ judging

CASES = {
    "dense": Configuration(1, 0, "dense", 90, 90, 1, 4, 2, 32, "float32", True, ranks=3, layout="zigzag"),
    "documents": Configuration(
        1, 1, "documents", 90, 90, 2, 2, 2, 64, "bfloat16", False, documents=[[0, 20, 90], [0, 50, 90]], with_dlse=True
    ),
    "dilated": Configuration(
        1, 2, "dilated mod", 70, 90, 1, 4, 4, 32, "float16", True, segments=[16, 90], rates=[1, 3], ranks=2
    ),
}
ERROR = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1.5e-2}


@pytest.mark.parametrize("quantity", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("is_sampled", [False, True], ids=["whole", "sampled"])
@pytest.mark.parametrize("name", CASES)
def test_planted_errors_are_caught(name, is_sampled, quantity, monkeypatch):
    """Of one row among those at the edges, in one batch row."""
    if is_sampled:
        monkeypatch.setattr(random_configurations, "SMALL", 0)
    it = CASES[name]
    x, got, _ = computed(it, "cpu")
    assert max(judged(it, x, got).values()) <= 1
    number = int(sampled(it)[quantity in ("dk", "dv")][-2])
    wrong = getattr(got, quantity).double()
    wrong[0].select(1 if quantity == "lse" else 0, number).mul_(1 + ERROR[it.dtype])
    assert judged(it, x, got._replace(**{quantity: wrong}))[quantity] > 1


def test_one_number_that_is_nan_is_caught_wherever_it_is(monkeypatch):
    monkeypatch.setattr(random_configurations, "SMALL", 0)
    it = replace(CASES["dense"], n_q=500, n_k=500)
    x, got, _ = computed(it, "cpu")
    elsewhere = next(row for row in range(500) if row not in sampled(it)[0].tolist())
    got.out[0, elsewhere, 0, 0] = math.nan
    assert math.inf in judged(it, x, got).values()


@pytest.mark.parametrize("quantity", ["dk", "dv"])
def test_a_block_of_keys_that_is_wrong_is_caught_between_the_samples(quantity, monkeypatch):
    monkeypatch.setattr(random_configurations, "SMALL", 0)
    it = replace(CASES["dense"], n_q=2000, n_k=2000, ranks=0, layout="auto", dtype="bfloat16", with_dlse=True)
    x, got, _ = computed(it, "cpu")
    assert max(judged(it, x, got).values()) <= 1
    keys = set(sampled(it)[1].tolist())
    missed = next(j for j in range(2000) if not keys & set(range(j, j + 16)))
    getattr(got, quantity)[0, missed : missed + 16] = 0.0
    ratios = judged(it, x, got)
    assert ratios.pop(f"sum of {quantity}") > 1
    assert max(ratios.values()) <= 1


def test_samples_are_at_edges():
    it = Configuration(
        3, 1, "dilated mod", 900_001, 900_001, 1, 8, 8, 64, "bfloat16", True,
        segments=[300_000], rates=[2], ranks=2, layout="contiguous",
    )  # fmt: skip
    rows, keys = (some.tolist() for some in sampled(it))
    for found in (rows, keys):
        assert found == sorted(set(found))
        assert {0, 900_000} <= set(found)
        assert {299_999, 300_000, 450_000, 450_001} & set(found)
        assert len(found) > 20


def test_a_refusal_by_name_is_told_from_an_error():
    refused = run(replace(CASES["dense"], kernel="cudnn"), "cpu")
    assert refused.outcome == REFUSED
    error = run(replace(CASES["dense"], layout="no such layout"), "cpu")
    assert error.outcome == "other error"
    assert "LayoutError" in error.message


# ------------------------------------------------------------------------------------------------------- running


@pytest.fixture(scope="module")
def command():
    path = Path(__file__).parent.parent / "benchmarks" / "random_gpu.py"
    spec = importlib.util.spec_from_file_location("random_gpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["random_gpu"] = module  # where a dataclass looks for it
    spec.loader.exec_module(module)
    return module


def arguments(record, seed, **told):
    asked = {"seed": seed, "device": "cpu", "jobs": 1, "most": 3, "at-most-n": 60, "record": record, **told}
    return [part for name, value in asked.items() for part in (f"--{name}", str(value))]


class Here:
    """Instead of a process."""

    facts = {"device": "none", "torch": "2"}  # noqa: RUF012

    def __init__(self, told, folder, number):
        self.told = told

    def ask(self, index, seconds):
        found = asdict(run(draw(self.told.seed, index, Limits.of("cpu", self.told.at_most_n)), "cpu"))
        return {name: value for name, value in found.items() if name != "configuration"}

    def sanitizer_errors(self):
        return []

    def end(self, patience=0.0):
        pass


def test_runs_of_other_seeds_add_up_in_the_record(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "Worker", Here)
    record = tmp_path / "record.json"
    assert command.main(arguments(record, 5, sources="0123abcd")) == 0
    with pytest.raises(SystemExit, match=r"a run of seed 5 already \(its seeds: \[5\]\)"):
        command.main(arguments(record, 5))
    assert command.main(arguments(record, 6)) == 0
    first, second = json.loads(record.read_text())["runs"]
    assert (first["seed"], first["sources"], first["outcomes"]) == (5, "0123abcd", {"right": 3})
    assert (second["seed"], second["sources"], second["indices"]) == (6, sources(), 3)
    assert sum(count["right"] for count in first["counts"]["dtype"].values()) == 3
    assert first["facts"] == Here.facts
    assert first["commit"]
    assert "3 right" in capsys.readouterr().out


@pytest.mark.processes
def test_what_hangs_is_recorded_and_replaced(command, tmp_path, capsys):
    record = tmp_path / "record.json"
    assert command.main(arguments(record, 5, limit=1e-6, most=2)) == 1
    (only,) = json.loads(record.read_text())["runs"]
    assert only["outcomes"] == {HANG: 2}
    told = only["failures"][1]["configuration"]
    assert command.main(["--device", "cpu", "--replay", json.dumps(told)]) == 0
    assert "right after" in capsys.readouterr().out


@pytest.mark.processes
def test_a_worker_that_dies_says_of_what(command, tmp_path):
    told = command.parsed(arguments(None, 5)[:-2])
    worker = command.Worker(told, tmp_path, 0)
    assert worker.facts["torch"]
    assert worker.ask(0, 60.0)["outcome"] == RIGHT
    os.kill(worker._process.pid, signal.SIGFPE)
    with pytest.raises(command.Gone, match="SIGFPE"):
        worker.ask(1, 60.0)
    worker.kill()


def test_all_that_fails_is_counted(command, tmp_path):
    done = command.Done(7, 2, "now", 0.1, "abc", None, {"device": "none"}, {}, 1, None)
    done.add(command.Outcome(CASES["dense"], CRASH, "SIGFPE"))
    done.add(command.Outcome(CASES["dilated"], "wrong", "out inf times", {"out": math.inf}))
    command.append(tmp_path / "record.json", done)
    (run_,) = json.loads((tmp_path / "record.json").read_text())["runs"]
    assert run_["outcomes"] == {"crash": 1, "wrong": 1}
    assert Configuration(**run_["failures"][1]["configuration"]) == CASES["dilated"]
    assert command.report(done) == 1
