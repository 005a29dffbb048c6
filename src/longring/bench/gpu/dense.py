"""One call of longring beside every fused kernel called directly: what the call itself costs."""

from __future__ import annotations

from collections.abc import Iterator

from ...functional import attention
from ...geometry.patterns import Dense
from .contest import Differentiated, Directly, Stage, best, compare, contest
from .direct import direct_kernels
from .given import Shape, given
from .record import Row

TO_THE_BEST = "times the best kernel called directly"


def run(stage: Stage) -> Iterator[Row]:
    for shape, causal in stage.sizes.dense:
        yield from one_shape(stage, shape, causal)


def one_shape(stage: Stage, shape: Shape, causal: bool) -> list[Row]:
    pattern = Dense(causal=causal)
    x = given(shape, stage.place)
    ours = Differentiated("longring", x, lambda q, k, v: attention(q, k, v, pattern=pattern, return_lse=True))
    kernels = [Directly(kernel, x, causal) for kernel in direct_kernels(stage.device).values()]
    rows = contest(stage, f"{'causal' if causal else 'full'}, {shape}", shape, pattern, x, [ours, *kernels])
    for phase in ("forward", "backward"):
        compare(rows, "longring", best(rows, phase, "kernel"), TO_THE_BEST)
    return rows
