"""`longring conform`: the questions longring asks itself, put to any attention function."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from . import options, screen

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..testing import Case, Finding, Report

OURS = "longring.testing.worlds:longring_attention"
LAYOUTS = ("contiguous", "zigzag", "striped", "dealt")
PATIENCE = 60.0  # seconds for one case on processes
SHOWN = 10  # findings in words; JSON has them all
QUANTITIES = {
    "out": "the output",
    "lse": "the log-sum-exp, where the function returns it",
    "dq": "the gradient of q",
    "dk": "the gradient of k",
    "dv": "the gradient of v",
    "probe: any number of ranks": "the output is the same on any number of ranks",
    "probe: v = 1": "weights sum to one: where all values are 1, the output is 1",
    "probe: one token edited": "rows that do not see a token do not notice that it changes",
}
"""What is looked at in every case."""


def conform(
    function: Annotated[
        str, typer.Argument(metavar="PACKAGE.MODULE:FUNCTION", help="What to judge.", show_default="longring's own")
    ] = OURS,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="TEXT",
            help="Cases whose name contains this; may be given several times.",
            show_default="all",
        ),
    ] = None,
    ranks: Annotated[str, typer.Option(metavar="COUNT,...", help="Numbers of ranks to ask on.")] = "1,2,3",
    layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help=f"Of {', '.join(LAYOUTS)}; may be given several times.", show_default="all of them"
        ),
    ] = None,
    dtype: options.Dtype = "fp32",
    threads: Annotated[
        bool,
        typer.Option(
            "--threads/--processes",
            help="Ranks as threads, which share a group of longring's own and are quicker, or as processes with a "
            "group of torch.distributed over Gloo.",
        ),
    ] = False,
    seed: options.Seed = 0,
    listed: Annotated[bool, typer.Option("--list", help="Name the checks, and stop.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Judge any attention function against the definition.

    The function is imported, that is, its module's code runs here; the current folder is on the import path. It is
    called on every rank with that rank's tokens of q, k and v [batch, tokens, heads, d], and must be differentiable:

    \b
        def function(q, k, v, *, group, pattern, layout, length):
            return out  # or (out, lse)

    The group is one of torch.distributed, the pattern a longring.Dense or longring.Dilated. What the function does not
    serve it should refuse by raising. What it returns is judged, forward and each gradient, against the float64
    definition; the error allowed comes from the dtype.

    \b
        longring conform
        longring conform mypackage.ring:attention --only causal --ranks 2,4
        longring conform --list

    Exit code 1 if anything it returned is wrong, or if it served nothing.
    """
    chosen = _chosen(only)
    if listed:
        _print_list(chosen, as_json)
        return
    sizes, layouts = _sizes(ranks), _layouts(layout)
    asked = {"layouts": layouts, "dtype": _dtype(dtype), "seed": seed}
    found(function)  # before the work, so that a wrong name costs no time
    console = screen.console()
    report = _watched(console, function, chosen, sizes, threads, asked, quiet=as_json)
    if as_json:
        given = {"function": function, "only": only, "ranks": sizes, "layouts": layouts, "dtype": dtype}
        screen.print_json(_as_json({**given, "threads": threads, "seed": seed}, report))
    else:
        _print_report(console, function, report, _where(sizes, threads))
    if not report.ok:
        raise typer.Exit(1)


# ------------------------------------------------------------------------------------------------ arguments


def found(name: str) -> Callable[..., Any]:
    """The function of this name, imported."""
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise ArgumentError(f"the function must be named as package.module:function, got {name!r}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # as python -m has it
    made: Any = _imported(module_name)
    for step in path.split("."):
        if not hasattr(made, step):
            raise ArgumentError(f"{module_name} has no {path!r}")
        made = getattr(made, step)
    if not callable(made):
        raise ArgumentError(f"{name} is {type(made).__name__}, which cannot be called")
    return made


def _imported(module_name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module_name)
    except ModuleNotFoundError as failure:
        if failure.name is not None and (module_name + ".").startswith(failure.name + "."):
            raise ArgumentError(
                f"there is no module {failure.name!r} on the import path, which begins at {os.getcwd()}"
            ) from failure
        raise ArgumentError(f"{module_name} could not be imported: {failure}") from failure
    except (Exception, SystemExit) as failure:  # what a stranger's module does when it runs, anything may be
        raise ArgumentError(f"{module_name} could not be imported: {type(failure).__name__}: {failure}") from failure


def _chosen(only: Sequence[str] | None) -> list[Case]:
    from ..testing.conformance import CASES

    for text in only or ():
        if not any(text.lower() in case.name for case in CASES):
            raise ArgumentError(f"--only {text!r} names none of: {'; '.join(case.name for case in CASES)}")
    return [case for case in CASES if not only or any(text.lower() in case.name for text in only)]


def _sizes(ranks: str) -> list[int]:
    from ..plan.quantities import count

    sizes = [count(text, of="a number of --ranks") for text in ranks.split(",")]
    if max(sizes) > 16:
        raise ArgumentError(f"--ranks must be at most 16, which run on this machine; got {max(sizes)}")
    return sizes


def _layouts(names: Sequence[str] | None) -> list[str]:
    for name in names or ():
        if name not in LAYOUTS:
            raise ArgumentError(f"--layout must be one of {', '.join(LAYOUTS)}, got {name!r}")
    return list(names or LAYOUTS)


def _dtype(name: str) -> Any:
    import torch

    options.bytes_of(name)  # which knows the names
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    return kinds[name]


# ------------------------------------------------------------------------------------------------ the work


def _watched(
    console: Console,
    name: str,
    cases: list[Case],
    sizes: list[int],
    threads: bool,
    asked: dict[str, Any],
    *,
    quiet: bool,
) -> Report:
    with screen.progress(console, quiet=quiet) as progress:
        if threads:
            from ..testing import Report, conformance

            bar, report, function = progress.add_task("asking", total=len(cases)), Report(), found(name)
            for case in cases:
                progress.update(bar, description=f"asking: {case.name}")
                report.findings += conformance(function, ranks=sizes, cases=[case], **asked).findings
                progress.advance(bar)
            return report
        from ..testing.worlds import conformance_in_processes

        progress.add_task(f"{max(sizes)} processes at work on {len(cases)} cases", total=None)
        return conformance_in_processes(found, name, cases, ranks=sizes, patience=PATIENCE, **asked)


# ------------------------------------------------------------------------------------------------ printing


def _where(sizes: list[int], threads: bool) -> str:
    kind = "threads of one process" if threads else "processes over Gloo"
    return f"{', '.join(map(str, sizes))} ranks as {kind}"


def _print_list(cases: list[Case], as_json: bool) -> None:
    if as_json:
        told = [{"name": case.name, "pattern": repr(case.pattern)} for case in cases]
        screen.print_json({"command": "conform", "cases": told, "quantities": QUANTITIES})
        return
    print("Cases, each on every layout and number of ranks:\n")
    for case in cases:
        print(f"  {case.name:<32} {_sizes_of(case)}")
    print("\nIn each of them:\n")
    for quantity, meaning in QUANTITIES.items():
        print(f"  {quantity:<32} {meaning}")


def _sizes_of(case: Case) -> str:
    return f"{case.length} tokens, {case.heads} heads over {case.kv_heads}, batch of {case.batch}"


def _print_report(console: Console, name: str, report: Report, where: str) -> None:
    console.print(f"{name} on {where}\n", soft_wrap=True)
    console.print(_case_table(report))
    console.print(_quantity_table(report))
    troubled = [finding for finding in report.findings if finding.status != "exact"]
    for finding in troubled[:SHOWN]:
        console.print(f"{finding.status}: {_told(finding)}", soft_wrap=True)
    if len(troubled) > SHOWN:
        console.print(f"... and {len(troubled) - SHOWN} more, which --json has")
    console.print(_verdict(report), style="bold green" if report.ok else "bold red", soft_wrap=True)


def _case_table(report: Report) -> Table:
    title = "Cases; of each the quantity that came nearest to its budget, or beyond it"
    table = screen.table(title, "case", "holds", "worst", "layout", numbers=("ranks", "error", "allowed"))
    for name, findings in _by(report, "case"):
        worst = _worst(findings)
        where = ("", "", "") if worst is None else (_short(worst.quantity), worst.layout, str(worst.ranks))
        table.add_row(name, _holds(findings), *where, *_numbers(worst))
    return table


def _quantity_table(report: Report) -> Table:
    table = screen.table("Quantities, over all cases", "quantity", "holds", numbers=("questions", "error", "allowed"))
    for name, findings in _by(report, "quantity"):
        if name in QUANTITIES:
            table.add_row(name, _holds(findings), f"{len(findings)}", *_numbers(_worst(findings)))
    return table


def _by(report: Report, attribute: str) -> Iterator[tuple[str, list[Finding]]]:
    for name in dict.fromkeys(getattr(finding, attribute) for finding in report.findings):
        yield name, [finding for finding in report.findings if getattr(finding, attribute) == name]


def _holds(findings: list[Finding]) -> Text:
    counts = {status: sum(finding.status == status for finding in findings) for status in ("wrong", "refused", "exact")}
    if counts["wrong"]:
        return screen.styled(f"NO, {counts['wrong']} wrong", "bold red")
    if not counts["exact"]:
        return screen.styled("refused", "yellow")
    if counts["refused"]:
        return screen.styled(f"yes, {counts['refused']} refused", "yellow")
    return screen.styled("yes", "green")


def _worst(findings: list[Finding]) -> Finding | None:
    """The largest share of its budget; what is not a number is worse than any."""
    judged = [finding for finding in findings if finding.status != "refused"]
    return max(judged, key=_share, default=None)


def _share(finding: Finding) -> float:
    if finding.error != finding.error:  # nan
        return float("inf")
    return finding.error / finding.allowed if finding.allowed else float("inf") if finding.error else 0.0


def _short(quantity: str) -> str:
    return quantity.removeprefix("probe: ")


def _numbers(finding: Finding | None) -> tuple[str, str]:
    return ("", "") if finding is None else (f"{finding.error:.1e}", f"{finding.allowed:.1e}")


def _told(finding: Finding) -> str:
    where = f"{finding.case} | {finding.layout} | {finding.ranks} ranks | {finding.quantity}"
    if finding.error != finding.error:
        return f"{where}: {finding.message}"
    reason = f" ({finding.message})" if finding.message else ""
    return f"{where}: error {finding.error:.1e} where {finding.allowed:.1e} is allowed{reason}"


def _verdict(report: Report) -> str:
    counts = f"{len(report.exact)} answers within their budget, {len(report.wrong)} not, {len(report.refused)} refused"
    if report.wrong:
        return f"WRONG: {counts}."
    if not report.exact:
        return f"Nothing was served: {counts}."
    return f"It conforms: {counts}."


def _as_json(arguments: dict[str, Any], report: Report) -> dict[str, Any]:
    where = _where(arguments["ranks"], arguments["threads"])
    return {
        **screen.envelope("conform", arguments, real=f"every question was asked on {where}", simulated="nothing"),
        "findings": [finding._asdict() for finding in report.findings],
        "counts": {"exact": len(report.exact), "wrong": len(report.wrong), "refused": len(report.refused)},
        "ok": report.ok,
        "verdict": _verdict(report),
    }
