"""A record comes back as it was written, and what is shown of it is what it says."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from longring import LongringError
from longring.bench.gpu.dense import TO_THE_BEST
from longring.bench.gpu.dilated import TO_LONGNET
from longring.bench.gpu.error import TO_ONE_CALL
from longring.bench.gpu.goals import goals
from longring.bench.gpu.ring import EFFICIENCY
from longring.bench.gpu.scenarios import SCENARIOS, gpu_record
from longring.bench.gpu.tables import goal_table, machine_table, markdown, plain, plain_goals
from longring.bench.records import SCHEMA, Record, Row, Spread

TIME = Spread(1.5e-3, 1.25e-3, 2e-3, 5)


def record(**scenarios):
    made = gpu_record("the command", torch.device("cpu"), is_quick=False)
    made.scenarios = scenarios
    return made


def row(case="causal, n = 32K", name="longring", phase="forward", **told):
    return Row(case, phase, name, **{"time": TIME, **told})


def test_what_is_written_is_read(tmp_path):
    rows = [row(tflops=612.5, ratios={TO_THE_BEST: 1.005}, errors={"out": 0.002}), row(name="cudnn", kind="kernel")]
    written = record(dense=rows)
    written.missing, written.failures, written.seconds = ["a peer"], ["a failure"], {"dense": 1.0}
    path = tmp_path / "deep" / "record.json"
    written.save(path)
    assert Record.load(path) == written
    told = json.loads(path.read_text())
    assert told["schema"] == SCHEMA
    assert "virtual" in told["simulated"]
    assert {"torch", "triton", "flash-attn-4", "cuda"} <= told["versions"].keys()
    assert told["command"] == "bench"
    assert told["rows"][0]["time"] == {"median": 0.0015, "low": 0.00125, "high": 0.002, "runs": 5}


def test_another_form_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"schema": "something else"}')
    with pytest.raises(LongringError, match="not a record of the form"):
        Record.load(path)


def test_a_record_is_continued_by_the_same_code_on_the_same_machine(tmp_path):
    path = tmp_path / "record.json"
    later = record()
    assert not later.continues(path)
    earlier = record(dense=[row()])
    earlier.missing, earlier.failures = ["a peer"], ["a failure"]
    earlier.save(path)
    assert later.continues(path)
    assert later.scenarios == {"dense": [row()]}
    assert (later.missing, later.failures) == (["a peer"], ["a failure"])
    assert later.line == "the command; the command"
    other = record()
    other.commit = "another"
    assert not other.continues(path)
    assert other.scenarios == {}


def test_tables_leave_out_empty_columns():
    rows = [row(), row(name="cudnn", kind="kernel", time=None, note="not timed: it refused")]
    text = plain(rows)
    assert "1.5 (1.25 to 2)" in text
    assert "cudnn (kernel)" in text
    assert "extra memory" not in text
    table = markdown(record(dense=rows), "dense")
    assert table.startswith("| case | pass | who | ms (quartiles) | note |\n| --- |")
    assert markdown(record(), "dense") == "Not in this record.\n"


def test_goals_are_read_off_the_rows():
    found = goals(
        record(
            dense=[row(ratios={TO_THE_BEST: 1.02}), row("causal, n = 8K, x", ratios={TO_THE_BEST: 1.02})],
            ring=[
                row("4 ranks, n = 128K", "ring of 4", ratios={EFFICIENCY: 0.985}),
                row("16 ranks, n = 128K", "ring of 16", "backward", ratios={EFFICIENCY: 0.89}),
                row("4 of 64 ranks, n = 1M", "ring of 64", ratios={EFFICIENCY: 0.98}),
                row("4 ranks", "simulated ring of 4", ratios={EFFICIENCY: 0.5}),
            ],
            dilated=[
                row("n = 1M, 16 heads, d = 128", time=Spread(0.040, 0.039, 0.041, 5), extra_memory=1.6),
                row("n = 64K, 16 heads, d = 128", ratios={TO_LONGNET: 4.5}),
            ],
            longest=[row("causal forward", time=None, note="failed: out of memory")],
            error=[
                row("64 ranks", "ring of 64", "both", time=None, ratios={TO_ONE_CALL: 1.1}),
                row("64 ranks", "another's", "both", time=None, kind="re-created", ratios={TO_ONE_CALL: 6.0}),
            ],
        )
    )
    assert [goal.is_met for goal in found] == [False, True, True, False, True, True, False, True, False, True]


def test_goals_and_machine_are_shown():
    shown = record(dense=[row(ratios={TO_THE_BEST: 1.02})])
    shown.missing, shown.failures = ["a peer is missing"], ["it broke"]
    assert "| at most 1.01 times the best kernel called directly | 1.02 | **no** |" in goal_table(shown)
    assert plain_goals(shown).splitlines()[1].startswith("NO ")
    text = machine_table(shown)
    assert "a peer is missing" in text
    assert "FAILED: it broke" in text
    assert "`the command`" in text


def test_the_document_shows_the_record():
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("write_tables", docs / "write_tables.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (docs / "benchmarks.md").read_text()
    assert text == script.renewed(text), "run python docs/write_tables.py"
    assert all(f"<!-- {name}: from" in text for name in ("machine", "goals", *SCENARIOS))
