"""The command line: parse, call, print. One file per command; heavy imports wait until a command runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .. import __version__
from ..errors import ArgumentError, LongringError
from .demo import demo

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
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
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Exact attention over very long sequences: ring attention and LongNet dilated attention."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Run a command. Exit code 2: the arguments were wrong; 1: the result was, or something failed on the way."""
    arguments = [word for word in sys.argv[1:] if word != "--debug"]  # it may stand anywhere
    is_debugging = len(arguments) < len(sys.argv) - 1
    try:
        code = app(arguments, prog_name="longring", standalone_mode=False)
    except Exception as failure:
        if is_debugging:
            raise
        code = _complain(*_told(failure))
    except KeyboardInterrupt:
        code = _complain("stopped", 130)
    sys.exit(code)


def _told(failure: Exception) -> tuple[str, int]:
    """What to say of it, and the exit code."""
    if isinstance(failure, LongringError):
        return str(failure), 2 if isinstance(failure, ArgumentError) else 1
    if isinstance(failure, typer.Abort):
        return "stopped", 130
    if hasattr(failure, "format_message"):  # of click, or of typer's own copy of it, depending on its version
        return failure.format_message(), 2  # type: ignore[attr-defined]
    return f"{type(failure).__name__}: {failure} (the whole story: --debug)", 1


def _complain(what: str, code: int) -> int:
    print("error:", " ".join(what.split()), file=sys.stderr)
    return code
