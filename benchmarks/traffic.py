"""What travels, beside what would have to: bytes per rank, planned, and on real processes counted step by step.

python benchmarks/traffic.py          writes docs/records/traffic.json and docs/traffic.md; runs eight local ranks
python benchmarks/traffic.py --plan   only the planned part
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import longring as lr
from longring.geometry.layouts import deal
from longring.geometry.parcels import needed
from longring.geometry.patterns import Pattern, Problem
from longring.geometry.plans import plan
from longring.geometry.task import Task, runs_over_sources
from longring.plan.traffic import backward_bytes, bytes_of, forward_bytes
from longring.transport.select import transport_for

DOCS = Path(__file__).parents[1] / "docs"
HEADS, KV_HEADS, D, ITEM = 4, 2, 32, 4  # of the runs, in float32
SCHEDULES = ("ring", "bidirectional", "double_ring", "exchange", "ulysses", "hybrid", "gather")


class Question(NamedTuple):
    name: str
    pattern: Pattern
    layout: str
    length: int
    ranks: int
    run: bool


def longnet(branches: int) -> lr.Dilated:
    """Segments from 2,048 on, each twice as long and half as dense as the one before."""
    segments = [2048 << i for i in range(branches)]
    return lr.Dilated(segments, [segment // 2048 for segment in segments])


def documents(length: int) -> lr.Dense:
    """A hundred, of all sizes: the i-th is as long as its place in a shuffled order says."""
    sizes = [1 + (37 * i) % 101 for i in range(100)]
    total, boundaries, at = sum(sizes), [0], 0
    for size in sizes:
        at += size
        boundaries.append(length * at // total)
    return lr.Dense(documents=boundaries)


def questions() -> list[Question]:
    million, short = 1 << 20, 1 << 16
    window = lr.Dense(window=(4095, 0))
    found = [
        Question("LongNet, 5 branches to 32K", longnet(5), "contiguous", short, 8, True),
        Question("window of 4,096", window, "contiguous", short, 8, True),
        Question("100 documents", documents(short), "dealt", short, 8, True),
        Question("100 documents", documents(short), "zigzag", short, 8, False),
        Question("causal", lr.Dense(), "zigzag", short, 8, False),
        Question("causal", lr.Dense(), "contiguous", short, 8, False),
    ]
    for ranks in (8, 64):
        found += [
            Question("LongNet, 5 branches to 32K", longnet(5), "contiguous", million, ranks, False),
            Question("LongNet, 10 branches to 1M", longnet(10), "contiguous", million, ranks, False),
            Question("window of 4,096", window, "contiguous", million, ranks, False),
            Question("100 documents", documents(million), "dealt", million, ranks, False),
            Question("causal", lr.Dense(), "zigzag", million, ranks, False),
        ]
    return found


def task_of(question: Question) -> Task:
    length = question.length
    dealt = deal(question.layout, length, question.ranks, documents=question.pattern.documents)
    return Task(question.pattern, Problem(1, length, length, KV_HEADS, 0), dealt, dealt, HEADS)


def node_ranks(ranks: int) -> int:
    return ranks // 2 if ranks <= 8 else 8


def needed_bytes(task: Task, rank: int) -> int:
    """Keys and values that the rank's tiles name and that it does not hold, each once: nobody can receive less."""
    found = 0
    for run in runs_over_sources(task, rank):
        others = len(run.ranks) - (rank in run.ranks)
        if others and run.tiles:
            found += others * sum(share.vectors for share in needed(run.tiles))
    return 2 * found * D * ITEM


def planned(question: Question) -> dict[str, Any]:
    task = task_of(question)
    size = {"head_dim": D, "itemsize": ITEM, "node_ranks": node_ranks(question.ranks)}
    ranks = range(question.ranks)
    needs = [needed_bytes(task, rank) for rank in ranks]
    blocks = [2 * (task.keys.length - rows) * KV_HEADS * D * ITEM for rows in task.keys.sizes]
    found: dict[str, Any] = {}
    for schedule in SCHEDULES:
        forward = [forward_bytes(task, schedule, rank, **size) for rank in ranks]
        backward = [backward_bytes(task, schedule, rank, **size) for rank in ranks]
        found[schedule] = {"forward": summary(forward), "backward": summary(backward)}
    return {
        **described(question),
        "bounds": {"needed rows": summary(needs), "every row of the others": summary(blocks)},
        "planned": found,
    }


def summary(values: list[int]) -> dict[str, float]:
    return {"mean": sum(values) / len(values), "most": max(values)}


def described(question: Question) -> dict[str, Any]:
    return question._asdict() | {
        "pattern": repr(question.pattern) if question.pattern.documents is None else "documents"
    }


# ------------------------------------------------------------------------------------------------- for real


def counted(question: Question, schedule: str) -> dict[str, list[int]]:
    """On one rank: bytes of every post of a forward and a backward, as the transport counted them."""
    mesh = dist.init_device_mesh("cpu", (2, question.ranks // 2))
    s = lr.Sharding(question.length, mesh, question.layout, documents=question.pattern.documents)
    torch.manual_seed(s.rank)
    q, k, v = (torch.randn(1, s.local_length, heads, D).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS))
    transport = transport_for(mesh)
    with transport.recording() as forward:
        out = lr.attention(q, k, v, pattern=question.pattern, sharding=s, schedule=schedule)
    with transport.recording() as backward:
        out.sum().backward()
    return {
        phase: [entry.bytes_sent for entry in journal.entries]
        for phase, journal in (("forward", forward), ("backward", backward))
    }


def compared(question: Question, schedule: str) -> dict[str, Any]:
    """Whether every rank sent at every step what the plan said; raises if not."""
    task = task_of(question)
    got = lr.launch(counted, question, schedule, ranks=question.ranks, timeout=900)
    for rank, mine in enumerate(got):
        made = plan(schedule, task, rank, question.ranks // 2)
        for phase in ("forward", "backward"):
            want = [bytes_of(post, D, ITEM) for post in getattr(made, phase)()]
            assert mine[phase] == want, (question.name, schedule, rank, phase, mine[phase], want)
    return {phase: summary([sum(mine[phase]) for mine in got]) for phase in ("forward", "backward")}


# ------------------------------------------------------------------------------------------------- the table


def table(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| task | tokens, ranks, layout | needed | " + " | ".join(SCHEDULES) + " |",
        "|---|---|---|" + "---|" * len(SCHEDULES),
    ]
    for run in runs:
        row = [run["name"], f"{run['length']:,}, {run['ranks']}, {run['layout']}", cell(run["bounds"]["needed rows"])]
        for schedule in SCHEDULES:
            equal = " =" if schedule in run.get("counted", {}) else ""
            row.append(cell(run["planned"][schedule]["forward"]) + equal)
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def cell(one: dict[str, float]) -> str:
    per_row = 2 * KV_HEADS * D * ITEM
    return f"{one['mean'] / per_row:,.0f} / {one['most'] / per_row:,.0f}"


PAGE = """# What travels

Rows of K (and as many of V) per kv head that a rank sends in a forward pass, by schedule: on average over the ranks,
and the busiest rank. *needed*: rows that a rank's tiles name and that it does not hold, each once; nobody could
receive less. Written by `benchmarks/traffic.py`, with the bytes of forward and backward in `records/traffic.json`.

{table}

- Planned for every line; `=` marks what was also **run**, forward and backward, on eight real processes over Gloo,
  where every rank's every post had exactly the bytes planned ({versions}, commit {commit}). Lines of a million tokens
  were planned, not run.
- {heads} query heads over {kv_heads} kv heads. For `ulysses` and `hybrid` queries and outputs travel, too, and are
  counted as rows of K and V of the same bytes. `hybrid` and `double_ring` see nodes of half the ranks (p = 8) or of
  8 (p = 64).
- A rank of a ring sends what it hands on, too: of a causal zigzag 75 %, of a causal contiguous layout 50 % of all
  blocks. Rows are cut to what somebody further on could see, as intervals; exchange sends the very rows that tiles
  name, to each who names them.
- LongNet's branches that fit a rank move nothing; of the others the kept rows travel, each once for all branches.
- A backward sends the rows again, and their gradients in float32.
"""


def main() -> None:
    found = []
    for question in questions():
        run = planned(question)
        if question.run and "--plan" not in sys.argv:
            run["counted"] = {schedule: compared(question, schedule) for schedule in SCHEDULES}
        found.append(run)
        print(question.name, question.length, question.ranks, question.layout, file=sys.stderr)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "longring": lr.__version__}
    record = {
        "commit": commit,
        "versions": versions,
        "what": "bytes that a rank sends; 'counted' was run on real processes over Gloo, the rest planned",
        "shapes": f"batch 1, {HEADS} heads, {KV_HEADS} kv heads, d = {D}, float32",
        "runs": found,
    }
    (DOCS / "records" / "traffic.json").write_text(json.dumps(record, indent=1) + "\n")
    spoken = ", ".join(f"{name} {version}" for name, version in versions.items())
    page = PAGE.format(table=table(found), versions=spoken, commit=commit, heads=HEADS, kv_heads=KV_HEADS)
    (DOCS / "traffic.md").write_text(page)


if __name__ == "__main__":
    main()
