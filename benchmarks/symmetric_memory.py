"""What a rank holds on a GPU: peak bytes of forward and backward, with 1, 4 and 8 real processes on one GPU.

    python benchmarks/symmetric_memory.py > docs/records/symmetric_memory.json

Processes share the GPU, so nothing here is timed. A rank's peak is what torch's allocator held at most plus the
symmetric memory of its transport, which the allocator does not count. The prediction is the sum of components that
`longring plan` counts, and the symmetric memory that the transport asked for.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist

import longring as lr
from longring.geometry.layouts import deal
from longring.geometry.patterns import Problem
from longring.geometry.task import Task
from longring.plan.memory import Phase, held
from longring.transport.select import transport_for

N, HEADS, D = 256 * 1024, 16, 128
RANKS = (1, 4, 8)


def measured(schedule: str, n: int) -> dict[str, Any]:
    """On one rank. The first call is small: it compiles, and opens what stays open."""
    torch.cuda.set_device(0)
    is_alone = dist.get_world_size() == 1
    group = None if is_alone else dist.group.WORLD
    for length in (16 * 1024, n):
        s = lr.Sharding(length, group, "contiguous" if is_alone else "zigzag")
        lr.release_buffers()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = _once(s, schedule)
    transport = transport_for(group)
    symmetric = getattr(transport, "symmetric_bytes", 0)
    assert is_alone or symmetric > 0, "this did not go through symmetric memory"
    return {"forward": found[0] - before, "backward": found[1] - before, "symmetric": symmetric, "finite": found[2]}


def _once(s: lr.Sharding, schedule: str) -> tuple[int, int, bool]:
    draw = torch.Generator("cuda").manual_seed(s.rank)
    shape = (1, s.local_length, HEADS, D)
    q, k, v, dout = (torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = lr.attention(q, k, v, pattern=lr.Dense(causal=True), sharding=s, schedule=schedule)
    torch.cuda.synchronize()
    forward = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out.backward(dout)
    torch.cuda.synchronize()
    backward = torch.cuda.max_memory_allocated()
    is_finite = all(bool(x.grad.isfinite().all()) for x in (q, k, v) if x.grad is not None)
    return forward, backward, is_finite and bool(out.isfinite().all())


def predicted(schedule: str, ranks: int, n: int, phase: Phase) -> dict[str, int]:
    """Bytes of each component on the fullest rank at its fullest moment, as `longring plan` counts them."""
    dealt = deal("zigzag" if ranks > 1 else "contiguous", n, ranks)
    task = Task(lr.Dense(causal=True), Problem(1, n, n, HEADS, 0), dealt, dealt, HEADS)
    each = [held(task, schedule, rank, head_dim=D, itemsize=2, phase=phase, device="cuda") for rank in range(ranks)]
    return max(each, key=lambda one: one.peak_bytes).components


def main() -> None:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # ranks that share a GPU
    n = int(sys.argv[1]) if len(sys.argv) > 1 else N
    runs: list[dict[str, Any]] = []
    alone = 0
    for schedule in ("ring", "gather"):
        for ranks in RANKS:
            if ranks == 1 and schedule != "ring":
                continue
            found = lr.launch(measured, schedule if ranks > 1 else "auto", n, ranks=ranks, timeout=500, backend="gloo")
            most = max(each["backward"] + each["symmetric"] for each in found)
            alone = alone or most
            parts = predicted(schedule, ranks, n, "backward") | {"symmetric memory": found[0]["symmetric"]}
            runs.append(
                {
                    "schedule": schedule,
                    "ranks": ranks,
                    "of each rank": found,
                    "peak": most,
                    "peak, GiB": round(most / 2**30, 3),
                    "of one rank's peak": round(most / alone, 3),
                    "components": parts,
                    "of the sum of components": round(most / sum(parts.values()), 3),
                }
            )
            print(f"{schedule}, {ranks} ranks: {most / 2**30:.2f} GiB", file=sys.stderr, flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    record = {
        "what": "peak bytes on a GPU that all ranks share; torch's allocator and symmetric memory",
        "shapes": f"{n} tokens, {HEADS} heads, d = {D}, bfloat16, causal, zigzag, forward and backward",
        "machine": torch.cuda.get_device_name(0),
        "versions": {"torch": torch.__version__, "longring": lr.__version__},
        "commit": commit.stdout.strip() or "unknown",
        "runs": runs,
    }
    json.dump(record, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
