"""`longring verify` on ranks of this machine: right where the engine is, and what is broken on purpose is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import longring as lr
from longring.bench.verify.faults import LOSSES, MISMATCHES, _judge_loss, _judge_mismatch
from longring.bench.verify.program import cases, length_for, verify
from longring.bench.verify.ranks import FAILED, NOT_RUN, PASSED, Ranks, Row, Wanted
from longring.geometry.layouts import LAYOUTS
from longring.geometry.plans import PLANS

pytestmark = pytest.mark.processes

LATE = {"slack": 60.0, "disagreement": 60.0}  # on a busy machine; how soon ranks raise is asked in tests/processes
SCHEMA = {"what", "hardware", "backend", "ranks", "nodes", "shares_a_gpu", "versions", "commit", "sources"}
SCHEMA |= {"started", "seconds", "results"}


def run(*command, limit=110):
    environment = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=limit, env=environment)


def test_the_command_verifies_ranks_of_this_machine(tmp_path):
    file = tmp_path / "verify.json"
    done = run("-m", "longring", "verify", "--ranks", "3", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All that was run is right: 86 passed, 0 failed, 7 not run" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    told = json.loads(file.read_text())
    assert told.keys() == SCHEMA
    assert (told["backend"], told["ranks"], told["nodes"], told["shares_a_gpu"]) == ("gloo", 3, 1, False)
    exact = [row for row in told["results"] if row["check"] == "exactness"]
    assert {row["name"] for row in exact} == {case.name for case in cases(length_for(3, "cpu"))}
    for row in exact:
        assert row["passed"] is True
        assert 0 < row["numbers"]["bytes_sent"] == row["numbers"]["bytes_planned"]
        assert set(row["numbers"]["errors"]) == {"out", "lse", "dq", "dk", "dv"}
        assert 0 < row["numbers"]["budget_used"] < 1
    for row in told["results"]:
        assert row["check"] != "fault" or (row["status"] == NOT_RUN and "--faults" in row["detail"])
        assert ("passed" in row) == (row["status"] != NOT_RUN)


def test_every_schedule_pattern_and_layout_is_a_case():
    found = cases(307)
    assert {case.schedule for case in found} == set(PLANS)
    assert {case.layout for case in found} == set(LAYOUTS)
    assert len({case.name for case in found}) == len(found) == len(PLANS) * 6 * 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64, 1024])
def test_nothing_divides_the_length(ranks):
    for device in ("cpu", "cuda"):
        n = length_for(ranks, device)
        assert n >= 5 * ranks
        assert all(n % i for i in range(2, 1025) if i < n)


def test_torchrun_starts_the_ranks(tmp_path):
    file = tmp_path / "verify.json"
    words = ("--only", "ring, causal", "--only", "killed", "--faults", "--json", str(file))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(*torchrun, "-m", "longring", "verify", *words)
    told = json.loads(file.read_text())
    *exact, killed = told["results"]
    assert {row["status"] for row in exact} == {PASSED}, done.stdout + done.stderr
    assert len(exact) == 2 * 2  # ring's and double_ring's, in two dtypes
    assert killed["name"] == "a rank is killed"
    assert "PeerLost" in killed["detail"], killed


def test_one_rank_has_nobody_to_lose(tmp_path):
    file = tmp_path / "verify.json"
    done = run("-m", "longring", "verify", "--ranks", "1", "--faults", "--only", "rank", "--only", "ring, causal")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a single rank has no other to lose" in " ".join(done.stdout.split())
    assert not file.exists()


def test_words_that_name_no_check_are_refused():
    done = run("-m", "longring", "verify", "--ranks", "1", "--only", "nothing like it")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --only nothing like it names no check; without it, all of them are run\n"


# -------------------------------------------------------------------------------------------------------- faults


def test_every_fault_is_named():
    wanted = Wanted(only=("another", "a rank "), faults=True, **LATE)
    for found in lr.launch(verify, wanted, ranks=3, backend="gloo", timeout=400):  # the same on every rank
        rows = {row.name: row for row in found["rows"]}
        assert list(rows) == [*MISMATCHES.values(), *LOSSES.values()]
        for row in rows.values():
            assert row.status == PASSED, row
        for name in MISMATCHES.values():
            assert "Disagreement that names it on 3 of 3 ranks" in rows[name].detail
            assert len(rows[name].numbers["seconds"]) == 3
        for name in LOSSES.values():
            assert "PeerLost that names it on 2 of 2 other ranks" in rows[name].detail


def judged(judge, name, said, size=3):
    row = Row("fault", name, NOT_RUN)
    ranks = type("Three", (Ranks,), {"size": size, "rank": 0})(Wanted(), None, 0.0)
    judge(ranks, name, row, said)
    return row


def told(error, named=2, seconds=1.0, text="scale is 1 on rank 2", status=0, name="kill"):
    one = {"fault": name, "error": error, "named": named, "seconds": seconds, "text": text}
    return {"began": {"fault": "began"}, name: one, "status": status, "tail": ""}


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (told("PeerLost", named=0), "rank 1: PeerLost"),
        (told("Disagreement"), "rank 1: Disagreement"),
        (told(None), "rank 1: no error"),
        (told("PeerLost", seconds=5.6), "rank 1 raised after 5.60 s, and 5.5 s are allowed"),
        (told("PeerLost", status=-9), "rank 1 did not end well (-9)"),
        ({"status": -6, "tail": "what it printed"}, "rank 1's ended with -6: what it printed"),
    ],
)
def test_a_loss_that_is_not_told_as_promised_fails(second, words):
    assert judged(_judge_loss, "kill", [told("PeerLost"), told("PeerLost"), {}]).status == PASSED
    row = judged(_judge_loss, "kill", [told("PeerLost"), second, {}])
    assert row.status == FAILED
    assert words in row.detail


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (told("PeerLost", name="scale"), "rank 1: PeerLost"),
        (told(None, name="scale"), "rank 1: no error"),
        (told("Disagreement", name="scale", seconds=2.1), "after 2.10 s, and 2 s are allowed"),
        (told("Disagreement", name="scale", text="scale is 2 on rank 2"), "what ranks said"),
    ],
)
def test_a_mismatch_that_is_not_told_as_promised_fails(second, words):
    first = told("Disagreement", name="scale")
    assert judged(_judge_mismatch, "scale", [first] * 3).status == PASSED
    row = judged(_judge_mismatch, "scale", [first, second, first])
    assert row.status == FAILED
    assert words in row.detail


def test_a_world_that_never_began_is_not_run():
    row = judged(_judge_loss, "kill", [{"status": 1, "tail": "no GPU"}, {"status": 1, "tail": "no GPU"}, {}])
    assert row.status == NOT_RUN
    assert "no GPU" in row.detail


# --------------------------------------------------------------------------------------------------- broken engines


def with_a_wrong_number(rank):
    """One number of one rank's output is off by a hundredth."""
    import torch.distributed as dist

    honest = lr.attention

    def broken(*args, **options):
        out, lse = honest(*args, **options)
        if dist.get_rank() == rank and options["schedule"] == "gather":
            out = out + 0.01 * (out.detach().cumsum(1) == out.detach().cumsum(1)[:, :1])
        return out, lse

    lr.attention = broken
    return verify(Wanted(only=("gather, full", "ring, full, contiguous, fp32")))["rows"]


def with_other_bytes(rank):
    """The rank counts eight bytes more than are planned."""
    import torch.distributed as dist

    from longring.transport.process_group import ProcessGroupTransport

    honest = ProcessGroupTransport._enter_post

    def counted(self, *args):
        if dist.get_rank() == rank:
            self.bytes_sent += 8
        return honest(self, *args)

    ProcessGroupTransport._enter_post = counted
    return verify(Wanted(only=("ring, window",)))["rows"]


def with_a_rank_that_raises(rank):
    import torch.distributed as dist

    honest = lr.attention

    def broken(*args, **options):
        if dist.get_rank() == rank and options["schedule"] == "exchange":
            raise ZeroDivisionError("in the kernel")
        return honest(*args, **options)

    lr.attention = broken
    return verify(Wanted(only=("full, contiguous, fp32",), timeout=20.0))["rows"]


def test_a_wrong_number_is_named_with_its_case():
    for rows in lr.launch(with_a_wrong_number, 1, ranks=2, backend="gloo", timeout=100):
        found = {row.name: row for row in rows if row.check == "exactness"}
        failed = [name for name, row in found.items() if row.status == FAILED]
        assert failed == ["gather, full, contiguous, fp32", "gather, full, contiguous, bf16"]
        assert "the relative error of out is " in found[failed[0]].detail


def test_bytes_that_were_not_planned_are_named_with_their_rank():
    for rows in lr.launch(with_other_bytes, 1, ranks=2, backend="gloo", timeout=100):
        failed = [row for row in rows if row.status == FAILED]
        assert [row.name for row in failed] == [row.name for row in rows if row.check == "exactness"]
        for row in failed:
            assert row.detail.startswith("rank 1 sent ")
            assert row.numbers["bytes_sent"] > row.numbers["bytes_planned"]


def test_what_one_rank_raises_fails_the_case_and_says_why_the_rest_was_not_run():
    for rows in lr.launch(with_a_rank_that_raises, 1, ranks=2, backend="gloo", timeout=100):
        status = {row.name.partition(",")[0]: row for row in rows}
        assert status["exchange"].status == FAILED
        assert "rank 1: ZeroDivisionError: in the kernel" in status["exchange"].detail
        before, after = list(PLANS)[: list(PLANS).index("exchange")], list(PLANS)[list(PLANS).index("exchange") + 1 :]
        assert {status[name].status for name in before} == {PASSED}
        for name in after:
            assert status[name].status == NOT_RUN
            assert "ranks failed in exchange, full" in status[name].detail
