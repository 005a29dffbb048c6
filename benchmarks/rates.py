"""The table of src/longring/kernels/rates.py, measured: every operation of this GPU on tiles of many sizes.

python benchmarks/rates.py                   # prints the cases as the table has them
"""

from __future__ import annotations

import sys
from statistics import median

import torch

from longring.bench.gpu.clock import Turn, timed
from longring.kernels.operations.contract import Rows
from longring.kernels.select import ON_GPU

HEADS = 16
SQUARES = [(1, 256), (1, 512), (1, 1024), (1, 2048), (1, 4096), (1, 8192), (1, 16384), (1, 32768)]
SQUARES += [(512, 128), (128, 512), (32, 2048), (8, 2048)]
OBLONGS = [(1, 1024, 512), (1, 2048, 1024), (1, 4096, 2048), (1, 8192, 4096), (1, 4096, 8192), (1, 16384, 8192)]
OBLONGS += [(1, 8192, 16384), (1, 8192, 8192), (1, 32768, 16384), (32, 512, 512)]
CASES = [(many, n, n, True) for many, n in SQUARES] + [(*oblong, False) for oblong in OBLONGS]


def tensor(many: int, n: int, d: int) -> torch.Tensor:
    return torch.randn(many, n, HEADS, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)


def measured(d: int, many: int, rows: int, cols: int, causal: bool) -> dict[str, tuple[int, int]]:
    """TFLOP/s of the pairs that are kept, forward and backward, by the name of the operation."""
    q, k, v, dout = tensor(many, rows, d), tensor(many, cols, d), tensor(many, cols, d), tensor(many, rows, d)
    forward, backward = {}, {}
    for operation in ON_GPU:
        if operation.refusal(q, d) is None:
            given = (q, k, v, causal, d**-0.5)
            known = Rows(dout, *operation.forward(*given), None)
            forward[operation.name] = Turn(lambda o=operation, g=given: o.forward(*g))
            backward[operation.name] = Turn(lambda o=operation, g=given, r=known: o.backward(r, *g))
    work = 4e-12 * many * HEADS * rows * cols * d / (2 if causal else 1)
    times = [timed(turns, q.device, repeats=5) for turns in (forward, backward)]
    seconds = [{name: median(found) for name, found in turns.items()} for turns in times]
    return {name: (round(work / seconds[0][name]), round(2.5 * work / seconds[1][name])) for name in forward}


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    for d in (64, 128):
        for many, rows, cols, causal in CASES:
            found = measured(d, many, rows, cols, causal)
            columns = ", ".join(str(found.get(operation.name)) for operation in ON_GPU)
            print(f"    Case({d}, {many * HEADS}, {rows}, {cols}, {causal}, {columns}),", flush=True)
    print("#", [operation.name for operation in ON_GPU])


if __name__ == "__main__":
    main()
