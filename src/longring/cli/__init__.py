"""The command line: parse, call, print. One file per command; heavy imports wait until a command runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import ArgumentError, LongringError
from .bench import app as bench
from .conform import conform
from .demo import demo
from .doctor import doctor
from .evaluate import evaluate
from .plan import plan
from .profile import profile
from .quick import QuickCommand, QuickGroup
from .replay import replay
from .train import train

ORDER = ("doctor", "plan", "bench", "profile", "replay", "train", "eval", "conform", "demo")
"""As one meets them: is all well here, what would it cost, what does it cost, use it, is it right, show me."""

STOPPED, NOBODY_READS = 130, 141  # as a shell says of what ended by SIGINT and by SIGPIPE


class _InOrder(QuickGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


# Plain help: what it would take to colour it is twice the time of showing it.
app = typer.Typer(cls=_InOrder, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(doctor)
app.command(cls=QuickCommand, short_help="Memory, traffic and time over many ranks, predicted.")(plan)
app.add_typer(bench, name="bench")
app.command()(profile)
app.command()(replay)
app.command()(train)
app.command(name="eval")(evaluate)
app.command()(conform)
app.command()(demo)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"longring {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
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


def main() -> None:
    """Run the command that argv names."""
    arguments = [word for word in sys.argv[1:] if word != "--debug"]  # it may stand anywhere
    is_debugging = len(arguments) < len(sys.argv) - 1
    if sys.stdout is None:  # as a shell's >&- leaves it
        sys.exit(_complain("standard output is closed; redirect it to a file, or to /dev/null", 1))
    if isinstance(sys.stdout, TextIOWrapper):  # a name that this terminal has no letters for is no reason to fail
        sys.stdout.reconfigure(errors="replace")
    try:
        code = _run(arguments)
        sys.stdout.flush()  # a reader that left is noticed here, not while Python shuts down
    except (KeyboardInterrupt, typer.Abort):
        code = _say("stopped", STOPPED)
    except BrokenPipeError:
        code = _fall_silent()
    except Exception as failure:
        if is_debugging:
            raise
        code = _complain(*_told(failure))
    sys.exit(code)


def _run(arguments: Sequence[str]) -> int:
    """Not by the app itself, which answers Ctrl-C and a closed pipe in its own way."""
    command = typer.main.get_command(_with_what_is_named(arguments))
    try:
        with command.make_context("longring", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return 0


def _with_what_is_named(arguments: Sequence[str]) -> typer.Typer:
    """The app with the one command that comes first: making the others ready takes longer than some answers."""
    named = [one for one in app.registered_commands if one.callback and [_name(one)] == [*arguments[:1]]]
    if not named:
        return app
    alone = typer.Typer(cls=_InOrder, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.registered_callback, alone.registered_commands = app.registered_callback, named
    return alone


def _name(command: Any) -> str:
    return command.name or command.callback.__name__


def _told(failure: Exception) -> tuple[str, int]:
    """What to say of it, and the exit code."""
    if isinstance(failure, LongringError):
        return str(failure), 2 if isinstance(failure, ArgumentError) else 1
    if hasattr(failure, "format_message"):  # of click, or of typer's own copy of it, depending on its version
        return failure.format_message(), 2  # type: ignore[attr-defined]
    first, *_ = [*str(failure).strip().splitlines(), ""]
    return f"{type(failure).__name__}{': ' * bool(first)}{first} (the whole story: --debug)", 1


def _complain(what: str, code: int) -> int:
    return _say("error: " + " ".join(what.split()), code)


def _say(what: str, code: int) -> int:
    print(what, file=sys.stderr)
    return code


def _fall_silent() -> int:
    """Nobody reads any more; what is left in the buffer must not be tried again when Python shuts down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return NOBODY_READS
