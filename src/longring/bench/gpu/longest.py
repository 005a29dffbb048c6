"""The longest contexts that fit on the device, each computed once, checked, and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ...functional import attention
from ...geometry.patterns import Dense, Dilated, Pattern
from ..records import Row, Spread
from .check import Errors, Result, check
from .clock import Turn, once, release, timed
from .contest import Stage
from .given import Given, Shape, given
from .work import flops

PASSES = {"forward": ("forward",), "both": ("forward", "backward")}


def run(stage: Stage) -> Iterator[Row]:
    sizes = stage.sizes
    dilated = Dilated(sizes.segment_lengths, sizes.dilation_rates, causal=True)
    yield from _guarded(stage, f"dilated forward, {sizes.longest_dilated}", dilated, sizes.longest_dilated, _forward)
    yield from _guarded(stage, f"dilated both, {sizes.longest_backward}", dilated, sizes.longest_backward, _both)
    causal = Dense(causal=True)
    yield from _guarded(stage, f"causal forward, {sizes.longest_dense}", causal, sizes.longest_dense, _forward_once)


class Played(NamedTuple):
    phase: str
    time: Spread
    errors: Errors
    peak: str  # in words


Play = Callable[[Stage, Shape, Pattern], Played]


def _guarded(stage: Stage, case: str, pattern: Pattern, shape: Shape, play: Play) -> Iterator[Row]:
    """What does not fit is a failure of its own, and the next is tried."""
    release(stage.device)
    try:
        phase, time, errors, peak = play(stage, shape, pattern)
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        stage.failed(f"{case}: {why}")
        yield Row(case, "both", "longring", note=f"failed: {why}")
        return
    work = sum(flops(shape, pattern, one) for one in PASSES[phase])
    yield Row(
        case, phase, "longring", "ours", time, work / time.median / 1e12, errors=errors, note=peak, tokens=shape.n
    )


def _forward(stage: Stage, shape: Shape, pattern: Pattern) -> Played:
    x = given(shape, stage.place, backward=False)

    def call() -> Any:
        with torch.no_grad():
            return attention(x.q, x.k, x.v, pattern=pattern, return_lse=True)

    return _repeated(stage, "forward", call, x, pattern)


def _both(stage: Stage, shape: Shape, pattern: Pattern) -> Played:
    x = given(shape, stage.place)
    leaves = x.with_gradients()

    def call() -> Any:
        out, lse = attention(leaves.q, leaves.k, leaves.v, pattern=pattern, return_lse=True)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves[:3], leaves.upstream)

    return _repeated(stage, "both", call, x, pattern)


def _repeated(stage: Stage, phase: str, call: Callable[[], Any], x: Given, pattern: Pattern) -> Played:
    with _peak(stage) as peak:
        found = Result(*call())
    errors = check(x, pattern, found)
    del found
    times = timed({phase: Turn(call)}, stage.device, repeats=stage.sizes.repeats, is_warm=True)[phase]
    return Played(phase, Spread.of(times), errors, *peak)


def _forward_once(stage: Stage, shape: Shape, pattern: Pattern) -> Played:
    """Checked on the very result that was timed, since it takes long."""
    x = given(shape, stage.place, backward=False)
    with torch.no_grad(), _peak(stage) as peak:
        found, time = once(lambda: attention(x.q, x.k, x.v, pattern=pattern, return_lse=True), stage.device)
    return Played("forward", time, check(x, pattern, Result(*found)), *peak)


@contextmanager
def _peak(stage: Stage) -> Iterator[list[str]]:
    """In a list, once it is known: bytes on the device at most, everything included."""
    told: list[str] = []
    if stage.device.type != "cuda":
        yield told
        told.append("")
        return
    torch.cuda.reset_peak_memory_stats(stage.device)
    yield told
    torch.cuda.synchronize(stage.device)
    told.append(f"{torch.cuda.max_memory_allocated(stage.device) / 2**30:.0f} GiB at most, tensors included")
