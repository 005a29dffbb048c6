"""`longring demo`: ring and dilated attention on processes of this machine, judged, counted and drawn."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..errors import ArgumentError, LongringError
from . import options, screen
from .browser import show

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..bench.demonstration import Case, Inputs, Played, Size
    from ..geometry.patterns import Pattern
    from ..testing import Verdict

NAMES = ("pattern", "schedule", "layout")
MOST_RANKS = 64
MOST_SCORES = 1 << 28  # the definition holds about ten float64 matrices of heads x tokens x tokens: here 20 GiB


class Seconds(NamedTuple):
    """How long it took, and how much of that the processes."""

    processes: float
    all: float


class Row(NamedTuple):
    """A case, what it did, and how its numbers stand against the definition."""

    played: Played
    verdicts: list[Verdict]

    @property
    def bytes_agree(self) -> bool:
        return self.played.bytes_agree

    @property
    def budget_used(self) -> float:
        """The largest error, as a share of what is allowed; what is not a number uses it all and more."""
        shares = [verdict.error / verdict.allowed if verdict.allowed else math.inf for verdict in self.verdicts]
        return math.inf if any(map(math.isnan, shares)) else max(shares)


def demo(
    tokens: options.Tokens = 757,
    ranks: Annotated[
        int,
        typer.Option(
            parser=options.a_count("--ranks"), metavar="COUNT", help="Processes to start on this machine, a rank each."
        ),
    ] = 4,
    heads: options.Heads = 8,
    kv_heads: Annotated[
        int,
        typer.Option(
            parser=options.a_count("--kv-heads"), metavar="COUNT", help="Key and value heads; divide the query heads."
        ),
    ] = 4,
    head_dim: options.HeadDim = 64,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the pictures go.")] = Path("out/demo"),
    report: options.ReportPath = None,
    is_shown: Annotated[
        bool, typer.Option("--show", help="Open the report in a browser, where there is a screen.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Every schedule on processes of this machine, every number judged.

    Ring and dilated attention, forward and backward, on real processes that talk over Gloo; no GPU is needed. Results
    and gradients are held against the float64 definition, bytes sent against the plan.

    \b
        longring demo --tokens 1001 --ranks 3
        longring demo --report demo.html --show

    Exit code 1 if a result is wrong, if a rank sent other bytes than the plan said, or if a process could not be
    started or died.
    """
    start = time.monotonic()
    kv_heads = options.kv_heads_of(heads, kv_heads)
    _check(tokens, ranks, heads)
    if is_shown and report is None:
        raise ArgumentError("--show shows the page that --report FILE writes; say --report as well")
    options.check_writable(report)
    _make_folder(out)  # before the work, so that a folder that cannot be made costs no time

    from ..bench.demonstration import Size

    size = Size(tokens, ranks, heads, kv_heads, head_dim, seed)
    console = screen.console()
    rows, in_processes = _watched(console, size, quiet=as_json)
    pictures, missing = _draw(out)
    seconds = Seconds(in_processes, time.monotonic() - start)
    told = _as_json(size, rows, seconds, pictures, missing, out=out, report=report)
    if report is not None:
        from ..bench.report import write

        write(report, "demo", screen.finite(told))
    if as_json:
        screen.print_json(told)
    else:
        _print_report(console, size, rows, seconds, pictures, missing)
        if report is not None:
            console.print(show(report) if is_shown else f"report: {report}", soft_wrap=True)
    if _faults(rows):
        raise typer.Exit(1)


def _check(tokens: int, ranks: int, heads: int) -> None:
    if ranks > MOST_RANKS:
        raise ArgumentError(f"--ranks must be at most {MOST_RANKS}, which are processes of this machine; got {ranks}")
    if heads * tokens * tokens > MOST_SCORES:
        most = math.isqrt(MOST_SCORES // heads)
        raise ArgumentError(
            f"--tokens must be at most {most} with {heads} heads, got {tokens}: "
            "the float64 definition, which judges the results, holds every score in memory"
        )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ArgumentError("longring demo starts its ranks by itself: run it without torchrun, with --ranks")


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ArgumentError(f"--out {out} cannot be made a folder: {failure.strerror or failure}") from failure


def _watched(console: Console, size: Size, *, quiet: bool) -> tuple[list[Row], float]:
    """The rows, and the seconds that the processes took."""
    from ..bench.demonstration import cases, compare, inputs, play, threads

    chosen, judge, rows = cases(size), _Judge(), []
    with screen.progress(console, quiet=quiet) as progress:
        bar = progress.add_task(f"{_processes(size.ranks)} at work", total=None)
        start = time.monotonic()
        played = play(chosen, size)
        in_processes = time.monotonic() - start
        for case, parts in zip(chosen, played, strict=True):
            progress.update(bar, total=len(chosen), description=f"judging {case.name}, {case.schedule}, {case.layout}")
            given = inputs(size, case.dtype)
            with threads(parts[0].threads):
                compared = compare(case, parts, given)
                rows.append(Row(compared, judge.verdicts(compared, given)))
            progress.advance(bar)
    return rows, in_processes


class _Judge:
    """The float64 definition and its error budgets; a question asked twice is answered once, for it takes long."""

    def __init__(self) -> None:
        self._known: dict[tuple[Pattern, Any], tuple[Any, dict[str, float]]] = {}

    def verdicts(self, played: Played, given: Inputs) -> list[Verdict]:
        from ..testing import Verdict, budgets, relative_error

        question = played.case.pattern, played.case.dtype
        if question not in self._known:
            q, k, v, dout = given
            self._known[question] = budgets(q, k, v, played.case.pattern, dout)
        want, allowed = self._known[question]
        got = played.answer._asdict()
        return [Verdict(name, relative_error(got[name], getattr(want, name)), allowed[name]) for name in got]


# ------------------------------------------------------------------------------------------------ pictures


def _draw(out: Path) -> tuple[list[Path], str | None]:
    """The pictures' paths, and why there are none: the numbers do not wait for a plotting library."""
    from ..bench.pictures import draw_didactic_tiles

    try:
        return draw_didactic_tiles(out), None
    except LongringError as failure:
        return [], str(failure)


# ------------------------------------------------------------------------------------------------ judgement


def _faults(rows: list[Row]) -> list[str]:
    """What is wrong, in words; nothing if all is well."""
    return [f"{_title(row)}: {fault}" for row in rows for fault in _faults_of(row)]


def _faults_of(row: Row) -> Iterator[str]:
    for quantity, error, allowed in row.verdicts:
        if not error <= allowed:  # nan is a fault too
            yield f"the relative error of {quantity} is {error:.1e}, and {allowed:.1e} is allowed"
    if not row.bytes_agree:
        yield "some rank sent other bytes than predicted"


def _title(row: Row) -> str:
    return "{}, {}, {}".format(*_names(row))


def _verdict(rows: list[Row]) -> str:
    if faults := _faults(rows):
        return f"WRONG, {len(faults)} fault{'s' if len(faults) > 1 else ''}: " + "; ".join(faults)
    return (
        f"All {len(rows)} rows are right: every result and every gradient is within its error budget, "
        "and every rank sent exactly the bytes predicted."
    )


def _comparison(rows: list[Row]) -> str:
    """Not a judgement: another order of the same sums would be as right."""
    equal = sum(row.played.equals_simulated for row in rows)
    return f"Bit for bit what longring.simulate gives, with all ranks in one process: {equal} of {len(rows)} rows."


# ------------------------------------------------------------------------------------------------ printing


def _print_report(
    console: Console, size: Size, rows: list[Row], seconds: Seconds, pictures: list[Path], missing: str | None
) -> None:
    from ..bench.demonstration import left_out

    console.print(
        f"{size.tokens:,} tokens on {_processes(size.ranks)} of this machine (torch.distributed over Gloo)\n"
        f"{size.heads} query heads over {size.kv_heads} key/value heads of {size.head_dim}, forward and backward\n"
    )
    console.print(_error_table(rows))
    console.print(_cost_table(rows))
    console.print(_verdict(rows), style="bold red" if _faults(rows) else "bold green", soft_wrap=True)
    console.print(_comparison(rows), soft_wrap=True)
    for case in left_out(size):
        console.print(_excuse(case, size.ranks), soft_wrap=True)
    console.print(f"{seconds.all:.1f} s, of which the processes took {seconds.processes:.1f} s.")
    for path in pictures:
        console.print(f"picture: {path}", soft_wrap=True)
    if missing is not None:
        console.print(f"no pictures: {missing}", soft_wrap=True)


def _processes(ranks: int) -> str:
    return f"{ranks} real process{'es' if ranks > 1 else ''}"


def _excuse(case: Case, ranks: int) -> str:
    return f"Left out: {case.schedule}, since --ranks {ranks} is not a multiple of its {case.nodes} nodes."


def _error_table(rows: list[Row]) -> Table:
    """80 columns wide, as many terminals are: of the gradients the worst speaks for all, and JSON has each."""
    title = "Relative error against the float64 definition; share of the error budget used"
    table = screen.table(title, *NAMES, numbers=("out", "lse", "grad", "budget"))
    for row in rows:
        errors = {verdict.quantity: verdict.error for verdict in row.verdicts}
        shown = errors["out"], errors["lse"], max(errors["dq"], errors["dk"], errors["dv"])
        colour = "green" if all(verdict.ok for verdict in row.verdicts) else "bold red"
        numbers = (f"{error:.1e}" for error in shown)
        table.add_row(*_names(row), *numbers, screen.styled(f"{row.budget_used:.0%}", colour))
    return table


def _cost_table(rows: list[Row]) -> Table:
    title = "Most bytes a rank held, share of one rank doing all; most sent, as planned"
    table = screen.table(title, *NAMES, numbers=("held", "share", "sent", "plan"))
    for row in rows:
        played = row.played
        counts = f"{max(played.peak_bytes):,}", f"{played.share_of_one_rank:.0%}", f"{played.bytes_sent:,}"
        agrees = row.bytes_agree
        equal = screen.styled(*(("equal", "green") if agrees else (f"NOT {played.bytes_predicted:,}", "bold red")))
        table.add_row(*_names(row), *counts, equal)
    return table


def _names(row: Row) -> tuple[str, str, str]:
    case = row.played.case
    return case.name, case.schedule, case.layout


def _as_json(
    size: Size,
    rows: list[Row],
    seconds: Seconds,
    pictures: list[Path],
    missing: str | None,
    *,
    out: Path,
    report: Path | None,
) -> dict[str, Any]:
    from ..bench.demonstration import left_out

    real = f"every row on {_processes(size.ranks)} of this machine over Gloo, forward and backward; bytes were counted"
    simulated = "rows of 2 nodes: their ranks are on this one machine and pass for two"
    return {
        **screen.envelope("demo", {**size._asdict(), "out": out, "report": report}, real=real, simulated=simulated),
        "size": size._asdict(),
        "rows": [_row_as_json(row) for row in rows],
        "left_out": [_excuse(case, size.ranks) for case in left_out(size)],
        "seconds": seconds._asdict(),
        "pictures": [str(path) for path in pictures],
        "no_pictures": missing,
        "right": not _faults(rows),
        "verdict": _verdict(rows),
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    played, (pattern, schedule, layout) = row.played, _names(row)
    return {
        "pattern": pattern,
        "schedule": schedule,
        "layout": layout,
        "dtype": str(played.case.dtype).removeprefix("torch."),
        "kernel": played.kernel,
        "ranks": len(played.peak_bytes),
        "nodes": played.case.nodes,
        "errors": {verdict.quantity: verdict.error for verdict in row.verdicts},
        "allowed": {verdict.quantity: verdict.allowed for verdict in row.verdicts},
        "peak_bytes": played.peak_bytes,
        "peak_bytes_alone": played.peak_bytes_alone,
        "share_of_one_rank": played.share_of_one_rank,
        "forward": {"bytes_sent": played.forward_bytes, "predicted_bytes": played.forward_predicted},
        "backward": {"bytes_sent": played.backward_bytes, "predicted_bytes": played.backward_predicted},
        "bytes_agree": played.bytes_agree,
        "equals_simulated": played.equals_simulated,
        "right": not list(_faults_of(row)),
    }
