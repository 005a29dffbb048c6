"""Predicted against measured: the event simulation beside real ranks over links of a set speed, and the H200's record.

python benchmarks/events.py --h200           # what follows from docs/records/h200.json, anew; anywhere
python benchmarks/events.py --write          # Linux, as root: docs/records/events.json and the tables of docs/events.md
python benchmarks/events.py --only "ring"    # some of the scenarios, printed

Every rank is a machine of its own (namespaces.py). First all ranks measure at once, on shapes that no scenario has,
what they compute and merge in a second and what their links carry; then every scenario is run (checked against one
process before it is timed, each pass after a barrier, the slowest rank counts) and predicted from these numbers alone.
Computing without a message is timed, too, and says how much of an error is that of computing. On the H200 nothing is
run: what its record has is predicted from hardware.toml, whose rates come from the dense part of the same record.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import namespaces
import torch
import torch.distributed as dist
from overlap import SCENARIOS as OVERLAP
from overlap import Call, Mute, Scenario, longnet

import longring as lr
from longring.bench.records import Record, Row
from longring.geometry.layouts import deal
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.geometry.task import Task
from longring.geometry.tiles import Tile
from longring.kernels.contract import Upstream
from longring.kernels.fused import FusedKernel
from longring.kernels.operations.cpu import CpuFlash
from longring.numerics.online_softmax import merge_
from longring.plan.event_pace import FLOPS_OF_A_PAIR
from longring.plan.events import Played, play
from longring.plan.hardware import PER_PAIR, RATED_HEAD_DIM, Hardware, Link, hardware
from longring.plan.links import Slow
from longring.transport.select import transport_for

D, HEADS, REPEATS = 64, 4, 5
PASSES = ("forward", "backward")
DOCS = Path(__file__).parent.parent / "docs"
RECORD, PAGE = DOCS / "records" / "events.json", DOCS / "events.md"

# Two ranks have a core each, and computing and moving are weighed against each other; four share two cores, and there
# only what moves more than it computes says something about the model.
SCENARIOS = (
    Scenario("ring, 2 ranks, computing is longer", 2, "400mbit", 8192, HEADS, lr.Dense(), "zigzag", "ring"),
    Scenario("ring, 2 ranks, moving is longer", 2, "60mbit", 4096, HEADS, lr.Dense(), "zigzag", "ring"),
    Scenario("ring, 2 ranks, about equal", 2, "150mbit", 8192, HEADS, lr.Dense(), "zigzag", "ring"),
    Scenario("gather, 2 ranks", 2, "150mbit", 8192, HEADS, lr.Dense(), "zigzag", "gather"),
    Scenario("ulysses, 2 ranks", 2, "150mbit", 8192, HEADS, lr.Dense(), "zigzag", "ulysses"),
    Scenario(
        "window, exchange, 2 ranks", 2, "40mbit", 16384, HEADS, lr.Dense(window=(2047, 0)), "contiguous", "exchange"
    ),
    Scenario("dilated, exchange, 2 ranks", 2, "100mbit", 16384, HEADS, longnet(16384), "contiguous", "exchange"),
    Scenario("ring, 4 ranks", 4, "80mbit", 4096, HEADS, lr.Dense(), "zigzag", "ring"),
    Scenario("bidirectional, 4 ranks", 4, "80mbit", 4096, HEADS, lr.Dense(), "zigzag", "bidirectional"),
    Scenario("dilated, exchange, 4 ranks", 4, "50mbit", 8192, HEADS, longnet(8192), "contiguous", "exchange"),
    Scenario("ulysses, 4 ranks", 4, "50mbit", 4096, HEADS, lr.Dense(), "zigzag", "ulysses"),
)


# ------------------------------------------------------------------------------------ calibrating, on every rank


class Shape(NamedTuple):
    """A tile none of the scenarios has."""

    rows: int
    cols: int
    is_causal: bool

    @property
    def pairs(self) -> int:
        return self.rows * (self.rows + 1) // 2 if self.is_causal else self.rows * self.cols

    @property
    def tile(self) -> Tile:
        return Tile(range(1), range(HEADS), range(self.rows), range(self.cols), None, 0 if self.is_causal else None)


SHAPES = (Shape(768, 768, True), Shape(1536, 1536, True), Shape(1536, 2304, False))


def timed(run: Callable[[], object], times: int = 5) -> float:
    """The median of so many, all ranks at once."""
    run()
    seconds: list[float] = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def computing_rates() -> dict[str, dict[str, float]]:
    """FLOP/s on wide tiles, and the rows at which half of that is attained, by least squares over the shapes."""
    kernel = FusedKernel("sdpa", [CpuFlash()])
    found: dict[str, dict[str, float]] = {}
    for phase in PASSES:
        points: list[tuple[float, float, float]] = []
        for shape in SHAPES:
            q, dout, out = (torch.randn(1, shape.rows, HEADS, D) for _ in range(3))
            k, v = (torch.randn(1, shape.cols, HEADS, D) for _ in range(2))
            lse = torch.full((1, HEADS, shape.rows), 10.0)
            if phase == "forward":
                run = lambda q=q, k=k, v=v, t=shape.tile: kernel.forward(q, k, v, [t], scale=0.1)  # noqa: E731
            else:
                up = Upstream(dout, None, out, lse)
                run = lambda q=q, k=k, v=v, t=shape.tile, up=up: kernel.backward(up, q, k, v, [t], scale=0.1)  # noqa: E731
            flops = FLOPS_OF_A_PAIR[phase] * D * shape.pairs * HEADS
            points.append((flops, flops / (2 * shape.pairs / shape.rows), timed(run)))
        slope, edge = _fitted(points)
        found[phase] = {"flops": 1 / slope, "half_rate_rows": max(0.0, edge / slope)}
    return found


def _fitted(points: list[tuple[float, float, float]]) -> tuple[float, float]:
    """a, b with seconds = a x + b y, every point with the same weight in relative terms."""
    scaled = [(x / s, y / s) for x, y, s in points]
    xx, xy, yy = (sum(p[i] * p[j] for p in scaled) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(p[i] for p in scaled) for i in (0, 1))
    determinant = xx * yy - xy * xy
    a, b = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
    return (a, b) if b > 0 else (x / xx, 0.0)


def merging_rates() -> dict[str, float]:
    """Bytes a second of what the model counts for bringing a part to the rest: 12 for a number of float32."""
    rows = 2048
    out, part = torch.zeros(1, rows, HEADS, D), torch.randn(1, rows, HEADS, D)
    lse, part_lse = torch.zeros(1, rows, HEADS, dtype=torch.float64), torch.randn(1, rows, HEADS)
    forward = timed(lambda: merge_(out, lse, part.clone(), part_lse))
    backward = timed(lambda: out.add_(part))
    return {"forward": 12 * out.numel() / forward, "backward": 12 * out.numel() / backward}


def launching() -> float:
    kernel, x = FusedKernel("sdpa", [CpuFlash()]), torch.randn(1, 8, HEADS, D)
    tile = Tile(range(1), range(HEADS), range(8), range(8), None, 0)
    return timed(lambda: kernel.forward(x, x, x, [tile], scale=0.1), times=50)


def link() -> dict[str, float]:
    """Seconds until a message is there, and bytes a second, from two sizes, one way at a time."""
    rank = dist.get_rank()

    def turn(nbytes: int) -> float:
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        return timed(lambda: dist.recv(tensor, rank - 1) if rank % 2 else dist.send(tensor, rank + 1), times=3)

    small, large = 1 << 19, 3 << 20
    brief, longer = turn(small), turn(large)
    speed = (large - small) / (longer - brief)
    return {"bytes_per_second": speed, "latency_seconds": max(0.0, brief - small / speed)}


def one_rank(scenario: Scenario) -> dict[str, Any]:
    dist.init_process_group("gloo")
    measured = {"computing": computing_rates(), "merging": merging_rates(), "launching": launching(), "link": link()}
    real = transport_for(dist.group.WORLD)
    call, mute = Call(scenario), Mute(real)
    _, found, _ = call.run(real)
    error = call.check(real, found)
    if not error < 1e-5:
        raise SystemExit(f"wrong by {error:.1e}: nothing is timed")
    rounds = [{"call": call.run(real)[0], "tiles alone": call.run(mute)[0]} for _ in range(REPEATS + 1)][1:]
    dist.barrier()
    return {"error": error, "rounds": rounds, "calibration": measured}


# ---------------------------------------------------------------------------------------------- all ranks


def all_ranks(number: int) -> dict[str, Any]:
    scenario = SCENARIOS[number]
    with namespaces.machines(scenario.ranks, scenario.rate) as made:
        running = [start(machine, number, made[0].address, scenario.ranks) for machine in made]
        said = [process.communicate(timeout=600)[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"{scenario.name}: a rank failed")
    return summary(scenario, [json.loads(text) for text in said])


def start(machine: namespaces.Machine, number: int, first: str, ranks: int) -> subprocess.Popen[str]:
    world = {"RANK": str(machine.number), "WORLD_SIZE": str(ranks), "MASTER_ADDR": first, "MASTER_PORT": "29500"}
    command = [sys.executable, __file__, "--rank-of", str(number)]
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return machine.start(command, {**world, **quiet}, stdout=subprocess.PIPE)


def summary(scenario: Scenario, reports: list[dict[str, Any]]) -> dict[str, Any]:
    calibration = _middle([report["calibration"] for report in reports])
    calibration["link"] = _middle([report["calibration"]["link"] for report in reports[1::2]])  # those who received
    passes = {phase: compared(scenario, calibration, phase, reports) for phase in PASSES}
    return {
        "what": scenario.name,
        "ranks": scenario.ranks,
        "rate": scenario.rate,
        "shape": f"batch 1, {scenario.tokens} tokens, {scenario.heads} heads, d = {D}, float32",
        "pattern": repr(scenario.pattern),
        "layout": scenario.layout,
        "schedule": scenario.schedule,
        "error against one process": max(report["error"] for report in reports),
        "calibration": calibration,
        **passes,
    }


def _middle(told: list[Any]) -> Any:
    """The median over the ranks of every number."""
    if isinstance(told[0], dict):
        return {key: _middle([one[key] for one in told]) for key in told[0]}
    return statistics.median(told)


def compared(scenario: Scenario, calibration: Any, phase: Any, reports: list[dict[str, Any]]) -> dict[str, Any]:
    slowest = {
        what: [max(one[what][phase] for one in rounds) for rounds in zip(*(r["rounds"] for r in reports), strict=True)]
        for what in ("call", "tiles alone")
    }
    found = predicted(scenario, calibration, phase)
    median = statistics.median(slowest["call"])
    alone = statistics.median(slowest["tiles alone"])
    return {
        "measured": {"median": median, "low": min(slowest["call"]), "high": max(slowest["call"]), "runs": REPEATS},
        "predicted": found.seconds,
        "error": found.seconds / median - 1,
        "tiles alone": {
            "measured": alone,
            "predicted": max(found.computing),
            "error": max(found.computing) / alone - 1,
        },
    }


def predicted(scenario: Scenario, calibration: Any, phase: Any) -> Played:
    return played(scenario, calibrated(calibration, phase), phase)


def played(scenario: Scenario, machine: Hardware, phase: Any, slow: Slow | None = None) -> Played:
    layout = deal(scenario.layout, scenario.tokens, scenario.ranks)
    problem = Problem(1, scenario.tokens, scenario.tokens, scenario.heads, 0)
    return play(
        Task(scenario.pattern, problem, layout, layout),
        scenario.schedule,
        hardware=machine,
        head_dim=D,
        itemsize=4,
        node_ranks=1,
        phase=phase,
        slow=slow,
    )


def calibrated(told: Any, phase: Any) -> Hardware:
    """This machine, as measured: what plan knows of a "cpu", with these numbers in the place of its own."""
    rates = told["computing"]
    rated = {
        which: {"fp32": rates[which]["flops"] * (1 + PER_PAIR[which] * (RATED_HEAD_DIM / D - 1))} for which in PASSES
    }
    return replace(
        hardware("cpu"),
        forward_flops=rated["forward"],
        backward_flops=rated["backward"],
        half_rate_rows=round(rates[phase]["half_rate_rows"]),
        memory_bytes_per_second=told["merging"][phase],
        launch_seconds=told["launching"],
        outside=Link("shaped", source="measured", **told["link"]),
        links_out=1,
    )


# ------------------------------------------------------------------------------------- the record of overlap


def overlapped() -> list[dict[str, Any]]:
    """Runs of docs/records/overlap.json: computing as long as was measured there, links of the set speed."""
    record = json.loads((DOCS / "records" / "overlap.json").read_text(encoding="utf-8"))
    known = {one.name: one for one in OVERLAP}
    return [_overlapped(known[run["what"]], run, phase) for run in record["runs"] for phase in PASSES]


def _overlapped(scenario: Scenario, run: dict[str, Any], phase: Any) -> dict[str, Any]:
    wire = Link("shaped", float(scenario.rate.removesuffix("mbit")) * 1e6 / 8, 0.0, "as set by tc")
    machine = replace(hardware("cpu"), outside=wire, links_out=1)
    seconds = {way: told["median"] for way, told in run[phase]["seconds"].items()}
    factor = seconds["compute"] / max(played(scenario, machine, phase).computing)
    slow = Slow(ranks=dict.fromkeys(range(scenario.ranks), factor))
    found, measured = played(scenario, machine, phase, slow).seconds, seconds["together"]
    return {"what": scenario.name, "rate": scenario.rate, "phase": phase, "measured": measured, "predicted": found,
            "error": found / measured - 1}  # fmt: skip


# ------------------------------------------------------------------------------------------------ the H200


def h200() -> list[dict[str, Any]]:
    """What docs/records/h200.json measured of longring on one GPU, predicted."""
    scenarios = Record.load(DOCS / "records" / "h200.json").scenarios
    rows = [(name, row) for name in ("dilated", "dense") for row in scenarios[name] if row.name == "longring"]
    return [_on_h200(name, row, row.time.median) for name, row in rows if row.time is not None]


def _on_h200(scenario: str, row: Row, measured: float) -> dict[str, Any]:
    n, unit, heads, kv_heads, d = re.search(r"n = (\d+)([KM]), (\d+)(?:/(\d+))? heads, d = (\d+)", row.case).groups()  # type: ignore[union-attr]
    tokens = int(n) * {"K": 2**10, "M": 2**20}[unit]
    branches = [2048 << i for i in range(5)]
    pattern = Dilated(branches, [w // 2048 for w in branches]) if scenario == "dilated" else Dense("causal" in row.case)
    alone = deal("contiguous", tokens, 1)
    task = Task(pattern, Problem(1, tokens, tokens, int(kv_heads or heads), 0), alone, alone, int(heads))
    seconds = play(task, "ring", hardware=hardware("h200"), head_dim=int(d), itemsize=2, phase=row.phase).seconds
    case = row.case if scenario == "dense" else f"dilated, {row.case}"
    return {
        "case": case,
        "phase": row.phase,
        "measured": measured,
        "predicted": seconds,
        "error": seconds / measured - 1,
    }


# ------------------------------------------------------------------------------------------- 4,096 ranks


def thousands() -> list[dict[str, Any]]:
    """How long the simulation itself takes."""
    ranks, found = 4096, []
    longnet_over_all = Dilated([2048 * 4**k for k in range(10)], [4**k for k in range(10)])
    for what, pattern, layout, tokens, schedule in (
        ("causal zigzag, 16K tokens a rank", Dense(), "zigzag", 2**14 * ranks, "ring"),
        ("causal zigzag, 2K tokens a rank", Dense(), "zigzag", 2**11 * ranks, "ring"),
        ("LongNet, 256K tokens a rank", longnet_over_all, "contiguous", 2**18 * ranks, "exchange"),
    ):
        for phase in PASSES:
            dealt = deal(layout, tokens, ranks)
            task = Task(pattern, Problem(1, tokens, tokens, 8, 0), dealt, dealt, 32)
            start = time.process_time()
            played = play(
                task, schedule, hardware=hardware("h200"), head_dim=128, itemsize=2, node_ranks=8, phase=phase
            )
            took = time.process_time() - start
            found.append({"what": what, "schedule": schedule, "phase": phase, "ranks": ranks, "took": took,
                          "predicted": played.seconds, "hidden": played.hidden})  # fmt: skip
    return found


# ------------------------------------------------------------------------------------------------- tables


def percent(error: float) -> str:
    return f"{100 * error:+.0f} %"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shaped_table(record: dict[str, Any]) -> str:
    rows = []
    for run in record["shaped links"]:
        for phase in PASSES:
            one = run[phase]
            measured = one["measured"]
            rows.append([
                run["what"], run["rate"], phase,
                f"{measured['median']:.3f} ({measured['low']:.3f} to {measured['high']:.3f})",
                f"{one['predicted']:.3f}", percent(one["error"]), percent(one["tiles alone"]["error"]),
            ])  # fmt: skip
    return table(("scenario", "link", "pass", "measured s", "predicted s", "error", "of that, computing"), rows)


def overlap_table(record: dict[str, Any]) -> str:
    rows = [
        [r["what"], r["rate"], r["phase"], f"{r['measured']:.3f}", f"{r['predicted']:.3f}", percent(r["error"])]
        for r in record["record of overlap"]
    ]
    return table(("scenario", "link", "pass", "measured s", "predicted s", "error"), rows)


def h200_table(record: dict[str, Any]) -> str:
    rows = [
        [r["case"], r["phase"], f"{1e3 * r['measured']:.3g}", f"{1e3 * r['predicted']:.3g}", percent(r["error"])]
        for r in record["h200"]
    ]
    return table(("case", "pass", "measured ms", "predicted ms", "error"), rows)


def thousands_table(record: dict[str, Any]) -> str:
    rows = [
        [r["what"], r["schedule"], r["phase"], f"{r['predicted']:.3g}", f"{r['hidden']:.2f}", f"{r['took']:.1f}"]
        for r in record["4096 ranks"]
    ]
    return table(("task", "schedule", "pass", "predicted s", "hidden", "simulated in s"), rows)


def write(record: dict[str, Any]) -> None:
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    made_by = {"shaped": shaped_table, "overlap": overlap_table, "h200": h200_table, "thousands": thousands_table}
    for name, made in made_by.items():
        begin, end = f"<!-- {name}: by benchmarks/events.py -->", f"<!-- end of {name} -->"
        before, behind = page.split(begin)[0], page.split(end)[1]
        page = f"{before}{begin}\n{made(record)}\n{end}{behind}"
    PAGE.write_text(page, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="scenarios whose name holds one of these")
    parser.add_argument("--write", action="store_true", help="write the record and the tables of docs/events.md")
    parser.add_argument("--h200", action="store_true", help="of the record and the page, that part alone, anew")
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of is not None:
        json.dump(one_rank(SCENARIOS[asked.rank_of]), sys.stdout)
        return
    if asked.h200:
        write({**json.loads(RECORD.read_text(encoding="utf-8")), "h200": h200()})
        return
    reason = namespaces.why_not()
    if reason is not None:
        sys.exit(f"skipped: {reason}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    busy = os.getloadavg()[0]
    record = {
        "commit": commit.stdout.strip(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "longring": lr.__version__},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}; a rank has 1 thread; medians of {REPEATS}",
        "load of the machine before": round(busy, 2),
        "real": "shaped links: processes over Gloo in network namespaces, timed; h200: times of docs/records/h200.json",
        "simulated": "everything called predicted, and all of the 4096 ranks",
        "shaped links": [
            all_ranks(number) for number, one in enumerate(SCENARIOS) if any(text in one.name for text in asked.only)
        ],
        "record of overlap": overlapped(),
        "h200": h200(),
        "4096 ranks": thousands() if asked.write else [],
    }
    if asked.write:
        write(record)
    else:
        print(json.dumps([run["calibration"] for run in record["shaped links"]]))
        print(shaped_table(record), h200_table(record), sep="\n\n")


if __name__ == "__main__":
    main()
