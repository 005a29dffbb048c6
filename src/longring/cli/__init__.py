"""The command line: parse, call, print. One file per command, loaded when it is called, as what it imports is."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import ArgumentError, LongringError
from .interrupt import Interrupts
from .quick import QuickCommand, QuickGroup
from .screen import shown

ORDER = ("doctor", "verify", "plan", "bench", "profile", "replay", "train", "eval", "conform", "demo")
"""As one meets them: is all well here, and on all ranks, what would it cost, what does it cost, use it, show me."""

NOBODY_READS = 141  # as a shell says of what ended by SIGPIPE
LONGEST = 4000  # letters of an error


class _InOrder(QuickGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def _print_version(asked: bool) -> None:
    if asked:
        print(f"longring {__version__}")
        raise typer.Exit


def longring(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand after the command, too.")
    ] = False,
) -> None:
    """Exact attention over very long sequences: ring attention and LongNet dilated attention.

    Every command has --help with an example, and --json for programs. Exit codes: 0 all is well, 1 a result is wrong
    or something failed, 2 the arguments are wrong.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


def _app(*names: str) -> typer.Typer:
    """What reads the words of these commands. Plain help: colouring it would take twice the time of showing it."""
    made = typer.Typer(cls=_InOrder, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    made.callback(invoke_without_command=True)(longring)
    for name in names:
        _add(made, name)
    return made


def _add(app: typer.Typer, name: str) -> None:
    file = "evaluate" if name == "eval" else name  # which is a function of Python's
    loaded = import_module(f".{file}", __name__)
    if name == "bench":
        app.add_typer(loaded.app, name=name)
    elif name == "plan":
        app.command(cls=QuickCommand, short_help="Memory, traffic and time over many ranks, predicted.")(loaded.plan)
    else:
        app.command(name=name)(getattr(loaded, file))


@cache
def _everything() -> typer.Typer:
    return _app(*ORDER)


def __getattr__(name: str) -> Any:
    """`app` has all commands: loading and making them ready takes longer than some answers."""
    if name == "app":
        return _everything()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """Run the command that argv names."""
    arguments = [word for word in sys.argv[1:] if word != "--debug"]  # it may stand anywhere
    is_debugging = len(arguments) < len(sys.argv) - 1
    if sys.stdout is None:  # as a shell's >&- leaves it
        sys.exit(_complain("standard output is closed; redirect it to a file, or to /dev/null", 1))
    if isinstance(sys.stdout, TextIOWrapper):  # a name that this terminal has no letters for is no reason to fail
        sys.stdout.reconfigure(errors="replace")
    with Interrupts() as interrupts:
        try:
            code = _answered(arguments, is_debugging)
        except (KeyboardInterrupt, typer.Abort):
            code = interrupts.say()
    sys.exit(code)


def _answered(arguments: Sequence[str], is_debugging: bool) -> int:
    try:
        code = _run(arguments)
        sys.stdout.flush()  # a reader that left is noticed here, not while Python shuts down
    except typer.Abort:
        raise
    except BrokenPipeError:
        code = _fall_silent()
    except Exception as failure:
        said, code = _told(failure)
        if is_debugging:
            _say(traceback.format_exc().rstrip(), code)
        else:
            _complain(said, code)
    return code


def _run(arguments: Sequence[str]) -> int:
    """Not by the app itself, which answers Ctrl-C and a closed pipe in its own way."""
    named = [name for name in arguments[:1] if name in ORDER]
    command = typer.main.get_command(_app(*named) if named else _everything())
    try:
        with command.make_context("longring", list(arguments), help_option_names=["-h", "--help"]) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return 0


def _told(failure: Exception) -> tuple[str, int]:
    """What to say of it, and the exit code."""
    if isinstance(failure, LongringError):
        return str(failure), 2 if isinstance(failure, ArgumentError) else 1
    if hasattr(failure, "format_message"):  # of click, or of typer's own copy of it, depending on its version
        return failure.format_message(), 2  # type: ignore[attr-defined]
    first, *_ = [*str(failure).strip().splitlines(), ""]
    return f"{type(failure).__name__}{': ' * bool(first)}{first} (the whole story: --debug)", 1


def _complain(what: str, code: int) -> int:
    line = " ".join(what.split())
    if len(line) > LONGEST:  # as a refusal that repeats what was given: its beginning and its end say enough
        line = f"{line[: LONGEST // 2]} [...] {line[-LONGEST // 2 :]}"
    return _say(f"error: {line}", code)


def _say(what: str, code: int) -> int:
    print(shown(what), file=sys.stderr)
    return code


def _fall_silent() -> int:
    """Nobody reads any more; what is left in the buffer must not be tried again when Python shuts down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return NOBODY_READS
