"""Whether rounding grows with the number of ranks: errors of whole tensors, against float64, of several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...functional import attention
from ...geometry.patterns import Dense
from ...schedules.buffers import release_buffers
from ...testing.sampled import exact_columns, exact_rows
from ..records import Row
from .check import Errors, Result
from .contest import Differentiated, Entry, Stage
from .direct import direct_kernels
from .given import Given, given
from .recreated import RingFlashAttention, TransformerEngine
from .virtual_ring import VirtualRing

CAUSAL = Dense(causal=True)
TO_ONE_CALL = "times one call's error in the worst of out, dq, dk and dv"
TO_ITS_LSE = "times its error in lse"
KERNELS = ("cudnn", "flash", "cpu")  # what the re-created rings compute with: the first that is there


def run(stage: Stage) -> Iterator[Row]:
    shape, ranks = stage.sizes.error
    found: dict[str, list[Errors]] = {}
    kinds: dict[str, str] = {}
    for seed in stage.sizes.seeds:
        x = given(shape, stage.place, seed=seed)
        want = whole(x)
        for entry in entries(stage, x, ranks):
            kinds[entry.name] = entry.kind
            found.setdefault(entry.name, []).append(relative_errors(entry.result(), want))
            release_buffers()
    medians = {name: _medians(seeds) for name, seeds in found.items()}
    base = medians["one call"]
    for name, errors in medians.items():
        ratios = {} if name == "one call" else _ratios(errors, base)
        note = f"median of {len(stage.sizes.seeds)} seeds, all rows"
        yield Row(f"{ranks} ranks, {shape}", "both", name, kinds[name], ratios=ratios, errors=errors, note=note)


def _ratios(errors: Errors, base: Errors) -> dict[str, float]:
    """lse apart: it is in float32, where a last digit decides."""
    times = {quantity: errors[quantity] / base[quantity] for quantity in errors}
    lse = times.pop("lse")
    return {TO_ONE_CALL: max(times.values()), TO_ITS_LSE: lse}


def entries(stage: Stage, x: Given, ranks: int) -> list[Entry]:
    def one(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, pattern=CAUSAL, return_lse=True)

    kernels = direct_kernels(stage.device)
    kernel = next(kernels[name] for name in KERNELS if name in kernels)
    return [
        Differentiated("one call", x, one),
        VirtualRing(x, CAUSAL, ranks),
        RingFlashAttention(x, ranks, kernel),
        TransformerEngine(x, ranks, kernel),
    ]


def whole(x: Given) -> Result:
    """Every row and column in float64, from q, k, v and dout alone."""
    everything = torch.arange(x.q.shape[1], device=x.q.device)
    rows = exact_rows(x, CAUSAL, everything)
    assert rows.dq is not None
    columns = exact_columns(x, CAUSAL, everything, rows.out.value, rows.lse)
    return Result(rows.out.value, rows.lse, rows.dq.value, columns.dk.value, columns.dv.value)


def relative_errors(got: Result, want: Result) -> Errors:
    """By the Frobenius norm."""
    pairs: dict[str, tuple[Any, Any]] = {name: (getattr(got, name), getattr(want, name)) for name in Result._fields}
    return {name: float((a.double() - b).norm() / b.norm()) for name, (a, b) in pairs.items() if a is not None}


def _medians(seeds: list[Errors]) -> Errors:
    return {name: statistics.median(errors[name] for errors in seeds) for name in seeds[0]}
