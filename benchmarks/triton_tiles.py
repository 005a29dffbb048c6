"""Attention over stacks in Triton on a GPU: which block sizes are fastest. Checked on sampled rows before it is timed.

python benchmarks/triton_tiles.py                        every case with the block sizes of the table
python benchmarks/triton_tiles.py --sweep longnet16      one case with every size worth trying, fastest marked

A stack's backward is exact for any out and lse of whole rows that it is given, so none is merged here: out is random,
lse a constant above what a row of a stack can reach.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

import longring as lr
from longring.geometry.itinerary import tiles_between
from longring.geometry.layouts import deal
from longring.geometry.packs import Trays, apart
from longring.geometry.patterns import Problem
from longring.geometry.task import Task
from longring.geometry.tiles import without_bands
from longring.kernels.places import Stack, stacks
from longring.kernels.triton import tiles
from longring.kernels.triton.tiles import Blocks

LONGNET = lr.Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
CASES = {
    "longnet16": (LONGNET, 1 << 20, 16, 128),
    "longnet12": (LONGNET, 1 << 20, 12, 64),
    "dense8k": (lr.Dense(causal=True), 8192, 16, 128),
    "dense32k": (lr.Dense(causal=True), 32768, 16, 128),
}
NEAR = 1e-2  # of bfloat16 against float64, relative
LSE = 12.0

FORWARD = {
    128: [(128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 8, 2, 2), (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3)],
    64: [(128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 8, 3, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 2)],
}
DQ = {
    128: [(128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 3, 2), (128, 128, 8, 2), (64, 64, 4, 2)],
    64: [(128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 128, 4, 2)],
}
DKV = {
    128: [(128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (128, 32, 8, 3, 2), (64, 32, 4, 3)],
    64: [(128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 4), (64, 64, 4, 3), (64, 32, 4, 3)],
}


class Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor
    scale: float


def tensors(n: int, heads: int, d: int) -> Tensors:
    torch.manual_seed(0)
    q, k, v, dout, out = (torch.randn(1, n, heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(5))
    return Tensors(q, k, v, dout, out, torch.full((1, heads, n), LSE, device="cuda"), d**-0.5)


def stacks_of(pattern: lr.Dilated | lr.Dense, n: int, heads: int) -> list[Stack]:
    whole = deal("contiguous", n, 1)
    task = Task(pattern, Problem(1, n, n, heads, 0), whole, whole, heads)
    return stacks([piece for tile in tiles_between(task, 0, 0) for piece in without_bands(tile)], 1)


def pairs(stack: Stack) -> int:
    rows, cols = len(stack.queries.rows), len(stack.keys.rows)
    each = rows * cols if stack.shape == "full" else rows * (rows + 1) // 2
    return stack.queries.many * stack.queries.heads * each


# ------------------------------------------------------------------------------------------------- checking


def near(got: Tensor, want: Tensor, what: str) -> None:
    error = float((got.double() - want).norm() / want.norm())
    assert error < NEAR, f"{what}: relative error {error:.2e}, allowed {NEAR:.0e}"


def samples(found: list[Stack]) -> list[tuple[int, int, int, Tensor]]:
    """(stack, which of its many, head, some of its rows): of each stack the last square, and one by chance."""
    rng = random.Random(0)
    chosen = []
    for i, stack in enumerate(found):
        many, heads, rows = stack.queries.many, stack.queries.heads, len(stack.queries.rows)
        for square in ((many - 1, heads - 1), (rng.randrange(many), rng.randrange(heads))):
            at = {0, rows - 1, *(rng.randrange(rows) for _ in range(30))}
            chosen.append((i, *square, torch.tensor(sorted(at), device="cuda")))
    return chosen


def check_forward(x: Tensors, found: list[Stack], results: list[tuple[Tensor, Tensor]]) -> None:
    for i, m, h, at in samples(found):
        stack = found[i]
        q, k, v = (place.view(t)[m, h].double() for place, t in _places(stack, x))
        scores = _masked(x.scale * (q[at] @ k.T), at, stack.shape)
        near(results[i][0][m, h, at], scores.softmax(-1) @ v, f"out of stack {i}")
        near(results[i][1][m, h, at], scores.logsumexp(-1), f"lse of stack {i}")


def check_dq(x: Tensors, found: list[Stack], dqs: list[Tensor]) -> None:
    for i, m, h, at in samples(found):
        stack = found[i]
        q, k, v = (place.view(t)[m, h].double() for place, t in _places(stack, x))
        dout, out = (stack.queries.view(t)[m, h].double()[at] for t in (x.dout, x.out))
        p = (_masked(x.scale * (q[at] @ k.T), at, stack.shape) - LSE).exp()
        ds = p * (dout @ v.T - (dout * out).sum(-1, keepdim=True))
        near(dqs[i][m, h, at], x.scale * ds @ k, f"dq of stack {i}")


def check_dkv(x: Tensors, found: list[Stack], dks: list[Tensor], dvs: list[Tensor]) -> None:
    flipped = {"full": "full", "causal": "flipped", "flipped": "causal"}
    for i, m, h, at in samples(found):  # squares, or as many keys as rows
        stack = found[i]
        q, k, v = (place.view(t)[m, h].double() for place, t in _places(stack, x))
        dout, out = (stack.queries.view(t)[m, h].double() for t in (x.dout, x.out))
        p = (_masked(x.scale * (k[at] @ q.T), at, flipped[stack.shape]) - LSE).exp()
        ds = p * (v[at] @ dout.T - (dout * out).sum(-1))
        near(dvs[i][m, h, at], p @ dout, f"dv of stack {i}")
        near(dks[i][m, h, at], x.scale * ds @ q, f"dk of stack {i}")


def _places(stack: Stack, x: Tensors):
    return (stack.queries, x.q), (stack.keys, x.k), (stack.keys, x.v)


def _masked(scores: Tensor, at: Tensor, shape: str) -> Tensor:
    cols = torch.arange(scores.shape[1], device=scores.device)
    hidden = {"full": cols < 0, "causal": cols > at[:, None], "flipped": cols < at[:, None]}[shape]
    return scores.masked_fill(hidden, -torch.inf)


# --------------------------------------------------------------------------------------------------- timing


def milliseconds(function: Callable[[], object], repeats: int = 5) -> float:
    function()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def tried(name: str, sizes: list[Blocks], run: Callable[[Blocks], object], check: Callable, flop: float) -> float:
    """Every size checked and timed; the best time."""
    best = float("inf")
    for blocks in sizes:
        try:
            check(run(blocks))
            ms = milliseconds(lambda blocks=blocks: run(blocks))
        except OutOfResources as error:
            print(f"  {name:8} {tuple(blocks)!s:22} does not fit: {error}", flush=True)
            continue
        best = min(best, ms)
        mark = "*" if ms == best else " "
        print(f"  {name:8} {tuple(blocks)!s:22} {ms:8.2f} ms {flop / ms * 1e-9:6.0f} TFLOP/s {mark}", flush=True)
    return best


def on_trays(x: Tensor, trays: Trays) -> list[Tensor]:
    return [tiles._on_tray(x, tray) for tray in trays.trays]


def run_case(name: str, is_sweep: bool) -> None:
    pattern, n, heads, d = CASES[name]
    x, found = tensors(n, heads, d), stacks_of(pattern, n, heads)
    flop = 4.0 * d * sum(pairs(stack) for stack in found)
    print(f"{name}: {len(found)} stacks, {flop * 1e-12:.1f} TFLOP forward", flush=True)
    table = tiles.sizes_for(x.q)
    sizes = [[one] for one in table]
    if is_sweep:
        sizes = [[Blocks(*size) for size in some[d]] for some in (FORWARD, DQ, DKV)]
    delta, log2 = tiles._row_terms(x.dout, x.out, x.lse, None)
    pack = apart(found)
    terms = tiles._queries_backward(x.dout, delta, log2, *x[:3], pack, x.scale, None, table.dq)[1]
    before = milliseconds(lambda: tiles._row_terms(x.dout, x.out, x.lse, None))

    def forward(blocks: Blocks) -> list[tuple[Tensor, Tensor]]:
        return tiles.forward(*x[:3], pack, x.scale, sizes=table._replace(forward=blocks))

    def dq(blocks: Blocks) -> Tensor:
        return tiles._queries_backward(x.dout, delta, log2, *x[:3], pack, x.scale, None, blocks)[0]

    def dkv(blocks: Blocks) -> tuple[Tensor, Tensor]:
        return tiles._keys_backward(x.dout, terms, *x[:3], pack, x.scale, None, blocks)

    tried("forward", sizes[0], forward, lambda got: check_forward(x, found, got), flop)
    # three and four of the products of a square's sides; together they count as the five that are needed
    queries = tried("dq", sizes[1], dq, lambda got: check_dq(x, found, on_trays(got, pack.queries)), 1.5 * flop)
    keys = tried(
        "dkv", sizes[2], dkv, lambda got: check_dkv(x, found, *(on_trays(g, pack.keys) for g in got)), 2.0 * flop
    )
    total = before + queries + keys
    print(f"  backward {total:.2f} ms, {before:.2f} of it for the rows' terms: {2.5 * flop / total * 1e-9:.0f} TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Block sizes of the Triton attention over stacks.")
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all if none is named")
    parser.add_argument("--sweep", action="store_true", help="every size worth trying, not the table's alone")
    args = parser.parse_args()
    unknown = set(args.cases) - set(CASES)
    if unknown:
        parser.error(f"no case is named {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    for name in args.cases or CASES:
        run_case(name, args.sweep)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
