"""Two ring ranks with a thread each beside torch's own attention in one process with two: checked before timed.

python benchmarks/two_ranks.py > docs/records/two_ranks.json

Both are timed in turns in one run: while rank 0 computes alone with torch on two threads, rank 1 waits for a message.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import longring as lr
from longring.testing import relative_error

N, HEADS, D, REPEATS = 16384, 8, 64, 5


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, N, HEADS, D, generator=generator) for _ in range(4)]


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def both_passes(attend: Callable[..., torch.Tensor], qkv: list[torch.Tensor], dout: torch.Tensor) -> Any:
    out = attend(*qkv)
    return out, *torch.autograd.grad(out, qkv, dout)


def seconds(threads: int, call: Callable[[], Any]) -> float:
    """From when all ranks are ready until all are done."""
    torch.set_num_threads(threads)
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start


def rank_program(schedule: str, layout: str, repeats: int) -> dict[str, Any]:
    s = lr.Sharding(N, dist.group.WORLD, layout)
    whole = tensors()
    mine = [s.shard(x).requires_grad_() for x in whole[:3]]
    dout = s.shard(whole[3])
    everything = [x.requires_grad_() for x in whole[:3]]

    def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return lr.attention(q, k, v, sharding=s, schedule=schedule)

    torch.set_num_threads(2)
    want = both_passes(torch_attention, everything, whole[3]) if s.rank == 0 else None
    dist.barrier()
    torch.set_num_threads(1)
    got = [s.unshard(x.detach()) for x in both_passes(ring, mine, dout)]
    errors = [relative_error(a, b) for a, b in zip(got, want, strict=True)] if want else []
    assert all(error < 1e-5 for error in errors), errors
    calls = {
        "torch forward": (2, lambda: torch_attention(*everything) if s.rank == 0 else None),
        "ring forward": (1, lambda: ring(*mine)),
        "torch both": (2, lambda: both_passes(torch_attention, everything, whole[3]) if s.rank == 0 else None),
        "ring both": (1, lambda: both_passes(ring, mine, dout)),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, (threads, call) in calls.items():
            found[name].append(seconds(threads, call))
    return {"errors": errors, "seconds": found}


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else REPEATS
    runs = []
    for schedule, layout in (("ring", "zigzag"), ("bidirectional", "zigzag"), ("ulysses", "zigzag")):
        found = lr.launch(rank_program, schedule, layout, repeats, ranks=2, timeout=3000)[0]
        medians = {name: statistics.median(times) for name, times in found["seconds"].items()}
        runs.append(
            {
                "schedule": schedule,
                "layout": layout,
                "relative errors of out, dq, dk, dv against torch": found["errors"],
                "seconds": {
                    name: {"median": medians[name], "min": min(times), "max": max(times)}
                    for name, times in found["seconds"].items()
                },
                "throughput of two ranks / torch": {
                    part: medians[f"torch {part}"] / medians[f"ring {part}"] for part in ("forward", "both")
                },
            }
        )
        print(schedule, runs[-1]["throughput of two ranks / torch"], file=sys.stderr)
    record = {
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "longring": lr.__version__},
        "machine": f"2 cores, {platform.machine()}; two processes over Gloo on loopback, all of it real",
        "shapes": f"causal, n = {N}, {HEADS} heads, d = {D}, float32; medians of {repeats}",
        "runs": runs,
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
