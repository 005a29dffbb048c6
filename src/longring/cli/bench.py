"""`longring bench`: us beside others, checked before timed, into a record; `longring bench compare`: two records."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from ..geometry.patterns import Dense, Dilated
from ..plan.quantities import spoken_seconds
from . import options, screen

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from ..bench.compare import Comparison
    from ..bench.ranks.case import Case
    from ..bench.ranks.scenarios import Wish
    from ..bench.records import Record, Row

DEVICES = ("auto", "cpu", "cuda")
PRESETS = ("usual", "report")
MOST_RANKS = 64
OUT = Path("out/bench.json")

app = typer.Typer(invoke_without_command=True, add_completion=False, rich_markup_mode=None)


def _several(name: str, what: str, default: str) -> Any:
    return typer.Option(name, parser=options.counts(name), metavar="COUNT,...", help=what, show_default=default)


def _one(name: str, what: str, default: str) -> Any:
    return typer.Option(name, parser=options.a_count(name), metavar="COUNT", help=what, show_default=default)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


@app.callback()
def bench(
    context: typer.Context,
    preset: Annotated[
        str,
        typer.Option(metavar="NAME", help="usual: every schedule, layout and kernel. report: the classic table."),
    ] = "usual",
    only: Annotated[
        Any, typer.Option(parser=_names, metavar="NAME,...", help="Scenarios by name.", show_default="of the preset")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes and few runs, to see that all of it runs.")
    ] = False,
    tokens: Annotated[Any, _several("--tokens", "Lengths of the sequence.", "4Ki; report: 4Ki to 64Ki")] = None,
    ranks: Annotated[Any, _several("--ranks", "Processes to start, a rank each.", "1,2,4")] = None,
    heads: Annotated[Any, _one("--heads", "Query heads.", "4")] = None,
    kv_heads: options.KvHeads = None,
    head_dim: Annotated[Any, _one("--head-dim", "Numbers of a head.", "32")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Type of q, k and v: fp32, bf16, fp16, fp64.", show_default="fp32"),
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--full", help="Whether a token sees those before it alone, or all.", show_default="causal"
        ),
    ] = None,
    window: Annotated[
        Any, _one("--window", "How far a query sees to each side, itself included; not in dilated.", "all")
    ] = None,
    dilated: Annotated[
        str | None,
        typer.Option(
            metavar="LENGTH:RATE,...", help="LongNet's segments and rates, of dilated.", show_default="by the length"
        ),
    ] = None,
    rounds: Annotated[
        Any, _one("--rounds", "Runs of each, at most; fewer where they take long.", "7; report: 5")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="NUMBER", help="Of the random inputs.", show_default="0")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cpu: ranks. cuda: a GPU alone. auto: a GPU where there is one.")
    ] = "auto",
    peers: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Clones of torchscale and others, for dilated.", show_default="none"),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The record, saved case by case.")] = OUT,
    report: options.ReportPath = None,
    as_json: options.AsJson = False,
) -> None:
    """How fast it is, beside others.

    Runs schedules, layouts and kernels of longring and whatever else is installed in turns, on processes of this
    machine or on its GPU. Every result is first compared with the float64 definition; what is wrong is told as wrong.

    \b
        longring bench                                    # every schedule, layout and kernel, 4,096 tokens
        longring bench --preset report --report out.html  # the classic table: 4Ki to 64Ki tokens, 1, 2 and 4 ranks
        longring bench --only schedules --tokens 16Ki --ranks 2 --heads 8 --head-dim 64
        longring bench compare before.json after.json     # what became slower or wrong

    Heads are few and small unless you say otherwise, since these are the cores of one machine. Times are medians with
    quartiles, memory is the peak of the fullest rank. The record is the object that --json prints. Exit code 1 if a
    result of ours is wrong or could not be had.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    asked = {name: value for name, value in context.params.items() if value is not None}
    _check(preset, device, peers)
    options.check_apart(out=out, report=report)
    options.check_writable(out, "--out")
    options.check_writable(report)
    record = _on_gpu(asked) if _device(device, preset) == "cuda" else _on_ranks(asked)
    record.is_complete = True
    record.save(out)
    if report is not None:
        from ..bench.report import write

        write(report, "bench", record.to_json())
    _finish(record, out, report, as_json)


def _refuse_options(context: typer.Context) -> None:
    """Of the command that is not run: `longring bench --tokens 1M compare` means something else."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ArgumentError(
                f"{parameter.opts[0]} is an option of longring bench, not of {context.invoked_subcommand}"
            )


def _check(preset: str, device: str, peers: Path | None) -> None:
    if preset not in PRESETS:
        raise ArgumentError(f"--preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if device not in DEVICES:
        raise ArgumentError(f"--device must be one of {', '.join(DEVICES)}, got {device!r}")
    if peers is not None and not os.path.isdir(peers):
        raise ArgumentError(f"--peers {peers} is no folder")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ArgumentError("longring bench starts its ranks by itself: run it without torchrun, with --ranks")


def _device(device: str, preset: str) -> str:
    """The classic table is about ranks, and ranks are processes on the cores of this machine."""
    if device == "cpu" or (device == "auto" and preset == "report"):
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        if device == "cuda":
            raise ArgumentError("--device cuda: torch sees no GPU here; use --device cpu")
        return "cpu"
    if preset == "report":
        raise ArgumentError("--preset report compares ranks, which run on the cores of this machine; use --device cpu")
    return "cuda"


# ------------------------------------------------------------------------------------------------------ on ranks


def _on_ranks(asked: Mapping[str, Any]) -> Record:
    wish = _wish(asked)
    from ..bench.ranks import run
    from ..bench.ranks.scenarios import cases

    chosen = cases(asked["preset"], wish, asked.get("only", ()))
    _refuse_unused(asked, {case.scenario for case in chosen})
    run.be_quiet()
    import torch

    from ..bench.records import new_record

    record = new_record(
        _line(),
        torch.device("cpu"),
        asked["quick"],
        real=run.REAL,
        simulated=run.SIMULATED,
        arguments=_arguments(asked, wish),
    )
    console, quiet = screen.console(), asked["as_json"]
    pace = run.measured_pace(chosen[0])
    expected = sum(run.seconds_of(case, pace) for case in chosen)
    if not quiet:
        many = f"{len(chosen)} case{'s' if len(chosen) > 1 else ''}"
        console.print(
            f"{many}, about {_spoken_minutes(expected)} at the pace of this moment; saved one by one in {asked['out']}"
        )
    with screen.progress(console, quiet=quiet) as progress:
        bar = progress.add_task("", total=len(chosen))

        def tell(case: Case, rows: list[Row]) -> None:
            progress.advance(bar)
            if not quiet:
                _print_case(progress.console, case, rows)

        def name(case: Case) -> None:
            progress.update(bar, description=f"{case.scenario}: {case.title}")

        run.run_cases(chosen, record, tell, lambda: record.save(asked["out"]), pace=pace, begin=name)
    return record


def _wish(asked: Mapping[str, Any]) -> Wish:
    """The preset with what was said otherwise."""
    from dataclasses import replace

    from ..bench.ranks.scenarios import PRESETS as WISHES
    from ..bench.ranks.scenarios import QUICK

    wish = WISHES[asked["preset"]]
    if asked["quick"]:
        wish = replace(wish, **QUICK)
    plain = ("tokens", "ranks", "heads", "head_dim", "dtype", "rounds", "seed", "peers")
    wish = replace(wish, **{name: asked[name] for name in plain if name in asked})
    options.bytes_of(wish.dtype)
    if max(wish.ranks) > MOST_RANKS:
        raise ArgumentError(
            f"--ranks must be at most {MOST_RANKS}, which are processes of this machine; got {max(wish.ranks)}"
        )
    causal = asked.get("causal", True)
    dense = options.pattern_of(causal=causal, window=asked.get("window"), dilated=None)
    branches = asked.get("dilated") and options.pattern_of(causal=causal, window=None, dilated=asked["dilated"])
    assert isinstance(dense, Dense)
    assert branches is None or isinstance(branches, Dilated)
    kv_heads = options.kv_heads_of(wish.heads, asked.get("kv_heads"))
    return replace(wish, kv_heads=kv_heads, pattern=dense, dilated=branches)


def _refuse_unused(asked: Mapping[str, Any], scenarios: set[str]) -> None:
    """What no scenario would look at."""
    for name in ("dilated", "peers"):
        if name in asked and "dilated" not in scenarios:
            raise ArgumentError(f"--{name} is for the scenario dilated; add --only dilated, or leave out --{name}")
    if "window" in asked and scenarios == {"dilated"}:
        raise ArgumentError("--window is for dense attention, not for the scenario dilated; leave out --window")


def _arguments(asked: Mapping[str, Any], wish: Wish) -> dict[str, Any]:
    """What was asked for, and what stands in the place of what was not."""
    told = {name: str(value) if isinstance(value, Path) else value for name, value in asked.items()}
    filled = {
        name: getattr(wish, name) for name in ("tokens", "ranks", "heads", "kv_heads", "head_dim", "dtype", "seed")
    }
    return told | filled | {"causal": wish.pattern.causal, "rounds": wish.rounds}


def _spoken_minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"


def _line() -> str:
    return " ".join(["longring", *sys.argv[1:]])


def _print_case(console: Console, case: Case, rows: Sequence[Row]) -> None:
    from ..bench.ranks.tables import MEMORY, TIMES, memory_cells, notes, time_cells

    _print_cells(console, f"{case.scenario}: {case.title}; base: {case.baseline}", TIMES, time_cells(rows))
    if case.scenario == "report":
        title = "Most bytes that a rank held, forward and backward: measured, and by the plan"
        _print_cells(console, title, MEMORY, memory_cells(rows))
    for note in notes(rows):
        console.print(note, style="bold red" if "WRONG" in note else None, soft_wrap=True)
    console.print()


def _print_cells(console: Console, title: str, heads: Sequence[str], lines: Sequence[tuple[str, ...]]) -> None:
    """Columns that are empty throughout are left out."""
    if not lines:
        return
    kept = [i for i in range(len(heads)) if any(line[i] for line in lines)]
    table = screen.table(title, heads[0], numbers=tuple(heads[i] for i in kept[1:]))
    for line in lines:
        table.add_row(*(line[i] for i in kept))
    console.print(table)


# ----------------------------------------------------------------------------------------------------- on the GPU


def _on_gpu(asked: Mapping[str, Any]) -> Record:
    """The scenarios of one GPU have their own sizes."""
    fixed = (
        "tokens",
        "ranks",
        "heads",
        "kv_heads",
        "head_dim",
        "dtype",
        "causal",
        "window",
        "dilated",
        "rounds",
        "seed",
    )
    if given := [name for name in fixed if name in asked]:
        option = f"--{given[0].replace('_', '-')}"
        raise ArgumentError(f"{option} is for ranks: the scenarios of a GPU have set sizes; add --device cpu")
    import torch

    from ..bench.gpu.contest import Stage
    from ..bench.gpu.given import Place
    from ..bench.gpu.scenarios import SCENARIOS, gpu_record, run_scenarios
    from ..bench.gpu.sizes import FULL, QUICK
    from ..bench.gpu.tables import TITLES, plain

    only = list(asked.get("only", SCENARIOS))
    for name in only:
        if name not in SCENARIOS:
            raise ArgumentError(f"--only must be one of {', '.join(SCENARIOS)} on a GPU, got {name!r}")
    device = _gpu()
    stage = Stage(Place(device, torch.bfloat16), QUICK if asked["quick"] else FULL, asked.get("peers"))
    told = {name: str(value) if isinstance(value, Path) else value for name, value in asked.items()}
    record = gpu_record(_line(), device, asked["quick"], told)
    console, quiet = screen.console(), asked["as_json"]

    def tell(name: str, rows: list[Row]) -> None:
        if not quiet:
            print(f"\n{TITLES[name]} ({record.seconds[name]:.0f} s)\n{plain(rows)}", flush=True)

    with screen.progress(console, quiet=quiet) as progress:
        progress.add_task(f"{len(only)} scenarios on {record.machine['device']}", total=None)
        run_scenarios(stage, record, only, tell, lambda: record.save(asked["out"]))
    return record


def _gpu() -> torch.device:
    import torch

    return torch.device("cuda", torch.cuda.current_device())


# --------------------------------------------------------------------------------------------------------- after


def _finish(record: Record, out: Path, report: Path | None, as_json: bool) -> None:
    if as_json:
        screen.print_json(record.to_json())
    else:
        _print_end(screen.console(), record, out, report)
    if record.failures:
        raise typer.Exit(1)


def _print_end(console: Console, record: Record, out: Path, report: Path | None) -> None:
    rows = [row for rows in record.scenarios.values() for row in rows]
    wrong = sum(row.is_wrong for row in rows if row.kind != "ours")
    for note in record.missing:
        console.print(f"not here: {note}", soft_wrap=True)
    for failure in record.failures:
        console.print(f"FAILED: {failure}", style="bold red", soft_wrap=True)
    if not record.failures:
        console.print("Every result of ours is within its error budget.", style="bold green")
    if wrong:
        console.print(f"{wrong} row{'s' if wrong > 1 else ''} of others' are wrong, and marked so.", style="bold")
    console.print(f"{spoken_seconds(sum(record.seconds.values()))} in all.")
    console.print(f"record: {out}", soft_wrap=True)
    if report is not None:
        console.print(f"report: {report}", soft_wrap=True)


# ------------------------------------------------------------------------------------------------------- compare


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="The earlier record.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="The later one.")],
    tolerance: Annotated[
        float, typer.Option(min=0.0, metavar="SHARE", help="What may change unnoticed: 0.05 is five percent.")
    ] = 0.05,
    show_all: Annotated[bool, typer.Option("--all", help="Show rows that are alike, too.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """What became slower, heavier or wrong.

    Two records, row by row: rows are the same if their scenario, case, name and pass are. One is slower if its median
    grew by more than the tolerance and its quartiles lie beyond those of the other record, and heavier if the fullest
    rank holds more by more than the tolerance.

    \b
        longring bench --out before.json
        longring bench --out after.json       # with other code
        longring bench compare before.json after.json

    Exit code 1 if something is slower, heavier or wrong that was not; 2 if a file is no record.
    """
    from ..bench.compare import compare as compared
    from ..bench.records import Record

    found = compared(Record.load(before), Record.load(after), tolerance=tolerance)
    if as_json:
        arguments = {"before": before, "after": after, "tolerance": tolerance}
        real = "nothing ran: two records were compared"
        screen.print_json(screen.envelope("bench compare", arguments, real=real, simulated="nothing") | found.to_json())
    else:
        _print_comparison(screen.console(), found, show_all)
    if found.regressions:
        raise typer.Exit(1)


def _print_comparison(console: Console, found: Comparison, show_all: bool) -> None:
    from ..bench.compare import REGRESSIONS, VERDICTS

    for caveat in found.caveats:
        console.print(f"note: {caveat}", soft_wrap=True)
    changes = sorted(found.changes, key=lambda change: VERDICTS.index(change.verdict))
    shown = [change for change in changes if show_all or change.verdict != "alike"]
    if shown:
        title = f"Beyond {found.tolerance:.0%} and beyond the spread of both: the later over the earlier"
        table = screen.table(title, "", "scenario and case", "who", "pass", numbers=("time", "memory"))
        for change in shown:
            style = "bold red" if change.verdict in REGRESSIONS else ""
            what = f"{change.key.scenario}: {change.key.case}"
            numbers = ("" if ratio is None else f"{ratio:.3f}" for ratio in (change.ratio, change.memory_ratio))
            table.add_row(change.verdict, what, change.key.name, change.key.phase, *numbers, style=style)
        console.print(table)
    counts = [f"{sum(c.verdict == verdict for c in changes)} {verdict}" for verdict in VERDICTS]
    told = ", ".join(count for count in counts if not count.startswith("0 "))
    console.print(f"{len(changes)} rows in both: {told}.", soft_wrap=True)
    for what, keys in (("no longer there", found.gone), ("new", found.new)):
        if keys:
            console.print(f"{len(keys)} rows are {what}: {_spoken_keys(keys)}", soft_wrap=True)


def _spoken_keys(keys: Sequence[Any], most: int = 3) -> str:
    told = "; ".join(f"{key.name}, {key.phase} ({key.scenario}: {key.case})" for key in keys[:most])
    return told + (f"; and {len(keys) - most} more" if len(keys) > most else "")
