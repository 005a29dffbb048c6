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

_settings = {"debug": False}


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
    _settings["debug"] = debug
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Run a command. Exit code 2: the arguments were wrong; 1: the result was, or something failed on the way."""
    _settings["debug"] = False
    try:
        code = app(prog_name="longring", standalone_mode=False)
    except LongringError as failure:
        if _settings["debug"]:
            raise
        code = _complain(str(failure), 2 if isinstance(failure, ArgumentError) else 1)
    except typer.Abort:
        code = _complain("stopped", 1)
    except Exception as failure:
        # typer brings click's exceptions or takes click's own, depending on its version: their method tells them
        if _settings["debug"] or not hasattr(failure, "format_message"):
            raise
        code = _complain(failure.format_message(), 2)  # type: ignore[attr-defined]
    sys.exit(code)


def _complain(what: str, code: int) -> int:
    print("error:", " ".join(what.split()), file=sys.stderr)
    return code
