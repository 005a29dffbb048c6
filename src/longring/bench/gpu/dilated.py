"""LongNet's dilated attention: longring beside the authors' code and another's, time, memory and rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...functional import attention
from ...geometry.patterns import Dense, Dilated
from ..records import Row
from .clock import peak_beyond, release
from .contest import Differentiated, Directly, Entry, Stage, best, compare, contest
from .direct import direct_kernels
from .given import Given, Shape, given
from .packages import dilated_peers

TO_LONGNET = "times as fast as LongNet's own code"
DENSE_RATE = "of the best dense kernel's rate"
DENSE_LENGTH = 32 << 10  # where dense kernels are at their best


def run(stage: Stage) -> Iterator[Row]:
    for shape in stage.sizes.dilated:
        yield from one_shape(stage, shape)


def one_shape(stage: Stage, shape: Shape) -> list[Row]:
    sizes = stage.sizes
    pattern = Dilated(sizes.segment_lengths, sizes.dilation_rates, causal=True)
    x = given(shape, stage.place)
    ours = Differentiated("longring", x, lambda q, k, v: attention(q, k, v, pattern=pattern, return_lse=True))
    peers = dilated_peers(stage, x, pattern)
    rows = contest(stage, str(shape), shape, pattern, x, [ours, *peers])
    _tell_memory(stage, rows, x, [ours, *peers])
    del peers
    release(stage.device)
    _tell_rate(stage, rows, shape)
    for phase in ("forward", "backward"):
        theirs = next((row for row in rows if row.name == "torchscale" and row.phase == phase), None)
        compare(rows, "longring", theirs, TO_LONGNET, efficiency=True)
    return rows


def _tell_memory(stage: Stage, rows: list[Row], x: Given, entries: Sequence[Entry]) -> None:
    """Beyond inputs and outputs, in units of one tensor. lse counts as an output."""
    outputs = {"forward": x.tensor_bytes + 4 * x.q[..., 0].numel(), "backward": 3 * x.tensor_bytes}
    for entry in entries:
        for row in rows:
            if row.name == entry.name and row.time:
                turn = entry.turn(row.phase)
                turn.before()
                release(stage.device)
                peak = peak_beyond(turn.call, stage.device)
                turn.after()
                if peak is not None:
                    row.extra_memory = (peak - outputs[row.phase]) / x.tensor_bytes


def _tell_rate(stage: Stage, rows: list[Row], shape: Shape) -> None:
    """Beside the best dense kernel on the same heads, causal, in the same run."""
    n = min(shape.n, DENSE_LENGTH)
    alike = shape._replace(n=n)
    x = given(alike, stage.place)
    kernels = [Directly(kernel, x, True) for kernel in direct_kernels(stage.device).values()]
    dense = contest(stage, f"causal, {alike}", alike, Dense(causal=True), x, kernels)
    for phase in ("forward", "backward"):
        fastest = best(dense, phase, "kernel")
        for row in rows:
            if row.name == "longring" and row.phase == phase and row.tflops and fastest and fastest.tflops:
                row.ratios[DENSE_RATE] = row.tflops / fastest.tflops
