"""How long the event simulation itself takes: every schedule, forward and backward, over thousands of ranks.

python benchmarks/event_speed.py                  # a table of processor seconds; 4,096 ranks
python benchmarks/event_speed.py --only shared    # some of the cases
python benchmarks/event_speed.py --write          # docs/records/event_speed.json and the table of docs/events.md
python benchmarks/event_speed.py --only LongNet --write  # these cases anew; the others stay as they were recorded

Each is played in a process of its own, on one core, and nothing is remembered from the one before. What is timed is
real: user and system seconds of the play alone, without starting Python and importing. What is played is predicted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from longring.geometry.layouts import deal
from longring.geometry.patterns import Dense, Dilated, Pattern, Problem
from longring.geometry.plans import PLANS
from longring.geometry.task import Task
from longring.plan.events import play
from longring.plan.hardware import Phase, hardware
from longring.plan.links import Slow

DOCS = Path(__file__).parent.parent / "docs"
RECORD, PAGE = DOCS / "records" / "event_speed.json", DOCS / "events.md"
BEGIN, END = "<!-- speed: by benchmarks/event_speed.py -->", "<!-- end of speed -->"
PASSES: tuple[Phase, Phase] = ("forward", "backward")


class Case(NamedTuple):
    """H200s in nodes of 8; 32 query and 8 kv heads of 128, bfloat16."""

    name: str
    tokens: int  # a rank
    pattern: Pattern = Dense()
    layout: str = "zigzag"
    links_out: int = 8
    slow: Slow = Slow()


STRAGGLERS = Slow({17: 1.5, 42: 3.0}, {(7, 8): 4.0, (8, 7): 4.0, (60, 61): 9.0})
LONGNET = Dilated([2048 * 4**k for k in range(10)], [4**k for k in range(10)])

CASES = (
    Case("causal, 2K tokens a rank", 2**11),
    Case("causal, 16K tokens a rank", 2**14),
    Case("full, 2K tokens a rank", 2**11, Dense(causal=False), "contiguous"),
    Case("causal, slow ranks and links", 2**11, slow=STRAGGLERS),
    Case("causal, one shared link out of a node", 2**11, links_out=1),
    Case("window of 8K", 2**11, Dense(window=(8191, 0)), "contiguous"),
    Case("causal, striped", 2**11, layout="striped"),
    Case("LongNet, 256K tokens a rank", 2**18, LONGNET, "contiguous"),
    Case("LongNet, 128K tokens a rank", 2**17, LONGNET, "contiguous"),  # every other rank keeps rows of its last branch
    Case("LongNet over zigzag shards", 2**18, LONGNET),
)


def one(question: tuple[int, str, Phase, int]) -> dict[str, Any]:
    number, schedule, phase, ranks = question
    case = CASES[number]
    dealt = deal(case.layout, case.tokens * ranks, ranks)
    task = Task(case.pattern, Problem(1, dealt.length, dealt.length, 8, 0), dealt, dealt, 32)
    machine = replace(hardware("h200"), links_out=case.links_out)
    before = _processor_seconds()
    played = play(task, schedule, hardware=machine, head_dim=128, itemsize=2, node_ranks=8, phase=phase, slow=case.slow)
    return {
        "case": case.name,
        "schedule": schedule,
        "phase": phase,
        "took": _processor_seconds() - before,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "predicted": played.seconds,
    }


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def all_of(only: list[str], ranks: int) -> list[dict[str, Any]]:
    questions = [
        (number, schedule, phase, ranks)
        for number, case in enumerate(CASES)
        if any(text in case.name for text in only)
        for schedule in PLANS
        for phase in PASSES
    ]
    found: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(one, questions, chunksize=1):
            print(f"{row['case']}, {row['schedule']}, {row['phase']}: {row['took']:.2f} s", flush=True)
            found.append(row)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Cases down, schedules across: seconds of the forward / of the backward."""
    took = {(row["case"], row["schedule"], row["phase"]): row["took"] for row in rows}
    lines = [["", *PLANS], ["---"] * (1 + len(PLANS))]
    for case in dict.fromkeys(row["case"] for row in rows):
        cells = (" / ".join(f"{took[case, s, p]:.1f}" for p in PASSES if (case, s, p) in took) for s in PLANS)
        lines.append([case, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name holds one of these")
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--write", action="store_true", help="write the record and the table of docs/events.md")
    asked = parser.parse_args()
    busy = os.getloadavg()[0]
    rows = all_of(asked.only, asked.ranks)
    print(
        table(rows), f"\nlongest: {max(row['took'] for row in rows):.1f} s of one core, {asked.ranks} ranks", sep="\n"
    )
    if asked.write:
        write(rows, asked.ranks, busy)


def write(rows: list[dict[str, Any]], ranks: int, busy: float) -> None:
    import numpy

    from longring import __version__

    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    found = {"commit": told.stdout.strip(), "load of the machine before": round(busy, 2)}
    rows = _with_others([{**row, **found} for row in rows])
    record = {
        "versions": {"python": platform.python_version(), "numpy": numpy.__version__, "longring": __version__},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}; each play on one of them",
        "real": "took and peak_bytes: processor seconds of the simulation itself, and the most its process held",
        "simulated": "predicted: what the simulation says of these ranks, none of which was there",
        "ranks": ranks,
        "plays": rows,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, behind = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{behind}", encoding="utf-8")


def _with_others(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Together with the cases that were recorded earlier, in the order in which they are told."""
    anew = {row["case"] for row in rows}
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["plays"]
    every = rows + [row for row in recorded if row["case"] not in anew]
    return [row for case in CASES for row in every if row["case"] == case.name]


if __name__ == "__main__":
    main()
