"""The real command, in a process of its own, as a user runs it."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from longring import launching
from longring.bench import demonstration
from longring.cli import app, main
from longring.cli.browser import show
from longring.geometry.layouts import LAYOUTS
from longring.geometry.plans import PLANS

pytestmark = pytest.mark.processes

SMALL = ("--tokens", "67", "--head-dim", "16", "--heads", "4", "--kv-heads", "2")


def longring(*arguments):
    command = [sys.executable, "-c", "from longring.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    out = tmp_path_factory.mktemp("printed") / "new" / "folder"
    return longring("demo", *SMALL, "--out", str(out), "--report", str(out / "page.html")), out


@pytest.fixture(scope="module")
def as_json(tmp_path_factory):
    done = longring("demo", *SMALL, "--json", "--out", str(tmp_path_factory.mktemp("json")))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_demo_succeeds_and_says_so(printed):
    done, _ = printed
    assert done.returncode == 0, done.stdout + done.stderr
    assert "67 tokens on 4 real processes" in done.stdout
    assert "All 13 rows are right" in done.stdout
    assert "Bit for bit what longring.simulate gives, with all ranks in one process: 13 of 13 rows." in done.stdout
    assert "Left out" not in done.stdout
    assert done.stderr == ""


def test_the_tables_name_every_schedule_and_layout(printed):
    words = printed[0].stdout.split()
    for name in (*PLANS, *LAYOUTS, "causal", "window", "documents", "dilated"):
        assert name in words


def test_piped_output_is_plain_and_not_cut(printed):
    text = printed[0].stdout
    assert "\x1b" not in text
    assert "\r" not in text
    assert "…" not in text
    tables = [line for line in text.splitlines() if "zigzag" in line or "contiguous" in line]
    assert len(tables) == 22
    assert max(map(len, tables)) <= 80


def test_pictures_are_saved_and_named(printed):
    done, out = printed
    for name in ("ring.png", "dilated.png"):
        assert str(out / name) in done.stdout
        data = (out / name).read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(data) > 5000


def test_the_report_is_one_page(printed):
    done, out = printed
    assert f"report: {out / 'page.html'}" in done.stdout
    page = (out / "page.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert '"command": "demo"' in page or '"command":"demo"' in page


def test_json_has_every_row_within_its_budget(as_json):
    assert as_json["right"] is True
    assert (as_json["command"], as_json["arguments"]["tokens"]) == ("demo", 67)
    assert "4 real processes" in as_json["real"]
    assert "2 nodes" in as_json["simulated"]
    assert set(as_json["versions"]) == {"longring", "torch", "python"}
    assert as_json["left_out"] == []
    assert 0 < as_json["seconds"]["processes"] < as_json["seconds"]["all"]
    assert {row["schedule"] for row in as_json["rows"]} == set(PLANS)
    assert {row["schedule"] for row in as_json["rows"] if row["nodes"] == 2} == {"double_ring", "hybrid"}
    assert {row["dtype"] for row in as_json["rows"]} == {"float32", "bfloat16"}
    for row in as_json["rows"]:
        assert row["right"] is True
        assert row["equals_simulated"] is True
        assert set(row["errors"]) == {"out", "lse", "dq", "dk", "dv"}
        assert all(0 <= row["errors"][name] <= row["allowed"][name] for name in row["errors"])


def test_json_bytes_are_those_predicted_rank_by_rank(as_json):
    for row in as_json["rows"]:
        assert row["bytes_agree"] is True
        for part in ("forward", "backward"):
            assert len(row[part]["bytes_sent"]) == 4
            assert row[part]["bytes_sent"] == row[part]["predicted_bytes"]
            assert sum(row[part]["bytes_sent"]) > 0


def test_json_has_what_each_rank_held(as_json):
    for row in as_json["rows"]:
        assert len(row["peak_bytes"]) == row["ranks"] == 4
        assert 0 < min(row["peak_bytes"]) < row["peak_bytes_alone"]
        assert row["share_of_one_rank"] == max(row["peak_bytes"]) / row["peak_bytes_alone"]


@pytest.mark.parametrize("option", ["--tokens", "--ranks"])
def test_nothing_of_it_is_one_line_and_exit_code_2(option):
    done = longring("demo", option, "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {option} must be a whole number from 1")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("demo", "--tokens", "many"), "--tokens"),
        (("demo", "--tokens", "999999"), "--tokens must be at most"),
        (("demo", "--ranks", "65"), "--ranks must be at most 64"),
        (("demo", "--report", "/dev/null/page.html"), "--report /dev/null/page.html cannot be written"),
        (("demo", "--heads", "8", "--kv-heads", "3"), "--kv-heads, got 8 and 3"),
        (("demo", "--out", "/dev/null/folder"), "--out"),
        (("demo", "--show"), "--show shows the page that --report FILE writes"),
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


def test_under_torchrun_it_says_that_it_starts_its_own_ranks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["longring", "demo"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert (stopped.value.code, capsys.readouterr().err.count("run it without torchrun")) == (2, 1)


def test_debug_shows_the_traceback_and_leaves_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["longring", "--debug", "demo", "--heads", "8", "--kv-heads", "3"])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr().err
    assert (stopped.value.code, said.count("Traceback")) == (2, 1)
    assert "multiple of --kv-heads" in said.splitlines()[-1]


@pytest.fixture
def one_row(tmp_path, monkeypatch):
    """What to call the command with, in this process: the first case alone."""
    every = demonstration.cases
    monkeypatch.setattr(demonstration, "cases", lambda size: every(size)[:1])
    return ["demo", "--tokens", "9", "--ranks", "2", "--head-dim", "4", "--out", str(tmp_path)]


@pytest.fixture
def one_row_demo(one_row):
    return lambda *more: CliRunner().invoke(app, [*one_row, *more])


def test_one_right_row_is_exit_code_0(one_row_demo):
    done = one_row_demo()
    assert done.exit_code == 0
    assert ": 1 of 1 rows." in done.output


def test_the_report_has_what_json_has(one_row_demo, tmp_path, monkeypatch):
    """What `report.write` makes of it, its own tests look at."""
    written = []
    monkeypatch.setattr("longring.bench.report.write", lambda *given: written.append(given))
    page = tmp_path / "new" / "page.html"
    done = one_row_demo("--json", "--report", str(page))
    assert done.exit_code == 0
    assert written == [(page, "demo", json.loads(done.output))]
    assert f"report: {page}" in one_row_demo("--report", str(page)).output


def test_an_odd_number_of_ranks_leaves_out_two_nodes(one_row_demo):
    done = one_row_demo("--ranks", "3")
    assert done.exit_code == 0
    for schedule in ("double_ring", "hybrid"):
        assert f"Left out: {schedule}, since --ranks 3 is not a multiple of its 2 nodes." in done.output


def test_other_bits_than_simulated_are_told_and_no_fault(one_row_demo, monkeypatch):
    honest = demonstration._simulated

    def a_little_off(*given):
        sim, answer = honest(*given)
        return sim, answer._replace(dv=answer.dv.nextafter(answer.dv + 1))

    monkeypatch.setattr(demonstration, "_simulated", a_little_off)
    done = one_row_demo()
    assert done.exit_code == 0
    assert ": 0 of 1 rows." in done.output


def die_on_the_way(chosen, size):
    """In place of what a process does: rank 1 is killed, the others wait for it."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return demonstration.attend(chosen, size)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_killed_rank_is_one_line_and_exit_code_1(one_row, more, monkeypatch, capsys):
    monkeypatch.setattr(demonstration, "attend", die_on_the_way)
    said = failed_demo([*one_row, *more], monkeypatch, capsys)
    assert said == "error: rank 1 of 2 was killed by SIGKILL before it gave a result\n"


def test_processes_that_cannot_start_are_one_line_and_exit_code_1(one_row, monkeypatch, capsys):
    def refuse(*_):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(launching, "_start", refuse)
    said = failed_demo(one_row, monkeypatch, capsys)
    assert said.startswith("error: 2 processes could not be started: ")
    assert "Resource temporarily unavailable" in said
    assert said.count("\n") == 1


def failed_demo(arguments, monkeypatch, capsys):
    """What it says on stderr; there must be nothing else."""
    monkeypatch.setattr(sys, "argv", ["longring", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (1, "")
    return printed.err


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


# --------------------------------------------------------------------------------------------------- shown


@pytest.fixture
def browser(monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    return opened


def test_a_report_is_opened_where_there_is_a_screen(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("DISPLAY", ":0")
    said = show(tmp_path / "a page.html")
    assert browser == [f"file://{tmp_path}/a%20page.html"]
    assert said == f"report, opened in your browser: file://{tmp_path}/a%20page.html"


@pytest.mark.parametrize(("is_terminal", "screen"), [(True, ""), (False, ":0")])
def test_where_there_is_none_its_address_is_told(browser, tmp_path, monkeypatch, is_terminal, screen):
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: is_terminal))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("DISPLAY", screen)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert show(tmp_path / "page.html") == f"report, to be opened in a browser: file://{tmp_path}/page.html"
    assert browser == []
