"""What a rank holds: peak bytes of a forward and a backward by the allocator's events, on 1 to 8 real processes.

python benchmarks/state.py > docs/records/state.json
python benchmarks/state.py --table < docs/records/state.json > docs/state.md
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist

import longring as lr
from longring.bench.memory import measured_peak

N, D = 65536, 64


def held(schedule: str, n: int) -> dict[str, int]:
    """On one rank: its own shards and all that is made on top, at most, in the forward and in the backward."""
    s = lr.Sharding(n, dist.group.WORLD, "zigzag")
    with measured_peak() as forward:
        q, k, v = (torch.randn(1, s.local_length, 1, D).requires_grad_() for _ in range(3))
        out, lse = lr.attention(q, k, v, sharding=s, schedule=schedule, return_lse=True)
    dout = torch.ones_like(out)
    with measured_peak() as backward:
        out.backward(dout)
    kept = sum(x.nbytes for x in (q, k, v, out, lse, dout))
    return {"forward": forward.bytes, "backward": kept + backward.bytes}


PAGE = """# What a rank holds

Most bytes on the fullest rank, its own q, k, v, out and gradients included, in units of its part of q; so a number that
stays the same from line to line falls as 1/p. Written by `benchmarks/state.py`: {shapes}; {what}
({versions}, commit {commit}).

| schedule | ranks | MiB forward | MiB backward | parts of q forward | parts of q backward |
|---|---|---|---|---|---|
{rows}

A ring holds its own rows, the block it computes with and the one that is arriving, and in the backward float32
gradients of what it computes with, of what arrives and of what leaves; one rank alone needs none of these. Gather holds
all keys and values, and in the backward all their gradients: O(n), whatever p is.
"""


def page(record: dict[str, Any]) -> str:
    rows = []
    for run in record["runs"]:
        held, parts = run["bytes of the fullest rank"], run["in units of its q"]
        sizes = [f"{held[phase] / 2**20:.1f}" for phase in ("forward", "backward")]
        sizes += [f"{parts[phase]:.1f}" for phase in ("forward", "backward")]
        rows.append(f"| {run['schedule']} | {run['ranks']} | {' | '.join(sizes)} |")
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    facts = {key: record[key] for key in ("shapes", "what", "commit")}
    return PAGE.format(rows="\n".join(rows), versions=versions, **facts)


def main() -> None:
    if "--table" in sys.argv:
        sys.stdout.write(page(json.load(sys.stdin)))
        return
    n = int(sys.argv[1]) if len(sys.argv) > 1 else N
    runs: list[dict[str, Any]] = []
    for schedule in ("ring", "bidirectional", "gather"):
        for ranks in (1, 2, 4, 8):
            found = lr.launch(held, schedule, n, ranks=ranks, timeout=1800)
            most = {phase: max(one[phase] for one in found) for phase in ("forward", "backward")}
            share = n * D * 4 / ranks  # one rank's q
            runs.append(
                {
                    "schedule": schedule,
                    "ranks": ranks,
                    "bytes of the fullest rank": most,
                    "in units of its q": {phase: round(bytes_ / share, 2) for phase, bytes_ in most.items()},
                    "times p over p = 1": {
                        phase: round(ranks * bytes_ / first["bytes of the fullest rank"][phase], 3)
                        for phase, bytes_ in most.items()
                        for first in [
                            next((r for r in runs if r["schedule"] == schedule), {"bytes of the fullest rank": most})
                        ]
                    },
                }
            )
            print(schedule, ranks, runs[-1]["in units of its q"], runs[-1]["times p over p = 1"], file=sys.stderr)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {
        "commit": commit,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "longring": lr.__version__},
        "what": "real processes over Gloo on one machine; allocator events of torch's profiler, workspaces included",
        "shapes": f"causal, zigzag, n = {n}, one head, d = {D}, float32",
        "runs": runs,
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
