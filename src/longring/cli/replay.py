"""`longring replay`: one rank of a ring of any size, run for real on the device at hand, and checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from ..plan.quantities import spoken_bytes, spoken_seconds
from . import options, screen
from .interrupt import heard_within

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.table import Table

    from ..bench.replay.run import Replayed, Setting

DEVICES = ("auto", "cpu", "cuda")


def replay(
    tokens: options.Tokens = 1_000_000,
    ranks: options.Ranks = 64,
    rank: Annotated[
        int | None,
        typer.Option(
            parser=options.a_count("--rank", 0), metavar="NUMBER", help="Which of them.", show_default="the middle one"
        ),
    ] = None,
    nodes: options.Nodes = 1,
    batch: options.Batch = 1,
    heads: options.Heads = 2,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = 64,
    dtype: options.Dtype = "bf16",
    causal: options.Causal = True,
    window: options.Window = None,
    dilated: options.Branches = None,
    layout: options.Layout = "auto",
    schedule: options.Schedule = "auto",
    kernel: Annotated[str, typer.Option(metavar="NAME", help="What computes a tile; auto takes the fastest.")] = "auto",
    forward_only: Annotated[bool, typer.Option("--forward-only", help="No backward.")] = False,
    samples: Annotated[
        int,
        typer.Option(parser=options.a_count("--samples"), metavar="COUNT", help="Rows of each quantity to check."),
    ] = 64,
    repeats: Annotated[
        int,
        typer.Option(
            parser=options.a_count("--repeats"),
            metavar="COUNT",
            help="Measured runs of each pass; the time is their median. On a GPU one comes before them, unless it "
            "would take long; where none did, the first of several does not count.",
        ),
    ] = 1,
    seed: options.Seed = 0,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="auto, cpu or cuda; auto takes a GPU if there is one.")
    ] = "auto",
    report: options.ReportPath = None,
    as_json: options.AsJson = False,
) -> None:
    """One rank of a ring of any size, for real, on this device.

    The rank's true schedule, kernels and buffers run over its full share. The keys and values of all other ranks are
    generated from (seed, position) as they are due, and so are the gradients that others would have found; no tensor
    of the whole sequence exists anywhere. Sampled rows of the output, of dq, and of dk and dv as the rank keeps or
    sends them are held against the float64 definition, which is computed from the same generator; time, memory and
    bytes stand beside their prediction.

    \b
        longring replay --tokens 1M --ranks 64
        longring replay --tokens 1G --ranks 1024 --rank 513 --dilated 2048:1,8192:4,32768:16
        longring replay --tokens 16M --ranks 64 --heads 32 --kv-heads 8 --head-dim 128 --forward-only

    Followed are ring, bidirectional, double_ring, exchange and gather. Exit code 1 if a sampled row is wrong, or if
    other bytes moved than the plan said.
    """
    arguments = dict(locals())
    kv_heads = options.kv_heads_of(heads, kv_heads)
    options.bytes_of(dtype)
    rank = _rank_of(rank, ranks)
    node_ranks = _node_ranks(ranks, nodes)
    pattern = options.pattern_of(causal=causal, window=window, dilated=dilated)
    options.check_writable(report)
    setting = _setting(
        tokens=tokens,
        ranks=ranks,
        rank=rank,
        pattern=pattern,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        batch=batch,
        node_ranks=node_ranks,
        layout=layout,
        schedule=schedule,
        kernel=kernel,
        seed=seed,
    )
    console = screen.console()
    with heard_within(2.0):
        found = _watched(console, setting, forward_only, samples, repeats, quiet=as_json)
    arguments |= {"rank": rank, "kv_heads": kv_heads}
    told = screen.envelope("replay", arguments, real=found.real, simulated=found.simulated) | found.to_json()
    if report is not None:
        from ..bench.report import write

        write(report, "replay", screen.finite(told))
    if as_json:
        screen.print_json(told)
    else:
        _print(console, found, report)
    if not found.ok:
        raise typer.Exit(1)


def _rank_of(rank: int | None, ranks: int) -> int:
    if rank is not None and rank >= ranks:
        raise ArgumentError(f"--rank must be from 0 to {ranks - 1} with --ranks {ranks}, got {rank}")
    return ranks // 2 if rank is None else rank


def _node_ranks(ranks: int, nodes: int) -> int:
    if ranks % nodes:
        raise ArgumentError(f"--ranks must be a multiple of --nodes, got {ranks} and {nodes}")
    return ranks // nodes


def _setting(*, dtype: str, device: str, **rest: Any) -> Setting:
    if device not in DEVICES:
        raise ArgumentError(f"--device must be one of {', '.join(DEVICES)}, got {device!r}")
    import torch

    from ..bench.replay.run import Setting

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ArgumentError("--device cuda: torch finds no GPU here; take --device cpu")
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    place = torch.device("cuda", torch.cuda.current_device()) if has_gpu and device != "cpu" else torch.device("cpu")
    return Setting(dtype=types[dtype], device=place, **rest)


def _watched(
    console: Console, setting: Setting, forward_only: bool, samples: int, repeats: int, *, quiet: bool
) -> Replayed:
    from ..bench.replay.run import replay as run

    with screen.progress(console, quiet=quiet) as progress:
        bar = progress.add_task("planning", total=None)

        def watch(what: str, done: int, of: int) -> None:
            progress.update(bar, description=what, completed=done, total=of)

        return run(setting, forward_only=forward_only, samples=samples, repeats=repeats, watch=watch)


# ------------------------------------------------------------------------------------------------ printing


def _print(console: Console, found: Replayed, report: Path | None) -> None:
    setting = found.setting
    heads = f"{setting.heads} head{'s' if setting.heads > 1 else ''}"
    if setting.kv_heads < setting.heads:
        heads = f"{setting.heads}/{setting.kv_heads} heads"
    dtype = str(setting.dtype).removeprefix("torch.")
    console.print(
        f"rank {setting.rank:,} of {setting.ranks:,}: {found.local_tokens:,} of {setting.tokens:,} tokens, "
        f"{heads} of {setting.head_dim}, {dtype}",
        soft_wrap=True,
    )
    taken = f"schedule {found.schedule.name}, layout {found.layout.name}, kernel {found.kernel.name}"
    console.print(f"{taken}, on {setting.device}\n", soft_wrap=True)
    console.print(_cost_table(found))
    console.print(_check_table(found))
    console.print(_verdict(found), style="bold green" if found.ok else "bold red", soft_wrap=True)
    for note in {check.note for check in found.checks if check.note}:
        console.print(f"dk and dv: the definition's sums, {note}.", soft_wrap=True)
    for said in (*found.notes, found.real, found.simulated):
        console.print(said, soft_wrap=True)
    if report is not None:
        console.print(f"report: {report}", soft_wrap=True)


def _cost_table(found: Replayed) -> Table:
    table = screen.table("Measured here, and predicted", "", numbers=tuple(found.phases))
    rows: list[tuple[str, Callable[[Any], str]]] = [
        ("time of the engine", lambda p: spoken_seconds(p.seconds)),
        ("  predicted", lambda p: "not known" if p.predicted_seconds is None else spoken_seconds(p.predicted_seconds)),
        ("time to generate the others, not included", lambda p: spoken_seconds(p.to_json()["made_up_seconds"])),
        ("useful TFLOP", lambda p: f"{p.flops / 1e12:,.4g}"),
        ("TFLOP/s", lambda p: f"{p.flops / p.seconds / 1e12:,.3g}"),
        ("most bytes held", lambda p: spoken_bytes(p.peak_bytes)),
        ("  predicted", lambda p: spoken_bytes(p.predicted_bytes)),
        ("bytes received", lambda p: f"{p.bytes_received:,}"),
        ("bytes sent", lambda p: f"{p.bytes_sent:,}"),
        ("  as planned", lambda p: "both" if p.bytes_agree else f"NOT {p.planned_received:,}, {p.planned_sent:,}"),
    ]
    for name, value in rows:
        table.add_row(name, *(value(phase) for phase in found.phases.values()))
    return table


def _check_table(found: Replayed) -> Table:
    title = "Errors of sampled rows and what is allowed: of all, and of the worst"
    table = screen.table(title, "quantity", numbers=("rows", "error", "allowed", "worst", "allowed", "at position"))
    for check in found.checks:
        colour = "green" if check.ok else "bold red"
        numbers = (check.error, check.allowed, check.worst_error, check.worst_allowed)
        told = (f"{number:.1e}" for number in numbers)
        table.add_row(screen.styled(check.quantity, colour), str(len(check.rows)), *told, f"{check.worst_row:,}")
    return table


def _verdict(found: Replayed) -> str:
    if found.ok and not found.checks:
        return "There was nothing to compute and nothing to check, and the bytes that moved are those of the plan."
    if found.ok:
        return (
            f"All {len(found.checks)} checks hold: sampled rows are within their error budgets, and the bytes that "
            "moved are those of the plan."
        )
    wrong = [check.quantity for check in found.checks if not check.ok]
    wrong += [f"bytes of the {phase.name}" for phase in found.phases.values() if not phase.bytes_agree]
    return f"WRONG: {'; '.join(wrong)}"
