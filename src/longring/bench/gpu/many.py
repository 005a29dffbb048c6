"""Many small tiles: packed documents and windows, by the device's time and by the wall clock, beside others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...functional import attention
from ...geometry.patterns import Dense
from ..records import Row
from .clock import by_the_wall
from .contest import Differentiated, Entry, Stage, contest
from .direct import flash_attn_4
from .given import Given, Shape, given
from .peers import beside, flex

ON_THE_WALL = "times longring's time by the wall clock"
OURS = "longring"

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def run(stage: Stage) -> Iterator[Row]:
    for shape, count in stage.sizes.documents:
        bounds = _bounds(shape.n, count)
        pattern = Dense(documents=bounds)
        yield from _one_case(stage, f"{count} documents, {shape}", shape, pattern, _of_documents(stage, bounds))
    for shape, window in stage.sizes.windows:
        pattern = Dense(window=(window - 1, 0))
        yield from _one_case(stage, f"window of {window}, {shape}", shape, pattern, _of_window(stage, shape.n, window))


def _bounds(n: int, count: int) -> list[int]:
    """Of documents whose lengths differ as much as chance makes them."""
    return [0, *sorted(random.Random(0).sample(range(1, n), count - 1)), n]


def _one_case(stage: Stage, case: str, shape: Shape, pattern: Dense, peers: dict[str, Attend]) -> list[Row]:
    x = given(shape, stage.place)
    entries: list[Entry] = [_ours(OURS, x, pattern, "auto")]
    if stage.device.type == "cuda" and flash_attn_4() is not None:  # as where that is not installed, small stacks
        entries.append(_ours("longring, triton", x, pattern, "triton"))
    entries += [Differentiated(name, x, attend, kind="package") for name, attend in peers.items()]
    rows = contest(stage, case, shape, pattern, x, entries)
    _tell_the_wall(stage, rows, entries)
    return beside(rows, OURS)


def _ours(name: str, x: Given, pattern: Dense, kernel: str) -> Differentiated:
    return Differentiated(name, x, lambda q, k, v: attention(q, k, v, pattern=pattern, kernel=kernel, return_lse=True))


def _tell_the_wall(stage: Stage, rows: list[Row], entries: Sequence[Entry]) -> None:
    """What a call takes where nothing else keeps the device busy: its launches count."""
    walls: dict[tuple[str, str], float] = {}
    for entry in entries:
        for row in rows:
            if row.name == entry.name and row.time:
                wall = walls[row.name, row.phase] = by_the_wall(entry.turn(row.phase), stage.device)
                row.note = f"{1e3 * wall:.3g} ms by the wall clock"
                if (mine := walls.get((OURS, row.phase))) is not None and row.name != OURS:
                    row.ratios[ON_THE_WALL] = wall / mine


# -------------------------------------------------------------------------------------------------- peers


def _of_documents(stage: Stage, bounds: list[int]) -> dict[str, Attend]:
    if stage.device.type != "cuda":
        return {}
    starts = torch.tensor(bounds, dtype=torch.int32, device=stage.device)
    lengths = starts.diff()
    longest, n = int(lengths.max()), bounds[-1]
    number = torch.repeat_interleave(torch.arange(len(lengths), device=stage.device), lengths.long(), output_size=n)
    return {
        "torch's flash, varlen": _flash((starts, starts, longest, longest), {}),
        **_flash_attn_4("varlen", cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest),
        "FlexAttention, compiled": flex(n, lambda b, h, i, j: (i >= j) & (number[i] == number[j]), stage.device),
    }


def _of_window(stage: Stage, n: int, window: int) -> dict[str, Attend]:
    if stage.device.type != "cuda":
        return {}
    sides = {"window_size_left": window - 1, "window_size_right": 0}
    return {
        "torch's flash, window": _flash((None, None, n, n), sides),
        **_flash_attn_4("window", window_size=(window - 1, 0)),
        "FlexAttention, compiled": flex(n, lambda b, h, i, j: (i >= j) & (i - j < window), stage.device),
    }


def _flash(lengths: tuple[Any, ...], window: dict[str, int]) -> Attend:
    """flash-attn 2 as torch has it. With boundaries it takes rows of all documents, without a batch of sequences."""
    is_packed = lengths[0] is not None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        q, k, v = (x.squeeze(0) if is_packed else x for x in (q, k, v))
        out, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, True, False, **window)
        return (out.unsqueeze(0) if is_packed else out), None

    return attend


def _flash_attn_4(what: str, **told: Any) -> dict[str, Attend]:
    package = flash_attn_4()
    if package is None:
        return {}
    is_packed = what == "varlen"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        q, k, v = (x.squeeze(0) if is_packed else x for x in (q, k, v))
        function = package.flash_attn_varlen_func if is_packed else package.flash_attn_func
        found = function(q, k, v, causal=True, **told)
        out = found[0] if isinstance(found, tuple) else found
        return (out.unsqueeze(0) if is_packed else out), None

    return {f"flash-attn-4, {what}": attend}
