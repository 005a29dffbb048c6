"""`longring replay`, as a user runs it."""

import json
import os
import signal
import subprocess
import sys

import pytest

from commands import HEARING_CTRL_C
from longring.bench.replay import run
from longring.cli import main

SMALL = ("--tokens", "700", "--ranks", "8", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--samples", "8")


def longring(*arguments):
    command = [sys.executable, "-c", "from longring.cli import main; main()", "replay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, "NO_COLOR": "1"})


def called(monkeypatch, capsys, *arguments):
    """(exit code, what it printed) in this process."""
    monkeypatch.setattr(sys, "argv", ["longring", "replay", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code or 0, capsys.readouterr()


@pytest.fixture(scope="module")
def printed():
    return longring(*SMALL, "--rank", "3")


def test_it_succeeds_and_says_what_was_run_and_what_was_not(printed):
    assert (printed.returncode, printed.stderr) == (0, "")
    text = " ".join(printed.stdout.split())
    assert "rank 3 of 8: 87 of 700 tokens, 4/2 heads of 16, bfloat16" in text
    assert "All 9 checks hold" in text
    assert (
        "One rank's full share was computed here, on this machine's CPU: the forward and backward of rank 3 of 8"
        in text
    )
    assert "Nothing was multiplied up" in text
    assert "What the other 7 ranks would have sent of keys and values was generated from (seed, position)" in text
    assert "no link was used" in text
    assert "The gradients that they would have found were made up as well, from (seed, sender, position)" in text


def test_measured_stands_beside_predicted(printed):
    text = printed.stdout
    for words in ("time of the engine", "predicted", "not included", "most bytes held", "bytes received", "both"):
        assert words in text
    of_keys = ("own rows", "with what came home", "rows of others")
    for quantity in ("out", "lse", "dq", *(f"{kind}, {whose}" for kind in ("dk", "dv") for whose in of_keys)):
        assert quantity in text
    assert "…" not in text
    assert "\x1b" not in text


def test_json_is_one_object_and_nothing_else():
    done = longring(*SMALL, "--dilated", "32:1,128:4,512:16", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["command"] == "replay"
    assert told["arguments"]["dilated"] == "32:1,128:4,512:16"
    assert told["arguments"]["rank"] == told["rank"] == 4
    assert {"versions", "machine", "real", "simulated"} < set(told)
    assert told["ok"] is True
    assert all(check["ok"] and len(check["rows"]) >= 8 for check in told["checks"])
    assert told["phases"]["backward"]["bytes_sent"] == told["phases"]["backward"]["planned_bytes_sent"] > 0


def test_a_report_is_written(monkeypatch, capsys, tmp_path):
    page = tmp_path / "new" / "replay.html"
    code, said = called(monkeypatch, capsys, *SMALL, "--forward-only", "--report", str(page))
    assert code == 0, said
    assert f"report: {page}" in said.out
    assert "longring replay" in page.read_text()


def test_a_wrong_row_is_exit_code_1(monkeypatch, capsys):
    attended = run.attended
    monkeypatch.setattr(run, "attended", lambda *args: (lambda out, lse: (2 * out, lse))(*attended(*args)))
    code, said = called(monkeypatch, capsys, *SMALL, "--forward-only")
    assert code == 1
    assert "WRONG: out\n" in said.out
    code, said = called(monkeypatch, capsys, *SMALL, "--forward-only", "--json")
    assert code == 1
    told = json.loads(said.out)
    assert told["ok"] is False
    assert [check["quantity"] for check in told["checks"] if not check["ok"]] == ["out"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rank", "64"], "--rank must be from 0 to 63 with --ranks 64, got 64"),
        (["--rank", "-1"], "--rank must be a whole number from 0"),
        (["--ranks", "6", "--nodes", "4"], "--ranks must be a multiple of --nodes, got 6 and 4"),
        (["--heads", "6", "--kv-heads", "4"], "--heads must be a multiple of --kv-heads, got 6 and 4"),
        (["--heads", "0"], "--heads must be a whole number from 1"),
        (["--dtype", "int8"], "--dtype must be one of bf16, fp16, fp32, fp64, got 'int8'"),
        (["--device", "tpu"], "--device must be one of auto, cpu, cuda, got 'tpu'"),
        (["--schedule", "ulysses"], "schedule 'ulysses' cannot be replayed"),
        (["--schedule", "no-such"], "schedule must be one of auto, ring"),
        (["--layout", "no-such"], "layout must be one of"),
        (["--kernel", "no-such"], "kernel must be one of auto"),
        (["--window", "8", "--dilated", "8:1"], "leave out --window or --dilated"),
        (["--samples", "0"], "--samples must be a whole number from 1"),
        (["--tokens", "1e15"], "tokens must be at most"),
        (["--report", "/dev/null/page.html"], "--report /dev/null/page.html cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(arguments, said, monkeypatch, capsys):
    code, printed = called(monkeypatch, capsys, *arguments)
    assert (code, printed.out) == (2, "")
    assert printed.err.count("\n") == 1
    assert said in printed.err


def test_help_teaches(monkeypatch, capsys):
    code, said = called(monkeypatch, capsys, "--help")
    assert code == 0
    assert "longring replay --tokens 1M --ranks 64" in said.out
    assert "float64 definition" in said.out


A_CALL_THAT_HEARS_NOTHING = """
import ctypes
from longring.bench.replay import run

def replay(*args, **options):
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)

run.replay = replay
from longring.cli import main
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a mutex of 64 zeros is Linux's")
def test_ctrl_c_ends_it_though_a_kernel_is_at_work():
    command = [sys.executable, "-c", HEARING_CTRL_C + A_CALL_THAT_HEARS_NOTHING, "replay", *SMALL, "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "NO_COLOR": "1"}, **pipes) as running:
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGINT)
        out, said = running.communicate(timeout=60)
    assert (running.returncode, out, said) == (130, "", "stopped\n")
