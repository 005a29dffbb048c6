import tomllib
from pathlib import Path

import pytest

from longring.bench.records import Record
from longring.errors import ArgumentError
from longring.plan.hardware import BUILT_IN, DTYPES, all_hardware, hardware

LINKS = """
[links.string]
bytes_per_second = 100
latency_seconds = 0
source = "two tins"
"""
TOY = """
[hardware.toy]
title = "A toy"
device = "cpu"
memory_bytes = 1e9
forward_flops = { fp32 = 1e9 }
backward_flops = { fp32 = 5e8 }
half_rate_rows = 10
memory_bytes_per_second = 1e9
launch_seconds = 1e-3
inside = "string"
outside = "ethernet10"
links_out = 1
ranks_per_node = 4

[hardware.toy.sources]
memory_bytes = "estimate"
forward_flops = "estimate"
backward_flops = "estimate"
half_rate_rows = "estimate"
memory_bytes_per_second = "estimate"
launch_seconds = "estimate"
ranks_per_node = "estimate"
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "my.toml"
        path.write_text(text)
        return path

    return write


# ------------------------------------------------------------------------------------------ what longring knows


def test_there_is_every_machine_that_was_asked_for():
    assert set(all_hardware()) == {"h100", "h200", "a100", "b200", "rtx4090", "gtx1080", "cpu"}


@pytest.mark.parametrize("name", all_hardware())
def test_a_machines_numbers_make_sense(name):
    one = hardware(name)
    assert one.name == name
    for phase in ("forward", "backward"):
        for dtype in one.forward_flops:
            assert 0 < one.flops(phase, itemsize=DTYPES[dtype]) < 3e15
    assert one.inside.bytes_per_second >= one.outside.bytes_per_second
    assert one.memory_bytes_per_second > one.inside.bytes_per_second
    assert 1e9 < one.memory_bytes < 1e12
    assert 0 < one.links_out <= one.ranks_per_node


def test_every_number_has_a_source():
    """By the file itself, so that a field that somebody adds is not forgotten."""
    told = tomllib.loads(BUILT_IN.read_text())
    for link in told["links"].values():
        assert len(link["source"].split()) > 2
    for entry in told["hardware"].values():
        numbers = {key for key in entry if key not in ("title", "device", "inside", "outside", "links_out", "sources")}
        assert set(entry["sources"]) == numbers


def test_what_is_not_measured_says_so():
    """A made-up number never looks like a measured one."""
    for one in all_hardware().values():
        for field, source in one.sources.items():
            words = ("measured", "estimate", "NVIDIA", "github.com", "arXiv", "report")
            assert any(word in source for word in words), (one.name, field, source)


def test_the_h200_is_the_one_of_the_record():
    """longring, causal, 16 heads, at 32K and 128K tokens."""
    record, h200 = Record.load(Path(__file__).parents[2] / "docs" / "records" / "h200.json"), hardware("h200")
    rated = [row for row in record.scenarios["dense"] if row.name == "longring" and row.tflops]
    for n, tokens in (("32K", 1 << 15), ("128K", 1 << 17)):
        for d in (64, 128):
            for phase in ("forward", "backward"):
                case = f"causal, n = {n}, 16 heads, d = {d}"
                (row,) = [row for row in rated if row.case == case and row.phase == phase]
                rate = h200.flops(phase, itemsize=2, head_dim=d, rows=tokens)
                assert rate == pytest.approx(1e12 * row.tflops, rel=0.03), (case, phase)


# ------------------------------------------------------------------------------------------------- what it gives


def test_rates_fall_with_small_tiles_and_small_heads(file):
    toy = hardware("toy", file(LINKS + TOY))
    assert toy.flops("forward", itemsize=4) == 1e9
    assert toy.flops("forward", itemsize=4, rows=10) == 5e8
    assert toy.flops("forward", itemsize=4, head_dim=64) == pytest.approx(1e9 / 1.23)
    assert toy.flops("backward", itemsize=4, head_dim=64) == pytest.approx(5e8 / 1.15)
    assert toy.flops("forward", itemsize=4, head_dim=256) == 1e9  # nobody measured more


def test_a_type_without_a_rate_is_refused():
    with pytest.raises(ArgumentError, match="'gtx1080' has no forward_flops for numbers of 2 bytes; it has fp32, fp64"):
        hardware("gtx1080").flops("forward", itemsize=2)


def test_links_by_node(file):
    toy = hardware("toy", file(LINKS + TOY))
    assert (toy.link(0, 3, 4).name, toy.link(3, 4, 4).name) == ("string", "ethernet10")
    assert toy.out_of_node(4) == toy.outside.bytes_per_second / 4
    assert toy.out_of_node(1) == toy.outside.bytes_per_second


def test_a_file_adds_and_replaces(file):
    ours = file(LINKS + TOY + TOY.replace(".toy", ".h200"))
    known = all_hardware(ours)
    assert set(known) == {*all_hardware(), "toy"}
    assert known["h200"].title == "A toy"
    assert all_hardware()["h200"].title.startswith("NVIDIA")


def test_a_machine_can_be_a_key(file):
    assert len({hardware("h200"), hardware("h200"), hardware("toy", file(LINKS + TOY))}) == 2


# -------------------------------------------------------------------------------------------------- what it refuses


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ArgumentError, match="'h300' is unknown; there is h200, h100, a100, b200, rtx4090, "):
        hardware("h300")


FIELDS = [line.split(" = ")[0] for line in TOY.split("[hardware.toy.sources]")[0].splitlines() if " = " in line]


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named_with_its_file_and_entry(file, field):
    head, sources = TOY.split("[hardware.toy.sources]")
    lines = [line for line in head.splitlines() if not line.startswith(f"{field} =")]
    ours = file(LINKS + "\n".join(lines) + "\n[hardware.toy.sources]" + sources)
    with pytest.raises(ArgumentError, match=rf"my\.toml: \[hardware\.toy\] lacks {field}$"):
        hardware("toy", ours)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("memory_bytes = 1e9", "memroy_bytes = 1e9", r"\[hardware\.toy\] lacks memory_bytes"),
        ("title =", 'colour = "red"\ntitle =', r"\[hardware\.toy\] has 'colour', which is none of"),
        ("memory_bytes = 1e9", "memory_bytes = 0", r"memory_bytes must be a number above 0, got 0"),
        ("memory_bytes = 1e9", "memory_bytes = true", r"memory_bytes must be a number above 0, got True"),
        ("memory_bytes = 1e9", 'memory_bytes = "8GB"', r"memory_bytes must be a number above 0, got '8GB'"),
        ("memory_bytes = 1e9", "memory_bytes = inf", r"memory_bytes must be a number above 0, got inf"),
        ("memory_bytes = 1e9", "memory_bytes = nan", r"memory_bytes must be a number above 0, got nan"),
        ("memory_bytes = 1e9", "memory_bytes = 1e300", r"memory_bytes must be from 1e-15 to 1e\+30, got 1e\+300"),
        ("memory_bytes = 1e9", "memory_bytes = 1e-300", r"memory_bytes must be from 1e-15 to 1e\+30, got 1e-300"),
        ("ranks_per_node = 4", "ranks_per_node = 1.5", r"ranks_per_node must be a whole number, got 1\.5"),
        ("{ fp32 = 1e9 }", "{ fp8 = 1e9 }", r"forward_flops must be a table with some of bf16, fp16, fp32, fp64"),
        ("{ fp32 = 5e8 }", "5e8", r"backward_flops must be a table"),
        ("{ fp32 = 5e8 }", "{ bf16 = 5e8 }", r"backward_flops has bf16, forward_flops fp32: they must be of the same"),
        ("{ fp32 = 1e9 }", "{ fp32 = -1 }", r"forward_flops fp32 must be a number above 0, got -1"),
        ('inside = "string"', 'inside = "rope"', r"inside must name one of the links .*, string, got 'rope'"),
        ('inside = "string"', "inside = []", r"inside must name one of the links"),
        ('device = "cpu"', 'device = "tpu"', r"device must be cuda or cpu, got 'tpu'"),
        ('half_rate_rows = "estimate"', "", r"\[hardware\.toy\.sources\] lacks half_rate_rows"),
        ('half_rate_rows = "estimate"', 'half_rate_rows = " "', r"half_rate_rows must be a text that is not empty"),
        (
            "latency_seconds = 0",
            "latency_seconds = -1",
            r"\[links\.string\] latency_seconds must be a number from 0 on",
        ),
        ("latency_seconds = 0", "", r"\[links\.string\] lacks latency_seconds"),
        ("[hardware.toy]", "[machine.toy]", r"'machine' must be \[links\.NAME\] or \[hardware\.NAME\]"),
        ("[links.string]", "[links]", r"links must be tables, as \[links\.NAME\]"),
        ("[links.string]", "[links.string", r"my\.toml is not TOML: "),
    ],
)
def test_a_wrong_file_is_refused_with_what_and_where(file, old, new, said):
    text = LINKS + TOY
    assert old in text
    with pytest.raises(ArgumentError, match=said) as refused:
        hardware("toy", file(text.replace(old, new)))
    assert "my.toml" in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"none\.toml cannot be read: No such file"):
        hardware("toy", tmp_path / "none.toml")
    with pytest.raises(ArgumentError, match="cannot be read: Is a directory"):
        hardware("toy", tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "odd.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match=r"odd\.toml cannot be read: it is no text"):
        hardware("toy", path)


def test_ours_may_be_spelt_as_on_the_box():
    assert hardware("H200") is hardware("h200")
    assert hardware("RTX4090").name == "rtx4090"
