"""`longring profile`: what every rank does when and holds meanwhile, on processes of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from ..plan.quantities import spoken_bytes, spoken_count, spoken_seconds
from . import options, screen

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..bench.profiling.run import Profile, Rank

MOST_RANKS = 64
DEVICES = ("auto", "cpu", "cuda")
FORMATS = (".png", ".svg")
TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def profile(
    tokens: options.Tokens = 4096,
    ranks: Annotated[
        int,
        typer.Option(
            parser=options.a_count("--ranks"), metavar="COUNT", help="Processes to start on this machine, a rank each."
        ),
    ] = 4,
    nodes: Annotated[
        int,
        typer.Option(
            parser=options.a_count("--nodes"), metavar="COUNT", help="Machines that the ranks pass for, evenly."
        ),
    ] = 1,
    batch: options.Batch = 1,
    heads: options.Heads = 8,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = 64,
    dtype: options.Dtype = "fp32",
    causal: options.Causal = True,
    window: options.Window = None,
    dilated: options.Branches = None,
    layout: options.Layout = "auto",
    schedule: options.Schedule = "auto",
    kernel: Annotated[str, typer.Option(metavar="NAME", help="What computes a tile; auto takes the fastest.")] = "auto",
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Leave out the backward pass.")] = False,
    repeat: Annotated[
        int,
        typer.Option(
            parser=options.a_count("--repeat"), metavar="COUNT", help="Timed runs, of which the median one is shown."
        ),
    ] = 3,
    seed: options.Seed = 0,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev or Chrome.", show_default="none"),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it: .png or .svg.", show_default="none")
    ] = None,
    report: options.ReportPath = None,
    as_json: options.AsJson = False,
) -> None:
    """What every rank does when, and what it holds.

    Runs one call of attention, forward and backward, on real processes of this machine, and records every rank's
    computing, messages, waiting and merging step by step, and its memory by component beside the prediction.

    \b
        longring profile --tokens 8K --ranks 4 --schedule ring --picture profile.png
        longring profile --tokens 16K --ranks 2 --dilated 2K:1,8K:2 --trace profile.json

    Times are those of warm runs; memory is followed in a run of its own, whose moments are shown at the same places of
    the timed one. Exit code 1 if a rank sent other bytes than planned, or something failed.
    """
    kv_heads = options.kv_heads_of(heads, kv_heads)
    options.bytes_of(dtype)
    pattern = options.pattern_of(causal=causal, window=window, dilated=dilated)
    _check(ranks, nodes, device, picture)
    options.check_apart(report=report, trace=trace, picture=picture)
    for option, path in (("--report", report), ("--trace", trace), ("--picture", picture)):
        options.check_writable(path, option)

    import torch

    from ..bench.profiling.rank import Asked
    from ..bench.profiling.run import check
    from ..bench.profiling.run import profile as profiled

    asked = Asked(
        tokens=tokens,
        ranks=ranks,
        nodes=nodes,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=getattr(torch, TORCH_DTYPES[dtype]),
        pattern=pattern,
        layout=layout,
        schedule=schedule,
        kernel=kernel,
        device=_device(device),
        with_backward=not forward_only,
        repeat=repeat,
        seed=seed,
    )
    check(asked)
    console = screen.console()
    with screen.progress(console, quiet=as_json) as progress:
        progress.add_task(f"{_processes(ranks)} at work", total=None)
        found = profiled(asked)
    arguments = {
        **asked._asdict(),
        "dtype": dtype,
        "pattern": repr(pattern),
        "trace": trace,
        "picture": picture,
        "report": report,
    }
    told = _as_json(arguments, found)
    _write(found, told, trace, picture, report)
    if as_json:
        screen.print_json(told)
    else:
        _print_report(console, found)
        for name, path in (("trace", trace), ("picture", picture), ("report", report)):
            if path is not None:
                console.print(f"{name}: {path}", soft_wrap=True)
    if told["faults"]:
        raise typer.Exit(1)


def _check(ranks: int, nodes: int, device: str, picture: Path | None) -> None:
    if ranks > MOST_RANKS:
        raise ArgumentError(f"--ranks must be at most {MOST_RANKS}, which are processes of this machine; got {ranks}")
    if ranks % nodes:
        raise ArgumentError(f"--ranks must be a multiple of --nodes, got {ranks} and {nodes}")
    if device not in DEVICES:
        raise ArgumentError(f"--device must be one of {', '.join(DEVICES)}, got {device!r}")
    if picture is not None and picture.suffix.lower() not in FORMATS:
        raise ArgumentError(f"--picture {picture} must end with {' or '.join(FORMATS)}")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ArgumentError("longring profile starts its ranks by itself: run it without torchrun, with --ranks")


def _device(device: str) -> str:
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ArgumentError("--device cuda: torch sees no GPU here; use --device cpu")
    return ("cuda" if has_gpu else "cpu") if device == "auto" else device


def _write(found: Profile, told: dict[str, Any], trace: Path | None, picture: Path | None, report: Path | None) -> None:
    if trace is not None:
        from ..bench.profiling.trace import write_trace

        write_trace(found, trace)
    if picture is not None:
        from ..bench.profiling.picture import draw

        draw(found, picture, _title(found))
    if report is not None:
        from ..bench.report import write

        write(report, "profile", screen.finite(told))


# ------------------------------------------------------------------------------------------------------ telling


def _as_json(arguments: dict[str, Any], found: Profile) -> dict[str, Any]:
    from ..bench.profiling.run import told

    real = (
        f"one call of attention on {_processes(found.asked.ranks)} of this machine ({found.device}), again and again: "
        "times are of warm runs, memory is of a run of its own that began without buffers, and peaks are what the "
        "allocator saw in two more"
    )
    simulated = "nothing was; what is called predicted or planned is computed from the plan, not measured"
    body = {**told(found), "faults": _faults(found)}
    return {**screen.envelope("profile", arguments, real=real, simulated=simulated), **body}


def _faults(found: Profile) -> list[str]:
    return [
        f"rank {rank.rank} sent {rank.bytes_sent[phase]:,} bytes in the {phase}, and the plan said {said:,}"
        for rank in found.ranks
        for phase, said in rank.bytes_planned.items()
        if rank.bytes_sent[phase] != said
    ]


def _processes(ranks: int) -> str:
    return f"{ranks} real process{'es' if ranks > 1 else ''}"


def _title(found: Profile) -> str:
    asked = found.asked
    kind = "dilated" if hasattr(asked.pattern, "segment_lengths") else "dense"
    causal = "causal " if asked.pattern.causal else ""
    dealt = f"{spoken_count(asked.tokens)} tokens on {asked.ranks} rank{'s' if asked.ranks > 1 else ''}"
    return f"{dealt}: {causal}{kind} attention, {found.schedule} schedule, {found.layout} layout"


def _print_report(console: Console, found: Profile) -> None:
    asked = found.asked
    console.print(_title(found), soft_wrap=True)
    console.print(
        f"{asked.heads} query heads over {asked.kv_heads} of {asked.head_dim}, {found.kernel} kernel, {found.device}; "
        f"{_processes(asked.ranks)}\n",
        soft_wrap=True,
    )
    console.print(_time_table(found))
    console.print(_memory_table(found))
    for phase, times in found.seconds.items():
        from ..bench.profiling.run import spread

        these = spread(times)
        low, high = spoken_seconds(these["low"]), spoken_seconds(these["high"])
        console.print(f"{phase}: {spoken_seconds(these['median'])} (quartiles {low} to {high}, {len(times)} runs)")
    console.print(_overlap(found.overlap))
    for fault in _faults(found):
        console.print(f"WRONG: {fault}", style="bold red", soft_wrap=True)


def _overlap(share: float | None) -> str:
    if share is None:
        return "Nothing was sent."
    return f"{share:.0%} of the time in which messages were under way, ranks had something else to do than to wait."


def _time_table(found: Profile) -> Table:
    from ..bench.profiling.spans import hidden_share

    title = "Time of the shown run, and how much of its messages was hidden"
    table = screen.table(title, "rank", numbers=("compute", "merge", "post", "wait", "under way", "hidden", "sent"))
    for rank in found.ranks:
        numbers = [spoken_seconds(_seconds(rank, kind)) for kind in ("compute", "merge", "post", "wait", "send")]
        share = hidden_share([rank.spans])
        sent = spoken_bytes(sum(rank.bytes_sent.values()))
        table.add_row(str(rank.rank), *numbers, "-" if share is None else f"{share:.0%}", sent)
    return table


def _seconds(rank: Rank, kind: str) -> float:
    from ..bench.profiling.spans import under_way

    if kind == "send":
        return under_way(rank.spans)
    return sum(span.end - span.start for span in rank.spans if span.kind == kind)


def _memory_table(found: Profile) -> Table:
    table = screen.table(
        "Most bytes a rank held", "rank", "phase", numbers=("measured", "predicted", "measured / predicted")
    )
    for rank in found.ranks:
        for phase, peak in rank.peaks.items():
            said = rank.predicted.get(phase)
            numbers = ("-", "-") if said is None else (spoken_bytes(said.bytes), _ratio(peak.bytes, said.bytes))
            table.add_row(str(rank.rank), phase, spoken_bytes(peak.bytes), *numbers)
    return table


def _ratio(measured: int, predicted: int) -> str:
    return f"{measured / predicted:.3f}" if predicted else "-"  # a rank without tokens
