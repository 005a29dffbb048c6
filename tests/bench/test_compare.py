"""What changed between two records is told, and what lies within the spread or the tolerance is not."""

import math

import pytest
import torch

from longring.bench.compare import Key, compare
from longring.bench.records import Record, Row, Spread, new_record
from longring.errors import ArgumentError


def record(*rows, scenario="schedules", **told):
    made = new_record("a line", torch.device("cpu"), False, real="this", simulated="that")
    made.scenarios, made.is_complete = {scenario: list(rows)}, True
    for name, value in told.items():
        setattr(made, name, value)
    return made


def row(median=1.0, *, around=0.01, name="ring", **told):
    time = Spread(median, median * (1 - around), median * (1 + around), 5)
    return Row(**{"case": "a case", "phase": "forward", "name": name, "time": time} | told)


def verdict(before, after, tolerance=0.05):
    (change,) = compare(record(before), record(after), tolerance=tolerance).changes
    return change.verdict


@pytest.mark.parametrize(
    ("before", "after", "tolerance", "told"),
    [
        (row(1.0), row(1.0), 0.05, "alike"),
        (row(1.0), row(1.2), 0.05, "slower"),
        (row(1.2), row(1.0), 0.05, "faster"),
        (row(1.0), row(1.2), 0.3, "alike"),  # within the tolerance
        (row(1.0, around=0.2), row(1.2), 0.05, "alike"),  # within the spread of the first
        (row(1.0), row(1.2, around=0.2), 0.05, "alike"),  # and of the second
        (row(1.0), row(1.04), 0.05, "alike"),
        (row(1.0), row(1.06), 0.05, "alike" if 1.06 * 0.99 < 1.01 else "slower"),
        (row(1.0), row(1.03), 0.0, "slower"),
    ],
)
def test_slower_is_beyond_the_tolerance_and_the_spread_of_both(before, after, tolerance, told):
    assert verdict(before, after, tolerance) == told


def test_faster_is_slower_seen_from_the_other_side():
    for factor in (1.01, 1.049, 1.06, 1.5):
        there, back = verdict(row(1.0), row(factor)), verdict(row(factor), row(1.0))
        assert (there, back) in {("alike", "alike"), ("slower", "faster")}


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (row(peak_bytes=[90, 100]), row(peak_bytes=[120, 90]), "heavier"),
        (row(peak_bytes=[90, 120]), row(peak_bytes=[100, 90]), "lighter"),
        (row(peak_bytes=[100, 1]), row(peak_bytes=[104, 99]), "alike"),  # of the fullest rank
        (row(extra_memory=1.0), row(extra_memory=1.5), "heavier"),
        (row(1.5, peak_bytes=[120]), row(1.0, peak_bytes=[160]), "heavier"),  # faster, but that is not all
    ],
)
def test_memory_is_judged_too(before, after, told):
    assert verdict(before, after) == told


RIGHT = {"errors": {"out": 1e-7}, "allowed": {"out": 1e-6}}
WRONG = {"errors": {"out": 1e-3}, "allowed": {"out": 1e-6}}


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (row(**RIGHT), row(**WRONG), "wrong"),
        (row(**WRONG), row(**RIGHT), "right again"),
        (row(**WRONG), row(**WRONG), "alike"),  # it was wrong before
        (row(**RIGHT), row(0.5, errors={"out": math.nan}, allowed={"out": 1e-6}), "wrong"),
        (row(), row(time=None, note="not timed: it broke"), "wrong"),
        (row(time=None, note="not timed: it broke"), row(), "right again"),
        (row(), row(time=None, phase="both", note="not timed: it broke"), "wrong"),  # of both passes
    ],
)
def test_wrong_is_graver_than_any_time(before, after, told):
    changes = compare(record(before), record(after)).changes
    assert changes[0].verdict == told


def test_regressions_are_what_exit_code_1_is_for():
    before = record(row(name="a"), row(name="b"), row(name="c"), row(name="d"))
    after = record(row(name="a"), row(2.0, name="b"), row(0.5, name="c"), row(name="d", **WRONG))
    found = compare(before, after)
    assert [(change.key.name, change.verdict) for change in found.regressions] == [("b", "slower"), ("d", "wrong")]
    assert [change.ratio for change in found.changes] == [1.0, 2.0, 0.5, 1.0]
    assert found.to_json()["regressions"] == 2


def test_rows_of_one_record_alone_are_named():
    found = compare(record(row(name="a"), row(name="b")), record(row(name="b"), row(name="c")))
    assert found.gone == [Key("schedules", "a case", "a", "forward")]
    assert found.new == [Key("schedules", "a case", "c", "forward")]
    assert len(found.changes) == 1


@pytest.mark.parametrize("other", [row(case="another size"), row(name="another"), row(phase="backward")])
def test_nothing_in_common_is_an_error(other):
    with pytest.raises(ArgumentError, match="no row in common"):
        compare(record(row()), record(other))


@pytest.mark.parametrize("tolerance", [-0.1, math.nan, math.inf])
def test_a_tolerance_that_is_none(tolerance):
    with pytest.raises(ArgumentError, match="tolerance"):
        compare(record(row()), record(row()), tolerance=tolerance)


def test_what_makes_two_records_hard_to_compare_is_said():
    assert compare(record(row()), record(row())).caveats == []
    other = record(row(), is_complete=False, is_quick=True, machine={"cores": 4}, versions={"torch": "1"})
    caveats = compare(record(row(), machine={"cores": 2}, versions={"torch": "2"}), other).caveats
    assert caveats == [
        "another machine: cores 2 / 4",
        "another version: torch 2 / 1",
        "the second record was cut short",
        "the second record is a quick one, whose sizes are too small to judge speed by",
    ]


def test_a_record_is_like_itself_when_read_back(tmp_path):
    made = record(row(1.23456789, peak_bytes=[7]), row(2.0, name="other", **WRONG))
    made.save(tmp_path / "record.json")
    assert {change.verdict for change in compare(made, Record.load(tmp_path / "record.json")).changes} == {"alike"}


def test_what_is_no_longer_measured_is_not_passed_over():
    found = compare(record(row(), row(name="b", extra_memory=2.0)), record(row(time=None), row(name="b")))
    assert found.caveats == [
        "1 of 2 rows have a time in the first record and none in the second",
        "1 of 2 rows have a memory in the first record and none in the second",
    ]
