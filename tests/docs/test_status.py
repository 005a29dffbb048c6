"""docs/status.md says what the records say, of the sources of now."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import longring
from longring.sources import sources
from scripts import ROOT, script

status = script("docs/write_status.py")
SOURCE = Path(longring.__file__).parent
NOW = sources(SOURCE)
PASSED = {"status": "passed", "counts": {"passed": 716, "failed": 0}}
FAILED = {"status": "failed", "counts": {"passed": 715, "failed": 1}, "failures": [{"name": "a", "message": "b"}]}
CUT_OFF = {"status": "incomplete", "reason": "cut off by the time limit", "counts": {"passed": 300}}


def receipt(started="2026-11-19T18:00:00+00:00", sources=NOW, gpu="NVIDIA H200", **parts):
    found = {"tests": PASSED, "random": PASSED, "nccl": PASSED} | parts
    versions = {"torch": "2.11.0", "nccl": "2.28.9", "nccl of tests/gpu/nccl": "2.32.3"}
    hardware = {"gpu": gpu, "gpus": 1}
    told = {"started": started, "commit": "1a2b3c4", "seed": 7, "seconds": 400.0, "status": "passed"}
    return told | {"hardware": hardware, "versions": versions, "sources": sources, "parts": found}


@pytest.fixture
def records(tmp_path):
    (tmp_path / "gpu").mkdir()
    return tmp_path


def put(records, *receipts):
    for number, each in enumerate(receipts):
        (records / "gpu" / f"{number}.json").write_text(json.dumps(each))


def rows(page, what):
    return [line for line in page.splitlines() if line.startswith("|") and what in line]


def test_the_page_is_what_its_records_say_now():
    assert (ROOT / "docs" / "status.md").read_text() == status.page(), "run make status"


def test_a_receipt_of_these_sources_is_fresh(records):
    put(records, receipt())
    assert status.is_fresh(receipt(), NOW)
    page = status.page(records, NOW)
    assert status.STALE not in "".join(rows(page, "H200"))
    for part in ("`tests/gpu`", "random configurations", "NCCL, ranks"):
        (row,) = rows(page, part)
        assert row.endswith("| yes |")
    assert "NVIDIA H200, torch 2.11.0, NCCL 2.32.3" in page


def test_a_change_in_kernels_makes_it_stale_and_one_in_documents_does_not(records, tmp_path):
    copy = Path(shutil.copytree(SOURCE, tmp_path / "longring", ignore=shutil.ignore_patterns("__pycache__")))
    made = receipt(sources=sources(copy))
    put(records, made)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "kernels.md").write_text("another word")
    (copy / "cli" / "plan.py").write_text("print()")
    assert status.is_fresh(made, sources(copy))
    kernel = copy / "kernels" / "triton" / "parts.py"
    kernel.write_text(kernel.read_text().replace("+", "-", 1))
    now = sources(copy)
    assert not status.is_fresh(made, now)
    found = rows(status.page(records, now), "NVIDIA H200")
    assert len(found) == 4
    assert all(row.endswith("| *not run at these sources*: kernels changed |") for row in found)


@pytest.mark.parametrize(("part", "said"), [(FAILED, "**failed**"), (CUT_OFF, "**incomplete**")], ids=["failed", "cut"])
@pytest.mark.parametrize("name", ["tests", "random", "nccl"])
def test_what_failed_or_was_cut_off_never_reads_as_passed(records, name, part, said):
    made = receipt(**{name: part})
    put(records, made)
    assert not status.is_fresh(made, NOW)
    page = status.page(records, NOW)
    row, *_ = [line for line in rows(page, status.NAMES[name]) if "H200" in line]
    assert said in row
    assert "| passed" not in row
    assert row.endswith("| **no** |")
    history = rows(page.partition("## Receipts")[2].partition("## Measurements")[0], "H200")
    assert len(history) == 1
    assert all("| passed |" not in line and line.endswith("| **no** |") for line in history)


def test_nccl_that_could_not_run_is_said_not_to_have(records):
    put(records, receipt(nccl={"status": "not run", "reason": "NCCL 2.28 refuses two ranks on one GPU"}))
    (row,) = rows(status.page(records, NOW), "NCCL, ranks")
    assert "not run: NCCL 2.28 refuses" in row
    assert "NCCL 2.32" not in row
    assert row.endswith("| not run |")


def test_a_part_that_a_receipt_does_not_have_is_incomplete(records):
    made = receipt()
    del made["parts"]["random"]
    put(records, made)
    (row,) = rows(status.page(records, NOW), "random configurations")
    assert "**incomplete**" in row


def test_the_last_run_at_these_sources_is_shown_and_earlier_failures_at_them_are_told(records):
    old = NOW | {"packages": NOW["packages"] | {"kernels": "0"}}
    put(
        records,
        receipt("2026-11-18T10:00:00+00:00", sources=old),
        receipt("2026-11-19T10:00:00+00:00", tests=FAILED),
        receipt("2026-11-19T11:00:00+00:00"),
        receipt("2026-11-19T12:00:00+00:00", sources=old),
        receipt("2026-11-19T13:00:00+00:00", nccl=PASSED, tests={"status": "not run", "reason": "not asked for"}),
    )
    page = status.page(records, NOW).partition("## Receipts")[0]
    (row,) = rows(page, "`tests/gpu`")
    assert "2026-11-19, 1a2b3c4" in row
    assert "**1 earlier at these sources failed**" in row
    assert row.endswith("| yes |")


def test_what_a_cpu_wrote_is_no_receipt(records):
    put(records, receipt() | {"hardware": {"gpu": "cpu", "gpus": 0}})
    with pytest.raises(SystemExit, match="trial on a CPU"):
        status.page(records, NOW)


def test_a_damaged_record_does_not_vanish(records):
    (records / "gpu" / "one.json").write_text("{")
    with pytest.raises(SystemExit, match="is no JSON"):
        status.page(records, NOW)


# ----------------------------------------------------------------------------------------------- random over many runs


def random_run(seed, engine, sanitizer=None, **outcomes):
    facts, far = {"device": "NVIDIA H200"}, {"dilated_over_ranks_from_32768_tokens": 9}
    told = {"seed": seed, "sources": engine, "started": "2026-11-19T08:00:00", "commit": "1a2b3c4", "facts": facts}
    return told | far | {"outcomes": outcomes, "sanitizer": sanitizer}


def test_packages_that_changed_since_random_configurations_ran_are_named(records):
    before = NOW | {"engine": "another", "packages": NOW["packages"] | {"kernels": "another"}}
    (records / "random_gpu.json").write_text(json.dumps({"runs": [random_run(1, before, right=90)]}))
    (row,) = rows(status.page(records, NOW), "more random")
    assert row.endswith(f"| {status.STALE}: kernels changed |")


def test_runs_of_random_configurations_add_up_by_sources(records):
    watched = {"errors": 0, "processes": 8, "summaries": 8}
    runs = [
        random_run(1, NOW["engine"], right=90, refused=10),
        random_run(2, NOW["engine"], right=100),
        random_run(3, None, right=1400, wrong=1),
        random_run(4, NOW["engine"], watched, right=150),
        random_run(5, "another", watched | {"errors": 2}, right=150),
    ]
    (records / "random_gpu.json").write_text(json.dumps({"runs": runs}))
    page = status.page(records, NOW)
    old, new = sorted(rows(page, "more random"), key=lambda row: row.endswith("| yes |"))
    assert "200 configurations of 2 seeds: 190 right, 10 refused, 0 wrong" in new
    assert "**failed**: 1,401 configurations of 1 seeds" in old
    assert status.STALE in old
    old, new = sorted(rows(page, "memcheck over"), key=lambda row: row.endswith("| yes |"))
    assert "0 errors of memcheck" in new
    assert "**failed**" in old


def test_a_watch_that_did_not_last_to_the_end_is_incomplete(records):
    run = random_run(1, NOW["engine"], {"errors": 0, "processes": 8, "summaries": 7}, right=150)
    (records / "random_gpu.json").write_text(json.dumps({"runs": [run]}))
    (row,) = rows(status.page(records, NOW), "memcheck over")
    assert "**incomplete**" in row


# ------------------------------------------------------------------------------------------------------ longring verify


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"results": [{"ok": True}, {"passed": True}]}, "passed: 2 right"),
        ({"results": {"exact": [{"ok": True}], "faults": [{"ok": True}]}}, "passed: 2 right"),
        ({"results": [{"status": "passed"}, {"status": "not run"}]}, "passed: 1 right, 1 not run"),
        ({"results": [{"status": "passed"}, {"status": "failed"}]}, "**failed**: 1 right, 1 wrong"),
        ({"results": [{"status": "not run"}]}, "**incomplete**"),
        ({"results": [{"status": "passed"}, {"status": "hung"}]}, "**incomplete**"),
        ({"results": [{"ok": True}, {"ok": False}]}, "**failed**"),
        ({"results": {"exact": [{"ok": True}], "faults": [{"ok": False}]}}, "**failed**"),
        ({"results": [{"ok": True}], "ok": False}, "**failed**"),
        ({"results": [{"ok": True}, {"seconds": 3}]}, "**incomplete**"),
        ({"results": [{"ok": True}], "is_complete": False}, "**incomplete**"),
        ({"results": []}, "**incomplete**"),
        ({}, "**incomplete**"),
    ],
)
def test_what_verify_found_is_taken_in(records, told, said):
    (records / "verify").mkdir()
    whole = {"hardware": {"gpu": "NVIDIA H100"}, "ranks": 8, "nodes": 2, "backend": "nccl", "shares_a_gpu": False}
    (records / "verify" / "cluster.json").write_text(json.dumps(whole | {"sources": NOW, "commit": "1a2b3c4"} | told))
    page = status.page(records, NOW)
    (row,) = rows(page, "longring verify")
    assert said in row
    assert "NVIDIA H100, 8 ranks on 2 nodes over nccl" in row
    assert ("Several GPUs, a rank each" in page) == (not said.startswith("passed"))


def test_several_gpus_are_not_seen_where_ranks_share_one(records):
    (records / "verify").mkdir()
    told = {"hardware": "NVIDIA H200", "ranks": 4, "backend": "nccl", "shares_a_gpu": True, "sources": NOW}
    (records / "verify" / "one.json").write_text(json.dumps(told | {"results": [{"ok": True}]}))
    page = status.page(records, NOW)
    assert "Several GPUs, a rank each" in page
    assert "some sharing a GPU" in "".join(rows(page, "longring verify"))
