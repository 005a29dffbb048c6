"""A record comes back as it was written; one that was cut, edited or made by something else is told in one line."""

import json
import math
import os

import pytest
import torch

from longring.bench.records import FIRST_SCHEMA, RECORD_FIELDS, ROW_FIELDS, Record, Row, Spread, new_record
from longring.errors import ArgumentError


def made(**scenarios):
    record = new_record("a line", torch.device("cpu"), False, real="this", simulated="that", arguments={"ranks": [1]})
    record.scenarios = scenarios
    return record


def a_row(**told):
    usual = {"case": "a case", "phase": "forward", "name": "ring", "time": Spread(2.0, 1.0, 3.0, 5)}
    return Row(**usual | told)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "record.json"
    record = made(one=[a_row(), a_row(name="other", peak_bytes=[3, 4])], two=[a_row(time=None, note="not timed")])
    record.save(path)
    return path


def edited(path, change):
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))
    return path


def refused(path):
    with pytest.raises(ArgumentError) as caught:
        Record.load(path)
    said = str(caught.value)
    assert said.startswith(str(path))
    assert "\n" not in said
    return said


def test_quartiles_are_around_the_median():
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)


def test_what_is_written_is_read(saved):
    again = Record.load(saved)
    assert again.scenarios["one"][1].most_bytes == 4
    again.save(saved)
    assert Record.load(saved) == again
    assert [path.name for path in saved.parent.iterdir()] == ["record.json"]  # nothing is left beside it


def test_the_fields_that_are_checked_are_all_there_are(saved):
    told = json.loads(saved.read_text())
    assert told.keys() == RECORD_FIELDS.keys() | {"schema", "command"}
    assert all(row.keys() == ROW_FIELDS.keys() for row in told["rows"])


def test_what_is_not_finite_is_null_and_infinitely_wrong(tmp_path):
    path = tmp_path / "record.json"
    made(one=[a_row(errors={"out": math.nan}, allowed={"out": 1.0})]).save(path)
    assert json.loads(path.read_text())["rows"][0]["errors"] == {"out": None}
    assert Record.load(path).scenarios["one"][0].is_wrong


def test_a_number_that_is_no_float_is_refused(tmp_path):
    path = tmp_path / "record.json"
    made(one=[a_row(tokens=1234567)]).save(path)
    path.write_text(path.read_text().replace("1234567", "9" * 400))
    with pytest.raises(ArgumentError, match="tokens"):
        Record.load(path)


@pytest.mark.parametrize(("error", "is_wrong"), [(0.5, False), (1.0, False), (1.5, True), (math.nan, True)])
def test_wrong_is_beyond_what_is_allowed(error, is_wrong):
    assert a_row(errors={"out": error}, allowed={"out": 1.0}).is_wrong == is_wrong
    assert not a_row(errors={"out": error}).is_wrong  # told, and not judged


@pytest.mark.parametrize("kept", [0, 1, 40, 0.5, 0.99])
def test_one_that_was_cut_short(saved, kept):
    text = saved.read_text()
    saved.write_text(text[: kept if isinstance(kept, int) else int(kept * len(text))])
    assert "is no JSON, or was cut short" in refused(saved)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[]", "holds a list"),
        (b'"text"', "holds a str"),
        (b"{}", "not a record of the form"),
        (b'{"schema": "something else"}', "not a record of the form"),
        (b'{"schema": ["longring bench, 2"]}', "not a record of the form"),
        (b'{"schema": "longring gpu benchmark, 1"}', "not a record of the form"),
        (b"\xff\xfe\x00", "no text"),
        (b"[" * 100_000, "no JSON"),
    ],
)
def test_one_of_something_else(tmp_path, content, said):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    assert said in refused(path)


def test_one_that_is_not_there(tmp_path):
    assert "cannot be read" in refused(tmp_path / "nowhere.json")
    assert "cannot be read" in refused(tmp_path)


@pytest.mark.parametrize("name", RECORD_FIELDS)
@pytest.mark.parametrize("value", [7.5, None])
def test_a_damaged_field_is_named(saved, name, value):
    assert repr(name) in refused(edited(saved, lambda told: told.update({name: value})))


@pytest.mark.parametrize("name", ROW_FIELDS)
def test_a_damaged_field_of_a_row_is_named(saved, name):
    value = [7.5] if name not in ("tflops", "extra_memory") else "7.5"
    said = refused(edited(saved, lambda told: told["rows"][1].update({name: value})))
    assert f"row 1: {name!r}" in said


@pytest.mark.parametrize(
    "time",
    [
        {"median": 1.0},
        {"median": -1.0, "low": -1.0, "high": -1.0, "runs": 1},
        {"median": 2.0, "low": 3.0, "high": 4.0, "runs": 1},
        {"median": 2.0, "low": 1.0, "high": 4.0, "runs": 0},
        {"median": "2", "low": 1.0, "high": 4.0, "runs": 1},
    ],
)
def test_a_time_that_cannot_be(saved, time):
    assert "row 0: 'time'" in refused(edited(saved, lambda told: told["rows"][0].update(time=time)))


@pytest.mark.parametrize("where", ["record", "row"])
def test_what_is_missing_or_unknown_is_named(saved, where):
    text, name = saved.read_text(), "commit" if where == "record" else "case"

    def part(told):
        return told if where == "record" else told["rows"][2]

    assert f"{name!r} is missing" in refused(edited(saved, lambda told: part(told).pop(name)))
    saved.write_text(text)
    assert "'colour' is not known" in refused(edited(saved, lambda told: part(told).update(colour="red")))


def test_the_first_form_is_read(tmp_path):
    path = tmp_path / "old.json"
    row = {"case": "a case", "phase": "forward", "name": "longring", "kind": "ours"}
    ms = {"median": 2.0, "min": 1.0, "max": 4.0, "repeats": 5}
    told = {
        "schema": FIRST_SCHEMA,
        "real": "this",
        "simulated": "that",
        "command": "the line",
        "machine": {},
        "versions": {},
        "commit": "abc",
        "is_quick": False,
        "missing": [],
        "failures": [],
        "seconds": {},
        "scenarios": {"dense": [row | {"ms": ms, "tflops": 3.0}, row | {"note": "not timed"}]},
    }
    path.write_text(json.dumps(told))
    record = Record.load(path)
    assert (record.line, record.spread, record.is_complete) == ("the line", "least and most", True)
    first, second = record.scenarios["dense"]
    assert first.time == Spread(0.002, 0.001, 0.004, 5)
    assert second.time is None
    told["scenarios"]["dense"][0]["ms"] = {"median": "fast"}
    path.write_text(json.dumps(told))
    with pytest.raises(ArgumentError):
        Record.load(path)


def test_what_is_no_small_file_of_json_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    assert "is a pipe or a device" in refused(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    assert "is a pipe or a device" in refused(tmp_path / "zero.json")
    (tmp_path / "digits.json").write_text("9" * 5000)
    assert "is no JSON, or was cut short: Exceeds the limit" in refused(tmp_path / "digits.json")
    with (tmp_path / "sparse.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "has more than 4,194,304 bytes" in refused(tmp_path / "sparse.json")


def test_a_record_of_many_bytes_is_refused_before_it_is_parsed(tmp_path):
    (tmp_path / "record.json").write_text("[" + "{}," * 2_000_000 + "{}]")
    with pytest.raises(ArgumentError, match="more than 4,194,304 bytes"):
        Record.load(tmp_path / "record.json")
