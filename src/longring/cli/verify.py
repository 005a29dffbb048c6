"""`longring verify`: what to run first on a cluster. Every schedule and pattern, links and faults, on its own ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from . import joining, options, screen

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ..bench.verify.ranks import Row

MOST_RANKS = 64  # that are started here
MARKS = {"passed": "green", "failed": "bold red", "not run": "yellow"}
WHAT = "longring verify, 1"
SHOWN = 8  # names of one reason
SHORT = {"bidirectional": "bidir", "double_ring": "double", "exchange": "exch"}


def verify(
    ranks: Annotated[
        int | None,
        typer.Option(
            parser=options.a_count("--ranks", most=MOST_RANKS),
            metavar="COUNT",
            help="Processes to start on this machine; with torchrun, leave it out.",
            show_default="one for each GPU, or one for each core up to 4",
        ),
    ] = None,
    faults: Annotated[
        bool, typer.Option("--faults", help="Kill, stop and mislead ranks of worlds that are made for it, too.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Checks whose name contains this; may be given several times.", show_default="all"
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, metavar="NUMBER", help="After which no check begins.")] = 6.0,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all of it, for programs.", show_default="none")
    ] = None,
) -> None:
    """What to run first on a cluster: is it right here?

    On all ranks, each schedule computes each pattern, forward and backward, in fp32 and bf16, on a length that nothing
    divides. Results and gradients are judged by the float64 definition, bytes sent by the plan. Links between
    neighbours are measured, and what a ring hides of its messages. With --faults, ranks of other processes are killed,
    stopped, leave and disagree, and every other one has to raise in time. What could not be run is named, with why.

    \b
        torchrun --nproc-per-node 8 -m longring verify --faults --json verify.json
        longring verify --ranks 4

    Exit code 1, on every rank, if anything failed. NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU (NCCL 2.30).
    """
    options.check_writable(as_json if joining.is_first() else None, "--json")
    count, device = joining.ranks_and_device(ranks, "auto")

    from ..bench.verify.program import verify as verified
    from ..bench.verify.ranks import Wanted

    start, began = time.monotonic(), datetime.now(UTC)
    wanted = Wanted(only=tuple(only or ()), faults=faults, seconds=60 * minutes)
    found = joining.on_ranks(verified, wanted, ranks=count, device=device)
    rows, seconds = found.pop("rows"), time.monotonic() - start
    if not rows:
        raise ArgumentError(f"--only {', '.join(only or ())} names no check; without it, all of them are run")
    if joining.is_first():
        if as_json is not None:
            _write(as_json, found, rows, began, seconds)
        _print_page(screen.console(width=80), found, rows, seconds)
    if is_wrong(rows):
        raise typer.Exit(1)


def is_wrong(rows: list[Row]) -> bool:
    return any(row.status == "failed" for row in rows)


def _write(path: Path, found: dict[str, Any], rows: list[Row], began: datetime, seconds: float) -> None:
    import json

    from ..bench.records import commit, versions
    from ..sources import sources

    told = {"what": WHAT, **found, "versions": versions(), "sources": sources()}
    told["commit"] = os.environ.get("LONGRING_COMMIT") or commit()  # where there is no git to ask
    told |= {"started": began.isoformat(timespec="seconds"), "seconds": seconds}
    told["results"] = [row.as_json() for row in rows]
    path.write_text(json.dumps(screen.finite(told), indent=1, allow_nan=False) + "\n")


# ------------------------------------------------------------------------------------------------ the page


def _print_page(console: Console, found: dict[str, Any], rows: list[Row], seconds: float) -> None:
    nodes = f" on {found['nodes']} nodes" if found["nodes"] > 1 else ""
    shared = ", some sharing a GPU" if found["shares_a_gpu"] else ""
    console.print(f"{found['ranks']} ranks{nodes} over {found['backend'].upper()}{shared}: {found['hardware']}\n")
    exact = [row for row in rows if row.check == "exactness"]
    others = [row for row in rows if row.check != "exactness"]
    if exact:
        console.print(_matrix(exact))
    if others:
        table = screen.table("Links, overlap and faults", "check", "came of it", "in words")
        for row in others:
            table.add_row(row.name, _mark(row), row.detail)
        console.print(table)
    for reason, names in _reasons(row for row in exact if row.status != "passed"):
        console.print(f"{reason}: {names}")
    console.print(_verdict(rows, seconds), style="bold red" if is_wrong(rows) else "bold green")


def _mark(row: Row) -> Text:
    return screen.styled(row.status, MARKS[row.status])


def _matrix(rows: list[Row]) -> Any:
    """Patterns by schedules; of each the share of its error budget that the worst of out, lse, dq, dk and dv used."""
    split = {row.name: row.name.split(", ") for row in rows}  # schedule, pattern, layout, dtype
    schedules = list(dict.fromkeys(names[0] for names in split.values()))
    title = "Largest error of out, lse, dq, dk and dv, as a share of what is allowed"
    table = screen.table(title, "pattern", "dtype", numbers=tuple(SHORT.get(name, name) for name in schedules))
    cells = {(pattern, dtype, schedule): row for row in rows for schedule, pattern, _, dtype in [split[row.name]]}
    for pattern, dtype in dict.fromkeys((pattern, dtype) for pattern, dtype, _ in cells):
        found = (cells.get((pattern, dtype, schedule)) for schedule in schedules)
        table.add_row(pattern, dtype, *("" if row is None else _cell(row) for row in found))
    return table


def _cell(row: Row) -> Text:
    words = {"passed": f"{row.numbers.get('budget_used', 0):.0%}", "failed": "WRONG", "not run": "not run"}
    return screen.styled(words[row.status], MARKS[row.status])


def _reasons(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Each reason once, with all that it is the reason of."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(f"{row.status}: {row.detail}", []).append(row.name)
    return [(reason, _some(names)) for reason, names in found.items()]


def _some(names: list[str]) -> str:
    return "; ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _verdict(rows: list[Row], seconds: float) -> str:
    counts = {status: sum(row.status == status for row in rows) for status in MARKS}
    told = ", ".join(f"{number} {status}" for status, number in counts.items())
    failed = [row.name for row in rows if row.status == "failed"]
    return (f"FAILED: {_some(failed)}. " if failed else "All that was run is right: ") + f"{told}; {seconds:.0f} s."
