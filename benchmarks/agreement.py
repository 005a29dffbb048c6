"""What the greetings of a known call cost: ring attention with them and without, in turns, in one run.

OMP_NUM_THREADS=1 python benchmarks/agreement.py > docs/records/agreement.json

Without them nothing is checked, which is only for measuring. Each rank has a thread of its own; with more ranks
than cores every message costs its receiver a turn on a core, whatever is in it.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import longring as lr
from longring.transport.agreement import Agreement

HEADS, D, REPEATS = 8, 64, 150
CASES = [(2, 512), (2, 1024), (2, 2048), (4, 512), (4, 1024), (4, 4096), (4, 8192)]
REAL = Agreement.greet, Agreement.reach
NONE = (lambda self: None), (lambda self, errand: None)


def program(tokens: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    sharding = lr.Sharding(tokens, dist.group.WORLD, "zigzag")
    q, k, v = (torch.randn(1, sharding.local_length, HEADS, D) for _ in range(3))
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(REPEATS):
        for name, (greet, reach) in (("with", REAL), ("without", NONE)):
            Agreement.greet, Agreement.reach = greet, reach
            dist.barrier()
            began = time.perf_counter()
            lr.attention(q, k, v, sharding=sharding, schedule="ring")
            if number > 3:
                seconds[name].append(time.perf_counter() - began)
    Agreement.greet, Agreement.reach = REAL
    return seconds


def measured(ranks: int, tokens: int) -> dict[str, object]:
    seconds = lr.launch(program, tokens, ranks=ranks, timeout=300)[0]
    row: dict[str, object] = {"ranks": ranks, "tokens": tokens}
    for name, values in seconds.items():
        quarters = statistics.quantiles(values, n=4)
        row[name] = {"median_ms": round(quarters[1] * 1e3, 3), "quartiles_ms": [round(x * 1e3, 3) for x in quarters]}
    return row


def main() -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {
        "what": "ring attention, forward, causal zigzag, float32, one thread a rank, Gloo over loopback, rank 0's time",
        "commit": commit,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "longring": lr.__version__},
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "heads": HEADS,
        "d": D,
        "calls": REPEATS - 4,
        "rows": [measured(*case) for case in CASES],
    }
    json.dump(record, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
