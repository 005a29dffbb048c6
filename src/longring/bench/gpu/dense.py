"""One call of longring beside every fused kernel called directly: what the call itself costs."""

from __future__ import annotations

from collections.abc import Iterator

from ...functional import attention
from ...geometry.patterns import Dense
from ..records import Row
from .contest import Differentiated, Directly, Entry, Stage, best, compare, contest
from .direct import direct_kernels
from .given import Given, Shape, given

TO_THE_BEST = "times the best kernel called directly"
NEWEST = "flash_attn_4"
WITHOUT = f"longring without {NEWEST}"
FAR_BEHIND, FAR = "efficient", 64 << 10  # takes four to seven times as long as the best: shown up to so many tokens


def run(stage: Stage) -> Iterator[Row]:
    for shape, causal in stage.sizes.dense:
        yield from one_shape(stage, shape, causal)


def one_shape(stage: Stage, shape: Shape, causal: bool) -> list[Row]:
    pattern = Dense(causal=causal)
    x = given(shape, stage.place)
    kernels = direct_kernels(stage.device)
    if shape.n > FAR:
        kernels.pop(FAR_BEHIND, None)
    entries: list[Entry] = [_ours("longring", x, pattern, "auto")]
    if NEWEST in kernels:  # and as if it were not installed
        entries.append(_ours(WITHOUT, x, pattern, "cudnn"))
    entries += [Directly(kernel, x, causal) for kernel in kernels.values()]
    case = f"{'causal' if causal else 'full'}, {shape}"
    rows = contest(stage, case, shape, pattern, x, entries, repeats=stage.sizes.dense_repeats)
    for phase in ("forward", "backward"):
        compare(rows, "longring", best(rows, phase, "kernel"), TO_THE_BEST)
        compare(rows, WITHOUT, best([row for row in rows if row.name != NEWEST], phase, "kernel"), TO_THE_BEST)
    return rows


def _ours(name: str, x: Given, pattern: Dense, kernel: str) -> Differentiated:
    return Differentiated(name, x, lambda q, k, v: attention(q, k, v, pattern=pattern, kernel=kernel, return_lse=True))
