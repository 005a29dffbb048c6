"""What strangers wrote, on its way to the terminal; and command lines that no careful user would type."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from longring import cli
from longring.cli import options, screen
from longring.errors import ArgumentError

HERE = Path(__file__).parent
CONTROLS = [chr(code) for code in (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))]
PWN = "\x1b]0;pwn\x07\x9b31m"


def as_a_terminal(monkeypatch):
    """A console that believes in a terminal, and what it wrote."""
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = screen.console()
    console.file = io.StringIO()
    return console


@pytest.mark.parametrize("control", CONTROLS)
def test_no_control_character_is_shown_as_it_is(control):
    shown = screen.shown(f"a{control}b")
    if control in "\n\t":
        assert shown == f"a{control}b"
    else:
        code = ord(control)
        assert shown == (f"a\\x{code:02x}b" if code < 256 else f"a\\u{code:04x}b")


def test_letters_of_all_scripts_are_shown():
    text = "né Ω ж 漢字 العربية עברית 👩‍👩‍👧 é ─"
    assert screen.shown(text) == text


def test_a_console_shows_no_controls_of_others_and_keeps_its_own(monkeypatch):
    console = as_a_terminal(monkeypatch)
    console.print(f"{PWN}text", style="bold")
    table = screen.table(f"title {PWN}", f"head {PWN}")
    table.add_row(f"cell {PWN}")
    table.add_row(screen.styled(f"styled {PWN}", "bold red"))
    console.print(table)
    with screen.progress(console) as bar:
        bar.add_task(f"doing [bold]this[/] {PWN}", total=1)
    written = console.file.getvalue()
    assert written.count("\\x1b]0;pwn") >= 5
    assert "\x1b]" not in written
    assert "\x07" not in written
    assert "\x9b" not in written
    assert "doing [bold]this[/]" in written
    assert "cell \\x1b]0;pwn\\x07\\x9b31m" in written  # whole: spelt out before the column got its width
    assert "\x1b[1;31mstyled \\x1b]0;pwn\\x07\\x9b31m" in written  # bold, as this program asked for
    assert "\x1b[?25l" in written  # the cursor, hidden beside a bar


def test_a_console_reads_no_markup(monkeypatch):
    console = as_a_terminal(monkeypatch)
    text = "[bold]x[/] [link=http://a]b[/link] [/nothing] :smile:"
    table = screen.table(text, text)
    table.add_row(text)
    console.print(text, soft_wrap=True)
    console.print(table, soft_wrap=True)
    assert console.file.getvalue().count(text) == 4


@pytest.mark.parametrize("is_debugging", [False, True])
def test_errors_and_tracebacks_show_no_controls(capsys, is_debugging):
    assert cli._answered(["plan", "--hardware-file", f"no{PWN}\u202e"], is_debugging) == 2
    said = capsys.readouterr().err
    assert "no\\x1b]0;pwn\\x07\\x9b31m\\u202e cannot be read" in said
    assert ("Traceback" in said) is is_debugging
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", said)


def test_an_error_that_repeats_much_is_cut_in_its_middle(capsys):
    assert cli._answered(["plan", "--dtype", "9" * 100_000, "--ranks", "2"], False) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --dtype must be ")
    assert " [...] " in said
    assert len(said) < cli.LONGEST + 100


def test_no_code_prints_markup_or_makes_a_console_of_its_own():
    for path in (Path(cli.__file__).parent).glob("*.py"):
        text = path.read_text()
        assert not re.search(r"\[/\]|Text\.from_markup|markup=True", text), path
        assert path.name == "screen.py" or "Console(" not in text, path


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device"])
def test_no_output_goes_into_a_pipe_or_device(tmp_path, kind):
    """Opening a pipe would wait for its reader; and what is put in place by a rename would take a device's."""
    path = tmp_path / "out"
    if kind == "device":
        path.symlink_to("/dev/full")
    else:
        os.mkfifo(tmp_path / "pipe")
        path = tmp_path / "pipe" if kind == "pipe" else path
        if kind != "pipe":
            path.symlink_to(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match=r"--out .* cannot be written: it is a pipe or a device"):
        options.check_writable(path, "--out")


def test_a_link_to_a_place_for_an_output_stays(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    options.check_writable(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()


def test_outputs_that_are_links_to_themselves(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    options.check_apart(report=tmp_path / "loop", out=tmp_path / "other")
    with pytest.raises(ArgumentError, match=r"--report .*loop cannot be written: Too many levels of symbolic links"):
        options.check_writable(tmp_path / "loop")


@pytest.mark.parametrize("command", ["", "plan", "train", "bench", "bench compare"])
def test_help_has_a_short_word(command, capsys):
    pages = []
    for word in ("-h", "--help"):
        assert cli._run([*command.split(), word]) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1]
    assert "-h, --help" in pages[0]


def test_a_million_processes_are_a_slip_of_the_keyboard(tmp_path, capsys):
    assert cli._answered(["train", "--ranks", "1000000", "--context", "1M", "--out", str(tmp_path)], False) == 2
    assert (
        "--ranks must be at most 1,024 where they are processes of this machine, got 1,000,000"
        in capsys.readouterr().err
    )


def test_hostile_command_lines():
    """As many as fit into some seconds; more of them by hand: python tests/cli/hostile_lines.py 300"""
    done = subprocess.run(
        [sys.executable, HERE / "hostile_lines.py", "1000", "3", "10"],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["lines"] >= 5
    for kind in ("traceback", "raw", "controls", "left", "code"):
        assert found[kind] == [], kind


@pytest.mark.parametrize("kind", ["pipe", "loop", "file", "device"])
def test_a_run_writes_into_folders_only(tmp_path, capsys, kind):
    out = tmp_path / "out"
    if kind == "pipe":
        os.mkfifo(out)
    elif kind == "file":
        out.write_text("")
    else:
        out.symlink_to(out if kind == "loop" else "/dev/zero")
    assert cli._answered(["train", "--ranks", "1", "--out", str(out)], False) == 2
    assert capsys.readouterr().err == f"error: --out {out} is no folder; name one, or a place where one can be made\n"
