"""What a launch costs the host: every operation on one small stack, and many stacks at once, forward and backward.

python benchmarks/calls.py             # the operations alone
python benchmarks/calls.py --whole     # and whole calls of longring, by the wall clock and by the device's

Calls are launched one after the other without waiting for the device, whose queue is never full: what is measured is
the host's time alone. The numbers are what CALLS and CALL_OF_MANY in longring.kernels.rates were taken from.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import longring as lr
from longring.geometry.packs import Pack, Whole, pack
from longring.geometry.stacks import Place, Stack
from longring.kernels.operations.contract import Rows
from longring.kernels.operations.triton import TritonTiles
from longring.kernels.select import ON_GPU

HEADS, ROWS, D = 4, 128, 128
DOCUMENTS = 100


def microseconds(call: Callable[[], object], times: int = 20) -> float:
    call()
    found = []
    for _ in range(9):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            call()
        found.append((time.perf_counter() - begin) / times * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


def tensors(*shape: int) -> list[Tensor]:
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def documents() -> Pack:
    """A hundred of as many lengths, in all as many rows as they need."""
    lengths = [ROWS // 2 + i for i in range(DOCUMENTS)]
    starts = [sum(lengths[:i]) for i in range(DOCUMENTS + 1)]
    places = [
        Place(range(1), 1, 0, range(HEADS), 0, range(first, first + length), 1)
        for first, length in zip(starts, lengths, strict=False)
    ]
    whole = Whole(1, range(starts[-1]), HEADS, 1)
    return pack([Stack(place, place, hi=0) for place in places], whole, whole)


# ------------------------------------------------------------------------------------------------- whole calls

LONGNET = {"segment_lengths": [2048 << i for i in range(5)], "dilation_rates": [1 << i for i in range(5)]}


def on_the_device(call: Callable[[], object]) -> float:
    """Microseconds between two events, the device kept waiting until everything is launched."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(9):
        torch.cuda._sleep(20_000_000)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * begin.elapsed_time(end))
    return statistics.median(found)


def by_the_wall(call: Callable[[], object], times: int = 20) -> float:
    """Microseconds of a call among others like it, until the last is done."""

    def row() -> None:
        for _ in range(times):
            call()
        torch.cuda.synchronize()

    return microseconds(row, times=1) / times


def whole_call(name: str, attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
    with torch.no_grad():
        forward = by_the_wall(lambda: attend(q, k, v)), on_the_device(lambda: attend(q, k, v))
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*given)

    def back() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, given, q, retain_graph=True)

    backward = by_the_wall(back), on_the_device(back)
    shown = "  ".join(f"{pair[0]:6.0f} / {pair[1]:6.0f}" for pair in (forward, backward))
    print(f"{name:44} {shown}", flush=True)


def whole_calls() -> None:
    print("by the wall clock / of the device, forward and backward")
    for heads, d in ((12, 64), (16, 128)):
        for n in (1 << 13, 1 << 14, 1 << 15, 1 << 16):
            q, k, v, _ = tensors(1, n, heads, d)
            for kernel in ("auto", "triton", "flash_attn_4"):
                attend = partial(lr.dilated_attention, **LONGNET, kernel=kernel)
                whole_call(f"LongNet, {n} tokens, {heads} heads of {d}, {kernel}", attend, q, k, v)
    for n in (1024, 2048, 4096, 8192):
        q, k, v, _ = tensors(1, n, 16, 128)
        for kernel in ("auto", "flash_attn_4", "cudnn", "flash"):
            whole_call(f"causal, {n} tokens, {kernel}", partial(lr.attention, kernel=kernel), q, k, v)


def main() -> None:
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}; microseconds of the host, forward and backward")
    q, k, v, dout = tensors(1, HEADS, ROWS, D)
    for operation in ON_GPU:
        if (why := operation.refusal(q, D)) is not None:
            print(f"{operation.name:14} {why}")
            continue
        out, lse = operation.forward(q, k, v, True, D**-0.5)
        rows = Rows(dout, out, lse, None)
        forward = microseconds(lambda one=operation: one.forward(q, k, v, True, D**-0.5))
        backward = microseconds(lambda one=operation, rows=rows: one.backward(rows, q, k, v, True, D**-0.5))
        print(f"{operation.name:14} {forward:7.0f} {backward:7.0f}", flush=True)
    many = documents()
    operation, n = TritonTiles(), len(many.queries.trays[0].place.rows)
    q, k, v, dout = tensors(1, n, HEADS, D)
    ((out, lse),) = operation.forward_many(q, k, v, many, D**-0.5)
    rows = Rows(dout, out.transpose(1, 2), lse, None)
    forward = microseconds(lambda: operation.forward_many(q, k, v, many, D**-0.5))
    backward = microseconds(lambda: operation.backward_many(rows, q, k, v, many, D**-0.5))
    print(f"{DOCUMENTS} stacks     {forward:7.0f} {backward:7.0f}")


if __name__ == "__main__":
    main()
    if "--whole" in sys.argv[1:]:
        whole_calls()
