"""Packed documents that are new at every step, both passes: `auto` beside every kernel by name, on the same data.

    PYTHONPATH=src python benchmarks/new_documents.py --out docs/records/new_documents.json

Each step has boundaries of its own. In one round all kernels compute it, `auto` first, so that none of them profits
from what another left; times are wall times around both passes with the device waited for. The first step of each
kernel, which compiles, is counted apart.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import longring as lr

NAMES = ("auto", "flash", "triton")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=1, help="calls of the same boundaries at each step")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    record = measured(asked)
    print(json.dumps(record["kernels"], indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def measured(asked: argparse.Namespace) -> dict:
    n, heads, kv_heads, d = asked.tokens, 16, 4, 128
    draw = torch.Generator("cuda").manual_seed(asked.seed)
    q, k, v, dout = (
        torch.randn(1, n, h, d, dtype=torch.bfloat16, device="cuda", generator=draw)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    boundaries, steps = random.Random(asked.seed), []
    for _ in range(asked.steps):
        count = boundaries.randint(4, 100)
        steps.append([0, *sorted(boundaries.sample(range(1, n), count - 1)), n])
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for documents in steps:
        pattern = lr.Dense(documents=documents)
        for name in NAMES:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(asked.layers):
                out = lr.attention(q, k, v, pattern=pattern, kernel=name)
                torch.autograd.grad(out, leaves, dout)
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    last = lr.attention(q, k, v, pattern=pattern, kernel="auto").detach()
    other = lr.attention(q, k, v, pattern=pattern, kernel="triton").detach()
    assert torch.allclose(last.float(), other.float(), atol=2e-2)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "what": "ms of both passes, new boundaries at every step, 4 to 100 documents",
        "shape": {"tokens": n, "heads": heads, "kv_heads": kv_heads, "d": d, "dtype": "bfloat16"},
        "steps": asked.steps,
        "layers": asked.layers,
        "seed": asked.seed,
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda},
        "commit": commit,
        "kernels": {name: _summary(found) for name, found in times.items()},
    }


def _summary(found: list[float]) -> dict[str, float]:
    first, rest = found[0], found[1:]
    low, middle, high = statistics.quantiles(rest, n=4)
    numbers = {"first": first, "mean": statistics.mean(rest), "quartile": low, "median": middle, "quartile 3": high}
    return {name: round(value, 2) for name, value in {**numbers, "worst": max(rest)}.items()}


if __name__ == "__main__":
    sys.exit(main())
