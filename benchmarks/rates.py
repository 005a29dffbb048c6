"""The tables of src/longring/kernels/rates.py, measured: every operation of this GPU.

python benchmarks/rates.py                   # on tiles of many sizes: prints the cases as the table has them
python benchmarks/rates.py flash_attn_3      # of these operations alone
python benchmarks/rates.py --many            # with documents and windows in one launch, in TFLOP/s of whole blocks
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import torch

import longring as lr
from longring.bench.gpu.clock import Turn, timed
from longring.geometry.tiles import pairs_in_band
from longring.kernels.operations.contract import Operation, Rows, TakesMany
from longring.kernels.rates import BLOCK, OF_MANY, SECOND, Pass, Size, cost_together
from longring.kernels.select import KERNELS, ON_GPU

HEADS = 16
SQUARES = [(1, 256), (1, 512), (1, 1024), (1, 2048), (1, 4096), (1, 8192), (1, 16384), (1, 32768)]
SQUARES += [(512, 128), (128, 512), (32, 2048), (8, 2048)]
OBLONGS = [(1, 1024, 512), (1, 2048, 1024), (1, 4096, 2048), (1, 8192, 4096), (1, 4096, 8192), (1, 16384, 8192)]
OBLONGS += [(1, 8192, 16384), (1, 8192, 8192), (1, 32768, 16384), (32, 512, 512)]
CASES = [(many, n, n, True) for many, n in SQUARES] + [(*oblong, False) for oblong in OBLONGS]

PACKED = 64 * 1024  # tokens of documents together
DOCUMENTS = (100, 16)
WINDOWED = 128 * 1024
WINDOWS = (4096, 512)


def tensor(many: int, n: int, d: int) -> torch.Tensor:
    return torch.randn(many, n, HEADS, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)


# --------------------------------------------------------------------------------------------- tile by tile


def of_tiles(operations: Sequence[Operation]) -> None:
    for d in (64, 128):
        for many, rows, cols, causal in CASES:
            found = measured(operations, d, many, rows, cols, causal)
            columns = ", ".join(str(found.get(operation.name)) for operation in operations)
            print(f"    Case({d}, {many * HEADS}, {rows}, {cols}, {causal}, {columns}),", flush=True)
    print("#", [operation.name for operation in operations])


def measured(
    operations: Sequence[Operation], d: int, many: int, rows: int, cols: int, causal: bool
) -> dict[str, tuple[int, int]]:
    """TFLOP/s of the pairs that are kept, forward and backward, by the name of the operation."""
    q, k, v, dout = tensor(many, rows, d), tensor(many, cols, d), tensor(many, cols, d), tensor(many, rows, d)
    forward, backward = {}, {}
    for operation in operations:
        if operation.refusal(q, d) is None:
            given = (q, k, v, causal, d**-0.5)
            known = Rows(dout, *operation.forward(*given), None)
            forward[operation.name] = Turn(lambda o=operation, g=given: o.forward(*g))
            backward[operation.name] = Turn(lambda o=operation, g=given, r=known: o.backward(r, *g))
    work = 4e-12 * many * HEADS * rows * cols * d / (2 if causal else 1)
    times = [timed(turns, q.device, repeats=5) for turns in (forward, backward)]
    seconds = [{name: median(found) for name, found in turns.items()} for turns in times]
    return {name: (round(work / seconds[0][name]), round(2.5 * work / seconds[1][name])) for name in forward}


# ----------------------------------------------------------------------------------------------- many at once


def of_many(operations: Sequence[Operation]) -> None:
    names = [one.name for one in operations if isinstance(one, TakesMany)]
    for d in (64, 128):
        for count in DOCUMENTS:
            bounds = [0, *sorted(random.Random(0).sample(range(1, PACKED), count - 1)), PACKED]
            sizes = [Size(d, HEADS, stop - start, stop - start, True) for start, stop in pairwise(bounds)]
            tell_many(f"{count} documents, d = {d}", names, lr.Dense(documents=bounds), sizes)
        for window in WINDOWS:
            n = WINDOWED
            seen = pairs_in_band(n, n, 1 - window, 0) // n + BLOCK
            sizes = [Size(d, HEADS, n, seen, False)]
            tell_many(f"window of {window}, d = {d}", names, lr.Dense(window=(window - 1, 0)), sizes)


def tell_many(what: str, names: Sequence[str], pattern: lr.Dense, sizes: Sequence[Size]) -> None:
    """The rates with which the estimate would be what is measured."""
    q, k, v, dout = (tensor(1, sum(size.rows for size in sizes), sizes[0].d).transpose(1, 2) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    forward, backward = {}, {}
    for name in names:
        if KERNELS[name].refusal(q, k) is None:
            out = lr.attention(q, k, v, pattern=pattern, kernel=name)
            forward[name] = Turn(lambda name=name: lr.attention(q, k, v, pattern=pattern, kernel=name))
            backward[name] = Turn(lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    passes: dict[Pass, dict[str, Turn]] = {"forward": forward, "backward": backward}
    for which, turns in passes.items():
        for name, found in timed(turns, q.device, repeats=5).items():
            known = OF_MANY["flash" if name in SECOND else name][64 if sizes[0].d <= 64 else 128]
            estimate = sum(cost_together(name, which, size, "hopper").device for size in sizes)
            rate = known[which == "backward"] * estimate / median(found)
            print(f"{what}, {which}, {name}: {1e3 * median(found):.3f} ms, {rate:.0f} TFLOP/s", flush=True)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    parser = argparse.ArgumentParser(description="Rates of the operations of this GPU.")
    parser.add_argument("names", nargs="*", metavar="OPERATION", help="all where none is named")
    parser.add_argument("--many", action="store_true", help="documents and windows instead of tiles")
    options = parser.parse_args()
    operations = [one for one in ON_GPU if not options.names or one.name in options.names]
    (of_many if options.many else of_tiles)(operations)


if __name__ == "__main__":
    main()
