"""`longring train`: a language model on long sequences, over ranks of this machine or of a world that was started."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError, RankFailed
from ..plan.quantities import spoken_bytes, spoken_count, spoken_seconds
from . import joining, options, screen
from .options import counted, named, numbered

if TYPE_CHECKING:
    from rich.console import Console

    from ..train.config import Config
    from ..train.outlook import Outlook
    from ..train.run import Report

REAL = "a model was trained, on so many real processes"
ROUGH = (
    "Attention's bytes are exact for sequences of one document; activations beyond attention and all times are "
    "estimates."
)
PLANNED = "nothing: no rank was started; bytes and times are predicted"


def train(
    data: Annotated[
        str | None,
        named("--data", "File or folder: text, code, FASTA, tokens.", "Python's standard library", "PATH"),
    ] = None,
    kind: Annotated[str | None, named("--kind", "What --data is, where its name does not tell.", "auto")] = None,
    case: Annotated[str | None, named("--case", "Letters of FASTA: kept, or upper.", "kept")] = None,
    task: Annotated[
        str | None, named("--task", "language: the next token; passkey: find a planted key.", "language")
    ] = None,
    digits: Annotated[int | None, counted("--digits", "Of a key, in the task passkey.", "5")] = None,
    out: Annotated[
        str | None, named("--out", "The run's folder; what is there goes on.", "out/train", "FOLDER")
    ] = None,
    weights: Annotated[
        str | None, named("--weights", "Another run's folder, to begin with its weights.", "fresh ones", "FOLDER")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="TOML with any of these options.", show_default="none"),
    ] = None,
    context: Annotated[
        int | None, counted("--context", "Tokens of a sequence: 4096, 64K, 1M.", "4Ki; on GPUs 64Ki", least=2)
    ] = None,
    ranks: Annotated[
        int | None, counted("--ranks", "Processes to start here.", "a GPU each, or a core each, up to 4")
    ] = None,
    context_ranks: Annotated[
        int | None, counted("--context-ranks", "Ranks that share a sequence; the rest hold others.", "all")
    ] = None,
    node_ranks: Annotated[
        int | None, counted("--node-ranks", "Ranks of a context on one node, for hybrid and double_ring.", "as started")
    ] = None,
    model: Annotated[str | None, named("--model", "decoder or longnet.", "decoder")] = None,
    dim: Annotated[int | None, counted("--dim", "Width of the model.", "128; on GPUs 512")] = None,
    layers: Annotated[int | None, counted("--layers", "Layers.", "4; on GPUs 8")] = None,
    heads: Annotated[int | None, counted("--heads", "Query heads.", "4; on GPUs 8")] = None,
    kv_heads: Annotated[int | None, counted("--kv-heads", "Key and value heads.", "as many as heads")] = None,
    feedforward: Annotated[int | None, counted("--feedforward", "Width inside a layer.", "of the model")] = None,
    window: Annotated[int | None, counted("--window", "How far a token sees, itself included.", "all")] = None,
    dilated: Annotated[
        str | None,
        named("--dilated", "LongNet's segments and rates, as 2048:1,8192:4.", "longnet: by context", "LENGTH:RATE,..."),
    ] = None,
    rotary_base: Annotated[
        float | None,
        numbered("--rotary-base", "Of the decoder's positions; longer contexts take larger ones.", "10000"),
    ] = None,
    layout: Annotated[str | None, named("--layout", "How tokens are dealt to ranks.", "auto: by the pattern")] = None,
    schedule: Annotated[str | None, named("--schedule", "In what order ranks meet.", "auto: by the cost")] = None,
    kernel: Annotated[str | None, named("--kernel", "What computes a tile.", "auto: the fastest")] = None,
    dtype: Annotated[
        str | None, named("--dtype", "fp32, bf16 (by autocast; weights stay fp32) or fp64.", "fp32; on GPUs bf16")
    ] = None,
    device: Annotated[str | None, named("--device", "cpu, cuda, or auto: GPUs where there are.", "auto")] = None,
    steps: Annotated[int | None, counted("--steps", "Steps of the whole run.", "100")] = None,
    batch: Annotated[int | None, counted("--batch", "Sequences of a step.", "one a ring, or as saved")] = None,
    micro_batch: Annotated[
        int | None, counted("--micro-batch", "Sequences of a ring at a time; their gradients add up.", "1")
    ] = None,
    learning_rate: Annotated[float | None, numbered("--learning-rate", "Of AdamW, at its highest.", "0.001")] = None,
    warmup: Annotated[
        int | None, counted("--warmup", "Steps in which it rises; then it falls as a cosine.", "a tenth", least=0)
    ] = None,
    final_rate: Annotated[float | None, numbered("--final-rate", "What is left of it at the end.", "0.1")] = None,
    weight_decay: Annotated[float | None, numbered("--weight-decay", "Of all matrices.", "0.1")] = None,
    clip: Annotated[float | None, numbered("--clip", "Norm that gradients are cut down to; 0: never.", "1")] = None,
    seed: Annotated[int | None, counted("--seed", "Of weights and of the order of the data.", "0", least=0)] = None,
    fsdp: Annotated[
        bool | None, typer.Option("--fsdp/--no-fsdp", help="Deal parameters over all ranks.", show_default="no")
    ] = None,
    activation_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--activation-checkpointing/--no-activation-checkpointing",
            help="Keep less, compute layers twice.",
            show_default="no",
        ),
    ] = None,
    save_every: Annotated[int | None, counted("--save-every", "Steps between checkpoints.", "50")] = None,
    keep: Annotated[int | None, counted("--keep", "Checkpoints that stay.", "3")] = None,
    restart_if_damaged: Annotated[
        bool | None,
        typer.Option(
            "--restart-if-damaged/--no-restart-if-damaged",
            help="Begin at step 1 where all checkpoints are damaged.",
            show_default="no: refuse",
        ),
    ] = None,
    timeout: Annotated[float | None, numbered("--timeout", "Seconds after which a silent rank is lost.", "600")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and start nothing.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Train a language model on long sequences.

    Every sequence is dealt over the ranks of a ring, and attention is exact: the losses are those of one process,
    whatever the ranks, layout and schedule. Documents are packed, and tokens see their own document alone.

    \b
        longring train                                               # bytes of Python's library, on this machine
        longring train --data book.txt --context 64K --ranks 4       # ranks are started here
        longring train --config run.toml --steps 500                 # a flag wins over the file
        longring train --context 1M --model longnet --dry-run        # memory, bytes and time, predicted
        torchrun --nproc-per-node 8 -m longring train --context 1M   # a rank each of a world that was started

    Metrics, checkpoints and a picture of the loss are in --out. Run again, it goes on from the newest whole
    checkpoint, with the same or other ranks, layout and schedule. SIGTERM and Ctrl-C save and end with exit code 0; a
    second one ends at once. Exit code 1 if a rank was lost, all checkpoints are damaged, or something else failed.
    """
    flags = {name: value for name, value in locals().items() if name not in ("config", "dry_run", "as_json")}
    from ..train.config import read

    asked = read(flags, config)
    settled = _settled(asked)
    if dry_run:
        _plan(settled, as_json)
        return
    _check_folder(settled.out)
    report = _trained(settled, quiet=as_json, keeps_batch=asked.batch is None)
    if joining.is_first():
        _conclude(replace(settled, batch=report.batch), report, as_json)


# ------------------------------------------------------------------------------------------------------ the ranks


def _settled(asked: Config) -> Config:
    """Nothing left open, for the ranks and devices that there are."""
    ranks, device = joining.ranks_and_device(asked.ranks, asked.device)
    return asked.settled(device=device, ranks=ranks)


def _check_folder(out: str) -> None:
    """Before ranks are started. A link to itself is there, and nothing that its name leads to is."""
    if os.path.lexists(out) and not os.path.isdir(out):
        raise ArgumentError(f"--out {out} is no folder; name one, or a place where one can be made")
    from ..train.metrics import check

    check(Path(out))


def _trained(config: Config, *, quiet: bool, keeps_batch: bool) -> Report:
    from ..train.stopping import passed_on

    world: dict[str, Any] = {"ranks": config.ranks, "device": config.device}
    if joining.is_joined():
        return joining.on_ranks(_on_a_rank, config, None, quiet, keeps_batch, **world)
    with tempfile.TemporaryDirectory(prefix="longring-train-") as folder, passed_on(Path(folder) / "stop") as stop:
        try:
            return joining.on_ranks(_on_a_rank, config, stop, quiet, keeps_batch, **world)
        except RankFailed as failure:
            if stop.exists() and failure.error_type is None and failure.signal is None:  # Ctrl-C before it began
                raise KeyboardInterrupt from failure
            raise


def _on_a_rank(config: Config, stop: Path | None, quiet: bool, keeps_batch: bool) -> Report:
    from ..train.run import train
    from ..train.stopping import Stopping

    stopping = Stopping(stop)
    with stopping.listening():
        listener = None if quiet else Screen(config)
        return train(config, stopping=stopping, listener=listener, keeps_batch=keeps_batch)


class Screen:
    """What the first rank shows while it goes on: notes as lines, steps as a bar where there is a terminal."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._console = screen.console()
        self._bar: Any = None
        self._task: Any = None

    def note(self, text: str) -> None:
        with _whoever_looks():
            self._console.print(text, soft_wrap=True)

    def begin(self, *, step: int, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        with _whoever_looks():
            self._bar.start()
        self._task = self._bar.add_task("beginning", total=steps, completed=step)

    def step(self, record: dict[str, Any]) -> None:
        told = f"loss {record['loss']:.4f}, {record['tokens_per_second']:,.0f} tokens/s"
        with _whoever_looks():
            self._bar.update(self._task, completed=record["step"], description=told)

    def end(self) -> None:
        if self._bar is not None:
            with _whoever_looks():
                self._bar.stop()


@contextmanager
def _whoever_looks() -> Iterator[None]:
    """A terminal that is closed, or a reader that left, is no reason to lose what was learned."""
    from ..train.stopping import fall_silent

    try:
        yield
    except OSError:
        fall_silent()


# ------------------------------------------------------------------------------------------------------ the end


def _conclude(config: Config, report: Report, as_json: bool) -> None:
    out = Path(config.out)
    picture, missing = _picture(config, out)
    if missing is not None:
        report.notes.append(missing)
    if as_json:
        real = f"{REAL}: {config.ranks} ({config.device})"
        told = screen.envelope("train", config.as_json(), real=real, simulated="nothing was")
        screen.print_json(told | report.as_json() | {"out": str(out), "picture": picture})
        return
    console = screen.console()
    for line in _lines(config, report):
        console.print(line, soft_wrap=True)
    console.print(f"{out}: metrics.jsonl, config.json, checkpoints", soft_wrap=True)
    if picture is not None or missing is not None:
        console.print(missing or f"picture: {picture}", soft_wrap=True)


def _lines(config: Config, report: Report) -> list[str]:
    if report.last_loss is None:
        return [f"Nothing to do: step {report.steps:,} of {config.steps:,} is done. More with a higher --steps."]
    lines = [
        f"{report.corpus}; {spoken_count(report.parameters)} parameters, {_rings(config)} of "
        f"{spoken_count(config.context or 0)} tokens",
        f"step {report.steps:,} of {config.steps:,}: loss {report.first_loss:.4f} to {report.last_loss:.4f}; "
        f"{report.tokens_per_second:,.0f} tokens/s in {spoken_seconds(report.seconds)}",
        f"Of a step, {report.attention_share:.0%} was attention and {report.communication_share:.0%} sending and "
        "waiting for messages (a rank's time, on average).",
    ]
    if report.is_stopped:
        lines.append(f"Stopped as asked, and saved: {report.checkpoint}. The same command goes on.")
    return lines


def _rings(config: Config) -> str:
    rings = config.data_ranks
    ranks = f"{config.context_ranks} rank{'s' if config.context_ranks != 1 else ''}"
    return f"{rings} ring{'s' if rings > 1 else ''} of {ranks}, sequences"


def _picture(config: Config, out: Path) -> tuple[str | None, str | None]:
    """(its path, why there is none): what was trained is no worse for want of a picture."""
    from ..train.metrics import steps
    from ..train.picture import draw

    path = out / "loss.png"
    title = f"{config.model}, {spoken_count(config.context or 0)} tokens on {config.ranks} ranks"
    try:
        records = steps(out)
        return (str(path) if records and draw(records, path, title=title) else None), None
    except Exception as failure:  # matplotlib has errors of many kinds
        return (
            None,
            f"no picture of the loss: {path} cannot be written: {getattr(failure, 'strerror', None) or failure}",
        )


# -------------------------------------------------------------------------------------------------- the dry run


def _plan(config: Config, as_json: bool) -> None:
    from ..train.outlook import outlook
    from ..train.tasks import task_of

    task = task_of(config)
    found = outlook(config, vocabulary=task.vocabulary, gpu=_gpu(config))
    if as_json:
        told = screen.envelope("train", config.as_json(), real=PLANNED, simulated="everything")
        screen.print_json(told | {"corpus": task.description, "outlook": found.as_json()})
        return
    _print_outlook(screen.console(), config, task.description, found)


def _gpu(config: Config) -> str | None:
    if config.device != "cuda":
        return None
    import torch

    return torch.cuda.get_device_name(0)


def _print_outlook(console: Console, config: Config, corpus: str, found: Outlook) -> None:
    told = found.as_json()
    console.print(f"{corpus}\n{_rings(config)} of {spoken_count(config.context or 0)} tokens", soft_wrap=True)
    console.print(
        f"{config.model} of {spoken_count(found.parameters)} parameters; {found.schedule} schedule, {found.layout} "
        f"layout; hardware {found.hardware}. Predicted; nothing was run.\n",
        soft_wrap=True,
    )
    table = screen.table("One rank, the fullest", "part", numbers=("holds",))
    for part, size in found.memory.items():
        table.add_row(part, spoken_bytes(size))
    table.add_row("together", spoken_bytes(told["memory_bytes"]))
    console.print(table)
    table = screen.table("One step", "part", numbers=("sends", "takes"))
    for part in dict.fromkeys((*found.seconds, *found.sent)):
        sent, seconds = found.sent.get(part), found.seconds.get(part)
        table.add_row(
            part, "-" if sent is None else spoken_bytes(sent), "-" if seconds is None else spoken_seconds(seconds)
        )
    table.add_row("together", spoken_bytes(told["bytes_sent"]), spoken_seconds(found.step_seconds))
    console.print(table)
    whole = f"{config.steps:,} steps of {spoken_count(found.tokens_per_step)} tokens"
    console.print(f"{whole}: {spoken_seconds(told['run_seconds'])}. {ROUGH}", soft_wrap=True)
