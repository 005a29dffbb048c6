"""Options that commands share, so that the same word means the same everywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ArgumentError
from ..geometry.patterns import Dense, Dilated, Pattern
from ..plan.quantities import MOST, count, split_branches

MANY = 1_000_000  # ranks or heads: more of them is a slip of the keyboard, and would be counted for hours
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
"""Bytes of a number, by the name of its type."""


class _Refused(typer.BadParameter):
    """Says what is wrong in our words, which name the option; not a ValueError, of which typer would show the type."""

    def format_message(self) -> str:
        return self.message


def a_count(name: str, least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """Reads 1M, 1Mi, 1e6 and 1_000_000 alike; the error names the option."""

    def read(text: str) -> int:
        try:
            return count(text, of=name, least=least, most=most)
        except ArgumentError as error:
            raise _Refused(str(error)) from None

    return read


def counts(name: str) -> Callable[[str], tuple[int, ...]]:
    """Reads 4Ki,16Ki,64Ki; each once."""
    read = a_count(name)

    def read_all(text: str) -> tuple[int, ...]:
        parts = [part.strip() for part in text.split(",")]
        if any(part[:1] == "0" and len(part) > 1 for part in parts[1:]):  # 4,096 was meant for one number
            raise _Refused(f"{name} takes several numbers, with commas between them, so none within: got {text!r}")
        return tuple(dict.fromkeys(read(part) for part in parts))

    return read_all


def a_size(name: str) -> Callable[[str], int]:
    """Reads 40GiB, 40G and 512MiB: a count of bytes, with or without a B behind it, or 0."""

    def read(text: str) -> int:
        try:
            return count(str(text).strip().removesuffix("B"), of=name, least=0)
        except ArgumentError:
            raise _Refused(f"{name} must be a size like 40GiB, 512MiB or 0, got {text!r}") from None

    return read


def counted(name: str, help_: str, default: str, least: int = 1) -> Any:
    """An option that is a count, whose default is said in words."""
    return typer.Option(name, parser=a_count(name, least=least), metavar="COUNT", help=help_, show_default=default)


def named(name: str, help_: str, default: str, metavar: str = "NAME") -> Any:
    return typer.Option(name, metavar=metavar, help=help_, show_default=default)


def numbered(name: str, help_: str, default: str) -> Any:
    return typer.Option(name, metavar="NUMBER", help=help_, show_default=default)


Tokens = Annotated[
    int,
    typer.Option(
        "--tokens", parser=a_count("--tokens"), metavar="COUNT", help="Length of the sequence: 4096, 64K, 1M, 1Mi, 1e6."
    ),
]
Ranks = Annotated[
    int,
    typer.Option(
        "--ranks", parser=a_count("--ranks", most=MANY), metavar="COUNT", help="Processes that share it, a GPU each."
    ),
]
Nodes = Annotated[
    int,
    typer.Option(
        "--nodes",
        parser=a_count("--nodes", most=MANY),
        metavar="COUNT",
        help="Machines the ranks are spread over evenly.",
    ),
]
Batch = Annotated[
    int, typer.Option("--batch", parser=a_count("--batch", most=MANY), metavar="COUNT", help="Sequences at a time.")
]
Heads = Annotated[
    int, typer.Option("--heads", parser=a_count("--heads", most=MANY), metavar="COUNT", help="Query heads.")
]
KvHeads = Annotated[
    int | None,
    typer.Option(
        "--kv-heads",
        parser=a_count("--kv-heads", most=MANY),
        metavar="COUNT",
        help="Key and value heads; divide the query heads.",
        show_default="as many as heads",
    ),
]
HeadDim = Annotated[
    int, typer.Option("--head-dim", parser=a_count("--head-dim", most=MANY), metavar="COUNT", help="Numbers of a head.")
]
Dtype = Annotated[str, typer.Option("--dtype", metavar="NAME", help=f"Type of q, k and v: {', '.join(DTYPES)}.")]
Causal = Annotated[bool, typer.Option("--causal/--full", help="Whether a token sees those before it alone, or all.")]
Window = Annotated[
    int | None,
    typer.Option(
        "--window",
        parser=a_count("--window"),
        metavar="COUNT",
        help="How far a query sees to each side, itself included.",
        show_default="all",
    ),
]
Branches = Annotated[
    str | None,
    typer.Option(
        "--dilated",
        metavar="LENGTH:RATE,...",
        help="LongNet's segments and rates, as 2048:1,4096:2,8192:4.",
        show_default="dense attention",
    ),
]
Layout = Annotated[
    str, typer.Option("--layout", metavar="NAME", help="How tokens are dealt to ranks; auto looks at the pattern.")
]
Schedule = Annotated[
    str, typer.Option("--schedule", metavar="NAME", help="In what order ranks meet; auto looks at the cost.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, metavar="NUMBER", help="Of the random inputs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
ReportPath = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE", help="Write one HTML page with pictures and all numbers.", show_default="none"
    ),
]


def bytes_of(dtype: str) -> int:
    if dtype not in DTYPES:
        raise ArgumentError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def kv_heads_of(heads: int, kv_heads: int | None) -> int:
    if kv_heads is not None and heads % kv_heads:
        raise ArgumentError(f"--heads must be a multiple of --kv-heads, got {heads} and {kv_heads}")
    return kv_heads or heads


def pattern_of(*, causal: bool, window: int | None, dilated: str | None) -> Pattern:
    """Dense, or dilated where branches are given."""
    if dilated is None:
        return Dense(causal=causal, window=None if window is None else (window - 1, 0 if causal else window - 1))
    if window is not None:
        raise ArgumentError("--window is for dense attention; leave out --window or --dilated")
    branches = [_branch(text) for text in split_branches(dilated)]
    return Dilated(
        segment_lengths=tuple(w for w, _ in branches), dilation_rates=tuple(r for _, r in branches), causal=causal
    )


def _branch(text: str) -> tuple[int, int]:
    length, colon, rate = text.strip().partition(":")
    if not colon:
        raise ArgumentError(f"--dilated takes LENGTH:RATE pairs, as 2048:1,4096:2, got {text!r}")
    return count(length, of="a segment length of --dilated"), count(rate, of="a rate of --dilated")


def check_writable(path: Path | None, option: str = "--report") -> None:
    """Refuse a path before the work, not after it; nothing is left there until there is something to write."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not os.path.lexists(path)
        if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would wait for a reader
            raise ArgumentError(f"{option} {path} cannot be written: it is a pipe or a device; name a file")
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as failure:
        raise ArgumentError(f"{option} {path} cannot be written: {failure.strerror or failure}") from failure


def check_apart(**paths: Path | None) -> None:
    """Refuse two outputs in one file, of which one would be lost."""
    given = [(name, os.path.realpath(path)) for name, path in paths.items() if path is not None]
    for i, (name, path) in enumerate(given):
        for other, another in given[:i]:
            if path == another:
                raise ArgumentError(f"--{other} and --{name} are the same file, {path}; write them to two")
