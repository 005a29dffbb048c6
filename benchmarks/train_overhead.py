"""What dealing a sequence over ranks costs a training step, on the same cores: longring train, in turns.

python benchmarks/train_overhead.py                          # one rank with all cores, against a core each; 32Ki tokens
python benchmarks/train_overhead.py --ranks 4 --context 16Ki
python benchmarks/train_overhead.py --write                  # docs/records/train_overhead.json

Both train the same model on the same sequences, so every step of one has a step of the other with the same work. What
counts is the ratio of their seconds, step by step; the first of each turn is left out, since it makes things ready.
Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from longring.bench.records import commit

RECORD = Path(__file__).parent.parent / "docs" / "records" / "train_overhead.json"
MODEL = ("--dim", "128", "--layers", "2", "--heads", "4", "--device", "cpu")


def trained(ranks: int, context: str, steps: int, more: list[str]) -> dict[str, Any]:
    """One turn: seconds of each step but the first, and what the command said of them."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "longring", "train", "--ranks", str(ranks), "--context", context, "--json"]
        command += ["--steps", str(steps), "--save-every", "1000000", "--out", out, *MODEL, *more]
        unset = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # cores / ranks
        done = subprocess.run(command, capture_output=True, text=True, env=unset)
        if done.returncode:
            sys.exit(done.stderr)
        lines = map(json.loads, (Path(out) / "metrics.jsonl").read_text().splitlines())
        told = json.loads(done.stdout)
        found = {name: told[name] for name in ("attention_share", "communication_share")}
        return found | {"seconds": [line["seconds"] for line in lines if line.get("step", 1) > 1]}


def overhead(alone: list[dict[str, Any]], dealt: list[dict[str, Any]]) -> float:
    """The median over steps of how much longer it took, by each step's fastest turn: a busy machine only slows."""
    best = [
        [min(times) for times in zip(*(turn["seconds"] for turn in turns), strict=True)] for turns in (alone, dealt)
    ]
    return statistics.median(b / a for a, b in zip(*best, strict=True)) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--context", default="32Ki")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write {RECORD}")
    asked, more = parser.parse_known_args()  # further words are longring train's
    alone, dealt = [], []
    for turn in range(asked.turns):
        alone.append(trained(1, asked.context, asked.steps, more))
        dealt.append(trained(asked.ranks, asked.context, asked.steps, more))
        for ranks, found in ((1, alone[-1]), (asked.ranks, dealt[-1])):
            seconds = statistics.median(found["seconds"])
            shares = f"attention {found['attention_share']:.0%}, communication {found['communication_share']:.0%}"
            print(f"turn {turn + 1}, {ranks} rank{'s' if ranks > 1 else ''}: {seconds:.2f} s a step, {shares}")
    found = overhead(alone, dealt)
    more_or_less = "more" if found > 0 else "less"
    print(f"{asked.ranks} ranks take {abs(found):.1%} {more_or_less} time than one process with as many threads")
    if asked.write:
        about = {"command": ["longring", "train", *MODEL, *more], "context": asked.context, "ranks": asked.ranks}
        about |= {"torch": torch.__version__, "system": platform.platform(), "python": platform.python_version()}
        about |= {"commit": commit()}
        RECORD.write_text(json.dumps(about | {"overhead": found, "alone": alone, "dealt": dealt}, indent=2) + "\n")


if __name__ == "__main__":
    main()
