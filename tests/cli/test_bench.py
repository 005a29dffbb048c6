"""The real command, in a process of its own: what it prints, saves and refuses. No test looks at a time."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from commands import HEARING_CTRL_C
from longring.bench.records import RECORD_FIELDS, ROW_FIELDS, Record, Row, Spread, new_record
from longring.cli import main

pytestmark = pytest.mark.processes

TINY = ("--tokens", "64", "--heads", "2", "--head-dim", "8", "--rounds", "2", "--device", "cpu")
DEFAULTS = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR", "DS_ACCELERATOR": "cpu"}
CODE = "from longring.cli import main; main()"


def environment():
    inherited = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    return {**inherited, "NO_COLOR": "1", "COLUMNS": "100"}


def longring(*arguments):
    command = [sys.executable, "-c", CODE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment())


def called(monkeypatch, capsys, *arguments):
    """In this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["longring", *map(str, arguments)])
    for name in DEFAULTS:  # the command sets them, and the tests after this one must not have them
        monkeypatch.setenv(name, os.environ.get(name, DEFAULTS[name]))
    with pytest.raises(SystemExit) as stopped:
        main()
    return (stopped.value.code, *capsys.readouterr())


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The classic table, very small, as JSON, with its page and its record."""
    folder = tmp_path_factory.mktemp("bench")
    files = ("--out", folder / "new" / "bench.json", "--report", folder / "bench.html")
    done = longring("bench", "--preset", "report", "--ranks", "1,2", *TINY, *files, "--json")
    assert done.returncode == 0, done.stderr
    return done, json.loads(done.stdout), folder


def test_json_is_one_object_and_nothing_else(reported):
    done, told, _ = reported
    assert done.stderr == ""
    assert told.keys() == RECORD_FIELDS.keys() | {"schema", "command"}
    assert told["command"] == "bench"
    assert told["line"].startswith("longring bench --preset report")
    assert (told["arguments"]["tokens"], told["arguments"]["ranks"]) == ([64], [1, 2])
    assert told["is_complete"] is True
    assert told["failures"] == []
    assert "float64" in told["real"]
    assert {"torch", "deepspeed", "longring"} <= told["versions"].keys()
    assert told["machine"]["cores"] >= 1


def test_the_record_is_what_was_printed(reported):
    _, told, folder = reported
    saved = folder / "new" / "bench.json"
    assert json.loads(saved.read_text()) == told
    assert Record.load(saved).scenarios.keys() == {"report"}


def test_the_rows_are_those_of_the_classic_table(reported):
    _, told, _ = reported
    names = {"longring ring", "longring ulysses", "longring gather", "SDPA in one process", "FSDP users' setting"}
    missing = {note.split(":")[0] for note in told["missing"]}
    names |= {"DeepSpeed Ulysses"} - missing
    assert {(row["name"], row["ranks"], row["phase"]) for row in told["rows"]} == {
        (name, ranks, phase) for name in names for ranks in (1, 2) for phase in ("forward", "backward")
    }
    for row in told["rows"]:
        assert row.keys() == ROW_FIELDS.keys()
        assert row["time"]["runs"] == 2
        assert row["time"]["low"] <= row["time"]["median"] <= row["time"]["high"]
        assert all(row["errors"][name] <= row["allowed"][name] for name in row["errors"])
        assert len(row["peak_bytes"]) == row["ranks"]
        assert sum(row["components"].values()) == max(row["peak_bytes"])


def test_the_page_has_the_numbers(reported):
    _, told, folder = reported
    page = (folder / "bench.html").read_text()
    assert "<html" in page
    assert all(row["name"].replace("'", "&#x27;") in page or row["name"] in page for row in told["rows"])


def test_tables_for_people(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = called(monkeypatch, capsys, "bench", "--only", "kernels", *TINY)
    assert (code, err) == (0, "")
    assert "kernels: causal, n = 64, 2 heads, d = 8, fp32, 1 rank" in out
    for word in ("SDPA in one process", "longring, sdpa", "longring, reference", "1 case, about"):
        assert word in out
    assert "Every result of ours is within its error budget." in out
    assert "\x1b" not in out
    assert Record.load(tmp_path / "out" / "bench.json").is_complete


def test_other_patterns_and_heads(tmp_path, monkeypatch, capsys):
    code, out, err = called(
        *(monkeypatch, capsys),
        *("bench", "--only", "layouts,dilated", "--ranks", "2", "--tokens", "65", "--heads", "4", "--kv-heads", "2"),
        *("--head-dim", "8", "--rounds", "1", "--window", "9", "--dilated", "16:1,64:2", "--dtype", "bf16"),
        *("--device", "cpu", "--out", tmp_path / "bench.json", "--json"),
    )
    assert (code, err) == (0, "")
    rows = json.loads(out)["rows"]
    assert {(row["scenario"], row["window"], row["dilated"]) for row in rows} == {
        ("layouts", 9, None),
        ("dilated", None, "16:1,64:2"),
    }
    assert {(row["heads"], row["kv_heads"], row["tokens"]) for row in rows} == {(4, 2, 65)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--preset", "fast"), "--preset must be one of usual, report, got 'fast'"),
        (("--only", "speed"), "--only must be one of schedules, layouts"),
        (("--only", "layouts", "--ranks", "1"), "nothing is left to run"),
        (("--tokens", "many"), "--tokens must be a number like"),
        (("--tokens", "4Ki,"), "--tokens must be a number like"),
        (("--tokens", "4,096"), "--tokens takes several numbers, with commas between them, so none within: got"),
        (("--tokens", "64,1,000"), "so none within: got '64,1,000'"),
        (("--ranks", "0"), "--ranks must be a whole number from 1"),
        (("--ranks", "2,65"), "--ranks must be at most 64"),
        (("--heads", "0"), "--heads must be a whole number from 1"),
        (("--heads", "4", "--kv-heads", "3"), "--heads must be a multiple of --kv-heads, got 4 and 3"),
        (("--dtype", "int8"), "--dtype must be one of"),
        (("--device", "tpu"), "--device must be one of"),
        (("--out", "/dev/null/x"), "--out /dev/null/x cannot be written"),
        (("--report", "/dev/null/x"), "--report /dev/null/x cannot be written"),
        (("--peers", "/nowhere"), "--peers /nowhere is no folder"),
        (("--only", "kernels", "--dilated", "16:1"), "--dilated is for the scenario dilated"),
        (("--only", "dilated", "--window", "9"), "--window is for dense attention"),
        (("--dilated", "16"), "LENGTH:RATE"),
        (("--tokens", "1M", "compare", "a.json", "b.json"), "--tokens is an option of longring bench, not of compare"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    device = () if "--device" in arguments or "compare" in arguments else ("--device", "cpu")
    code, out, err = called(monkeypatch, capsys, "bench", *device, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


def test_under_torchrun_it_says_that_it_starts_its_own_ranks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = called(monkeypatch, capsys, "bench")
    assert (code, err.count("run it without torchrun")) == (2, 1)


def test_a_wrong_result_of_ours_is_exit_code_1(monkeypatch, capsys, tmp_path):
    from longring.bench.ranks import contest, run

    def wrong(case, judge, timeout):
        row = Row(
            case.title, "forward", "longring ring", errors={"out": 1.0}, allowed={"out": 0.1}, note="WRONG in out"
        )
        return contest.Played([row], [], [f"{case.title}: WRONG in out"])

    monkeypatch.setattr(run, "play", wrong)
    options = ("--only", "kernels", *TINY, "--out", tmp_path / "bench.json")
    code, out, err = called(monkeypatch, capsys, "bench", *options)
    assert (code, err) == (1, "")
    assert "FAILED: causal" in out
    assert "within its error budget" not in out
    assert Record.load(tmp_path / "bench.json").failures


def test_an_interrupted_run_keeps_what_it_has(tmp_path):
    path = tmp_path / "bench.json"
    options = ("--only", "kernels", "--tokens", "64,65,8Ki", "--heads", "8", "--device", "cpu", "--out", str(path))
    command = [sys.executable, "-c", HEARING_CTRL_C + CODE, "bench", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(), **pipes) as running:
        until = time.monotonic() + 60
        while not path.exists() and time.monotonic() < until and running.poll() is None:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (130, "stopped\n")
    kept = Record.load(path)
    assert not kept.is_complete
    assert {row.tokens for row in kept.scenarios["kernels"]} in ({64}, {64, 65})


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    """The scenarios of a GPU, very small, on the CPU."""
    import torch

    from longring.bench.gpu import sizes
    from longring.bench.gpu.given import Shape
    from longring.cli import bench

    monkeypatch.setattr(bench, "_device", lambda device, preset: "cuda")
    monkeypatch.setattr(bench, "_gpu", lambda: torch.device("cpu"))
    small = replace(sizes.QUICK, repeats=1, dense=((Shape(64, 2, 2, 8), True),))
    monkeypatch.setattr(sizes, "QUICK", small)


def test_on_a_gpu_its_own_scenarios_run(as_if_on_a_gpu, monkeypatch, capsys, tmp_path):
    options = ("--quick", "--only", "dense", "--out", tmp_path / "gpu.json", "--json")
    code, out, err = called(monkeypatch, capsys, "bench", *options)
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert {row["scenario"] for row in told["rows"]} == {"dense"}
    assert {row["name"] for row in told["rows"]} == {"longring", "cpu"}
    assert told["real"].startswith("One GPU")
    assert told["is_complete"] is True
    assert Record.load(tmp_path / "gpu.json").scenarios["dense"][0].tokens == 64


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tokens", "4Ki"), "--tokens is for ranks: the scenarios of a GPU have set sizes; add --device cpu"),
        (("--head-dim", "64"), "--head-dim is for ranks"),
        (("--full",), "--causal is for ranks"),
        (("--only", "schedules"), "--only must be one of dense, ring"),
    ],
)
def test_what_the_scenarios_of_a_gpu_do_not_take(as_if_on_a_gpu, arguments, said, monkeypatch, capsys, tmp_path):
    code, out, err = called(monkeypatch, capsys, "bench", "--out", tmp_path / "gpu.json", *arguments)
    assert (code, out) == (2, "")
    assert said in err


# -------------------------------------------------------------------------------------------------------- compare


def saved(path, median, **told):
    import torch

    record = new_record("a line", torch.device("cpu"), False, real="this", simulated="that")
    time_ = Spread(median, median * 0.99, median * 1.01, 5)
    usual = {"case": "a case", "phase": "forward", "name": "longring ring", "time": time_}
    record.scenarios = {"schedules": [Row(**usual | told)]}
    record.is_complete = True
    record.save(path)
    return path


@pytest.fixture
def before(tmp_path):
    return saved(tmp_path / "before.json", 1.0)


@pytest.mark.parametrize(("median", "code", "told"), [(1.0, 0, "alike"), (1.2, 1, "slower"), (0.8, 0, "faster")])
def test_compare_says_what_changed(before, tmp_path, monkeypatch, capsys, median, code, told):
    after = saved(tmp_path / "after.json", median)
    got, out, err = called(monkeypatch, capsys, "bench", "compare", before, after)
    assert (got, err) == (code, "")
    assert f"1 rows in both: 1 {told}." in out
    assert ("longring ring" in out) == (told != "alike")


def test_compare_as_json_and_with_a_tolerance(before, tmp_path, monkeypatch, capsys):
    after = saved(tmp_path / "after.json", 1.2)
    done = longring("bench", "compare", before, after, "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert (told["command"], told["regressions"], told["tolerance"]) == ("bench compare", 1, 0.05)
    assert told["rows"][0]["verdict"] == "slower"
    assert told["rows"][0]["ratio"] == pytest.approx(1.2)
    assert called(monkeypatch, capsys, "bench", "compare", before, after, "--tolerance", "0.25")[0] == 0


def test_compare_says_what_became_wrong(before, tmp_path, monkeypatch, capsys):
    after = saved(tmp_path / "after.json", 1.0, errors={"out": 1.0}, allowed={"out": 1e-6}, note="WRONG in out")
    code, out, _ = called(monkeypatch, capsys, "bench", "compare", before, after)
    assert code == 1
    assert "1 wrong" in out


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "is no JSON, or was cut short"),
        ('{"schema": "longring bench, 2", "rows": [', "is no JSON, or was cut short"),
        ('{"rows": []}', "is not a record of the form"),
        ('{"schema": "longring bench, 2"}', "is damaged: 'arguments' is missing"),
        ("[1, 2]", "is no record"),
    ],
)
def test_compare_with_what_is_no_record(before, tmp_path, monkeypatch, capsys, content, said, order):
    other = tmp_path / "other.json"
    if content is not None:
        other.write_text(content)
    code, out, err = called(monkeypatch, capsys, "bench", "compare", *(before, other)[::order])
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {other} {said}")
    assert err.count("\n") == 1


def test_compare_without_rows_in_common(before, tmp_path, monkeypatch, capsys):
    other = saved(tmp_path / "other.json", 1.0, phase="backward")
    code, _, err = called(monkeypatch, capsys, "bench", "compare", before, other)
    assert (code, "no row in common" in err) == (2, True)
