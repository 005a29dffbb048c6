"""Every scenario runs through, small and on the CPU: checked, timed, told. No test looks at a time."""

import pytest
import torch

from longring.bench.gpu import contest as contests
from longring.bench.gpu.__main__ import main
from longring.bench.gpu.clock import FAR_BEHIND, Turn, head_start, timed
from longring.bench.gpu.contest import Differentiated, Directly, Stage, compare, contest
from longring.bench.gpu.direct import FlashForCpu
from longring.bench.gpu.given import Place, Shape, given
from longring.bench.gpu.packages import Package, dilated_peers
from longring.bench.gpu.scenarios import SCENARIOS, gpu_record, run_scenarios
from longring.bench.gpu.sizes import FULL, QUICK, Sizes
from longring.bench.records import Row, Spread
from longring.geometry.patterns import Dense, Dilated

CPU = torch.device("cpu")
EQUAL, SHARED = Shape(128, 4, 4, 16), Shape(128, 4, 2, 16)
TINY = Sizes(
    repeats=1,
    dense_repeats=1,
    dense=((EQUAL, True), (SHARED, True), (EQUAL, False)),
    rings=((EQUAL, 2), (SHARED, 4)),
    simulated=((EQUAL, 2),),
    far=((EQUAL, 8, (0, 5)),),
    far_repeats=1,
    dilated=(EQUAL,),
    longest_dilated=EQUAL,
    longest_backward=EQUAL,
    longest_dense=EQUAL,
    branches=((16, 1), (32, 2), (64, 4)),
    documents=((EQUAL, 5), (SHARED, 3)),
    windows=((EQUAL, 20),),
    error=(EQUAL, 4),
    seeds=(0,),
    peers=(EQUAL, 2),
)
EXPECTED = {
    "dense": {"longring", "cpu"},
    "ring": {"one call", "ring of 2", "ring of 4"},
    "simulated ring": {"one call", "simulated ring of 2"},
    "far ring": {"one call", "ring of 8"},
    "dilated": {"longring"},
    "many tiles": {"longring"},
    "error": {"one call", "ring of 4", "ring-flash-attn over cpu", "TransformerEngine's schedule over cpu"},
    "longest": {"longring"},
    "peers": {
        "one call",
        "SDPA, flash",
        "ring of 2",
        "ring-flash-attn over cpu",
        "yunchang over cpu",
        "TransformerEngine's schedule over cpu",
        "Ulysses over cpu",
    },
}


def stage(**told):
    return Stage(Place(CPU, torch.bfloat16), TINY, **told)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_runs_through(name):
    record, told = gpu_record("", CPU, True), []
    run_scenarios(stage(), record, [name], lambda name, rows: told.append((name, len(rows))))
    rows = record.scenarios[name]
    assert record.failures == []
    assert {row.name for row in rows} == EXPECTED[name]
    assert all(row.errors for row in rows)
    assert all(row.time is not None for row in rows) or name == "error"
    assert told == [(name, len(rows))]


def test_a_scenario_that_breaks_leaves_the_others(monkeypatch):
    def broken(stage):
        yield from ()
        raise RuntimeError("no more memory")

    monkeypatch.setitem(SCENARIOS, "dense", broken)
    record = gpu_record("", CPU, True)
    here = stage()
    run_scenarios(here, record, ["dense", "longest"], lambda name, rows: None)
    assert record.failures == ["dense: RuntimeError: no more memory"]
    assert record.scenarios["longest"]
    monkeypatch.setitem(SCENARIOS, "dense", lambda stage: iter(()))
    here.failures.append("far dense: another's")
    run_scenarios(here, record, ["dense"], lambda name, rows: None)
    assert record.failures == ["far dense: another's"]


def test_what_is_wrong_is_not_timed():
    x, here = given(EQUAL, Place(CPU, torch.bfloat16)), stage()
    forgetful = Differentiated("forgetful", x, lambda q, k, v: (q + k + v, None))
    rows = contest(here, "a case", EQUAL, Dense(causal=True), x, [forgetful, Directly(FlashForCpu(), x, True)])
    assert [(row.name, row.time is None) for row in rows] == [("forgetful", True), ("cpu", False), ("cpu", False)]
    assert "not timed: Wrong" in rows[0].note
    assert len(here.failures) == 1


def test_competitors_take_turns_and_stragglers_leave(monkeypatch):
    played, times = [], {"a": 1.0, "b": 1.1, "slow": 2 * FAR_BEHIND, "kept": 3 * FAR_BEHIND}

    def round_(turns):
        for _, turn in turns:
            turn.call()
        return {name: times[name] for name, _ in turns}

    monkeypatch.setattr("longring.bench.gpu.clock._round_on_host", round_)
    turns = {name: Turn(lambda name=name: played.append(name)) for name in times}
    found = timed(turns, CPU, repeats=3, keep=("kept",), is_warm=True)
    assert played == ["a", "b", "slow", "kept", "kept", "b", "a", "b", "kept", "a", "a", "kept", "b"]
    assert {name: len(times) for name, times in found.items()} == {"a": 4, "b": 4, "slow": 1, "kept": 4}


def test_what_is_short_is_run_more_often_and_led_in(monkeypatch):
    led_in = []

    def round_(turns, device, hosts, *, lead_in):
        led_in.append(lead_in)
        return {name: 0.025 for name, _ in turns}

    monkeypatch.setattr("longring.bench.gpu.clock._round", round_)
    assert timed({"a": Turn(print)}, CPU, repeats=5, is_warm=True)["a"] == [0.025] * 12
    assert led_in == [{}] + [{"a": 2}] * 11  # how long it takes shows in the first round
    assert timed({"a": Turn(print)}, CPU, repeats=2, is_warm=True)["a"] == [0.025] * 2  # so few where it is long


@pytest.mark.parametrize(
    ("scatter", "ratio", "seconds", "rounds"),
    [
        (0.0, 1, 0.1, 4),
        (0.006, 1, 0.1, 16),
        (0.2, 1, 0.1, 38),  # that last a quarter of a minute, each call once to lead in
        (0.2, 1, 0.01, 48),
        (0.2, 1, 0.29, 14),
        (0.006, 1.01, 0.1, 16),
        (0.006, 1.2, 0.1, 4),
    ],
)
def test_rounds_go_on_until_ratios_are_known(monkeypatch, scatter, ratio, seconds, rounds):
    """Calls that differ from round to round take more of them, up to a limit; fewer where one is far ahead."""
    count = iter(range(1000))

    def round_(turns, device, hosts, *, lead_in):
        off = scatter * (-1) ** (next(count) // 2)  # the same in both rounds of a pair
        return {"a": seconds * (1 + off / 2), "b": ratio * seconds * (1 - off / 2)}

    monkeypatch.setattr("longring.bench.gpu.clock._round", round_)
    found = timed({"a": Turn(print), "b": Turn(print)}, CPU, repeats=3, is_warm=True)
    assert len(found["a"]) == pytest.approx(rounds, abs=4 if rounds == 16 else 0)


def test_a_package_keeps_its_graph_for_its_turn_alone():
    x = given(EQUAL, Place(CPU, torch.float32))
    package = Package("theirs", x, lambda q, k, v: q + k + v, Dilated([8], [1]))
    assert package.result().dk is None
    turn = package.turn("backward")
    with pytest.raises(AssertionError):
        turn.call()
    turn.before()
    turn.call()
    turn.after()


def test_a_peer_that_is_not_there_is_said_to_be_missing(tmp_path):
    here = stage(peers=tmp_path)
    x = given(EQUAL, here.place)
    for _ in range(2):
        assert dilated_peers(here, x, Dilated([16], [1])) == []
    assert len(here.missing) == 2
    assert "torchscale" in here.missing[0]


def test_an_lse_is_lent_to_those_that_have_none():
    x = given(EQUAL, Place(CPU, torch.bfloat16))
    kernel = Directly(FlashForCpu(), x, True)
    silent = Directly(FlashForCpu(), x, True)
    silent.result = lambda: kernel.result()._replace(lse=None)
    errors, lse = contests._checked(kernel, x, Dense(causal=True), None)
    lent, _ = contests._checked(silent, x, Dense(causal=True), lse)
    assert set(errors) - set(lent) == {"lse"}
    alone, _ = contests._checked(silent, x, Dense(causal=True), None)
    assert set(alone) == {"out", "dq"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without CUDA")
def test_without_a_gpu_the_command_says_so(capsys):
    assert main(["--quick"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("only", [["--only", "dense"], []], ids=["some", "everything"])
def test_a_record_of_other_code_is_replaced_by_a_whole_one_alone(only, tmp_path, monkeypatch, capsys):
    path = tmp_path / "record.json"
    earlier = gpu_record("", CPU, False)
    earlier.commit, earlier.scenarios = "another", {"dense": [], "ring": []}
    earlier.save(path)
    before = path.read_text()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("longring.bench.gpu.__main__.gpu_record", lambda line, *_: gpu_record(line, CPU, False))
    monkeypatch.setattr("longring.bench.gpu.__main__.run_scenarios", lambda *_: None)
    assert main([*only, "--out", str(path)]) == (2 if only else 0)
    assert (path.read_text() == before) == bool(only)
    assert ("say another --out" in capsys.readouterr().err) == bool(only)


def test_sizes_are_what_the_goals_speak_of():
    assert {shape.n for shape, _ in FULL.dense} == {8 << 10, 32 << 10, 128 << 10}
    assert {ranks for _, ranks in FULL.rings} == {4, 8, 16}
    assert FULL.longest_dilated.n >= 6_000_000
    assert FULL.longest_backward.n >= 2_500_000
    assert FULL.repeats >= 5
    assert QUICK.branches == FULL.branches == ((2048, 1), (4096, 2), (8192, 4), (16384, 8), (32768, 16))


def test_the_device_sleeps_for_as_long_as_the_host_needs():
    assert head_start(None) == head_start(1e-4) == 3_000_000
    assert head_start(0.004) == 12_000_000
    assert head_start(5.0) == 40_000_000  # seconds went into compiling something


def test_who_took_turns_is_compared_round_by_round():
    """The device slows down by a half, and whoever comes second in a round is slower by a tenth."""
    rounds = {"longring": (1.1, 1.0, 1.65, 1.5), "kernel": (1.0, 1.1, 1.5, 1.65), "left": (0.55,)}
    rows = [Row("a case", "forward", name, time=Spread.of(list(times)), rounds=times) for name, times in rounds.items()]
    compare(rows, "longring", rows[1], "kernels")
    compare(rows, "left", rows[0], "ours", efficiency=True)
    assert rows[0].ratios == {"kernels": pytest.approx(1.0)}
    assert rows[2].ratios == {"ours": pytest.approx(2.0)}
    assert "rounds" not in rows[0].to_json()
