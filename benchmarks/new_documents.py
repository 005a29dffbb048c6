"""Packed documents that are new at every step, both passes: `auto` beside every kernel by name, on the same data.

    PYTHONPATH=src python benchmarks/new_documents.py --out docs/records/new_documents.json

Each kernel computes the same steps in a process of its own, so that none of them profits from what another left behind
on the host; `auto` comes first and again last, which shows the spread. Times are wall times around both passes with the
device waited for. The first ten steps of each, which compile, are counted apart.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import longring as lr

NAMES = ("auto", "flash", "triton", "auto")
COMPILING = 10  # steps
HEADS, KV_HEADS, D = 16, 4, 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=1, help="calls of the same boundaries at each step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--profile", action="store_true", help="of the host, by function, instead of times")
    parser.add_argument("--kernel", help="this one alone, in this process; prints its times")
    asked = parser.parse_args()
    if asked.kernel:
        print(json.dumps(measured(asked)))
        return 0
    record = compared(asked)
    print(json.dumps(record["kernels"], indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def compared(asked: argparse.Namespace) -> dict[str, Any]:
    told = [f"--{name}={getattr(asked, name)}" for name in ("steps", "tokens", "layers", "seed")]
    found = []
    for name in NAMES:
        command = [sys.executable, str(Path(__file__).resolve()), *told, "--kernel", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert len({each["checksum"] for each in found}) == 1, "the kernels' outputs differ"
    return {
        "what": "ms of both passes, new boundaries at every step, 4 to 100 documents, a process per kernel",
        "shape": {"tokens": asked.tokens, "heads": HEADS, "kv_heads": KV_HEADS, "d": D, "dtype": "bfloat16"},
        "steps": asked.steps,
        "layers": asked.layers,
        "seed": asked.seed,
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda},
        "commit": asked.commit,
        "kernels": [{"kernel": name, **_summary(each["ms"])} for name, each in zip(NAMES, found, strict=True)],
    }


def measured(asked: argparse.Namespace) -> dict[str, Any]:
    n = asked.tokens
    draw = torch.Generator("cuda").manual_seed(asked.seed)
    q, k, v, dout = (
        torch.randn(1, n, h, D, dtype=torch.bfloat16, device="cuda", generator=draw)
        for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    boundaries, times = random.Random(asked.seed), []
    profile = cProfile.Profile()
    for step in range(asked.steps):
        count = boundaries.randint(4, 100)
        pattern = lr.Dense(documents=[0, *sorted(boundaries.sample(range(1, n), count - 1)), n])
        torch.cuda.synchronize()
        if asked.profile and step >= COMPILING:
            profile.enable()
        start = time.perf_counter()
        for _ in range(asked.layers):
            out = lr.attention(q, k, v, pattern=pattern, kernel=asked.kernel)
            torch.autograd.grad(out, leaves, dout)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        profile.disable()
    if asked.profile:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(40)
    out = lr.attention(q, k, v, pattern=pattern, kernel=asked.kernel).detach()
    return {"ms": times, "checksum": round(out.double().square().sum().item() / out.numel(), 4)}


def _summary(found: list[float]) -> dict[str, float]:
    rest = found[COMPILING:]
    low, middle, high = statistics.quantiles(rest, n=4)
    numbers = {"first": found[0], "mean": statistics.mean(rest), "quartile": low, "median": middle, "quartile 3": high}
    return {name: round(value, 2) for name, value in {**numbers, "worst": max(rest)}.items()}


if __name__ == "__main__":
    sys.exit(main())
