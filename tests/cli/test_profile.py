"""`longring profile`, in a process of its own as a user runs it, and its refusals."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

import profiled
from longring.bench.profiling import run
from longring.cli import main

pytestmark = pytest.mark.processes

SMALL = ("--tokens", "300", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--device", "cpu", "--repeat", "1")


def longring(*arguments, python=()):
    command = [sys.executable, *python, "-c", "from longring.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, "NO_COLOR": "1"})


def said(arguments, monkeypatch, capsys):
    """(exit code, stdout, stderr) of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["longring", "profile", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr()
    return stopped.value.code, printed.out, printed.err


@pytest.fixture
def by_hand(monkeypatch):
    """The command finds a profile that was made by hand; returns how to put another in its place."""

    def put(profile):
        monkeypatch.setattr(run, "profile", lambda asked: profile)

    put(profiled.profile_of_two())
    return put


def test_the_real_command_prints_json_and_writes_a_trace_and_a_picture(tmp_path):
    trace, picture = tmp_path / "new" / "trace.json", tmp_path / "profile.svg"
    paths = ("--trace", str(trace), "--picture", str(picture))
    done = longring("profile", *SMALL, "--ranks", "2", "--schedule", "ring", *paths, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["command"] == "profile"
    assert told["arguments"]["tokens"] == 300
    assert (told["schedule"], told["layout"], told["kernel"]) == ("ring", "zigzag", "sdpa")
    assert "2 real processes" in told["real"]
    assert "predicted" in told["simulated"]
    assert told["faults"] == []
    assert [one["rank"] for one in told["ranks"]] == [0, 1]
    assert set(told["seconds"]) == {"forward", "backward"}
    for one in told["ranks"]:
        for phase in one["phases"].values():
            assert phase["bytes_sent"] == phase["bytes_planned"] > 0
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == {"M", "X", "C", "s", "f"}
    assert picture.read_text().startswith("<?xml")


def test_the_real_command_on_one_rank_and_forward_only_says_that_nothing_was_sent():
    done = longring("profile", *SMALL, "--ranks", "1", "--forward-only", "--dilated", "64:1,256:2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "300 tokens on 1 rank: causal dilated attention" in done.stdout
    assert "Nothing was sent." in done.stdout
    assert "backward" not in done.stdout


def test_what_is_printed(by_hand, monkeypatch, capsys):
    code, out, _ = said(["--repeat", "1"], monkeypatch, capsys)
    assert code == 0
    words = out.split()
    assert out.startswith("64 tokens on 2 ranks: causal dense attention, ring schedule, zigzag layout\n")
    assert "75% of the time in which messages were under way" in out  # 1 s of 4 s is waited for
    assert "1.022" in words  # 2350 measured against 2300 predicted
    assert max(map(len, out.splitlines())) <= 100


def test_a_rank_without_tokens_held_nothing_and_is_printed():
    done = longring("profile", "--tokens", "3", "--ranks", "4", "--schedule", "ring", "--heads", "1", "--head-dim", "8")
    assert done.returncode == 0, done.stderr
    assert "Most bytes a rank held" in done.stdout


def test_other_bytes_than_planned_are_exit_code_1(by_hand, monkeypatch, capsys):
    profile = profiled.profile_of_two()
    wrong = replace(profile.ranks[1], bytes_planned={"forward": 201, "backward": 200})
    by_hand(replace(profile, ranks=[profile.ranks[0], wrong]))
    code, out, _ = said([], monkeypatch, capsys)
    assert code == 1
    assert "WRONG: rank 1 sent 200 bytes in the forward, and the plan said 201" in out


def test_a_report_is_one_page(by_hand, monkeypatch, capsys, tmp_path):
    page = tmp_path / "profile.html"
    code, out, _ = said(["--report", str(page)], monkeypatch, capsys)
    assert code == 0
    assert f"report: {page}" in out
    assert "<html" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--tokens", "many"), "--tokens"),
        (("--heads", "8", "--kv-heads", "3"), "--kv-heads, got 8 and 3"),
        (("--ranks", "65"), "--ranks must be at most 64"),
        (("--ranks", "4", "--nodes", "3"), "--ranks must be a multiple of --nodes, got 4 and 3"),
        (("--dtype", "int8"), "--dtype must be one of"),
        (("--schedule", "sing"), "schedule must be one of auto, ring"),
        (("--layout", "dealt"), "layout 'dealt'"),
        (("--kernel", "cudnn"), "kernel 'cudnn'"),
        (("--device", "abacus"), "--device must be one of auto, cpu, cuda"),
        (("--dilated", "100"), "--dilated takes LENGTH:RATE pairs"),
        (("--dilated", "64:1", "--window", "8"), "--window is for dense attention"),
        (("--repeat", "0"), "--repeat must be"),
        (("--picture", "profile.gif"), "--picture profile.gif must end with .png or .svg"),
        (("--trace", "/dev/null/trace.json"), "--trace /dev/null/trace.json cannot be written"),
        (("--picture", "/dev/null/p.png"), "--picture /dev/null/p.png cannot be written"),
        (("--report", "/dev/null/p.html"), "--report /dev/null/p.html cannot be written"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, named, monkeypatch, capsys):
    code, out, err = said(["--device", "cpu", *arguments], monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err


def test_under_torchrun_it_says_that_it_starts_its_own_ranks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = said([], monkeypatch, capsys)
    assert code == 2
    assert "run it without torchrun" in err


def test_help_teaches_and_does_not_import_torch():
    done = longring("profile", "--help", python=("-X", "importtime"))
    assert done.returncode == 0
    assert "longring profile --tokens" in done.stdout
    for option in ("--trace", "--picture", "--schedule", "--dilated", "--forward-only", "--repeat", "--json"):
        assert option in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "matplotlib"}
