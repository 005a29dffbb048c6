"""The real command, in a process of its own, as a user runs it."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from longring import __version__
from longring.cli import app, main
from longring.errors import ArgumentError

SMALL = ("--tokens", "67", "--ranks", "3", "--head-dim", "16", "--heads", "4", "--kv-heads", "2")


def longring(*arguments, python=()):
    command = [sys.executable, *python, "-c", "from longring.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    out = tmp_path_factory.mktemp("printed") / "new" / "folder"
    return longring("demo", *SMALL, "--out", str(out)), out


@pytest.fixture(scope="module")
def as_json(tmp_path_factory):
    done = longring("demo", *SMALL, "--json", "--out", str(tmp_path_factory.mktemp("json")))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_demo_succeeds_and_says_so(printed):
    done, _ = printed
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 9 rows are right" in done.stdout
    assert done.stderr == ""


def test_the_tables_name_every_schedule_and_layout(printed):
    words = printed[0].stdout.split()
    for name in ("ring", "exchange", "gather", "zigzag", "contiguous", "striped", "dealt", "causal", "dilated"):
        assert name in words


def test_piped_output_is_plain_and_not_cut(printed):
    text = printed[0].stdout
    assert "\x1b" not in text
    assert "\r" not in text
    assert "…" not in text
    tables = [line for line in text.splitlines() if "zigzag" in line or "contiguous" in line]
    assert len(tables) == 14
    assert max(map(len, tables)) <= 80


def test_pictures_are_saved_and_named(printed):
    done, out = printed
    for name in ("ring.png", "dilated.png"):
        assert str(out / name) in done.stdout
        data = (out / name).read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(data) > 5000


def test_json_has_every_row_within_its_budget(as_json):
    assert as_json["right"] is True
    assert set(as_json["versions"]) == {"longring", "torch", "python"}
    assert {row["schedule"] for row in as_json["rows"]} == {"ring", "exchange", "gather"}
    assert {row["dtype"] for row in as_json["rows"]} == {"float32", "bfloat16"}
    for row in as_json["rows"]:
        assert row["right"] is True
        assert set(row["errors"]) == {"out", "lse", "dq", "dk", "dv"}
        assert all(0 <= row["errors"][name] <= row["allowed"][name] for name in row["errors"])


def test_json_bytes_are_those_predicted_rank_by_rank(as_json):
    for row in as_json["rows"]:
        assert row["bytes_agree"] is True
        for part in ("forward", "backward"):
            assert len(row[part]["bytes_sent"]) == 3
            assert row[part]["bytes_sent"] == row[part]["predicted_bytes"]
    assert any(sum(row["forward"]["bytes_sent"]) > 0 for row in as_json["rows"])


@pytest.mark.parametrize("arguments", [("--help",), ("demo", "--help"), ()])
def test_help_does_not_import_torch(arguments):
    done = longring(*arguments, python=("-X", "importtime"))
    assert done.returncode == 0
    assert "longring" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "numpy", "matplotlib"}


def test_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["longring", "--version"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert (stopped.value.code, capsys.readouterr().out) == (0, f"longring {__version__}\n")


@pytest.mark.parametrize("option", ["--tokens", "--ranks"])
def test_nothing_of_it_is_one_line_and_exit_code_2(option):
    done = longring("demo", option, "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: Invalid value for '{option}'")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("demo", "--tokens", "many"), "--tokens"),
        (("demo", "--tokens", "999999"), "--tokens must be at most"),
        (("demo", "--heads", "8", "--kv-heads", "3"), "--kv-heads, got 8 and 3"),
        (("demo", "--out", "/dev/null/folder"), "--out"),
        (("demo", "--colour"), "--colour"),
        (("sing",), "sing"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["longring", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert named in printed.err


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["longring", "--debug", "demo", "--heads", "8", "--kv-heads", "3"])
    with pytest.raises(ArgumentError, match="multiple of --kv-heads"):
        main()


@pytest.fixture
def one_row_demo(tmp_path, monkeypatch):
    """The command in this process, with the first case alone."""
    from longring.bench import demonstration

    every = demonstration.cases
    monkeypatch.setattr(demonstration, "cases", lambda tokens: every(tokens)[:1])
    arguments = ["demo", "--tokens", "9", "--ranks", "2", "--head-dim", "4", "--out", str(tmp_path)]
    return lambda: CliRunner().invoke(app, arguments)


def test_one_right_row_is_exit_code_0(one_row_demo):
    assert one_row_demo().exit_code == 0


def test_bytes_that_were_not_predicted_are_exit_code_1(one_row_demo, monkeypatch):
    monkeypatch.setattr("longring.simulation.forward_bytes", lambda *_, **__: 1)
    done = one_row_demo()
    assert done.exit_code == 1
    assert "NOT" in done.output
    assert "WRONG, 1 fault: causal, ring, zigzag: some rank sent other bytes than predicted" in done.output


def test_an_error_beyond_the_budget_is_exit_code_1(one_row_demo, monkeypatch):
    from longring import testing

    budgets = testing.budgets

    def strict(*given):
        want, allowed = budgets(*given)
        return want, {**allowed, "dk": 0.0}

    monkeypatch.setattr(testing, "budgets", strict)
    done = one_row_demo()
    assert done.exit_code == 1
    assert "the relative error of dk is" in done.output


def test_without_matplotlib_there_are_numbers_and_a_hint(one_row_demo, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = one_row_demo()
    assert done.exit_code == 0
    assert "no pictures: pictures need matplotlib" in done.output
    assert "pip install longring[plot]" in done.output
