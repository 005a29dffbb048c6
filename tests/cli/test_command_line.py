"""The command line as a whole, in processes of its own: help, failures, Ctrl-C, a reader that leaves."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import HEARING_CTRL_C
from longring import __version__
from longring.cli import ORDER, app

DOCS = Path(__file__).parents[2] / "docs"
HEAVY = {"torch", "numpy", "matplotlib", "rich", "transformers"}

# A command that does as it is told, beside the real ones.
ODD_COMMAND = """
import sys, time, typer
from longring import errors
from longring.cli import app, main, screen

@app.command()
def odd(what: str, tables: bool = False):
    if what == "key":
        raise KeyError("x")
    if what == "lines":
        raise RuntimeError("first line\\nsecond line")
    if what == "mute":
        raise MemoryError
    if what == "lost":
        raise errors.PeerLost("rank 3 is\\n gone")
    if what == "exit":
        raise typer.Exit(3)
    if what == "abort":
        raise typer.Abort
    if what == "sleep":
        print("ready", flush=True)
        time.sleep(60)
    say = screen.console().print if tables else print
    for line in range(100_000):
        say(line)

main()
"""


def longring(*arguments, code="from longring.cli import main; main()", python=()):
    command = [sys.executable, *python, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())


def environment():
    """As most users have it: what is printed waits in a buffer."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**inherited, "NO_COLOR": "1", "COLUMNS": "80"}


def odd(*arguments):
    return longring("odd", *arguments, code=ODD_COMMAND)


def test_help_lists_the_commands_in_the_order_in_which_one_meets_them():
    done, bare = longring("--help"), longring()
    assert (done.returncode, done.stderr) == (0, "")
    assert bare.stdout == done.stdout
    listed = [line.split()[0] for line in done.stdout.partition("Commands:\n")[2].splitlines()]
    assert listed == [name for name in ORDER if name in listed]
    assert listed


def test_every_command_says_in_a_line_what_it_is_for():
    described = longring("--help").stdout.partition("Commands:\n")[2].splitlines()
    for line in described:
        assert len(line.split()) > 2
        assert not line.endswith("..."), f"the first sentence of this command's docstring is too long: {line}"


def names():
    from typer.main import get_command

    return list(get_command(app).commands)


@pytest.mark.parametrize("name", names())
def test_every_commands_help_teaches_by_an_example(name):
    done = longring(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"longring {name}" in done.stdout.partition("Usage:")[2].partition("\n")[2]
    assert "--json" in done.stdout


@pytest.mark.parametrize("arguments", [("--help",), (), ("--version",), *((name, "--help") for name in names())])
def test_help_and_version_load_nothing_heavy(arguments):
    done = longring(*arguments, python=("-X", "importtime"))
    assert done.returncode == 0
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & HEAVY


def test_a_plan_needs_no_torch():
    done = longring("plan", "--tokens", "64K", "--ranks", "2", python=("-X", "importtime"))
    assert done.returncode == 0
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "matplotlib"}


def test_version():
    done = longring("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"longring {__version__}\n", "")


def test_as_a_module_it_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "longring", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"longring {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sing",), "No such command 'sing'"),
        (("--colour",), "No such option: --colour"),
        (("demo", "--colour"), "No such option: --colour"),
        (("demo", "--seed", "-1"), "Invalid value for '--seed'"),
        (("demo", "--seed", "many"), "Invalid value for '--seed'"),
        (("demo", "more"), "unexpected extra argument"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, said):
    done = longring(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("key", "error: KeyError: 'x' (the whole story: --debug)\n"),
        ("lines", "error: RuntimeError: first line (the whole story: --debug)\n"),
        ("mute", "error: MemoryError (the whole story: --debug)\n"),
        ("lost", "error: rank 3 is gone\n"),
    ],
)
def test_any_failure_is_one_line_and_exit_code_1(what, said):
    done = odd(what)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


@pytest.mark.parametrize("arguments", [("--debug", "odd", "key"), ("odd", "--debug", "key"), ("odd", "key", "--debug")])
def test_debug_anywhere_shows_the_traceback(arguments):
    done = longring(*arguments, code=ODD_COMMAND)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.rstrip().endswith("KeyError: 'x'")


def test_a_command_has_the_last_word_on_its_exit_code():
    assert (odd("exit").returncode, odd("exit").stderr) == (3, "")


def test_an_aborted_command_was_stopped():
    done = odd("abort")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_ctrl_c_is_one_word_and_exit_code_130():
    with started("odd", "sleep") as running:
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGINT)
        out, said = running.communicate(timeout=30)
    assert (running.returncode, out, said) == (130, "", "stopped\n")


# A command that Ctrl-C meets at a bad moment.
INTERRUPTED_COMMAND = """
import os, signal, sys, time
from longring.cli import app, main

def press(times=1):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)

def press_in_callbacks(frame, event, argument):
    if frame.f_code.co_name == "cb" and "importlib" in frame.f_code.co_filename:  # of _get_module_lock
        sys.settrace(None)
        press()

@app.command()
def interrupted(when: str, folder: str):
    sys.path.insert(0, folder)
    sys.press = press
    if when == "callback":
        sys.settrace(press_in_callbacks)
    if when in ("import", "callback", "endless"):
        import odd_module
        time.sleep(60)
    try:
        press(2 if when == "two" else 1)
        time.sleep(60)
    finally:
        time.sleep(0.2)
        if when == "insisting":
            print("ready", flush=True)
            time.sleep(60)
        print("tidied", flush=True)

main()
"""


@pytest.mark.parametrize(
    ("when", "module", "printed"),
    [
        ("import", "sys.press(); time.sleep(0.1); print('loaded', flush=True)", "loaded\n"),
        ("callback", "print('loaded', flush=True)", "loaded\n"),
        ("endless", "sys.press(); time.sleep(60)", ""),
        ("two", "", "tidied\n"),
    ],
    ids=["in an import", "in a callback of an import", "in an import that goes on", "two for one"],
)
def test_ctrl_c_at_a_bad_moment_is_one_word_and_lets_the_command_tidy_up(when, module, printed, tmp_path):
    """What is raised in an import's callback Python prints, and forgets."""
    (tmp_path / "odd_module.py").write_text(f"import sys, time\n{module}\n")
    with started("interrupted", when, str(tmp_path), code=INTERRUPTED_COMMAND) as running:
        out, said = running.communicate(timeout=50)
    assert (running.returncode, out, said) == (130, printed, "stopped\n")


def test_ctrl_c_while_the_command_is_still_loaded_is_one_word(tmp_path):
    """Typer takes most of the time until the command hears Ctrl-C itself."""
    (tmp_path / "typer.py").write_text("import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(60)\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from longring.__main__ import main; main()"
    with started("--help", code=code) as running:
        out, said = running.communicate(timeout=50)
    assert (running.returncode, out, said) == (130, "", "stopped\n")


def test_the_command_itself_hears_ctrl_c_once_it_is_loaded(tmp_path):
    (tmp_path / "odd_module.py").write_text("import sys\nsys.press()\n")
    code = INTERRUPTED_COMMAND.replace("\nmain()", "\nfrom longring.__main__ import main as run\nrun()")
    assert code != INTERRUPTED_COMMAND
    with started("interrupted", "two", str(tmp_path), code=code) as running:
        out, said = running.communicate(timeout=50)
    assert (running.returncode, out, said) == (130, "tidied\n", "stopped\n")


def test_a_second_ctrl_c_ends_a_command_at_once(tmp_path):
    with started("interrupted", "insisting", str(tmp_path), code=INTERRUPTED_COMMAND) as running:
        assert running.stdout.readline() == "ready\n"
        time.sleep(0.5)  # a second one, no echo of the first
        running.send_signal(signal.SIGINT)
        out, said = running.communicate(timeout=50)
    assert (running.returncode, out, said) == (130, "", "stopped\n")


@pytest.mark.processes
@pytest.mark.parametrize("others", [1, 2, 4], ids=["loading torch", "the first rank begins", "ranks begin"])
def test_ctrl_c_at_a_terminal_reaches_ranks_too_and_none_of_them_says_anything(others, tmp_path):
    code = "from longring.cli import main; main()"
    with started("demo", "--tokens", "4001", "--out", str(tmp_path), code=code, start_new_session=True) as running:
        wait_for_children(running.pid, more_than=others - 1)
        os.killpg(running.pid, signal.SIGINT)
        out, said = running.communicate(timeout=60)
    assert (running.returncode, out, said) == (130, "", "stopped\n")


@pytest.mark.parametrize("more", [(), ("--tables",)])
def test_a_reader_that_leaves_is_no_error(more):
    with started("odd", "print", *more) as running:
        assert running.stdout.readline() == "0\n"
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.wait(timeout=30) == 141


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_a_reader_that_leaves_before_a_short_text_is_no_error(arguments):
    """Which is still in a buffer when the command is done."""
    with started(*arguments, code="import time; time.sleep(0.5); from longring.cli import main; main()") as running:
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.wait(timeout=30) == 141


def started(*arguments, code=ODD_COMMAND, **options):
    command = [sys.executable, "-c", HEARING_CTRL_C + code, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment(), **pipes, **options)


def wait_for_children(process, *, more_than):
    """Until its descendants are that many: the fork server, and ranks below it."""
    end = time.monotonic() + 60
    while len(descendants(process)) <= more_than:
        assert time.monotonic() < end
        time.sleep(0.05)


def descendants(process):
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found, older = [], [process]
    while older:
        older = [child for child, parent in pairs if parent in older]
        found += older
    return found


def test_json_begins_alike_for_all():
    code = """
from pathlib import Path
from longring.cli import screen
screen.print_json(screen.envelope("plan", {"tokens": 7, "report": Path("a/b")}, real="nothing", simulated="all"))
import sys
assert "torch" not in sys.modules
"""
    told = json.loads(longring(code=code).stdout)
    assert list(told) == ["command", "arguments", "versions", "machine", "real", "simulated"]
    assert told["arguments"] == {"tokens": 7, "report": "a/b"}
    assert set(told["versions"]) == {"longring", "torch", "python"}
    assert told["machine"]["cores"] >= 1


# ------------------------------------------------------------------------------------------------ the document


def document():
    """docs/write_command_line.py, as a module."""
    spec = importlib.util.spec_from_file_location("write_command_line", DOCS / "write_command_line.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


SHOWN = {found["command"]: found[0] for found in document().SHOWN.finditer((DOCS / "command_line.md").read_text())}


@pytest.mark.parametrize("command", SHOWN)
def test_the_document_shows_what_the_command_prints(command):
    assert document().renewed(SHOWN[command]) == SHOWN[command], "run python docs/write_command_line.py"


def test_the_document_shows_every_commands_help_in_order():
    helps = [command.split()[1] for command in SHOWN if command.endswith(" --help") and len(command.split()) == 3]
    assert helps == [name for name in ORDER if name in names()]
