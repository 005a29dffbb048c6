"""`longring eval`: what a run learned: perplexity by position, and keys found by depth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from ..plan.quantities import spoken_count
from . import joining, options, screen
from .options import counted, named

if TYPE_CHECKING:
    from ..train.evaluation.by_depth import ByDepth
    from ..train.evaluation.by_position import Bucket, ByPosition
    from ..train.evaluation.subject import Setting

REAL = "a model that was trained read held-out data, on so many real processes"
OF_TEXT = ("case", "split", "sequences", "window")
OF_KEYS = ("depths", "trials", "digits", "batch")


def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A run's folder, as longring train --out names it.")
    ],
    passkey: Annotated[bool, typer.Option("--passkey", help="Find keys planted in long texts instead.")] = False,
    data: Annotated[
        str | None,
        named("--data", "What is predicted; with --passkey, the text around keys.", "the run's; words", "PATH"),
    ] = None,
    kind: Annotated[str | None, named("--kind", "What --data is, where its name does not tell.", "auto")] = None,
    case: Annotated[str | None, named("--case", "Letters of FASTA: kept, or upper.", "the run's")] = None,
    split: Annotated[str | None, named("--split", "Documents: held-out, or train.", "held-out")] = None,
    context: Annotated[
        int | None, counted("--context", "Tokens of a sequence, or of a text with a key.", "the run's", least=2)
    ] = None,
    sequences: Annotated[int | None, counted("--sequences", "How many of them.", "16, or all")] = None,
    window: Annotated[
        int | None, counted("--window", "Compare with a context cut to so many tokens.", "not compared", least=2)
    ] = None,
    depths: Annotated[
        str | None,
        named("--depths", "Where keys are planted: 0 to 1, the end.", "0,0.25,0.5,0.75,1", "NUMBER,..."),
    ] = None,
    trials: Annotated[int | None, counted("--trials", "Keys at each depth.", "20")] = None,
    digits: Annotated[int | None, counted("--digits", "Of a key.", "5")] = None,
    batch: Annotated[int | None, counted("--batch", "Texts with keys that are read at a time.", "8")] = None,
    seed: Annotated[int, counted("--seed", "Of the order of documents, and of keys.", "0", least=0)] = 0,
    ranks: Annotated[
        int | None, counted("--ranks", "Processes to start here.", "a GPU each, or a core each, up to 4")
    ] = None,
    context_ranks: Annotated[
        int | None, counted("--context-ranks", "Ranks that share a sequence; the rest hold others.", "all")
    ] = None,
    layout: Annotated[str, named("--layout", "How tokens are dealt to ranks.", "auto: by the pattern")] = "auto",
    schedule: Annotated[str, named("--schedule", "In what order ranks meet.", "auto: by the cost")] = "auto",
    device: Annotated[str, named("--device", "cpu, cuda, or auto: GPUs where there are.", "auto")] = "auto",
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="NUMBER", help="Seconds after which a silent rank is lost.")
    ] = 600.0,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write what --json prints, too.", show_default="none"),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Judge what a run has learned.

    Perplexity by how many tokens a token sees, on documents that were held out; with --window also where the same
    tokens see the last few alone, which shows what the far context gives. Or, with --passkey, whether a key is found
    that stands anywhere in a long text.

    \b
        longring eval out/train                                     # perplexity by position, on the run's own data
        longring eval out/train --data book.txt --window 512        # and what lies beyond 512 tokens is worth
        longring eval out/train --passkey --context 16K --depths 0,0.5,1 --trials 50
        torchrun --nproc-per-node 8 -m longring eval out/train      # a rank each of a world that was started

    The newest whole checkpoint is read, whatever ranks wrote it. The numbers are the same on any number of ranks,
    within rounding. Exit code 1 if a rank was lost or something else failed.
    """
    asked = {name: value for name, value in locals().items() if value is not None}
    _refuse_words_of_the_other(asked, passkey)
    if joining.is_first():
        options.check_writable(out, "--out")
    ranks, device = joining.ranks_and_device(ranks, device)
    from ..train.evaluation.subject import Setting

    setting = Setting(
        str(checkpoint), ranks, device, context, context_ranks, layout=layout, schedule=schedule, timeout=timeout
    )
    program, question = (_keys if passkey else _text)(asked)
    found = joining.on_ranks(_on_a_rank, program, setting, question, as_json, ranks=ranks, device=device)
    if joining.is_first():
        _conclude(found, asked | {"ranks": ranks, "device": device}, out, as_json)


def _refuse_words_of_the_other(asked: dict[str, Any], passkey: bool) -> None:
    """What would change nothing is a misunderstanding."""
    for name in OF_TEXT if passkey else OF_KEYS:
        if name in asked:
            raise ArgumentError(f"--{name} is for {'perplexity' if passkey else '--passkey'}; leave one of them out")


def _text(asked: dict[str, Any]) -> tuple[str, Any]:
    from ..train.evaluation.by_position import Asked

    names = ("data", "kind", "case", "split", "sequences", "window", "seed")
    return "by_position", Asked(**{name: asked[name] for name in names if name in asked})


def _keys(asked: dict[str, Any]) -> tuple[str, Any]:
    from ..train.evaluation.by_depth import Asked

    if "kind" in asked and "data" not in asked:
        raise ArgumentError("--kind says what --data is; give --data, or leave it out")
    names = ("trials", "digits", "batch", "data", "kind", "seed")
    words: dict[str, Any] = {name: asked[name] for name in names if name in asked}
    if "depths" in asked:
        words["depths"] = _depths(asked["depths"])
    return "by_depth", Asked(**words)


def _depths(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= depth <= 1 for depth in found):
        raise ArgumentError(f"--depths takes numbers from 0 to 1 with commas between, as 0,0.5,1; got {text!r}")
    return found


def _on_a_rank(program: str, setting: Setting, question: Any, quiet: bool) -> ByPosition | ByDepth:
    from ..train.evaluation.by_depth import by_depth
    from ..train.evaluation.by_position import by_position

    listener = None if quiet else Screen()
    try:
        return (by_depth if program == "by_depth" else by_position)(setting, question, listener)
    except MemoryError as failure:  # a checkpoint may name any length, and so may a user
        length = "the run's context" if setting.context is None else f"--context {setting.context:,}"
        raise ArgumentError(f"{length} takes more memory than there is; say a shorter --context") from failure


class Screen:
    """A bar, where there is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def begin(self, total: int) -> None:
        self._bar = screen.progress(screen.console())
        self._bar.start()
        self._task = self._bar.add_task("reading", total=total)

    def advance(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def end(self) -> None:
        self._bar.stop()


# ----------------------------------------------------------------------------------------------------------- the end


def _conclude(found: ByPosition | ByDepth, asked: dict[str, Any], out: Path | None, as_json: bool) -> None:
    from ..train.evaluation.by_depth import ByDepth

    real = f"{REAL}: {asked['ranks']} ({asked['device']})"
    told = screen.envelope("eval", asked, real=real, simulated="nothing was") | found.as_json()
    if out is not None:
        out.write_text(json.dumps(screen.finite(told), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        screen.print_json(told)
        return
    console = screen.console()
    for line in _heading(found):
        console.print(line, soft_wrap=True)
    if isinstance(found, ByDepth):
        _print_depths(console, found)
    else:
        _print_positions(console, found)
    if out is not None:
        console.print(f"record: {out}", soft_wrap=True)


def _heading(found: ByPosition | ByDepth) -> list[str]:
    subject = found.subject
    config = subject["config"]
    lines = [f"skipped {text}" for text in subject["skipped"]]
    rings = config["ranks"] // config["context_ranks"]
    where = f"{rings} ring{'s' if rings > 1 else ''} of {_several(config['context_ranks'], 'rank')}"
    lines.append(f"step {subject['step']:,} in {subject['folder']}, on {where}")
    return lines


def _several(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'s' if count != 1 else ''}"


def _print_positions(console: Any, found: ByPosition) -> None:
    for line in (f"{found.split} part of {found.corpus}", *found.notes):
        console.print(line, soft_wrap=True)
    title = f"{_several(found.sequences, 'sequence')} of {spoken_count(found.context)} tokens: loss, in nats a token"
    numbers = ("a token sees", "tokens", "loss", "+-", "perplexity")
    if found.window is not None:
        numbers += (f"sees {spoken_count(found.window)}", "worse by", "+-")
    table = screen.table(title, numbers=numbers)
    for bucket in found.buckets:
        table.add_row(_span(bucket), *_row(bucket, found.window is not None))
    if found.beyond is not None and found.beyond.tokens:
        table.add_section()
        table.add_row(f"> {spoken_count(found.beyond.least - 1)}", *_row(found.beyond, True))
    table.add_section()
    table.add_row("all", *_row(found.everything, found.window is not None))
    console.print(table)
    if found.beyond is not None:
        console.print(_verdict(found.beyond, found.window or 0), soft_wrap=True)


def _span(bucket: Bucket) -> str:
    return f"{bucket.least:,}" if bucket.least == bucket.most else f"{bucket.least:,} to {bucket.most:,}"


def _row(bucket: Bucket, has_window: bool) -> list[str]:
    perplexity = bucket.perplexity
    row = [
        f"{bucket.tokens:,}",
        _number(bucket.loss),
        _number(bucket.loss_error),
        "-" if perplexity is None else f"{perplexity:,.4g}",
    ]
    if has_window:
        row += [_number(bucket.window_loss), _number(bucket.gain), _number(bucket.gain_error)]
    return row


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _verdict(beyond: Bucket, window: int) -> str:
    """What the comparison shows, and no more than that: twice the standard error is the least that counts."""
    if beyond.gain is None:
        return f"No token sees more than {window:,}: there is nothing to compare."
    if beyond.gain_error is None:
        return "One sequence has no standard error: take more --sequences to know what the difference means."
    if abs(beyond.gain) <= 2 * beyond.gain_error:
        return f"What lies beyond {window:,} tokens makes no difference of more than twice its standard error."
    verb = "helps" if beyond.gain > 0 else "hurts"
    return f"What lies beyond {window:,} tokens {verb}: {abs(beyond.gain):.4f} +- {beyond.gain_error:.4f} nats a token."


def _print_depths(console: Any, found: ByDepth) -> None:
    window = found.subject["config"]["window"]
    title = f"Held-out keys of {_several(found.digits, 'digit')}, in texts of {spoken_count(found.context)} tokens"
    table = screen.table(title, numbers=("depth", "tokens back", "found", "of", "share", "+-", "digits right"))
    for depth in found.depths:
        table.add_row(
            f"{depth.depth:g}",
            f"{depth.tokens_back:,}",
            f"{depth.found:,}",
            f"{depth.trials:,}",
            f"{depth.share:.1%}",
            f"{depth.error:.1%}",
            f"{depth.digits:.1%}",
        )
    console.print(table)
    found_, trials = (sum(getattr(depth, name) for depth in found.depths) for name in ("found", "trials"))
    console.print(f"{found_:,} of {_several(trials, 'key')} found, {found_ / trials:.1%}.", soft_wrap=True)
    if window is not None:
        console.print(f"Attention of a layer reaches {window:,} tokens.", soft_wrap=True)
