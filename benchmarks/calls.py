"""What a launch costs the host: every operation on one small stack, and many stacks at once, forward and backward.

python benchmarks/calls.py

Calls are launched one after the other without waiting for the device, whose queue is never full: what is measured is
the host's time alone. The numbers are those of CALLS in longring.kernels.rates, and the last line is CALL_OF_MANY.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

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
