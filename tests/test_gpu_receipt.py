"""make gpu, as far as it goes without a GPU: what it takes for passed, what it records, how it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from scripts import ROOT, script

gpu = script("benchmarks/gpu_receipt.py")

PLANTED = """
import subprocess, time
import pytest

def test_right(): pass

def test_right_too(): pass

@pytest.mark.skip(reason="needs a wish")
def test_skipped(): pass
"""
WRONG = """
def test_wrong(): assert 1 == 2, "planted"
"""
BROKEN = """
@pytest.fixture
def broken(): raise RuntimeError("planted in a fixture")

def test_broken(broken): pass
"""
ENDS_BADLY = """
def test_ends_badly(request): request.addfinalizer(lambda: 1 / 0)
"""
NO_MODULE = """
import there_is_no_such_module
"""
EXITS = """
import os
def test_exits(): os._exit(3)
"""
HANGS = """
def test_hangs():
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    open(__file__ + ".pid", "w").write(str(child.pid))
    time.sleep(300)
"""


def run_planted(folder: Path, code: str, limit: float = 60.0):
    (folder / "test_planted.py").write_text(code)
    return gpu.run_pytest([str(folder), f"--rootdir={folder}", "-c", os.devnull], 1, folder / "report.xml", limit)


# ---------------------------------------------------------------------------------------------------- pytest's results


def test_what_passed_and_was_skipped_is_counted(tmp_path):
    part = run_planted(tmp_path, PLANTED)
    assert (part.status, part.reason) == (gpu.PASSED, "")
    assert part.counts == {"passed": 2, "failed": 0, "errors": 0, "skipped": 1}
    assert part.skips == {"needs a wish": 1}


@pytest.mark.parametrize(
    ("planted", "name", "message"),
    [
        (WRONG, "test_wrong", "planted"),
        (BROKEN, "test_broken", "planted in a fixture"),
        (ENDS_BADLY, "test_ends_badly", "ZeroDivisionError"),
        (NO_MODULE, "test_planted", "there_is_no_such_module"),
    ],
    ids=["wrong", "fixture", "teardown", "collection"],
)
def test_a_failure_is_named(tmp_path, planted, name, message):
    part = run_planted(tmp_path, PLANTED + planted)
    assert part.status == gpu.FAILED
    (failure,) = part.failures
    assert name in failure["name"]
    assert message in failure["message"]


def test_a_process_that_ends_without_a_report_failed(tmp_path):
    part = run_planted(tmp_path, PLANTED + EXITS)
    assert part.status == gpu.FAILED
    assert "status 3" in part.reason


def test_no_test_and_none_that_is_not_skipped_is_not_passed(tmp_path):
    assert run_planted(tmp_path, "").status == gpu.INCOMPLETE
    part = run_planted(tmp_path, 'import pytest\n@pytest.mark.skip(reason="no")\ndef test_it(): pass\n')
    assert (part.status, part.reason) == (gpu.INCOMPLETE, "every test was skipped: no (1)")


def test_what_the_limit_cuts_off_is_incomplete_and_leaves_no_process(tmp_path):
    began = time.monotonic()
    part = run_planted(tmp_path, PLANTED + HANGS, limit=15.0)
    assert time.monotonic() - began < 60
    assert part.status == gpu.INCOMPLETE
    assert part.reason == "cut off by the time limit; those under way count as passed"
    assert part.counts["passed"] == 3
    pid, until = int((tmp_path / "test_planted.py.pid").read_text()), time.monotonic() + 20
    while is_running(pid):  # a signal takes a moment
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.processes
def test_ending_it_ends_what_it_started(tmp_path):
    (tmp_path / "test_planted.py").write_text(PLANTED + HANGS)
    options = ["--device", "cpu", "--out", str(tmp_path / "out"), "--tests", str(tmp_path), "--only", "tests"]
    process = subprocess.Popen([sys.executable, str(ROOT / "benchmarks" / "gpu_receipt.py"), *options])
    path, until = tmp_path / "test_planted.py.pid", time.monotonic() + 90
    while not (path.exists() and path.read_text()):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    until = time.monotonic() + 20
    while is_running(int(path.read_text())):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_running(pid):
    try:
        return gpu.stat(pid)[0][0] != "Z"
    except OSError:
        return False


def test_a_status_that_the_report_does_not_explain_failed(tmp_path):
    run_planted(tmp_path, PLANTED)
    part = gpu.pytest_part(3, "INTERNALERROR> planted", tmp_path / "report.xml")
    assert part.status == gpu.FAILED
    assert "INTERNALERROR> planted" in part.reason


@pytest.mark.parametrize("code", [0, 1, None])
def test_a_report_that_was_cut_short_is_not_passed(tmp_path, code):
    run_planted(tmp_path, PLANTED)
    report = tmp_path / "report.xml"
    report.write_text(report.read_text()[:-40])
    assert gpu.pytest_part(code, "", report).status == (gpu.INCOMPLETE if code is None else gpu.FAILED)


# ------------------------------------------------------------------------------------------------------------- parts


def told(*arguments):
    return gpu.parsed(["--device", "cpu", "--out", "elsewhere", *arguments])


SKIPPED = {"passed": 0, "failed": 0, "errors": 0, "skipped": 3}


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (gpu.Part(gpu.INCOMPLETE, "every test was skipped: NCCL 2.28 refuses", counts=SKIPPED), gpu.NOT_RUN),
        (gpu.Part(gpu.INCOMPLETE, "cut off by the time limit", counts=SKIPPED), gpu.INCOMPLETE),
        (gpu.Part(gpu.INCOMPLETE, "cut off by the time limit; no report"), gpu.INCOMPLETE),
        (gpu.Part(gpu.FAILED, counts=SKIPPED | {"failed": 1}), gpu.FAILED),
        (gpu.Part(gpu.PASSED, counts=SKIPPED | {"passed": 1}), gpu.PASSED),
    ],
)
def test_nccl_that_skips_is_not_run_and_else_is_what_it_is(monkeypatch, tmp_path, found, status):
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    assert gpu.run_nccl(told(), {}, tmp_path, 5.0) == gpu.Part(gpu.NOT_RUN, "there is no tests/gpu/nccl")
    (tmp_path / "tests" / "gpu" / "nccl").mkdir(parents=True)
    monkeypatch.setattr(gpu, "run_pytest", lambda *_: found)
    assert gpu.run_nccl(told(), {}, tmp_path, 5.0).status == status


@pytest.mark.parametrize("order", [[], ["--together"]], ids=["one after another", "together"])
def test_every_part_is_recorded_and_those_without_time_are_incomplete(monkeypatch, order):
    limits = {}

    def run(name):
        def part(told, receipt, folder, limit):
            limits[name] = limit
            return gpu.Part(gpu.PASSED, counts={"passed": 1})

        return part

    monkeypatch.setattr(gpu, "RUNS", {name: run(name) for name in gpu.PARTS})
    found = gpu.run_parts(told("--limits", "nccl=9", "--only", "nccl", "tests", *order), {}, time.monotonic())
    assert {name: part.status for name, part in found.items()} == {
        "nccl": "passed",
        "random": "not run",
        "tests": "passed",
    }
    assert limits["nccl"] == pytest.approx(60 * 8 - gpu.ENDING if order else 9, abs=1)
    late = gpu.run_parts(told(*order), {}, time.monotonic() - 500)
    assert {part.status for part in late.values()} == {gpu.INCOMPLETE}


def test_tests_that_saw_no_device_or_are_not_all_do_not_pass(monkeypatch, tmp_path):
    asked = gpu.parsed(["--out", "elsewhere"])
    monkeypatch.setattr(gpu, "run_pytest", lambda *_: gpu.Part(gpu.PASSED, counts={"passed": 5}, skips={}))
    assert gpu.run_tests(asked, {}, tmp_path, 5.0).status == gpu.PASSED
    asked.tests = ["tests/gpu/test_cuda.py"]
    assert gpu.run_tests(asked, {}, tmp_path, 5.0).reason == "only tests/gpu/test_cuda.py"
    asked = gpu.parsed(["--out", "elsewhere"])
    blind = gpu.Part(gpu.PASSED, counts={"passed": 5}, skips={gpu.NO_GPU: 700})
    monkeypatch.setattr(gpu, "run_pytest", lambda *_: blind)
    assert gpu.run_tests(asked, {}, tmp_path, 5.0).status == gpu.INCOMPLETE


# ----------------------------------------------------------------------------------------------- random configurations


def random_run(**changed):
    return {"outcomes": {"right": 90, "refused": 10}, "failures": [], "refusals": {"d of 200": 10}} | changed


FAILURE = {"outcome": "wrong", "message": "out 3.1", "configuration": {"index": 7}}


@pytest.mark.parametrize(
    ("code", "run", "status"),
    [
        (0, random_run(), gpu.PASSED),
        (1, random_run(outcomes={"right": 99, "wrong": 1}, failures=[FAILURE]), gpu.FAILED),
        (0, random_run(outcomes={"right": 99, "wrong": 1}), gpu.FAILED),
        (1, random_run(), gpu.FAILED),
        (1, None, gpu.FAILED),
        (None, None, gpu.INCOMPLETE),
        (0, random_run(outcomes={"right": 80}), gpu.INCOMPLETE),
        (0, random_run(outcomes={"right": 10, "refused": 90}), gpu.INCOMPLETE),
    ],
)
def test_random_configurations_pass_if_all_were_right(code, run, status):
    assert gpu.random_part(code, "what it printed", run, 100).status == status


def test_fewer_than_it_takes_do_not_pass():
    assert gpu.random_part(0, "", random_run(outcomes={"right": 10}), 10).status == gpu.INCOMPLETE


def test_a_seed_is_one_that_no_record_has(tmp_path):
    assert gpu.new_seed(7, tmp_path) == 7
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "one.json").write_text('{"seed": 7}')
    (tmp_path / "random_gpu.json").write_text('{"runs": [{"seed": 8}, {"seed": 10}]}')
    assert gpu.new_seed(7, tmp_path) == 9


# ------------------------------------------------------------------------------------------------------ whole receipts


def parts(**changed):
    passed = {"status": "passed", "counts": {"passed": 5}}
    return {"parts": {"tests": passed, "random": passed, "nccl": passed} | changed}


@pytest.mark.parametrize(
    ("receipt", "status"),
    [
        (parts(), gpu.PASSED),
        (parts(nccl={"status": "not run", "reason": "it refuses shared GPUs"}), gpu.PASSED),
        (parts(nccl={"status": "incomplete"}), gpu.INCOMPLETE),
        (parts(tests={"status": "not run"}), gpu.INCOMPLETE),
        (parts(random={"status": "incomplete", "counts": {"passed": 50, "unfinished": 50}}), gpu.INCOMPLETE),
        (parts(random={"status": "passed", "counts": {"passed": 50, "unfinished": 50}}), gpu.INCOMPLETE),
        (parts(tests={"status": "passed", "counts": {}}), gpu.INCOMPLETE),
        (parts(tests={"status": "passed", "counts": {"passed": 5, "errors": 1}}), gpu.FAILED),
        (parts(tests={"status": "incomplete", "failures": [{"name": "a", "message": "b"}]}), gpu.FAILED),
        (parts(tests={"status": "failed"}, random={"status": "incomplete"}), gpu.FAILED),
        ({"parts": {}}, gpu.INCOMPLETE),
        ({"status": "passed"}, gpu.INCOMPLETE),
    ],
)
def test_a_receipt_passed_if_all_its_parts_did(receipt, status):
    assert gpu.status_of(receipt) == status


def test_without_a_gpu_it_ends_at_once_with_one_line():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    began = time.monotonic()
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_receipt.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert time.monotonic() - began < 60
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("make gpu needs a CUDA device")
    assert "sees none" in line


def test_make_gpu_is_that_program_and_ends_as_it_does():
    if shutil.which("make") is None or torch.cuda.is_available():
        pytest.skip("there is no make, or a GPU that it would run on")
    command = ["make", "gpu", f"GPU_PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "make gpu needs a CUDA device" in done.stderr


@pytest.mark.processes
def test_a_trial_on_a_cpu_writes_a_whole_receipt_that_did_not_pass(tmp_path):
    (tmp_path / "test_planted.py").write_text(PLANTED + WRONG)
    told = ["--device", "cpu", "--out", str(tmp_path / "out"), "--tests", str(tmp_path), "--most", "2", "--jobs", "1"]
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_receipt.py"), *told, "--seed", "5", "--commit", "1a2b3c4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    (path,) = (tmp_path / "out").iterdir()
    receipt = json.loads(path.read_text())
    assert (receipt["status"], receipt["commit"], receipt["seed"]) == ("failed", "1a2b3c4", 5)
    assert receipt["sources"] == gpu.sources(ROOT / "src" / "longring")
    assert receipt["versions"]["torch"] == torch.__version__
    assert receipt["parts"]["tests"]["counts"] == {"passed": 2, "failed": 1, "errors": 0, "skipped": 1}
    assert receipt["parts"]["random"]["random"]["seed"] == 5
    assert receipt["parts"]["random"]["status"] == "incomplete"


def test_a_cpu_writes_no_receipt_where_those_of_gpus_are(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu"])
    assert "no receipt of a GPU" in capsys.readouterr().err
