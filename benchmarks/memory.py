"""What a rank will hold and what it held: random calls, predicted by the plan and measured.

    python benchmarks/memory.py > docs/records/memory.json

Thirty calls, drawn from a seed, are played by `simulate`, whose ledger counts what every virtual rank holds; a few run
again on real processes over Gloo, each of which reads its own peak off the allocator's events, workspaces included.
Predicted is the fullest moment of the fullest rank, forward and backward, before anything runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import longring as lr
from longring.bench.memory import measured_peak
from longring.geometry.layouts import deal
from longring.geometry.patterns import Pattern, Problem
from longring.geometry.plans import PLANS
from longring.geometry.task import Task
from longring.plan.memory import Held, held

LEAST = 64 * 10**6  # bytes that the fullest rank holds in the forward
MOST_PAIRS = 2e9  # scores of all ranks and heads: seconds on a core
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PHASES = ("forward", "backward")


@dataclass(frozen=True)
class Call:
    """One configuration, in words that JSON knows."""

    pattern: str
    layout: str
    schedule: str
    ranks: int
    node_ranks: int
    tokens: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def asked(self) -> Pattern:
        n = self.tokens
        return {
            "causal": lr.Dense(causal=True),
            "full": lr.Dense(causal=False),
            "window": lr.Dense(causal=True, window=(n // 5, 0)),
            "documents": lr.Dense(causal=True, documents=[0, n // 7, n // 3, n // 2, n]),
            "dilated": lr.Dilated([n // 8, n // 2, n], [1, 2, 4]),
        }[self.pattern]

    @property
    def task(self) -> Task:
        pattern = self.asked
        problem = Problem(self.batch, self.tokens, self.tokens, self.kv_heads, 0)
        documents = pattern.documents if self.layout == "dealt" else None
        layout = deal(self.layout, self.tokens, self.ranks, documents=documents)
        return Task(pattern, problem, layout, layout, self.heads)

    def predicted(self, rank: int, phase: str, threads: int = 1) -> Held:
        size = {"head_dim": self.head_dim, "itemsize": self.itemsize, "node_ranks": self.node_ranks}
        return held(self.task, self.schedule, rank, **size, phase=phase, threads=threads)  # type: ignore[arg-type]

    def fullest(self, phase: str) -> int:
        return max(self.predicted(rank, phase).peak_bytes for rank in range(self.ranks))


def drawn(draw: random.Random, least: int) -> Call:
    """A random call whose fullest rank will hold at least so much, by a batch that is large enough."""
    while True:
        pattern = draw.choice(["causal", "causal", "full", "window", "documents", "dilated"])
        layouts = {"causal": ["zigzag", "contiguous", "striped"], "documents": ["dealt", "zigzag"]}
        ranks = draw.choice([1, 2, 3, 4, 4, 6, 8])
        heads = draw.choice([2, 4, 8])
        call = Call(
            pattern=pattern,
            layout=draw.choice(layouts.get(pattern, ["contiguous"])),
            schedule=draw.choice([*PLANS]),
            ranks=ranks,
            node_ranks=draw.choice([d for d in range(1, ranks + 1) if ranks % d == 0]),
            tokens=draw.randrange(900, 2400),
            batch=1,
            heads=heads,
            kv_heads=draw.choice([h for h in (1, 2, 4, 8) if heads % h == 0]),
            head_dim=draw.choice([32, 64, 80, 128]),
            dtype=draw.choice([*DTYPES]),
        )
        while call.fullest("forward") < least:
            call = replace(call, batch=call.batch + 1 + call.batch // 4)
        if call.batch * call.heads * call.tokens**2 < MOST_PAIRS:
            return call


# ------------------------------------------------------------------------------------------------ measured


def played(call: Call) -> dict[str, tuple[int, ...]]:
    """What the ledger of every virtual rank counted."""
    x = [tensor(call, call.tokens, heads).requires_grad_() for heads in (call.heads, call.kv_heads, call.kv_heads)]
    sim = lr.simulate(
        *x,
        ranks=call.ranks,
        pattern=call.asked,
        layout=call.layout,
        schedule=call.schedule,
        node_ranks=call.node_ranks,
    )
    sim.out.backward(torch.ones_like(sim.out))
    assert sim.backward is not None
    return {"forward": sim.forward.peak_bytes, "backward": sim.backward.peak_bytes}


def tensor(call: Call, rows: int, heads: int) -> torch.Tensor:
    return torch.randn(call.batch, rows, heads, call.head_dim, dtype=DTYPES[call.dtype])


def on_this_rank(call: Call) -> dict[str, int]:
    """What the allocator of a real rank had, its own rows included."""
    documents = call.asked.documents if call.layout == "dealt" else None
    s = lr.Sharding(call.tokens, dist.group.WORLD, call.layout, documents=documents)
    options: dict[str, Any] = {"pattern": call.asked, "sharding": s, "schedule": call.schedule}
    lr.release_buffers()
    with measured_peak() as forward:
        q = tensor(call, s.local_length, call.heads).requires_grad_()
        k, v = (tensor(call, s.local_length, call.kv_heads).requires_grad_() for _ in "kv")
        out, lse = lr.attention(q, k, v, **options, return_lse=True)
    lr.release_buffers()
    dout = torch.ones_like(out)
    with measured_peak() as backward:
        out.backward(dout)
    kept = sum(x.nbytes for x in (q, k, v, out, lse, dout))
    return {"forward": forward.bytes, "backward": kept + backward.bytes}


# ---------------------------------------------------------------------------------------------- the record


def compared(call: Call, measured: dict[str, tuple[int, ...]], *, threads: int) -> dict[str, Any]:
    """By phase: the fullest rank's bytes, and the ratio of the rank that was predicted worst."""
    found: dict[str, Any] = {}
    for phase in PHASES:
        each = [call.predicted(rank, phase, threads) for rank in range(call.ranks)]
        assert all(sum(one.components.values()) == one.peak_bytes for one in each)
        ratios = [one.peak_bytes / bytes_ for one, bytes_ in zip(each, measured[phase], strict=True)]
        found[phase] = {
            "predicted": max(one.peak_bytes for one in each),
            "measured": max(measured[phase]),
            "worst ratio": round(max(ratios, key=lambda ratio: abs(ratio - 1)), 4),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--real", type=int, default=5, help="how many of them to run on real processes, too")
    parser.add_argument("--seed", type=int, default=6)
    given = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(given.seed)
    runs: list[dict[str, Any]] = []
    real = 0
    for number in range(given.calls):
        call, began = drawn(draw, LEAST), time.monotonic()
        run = {"call": asdict(call), "simulated ranks": compared(call, played(call), threads=0)}
        # a launched world is one node, so schedules that look at nodes are played only
        if real < given.real and call.ranks > 1 and call.node_ranks == call.ranks:
            found = lr.launch(on_this_rank, call, ranks=call.ranks, timeout=600)
            run["real ranks"] = compared(
                call, {phase: tuple(one[phase] for one in found) for phase in PHASES}, threads=1
            )
            real += 1
        runs.append(run)
        print(number, round(time.monotonic() - began, 1), "s", json.dumps(run), file=sys.stderr, flush=True)
    worst = {
        kind: max(abs(run[kind][phase]["worst ratio"] - 1) for run in runs if kind in run for phase in PHASES)
        for kind in ("simulated ranks", "real ranks")
        if any(kind in run for run in runs)
    }
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    record = {
        "what": "peak bytes of every rank: predicted by longring.plan.memory.held, measured by the ledger of simulate "
        "(simulated ranks: threads that exchange real messages; it sees no workspace inside a kernel, and none is "
        "predicted for it) and by allocator events (real ranks: processes over Gloo; workspaces included)",
        "least state": LEAST,
        "seed": given.seed,
        "worst error": {kind: round(error, 4) for kind, error in worst.items()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "longring": lr.__version__},
        "machine": f"{platform.machine()}, CPU, one thread a rank",
        "commit": commit.stdout.strip() or "unknown",
        "runs": runs,
    }
    json.dump(record, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
