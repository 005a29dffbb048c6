"""`longring conform`, on our own attention and on functions that are wrong in different ways."""

import json
import os
import subprocess
import sys

import pytest

from longring.cli import main
from longring.cli.conform import QUANTITIES
from longring.testing.conformance import CASES

SMALL = ("--only", "one batch row", "--ranks", "2", "--layout", "zigzag")

STRANGERS = """
import os

import torch.distributed as dist

import longring as lr
from longring.testing.worlds import longring_attention

number = 7


def local_only(q, k, v, *, group, pattern, layout, length):
    return lr.attention(q, k, v, pattern=pattern)


def over_torch(q, k, v, *, group, **asked):
    assert isinstance(group, dist.ProcessGroup) and dist.get_world_size(group) == 2
    return longring_attention(q, k, v, group=group, **asked)[0]


def no_windows(q, k, v, *, pattern, **asked):
    if pattern.window is not None:
        raise NotImplementedError("no windows here")
    return longring_attention(q, k, v, pattern=pattern, **asked)


def nothing(q, k, v, **asked):
    raise NotImplementedError("not today")


def kills_itself(q, k, v, *, pattern, **asked):
    if pattern.window is not None and dist.get_rank() == 1:
        os.abort()
    return longring_attention(q, k, v, pattern=pattern, **asked)


class Kept:
    attend = staticmethod(longring_attention)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with modules of strangers in it."""
    (tmp_path / "strangers.py").write_text(STRANGERS)
    (tmp_path / "broken.py").write_text("raise OSError('no such\\nlibrary')")
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    (tmp_path / "needs_more.py").write_text("import nowhere_to_be_found")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    yield tmp_path
    sys.modules.pop("strangers", None)


@pytest.fixture
def conform(folder, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["longring", "conform", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        return stopped.value.code, printed.out, printed.err

    return run


@pytest.mark.processes
def test_our_own_attention_conforms_on_processes(tmp_path):
    command = [sys.executable, "-m", "longring", "conform", *SMALL]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "longring_attention on 2 ranks as processes over Gloo" in done.stdout
    assert f"It conforms: {len(QUANTITIES)} answers within their budget, 0 not, 0 refused." in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    for quantity in ("out", "lse", "dq", "dk", "dv"):
        (row,) = (row for row in rows if row[:2] == [quantity, "yes"])
        assert 0 <= float(row[3]) <= float(row[4])


@pytest.mark.processes
def test_a_stranger_gets_a_group_of_torch_distributed(conform):
    code, out, _ = conform("strangers:over_torch", *SMALL)
    assert (code, "It conforms: 7 answers" in out) == (0, True)  # all but lse, which it does not return


@pytest.mark.processes
def test_a_case_that_kills_a_process_is_wrong_and_the_others_are_not(conform):
    only = ("--only", "window to the left", "--only", "one batch row")
    code, out, _ = conform("strangers:kills_itself", *only, "--ranks", "2", "--layout", "zigzag")
    assert code == 1
    assert "wrong: window to the left | any | 2 ranks | all: rank 1 of 2 was killed by SIGABRT" in out
    assert f"WRONG: {len(QUANTITIES)} answers within their budget, 1 not, 0 refused." in out


def test_what_is_wrong_is_shown_with_its_error_and_the_budget(conform):
    code, out, err = conform("strangers:local_only", *SMALL, "--threads", "--only", "full")
    assert (code, err) == (1, "")
    assert "NO, " in out
    assert "wrong: full | zigzag | 2 ranks | out: error " in out
    assert " is allowed" in out
    assert "WRONG: " in out


def test_many_findings_are_not_all_printed(conform):
    _, out, _ = conform("strangers:local_only", "--only", "causal", "--ranks", "2,3", "--threads")
    assert out.count("wrong: ") == 10
    assert "more, which --json has" in out


def test_a_refusal_is_told_and_is_no_fault(conform):
    code, out, _ = conform("strangers:no_windows", "--threads", *SMALL, "--only", "window")
    assert code == 0
    assert "refused: window to the left | zigzag | 2 ranks | all: NotImplementedError: no windows here" in out
    assert "0 not, 2 refused." in out


def test_to_refuse_everything_is_not_to_conform(conform):
    code, out, _ = conform("strangers:nothing", "--threads", *SMALL)
    assert (code, "Nothing was served" in out) == (1, True)


def test_json_has_every_finding(conform):
    code, out, err = conform("strangers:Kept.attend", "--threads", *SMALL, "--dtype", "bf16", "--json")
    told = json.loads(out)
    assert (code, err, told["ok"], told["command"]) == (0, "", True, "conform")
    assert told["arguments"]["function"] == "strangers:Kept.attend"
    assert [finding["quantity"] for finding in told["findings"]] == list(QUANTITIES)
    assert all(finding["error"] <= finding["allowed"] for finding in told["findings"])
    assert told["counts"] == {"exact": 8, "wrong": 0, "refused": 0}
    assert "2 ranks as threads" in told["real"]


def test_json_of_what_is_wrong_is_valid_too(conform):
    code, out, _ = conform("strangers:nothing", "--threads", *SMALL, "--json")
    told = json.loads(out)
    assert (code, told["ok"], told["findings"][0]["error"]) == (1, False, None)


def test_the_checks_are_named(conform):
    code, out, _ = conform("--list")
    assert code == 0
    for name in (*(case.name for case in CASES), *QUANTITIES):
        assert f"  {name} " in out
    only = conform("--list", "--only", "dilated", "--json")[1]
    assert [case["name"] for case in json.loads(only)["cases"]] == [c.name for c in CASES if "dilated" in c.name]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("strangers",), "must be named as package.module:function, got 'strangers'"),
        (("strangers:",), "must be named as package.module:function"),
        ((":attend",), "must be named as package.module:function"),
        (("nowhere:attend",), "there is no module 'nowhere' on the import path"),
        (("longring.nowhere:attend",), "there is no module 'longring.nowhere'"),
        (("strangers:nobody",), "strangers has no 'nobody'"),
        (("strangers:Kept.nobody",), "strangers has no 'Kept.nobody'"),
        (("strangers:number",), "strangers:number is int, which cannot be called"),
        (("broken:attend",), "broken could not be imported: OSError: no such library"),
        (("leaves:attend",), "leaves could not be imported: SystemExit: 0"),
        (("needs_more:attend",), "needs_more could not be imported: No module named 'nowhere_to_be_found'"),
        (("--only", "sideways"), "--only 'sideways' names none of: full; causal; "),
        (("--layout", "round"), "--layout must be one of contiguous, zigzag, striped, dealt, got 'round'"),
        (("--ranks", "2,x"), "a number of --ranks must be a number like"),
        (("--ranks", ""), "a number of --ranks must be a number like"),
        (("--ranks", "17"), "--ranks must be at most 16"),
        (("--dtype", "int8"), "--dtype must be one of"),
    ],
)
def test_what_cannot_be_asked_is_one_line_and_exit_code_2(arguments, said, conform):
    code, out, err = conform(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
