"""How fast partial results are merged: bytes moved a second, beside a plain copy, for several sizes of a program.

python benchmarks/parts.py
"""

from __future__ import annotations

import torch

from longring.geometry.itinerary import tiles_between
from longring.geometry.layouts import deal
from longring.geometry.patterns import Dilated, Problem
from longring.geometry.task import Task
from longring.geometry.tiles import without_bands
from longring.kernels.places import Part, Place, Stack, stacks
from longring.kernels.triton import parts as module
from longring.kernels.triton.parts import add_parts, merge_parts
from longring.numerics.online_softmax import Partial

HEADS, D = 16, 128
SIZES = [(16, 4), (32, 4), (32, 8), (64, 4), (64, 8), (128, 8)]  # rows of a program, its warps
GPU = torch.device("cuda", 0)


def milliseconds(call, repeats: int = 10) -> float:
    """The median; between two calls enough else is written that nothing is left in the cache."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=GPU)
    times = []
    for _ in range(3 + repeats):
        flush.zero_()
        torch.cuda._sleep(2_000_000)  # while the host prepares the call
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[3:])[repeats // 2]


def accumulator(n: int, dtype: torch.dtype, log_dtype: torch.dtype) -> Partial:
    out = torch.zeros(1, n, HEADS, D, dtype=dtype, device=GPU)
    return Partial(out, torch.zeros(1, HEADS, n, dtype=log_dtype, device=GPU))


def part_of(place: Place) -> Part:
    size = place.many, place.heads, len(place.rows)
    return Part(place, torch.randn(*size, D, device=GPU, dtype=torch.bfloat16), torch.randn(size, device=GPU))


def read(parts: list[Part]) -> int:
    return sum(part.out.nbytes + (0 if part.lse is None else part.lse.nbytes) for part in parts)


def written(into: Partial) -> int:
    return into.out.nbytes + into.lse.nbytes


def longnet(n: int) -> list[Stack]:
    """Segments of 2048 to 32768 at rates 1 to 16."""
    pattern = Dilated([2048 << i for i in range(5)], [1 << i for i in range(5)])
    whole = deal("contiguous", n, 1)
    tiles = tiles_between(Task(pattern, Problem(1, n, n, HEADS, 0), whole, whole, HEADS), 0, 0)
    return stacks([piece for tile in tiles for piece in without_bands(tile)], 1)


def report(name: str, bytes_moved: int, call) -> None:
    ms = milliseconds(call)
    print(f"{name:60} {ms:8.4f} ms {bytes_moved / ms / 1e6:8.0f} GB/s")


def main() -> None:
    x = torch.empty(1 << 30, dtype=torch.uint8, device=GPU)
    y = torch.empty_like(x)
    report("copy of 1 GiB", 2 * x.nbytes, lambda: y.copy_(x))
    ring = [part_of(Place(range(1), 1, 0, range(HEADS), 0, range(8192), 1)) for _ in range(4)]
    total = accumulator(8192, torch.float32, torch.float64)
    n = 262_144
    branches = [part_of(stack.queries) for stack in longnet(n)]
    final = accumulator(n, torch.bfloat16, torch.float32)
    grads = [part._replace(lse=None) for part in branches]
    at_home = [branches[0]._replace(out=branches[0].place.view(final.out)), *branches[1:]]
    sums_at_home = [part._replace(lse=None) for part in at_home]
    print(f"{len(branches)} parts of LongNet over {n} rows")
    for size in SIZES:
        module.BLOCKS[D] = module.MERGING[D] = size
        for some in (ring[:1], ring):
            moved = read(some) + 2 * written(total)
            name = f"{size}: {len(some)} of 8192 rows into float32"
            report(name, moved, lambda some=some: merge_parts(some, range(8192), total, total))
        call = lambda: merge_parts(branches, range(n), None, final)  # noqa: E731
        report(f"{size}: LongNet merged into bfloat16", read(branches) + written(final), call)
        call = lambda: add_parts(grads, range(n), None, final.out)  # noqa: E731
        report(f"{size}: LongNet summed into bfloat16", read(grads) + final.out.nbytes, call)
        moved = read(grads[1:]) + final.out.nbytes  # half of the rows at home are read and written, the others left
        call = lambda: merge_parts(at_home, range(n), None, final, is_first_at_home=True)  # noqa: E731
        report(f"{size}: LongNet merged into the branch at home", moved, call)
        call = lambda: add_parts(sums_at_home, range(n), None, final.out, is_first_at_home=True)  # noqa: E731
        report(f"{size}: LongNet summed into the branch at home", moved, call)


if __name__ == "__main__":
    main()
