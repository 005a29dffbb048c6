"""`longring verify` over NCCL ranks that share the GPU: every schedule with every pattern, links, and faults."""

import json
import subprocess
import sys

import pytest

import shared_gpu
from longring.bench.verify.faults import LOSSES, MISMATCHES
from longring.bench.verify.program import cases, length_for

LIMIT = 380.0


def verified(file, ranks, *words, torchrun=False):
    """What the command wrote; its own verdict is asserted, with all that it printed."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if torchrun else []
    where = [] if torchrun else ["--ranks", str(ranks)]
    command = [sys.executable, *start, "-m", "longring", "verify", *where, "--json", str(file), *words]
    environment = shared_gpu.command(ranks)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    print(done.stdout)  # noqa: T201  # for the log of a run
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    told = json.loads(file.read_text())
    assert (told["ranks"], told["backend"], told["shares_a_gpu"]) == (ranks, "nccl", ranks > 1)
    return {row["name"]: row for row in told["results"]}


@pytest.mark.smoke
def test_four_ranks_in_seconds(tmp_path):
    words = ("--only", "ring", "--only", "exchange, dilated", "--faults", "--only", "another", "--only", "killed")
    rows = verified(tmp_path / "verify.json", 4, *words)
    assert {row["status"] for row in rows.values()} == {"passed"}
    assert {*MISMATCHES.values(), LOSSES["kill"]} <= rows.keys()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_schedule_and_pattern_is_exact(ranks, tmp_path):
    rows = verified(tmp_path / "verify.json", ranks)
    for case in cases(length_for(ranks, "cuda")):
        assert rows[case.name]["status"] == "passed", rows[case.name]
        assert rows[case.name]["numbers"]["bytes_sent"] == rows[case.name]["numbers"]["bytes_planned"] > 0
    for name in ("links between neighbours", "overlap of a causal ring"):
        assert rows[name]["status"] == "passed", rows[name]


def test_every_fault_is_named_in_time_under_torchrun(tmp_path):
    words = ("--faults", "--only", "another", "--only", "a rank ")
    rows = verified(tmp_path / "verify.json", 4, *words, torchrun=True)
    assert list(rows) == [*MISMATCHES.values(), *LOSSES.values()]
    assert {row["status"] for row in rows.values()} == {"passed"}
