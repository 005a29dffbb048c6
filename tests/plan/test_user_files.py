"""Files that the user names, as careless or hostile ones are: pipes, devices, links, too much of everything."""

import contextlib
import os
import resource
import subprocess
import sys
import time
import tomllib

import pytest

from longring.errors import ArgumentError
from longring.plan.user_files import DOTS, MOST, read_bytes, read_text, read_toml

IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
from longring.plan.user_files import read_toml
try:
    read_toml(Path(sys.argv[1]), "it")
except ValueError as error:
    sys.exit(str(error))
"""


def refusal(path, read=read_toml, **options):
    with pytest.raises(ArgumentError) as refused:
        read(path, "--config it", **options)
    assert str(refused.value).startswith("--config it ")
    return str(refused.value)


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        assert refusal(tmp_path / name) == (
            "--config it cannot be read: it is a pipe or a device; write its content to a file first"
        )


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/random"])
def test_devices_are_refused_also_behind_links(tmp_path, device):
    (tmp_path / "link").symlink_to(device)
    assert "is a pipe or a device" in refusal(tmp_path / "link")


def test_what_is_swapped_for_a_pipe_in_between_is_refused(tmp_path, monkeypatch):
    """Between the look at its name and the opening."""
    os.mkfifo(tmp_path / "swapped")
    (tmp_path / "file").write_text("")
    regular = os.stat(tmp_path / "file")
    monkeypatch.setattr(type(tmp_path), "stat", lambda path: regular)
    assert "is a pipe or a device" in refusal(tmp_path / "swapped")


def test_what_is_no_file(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert refusal(tmp_path / "nowhere").endswith("cannot be read: No such file or directory")
    assert refusal(tmp_path).endswith("cannot be read: Is a directory")
    assert refusal(tmp_path / "loop").endswith("cannot be read: Too many levels of symbolic links")
    assert refusal(tmp_path / ("n" * 300)).endswith("cannot be read: File name too long")
    assert refusal(tmp_path / ("n" * 6000)).endswith("cannot be read: File name too long")
    assert "cannot be read: embedded null" in refusal(tmp_path / "a\0b")


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "file").write_text("a = 1")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_toml(tmp_path / "link", "it") == {"a": 1}


def test_of_a_large_file_no_more_is_read_than_is_allowed(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert refusal(tmp_path / "sparse").endswith("it has more than 1,048,576 bytes, too much for such a file")
    (tmp_path / "just").write_bytes(b"x" * MOST)
    assert len(read_bytes(tmp_path / "just", "it")) == MOST
    assert refusal(tmp_path / "just", read_bytes, most=MOST - 1)


def test_what_is_no_text(tmp_path):
    (tmp_path / "odd").write_bytes(b"ab\xff")
    assert refusal(tmp_path / "odd", read_text).endswith("it is no text in UTF-8, at byte 2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = " + "[" * 100_000, "is nested too deeply"),
        ("a = " + "{a=" * 100_000, "is nested too deeply"),
        ("a = " + "9" * 5000, "Exceeds the limit"),
        ("a = ", "is not TOML: Invalid value"),
        ("a" + ".a" * 50_000 + " = 1", "a key has more than 4 dots"),
        ("a" + " . a" * 50_000 + " = 1", "a key has more than 4 dots"),
        ("'a'" + ".'a'" * 50_000 + " = 1", "a key has more than 4 dots"),
        ('"a"' + '."a"' * 50_000 + " = 1", "a key has more than 4 dots"),
        ("[a" + ".a" * 50_000 + "]", "a key has more than 4 dots"),
        ("[[a" + ".a" * 50_000 + "]]", "a key has more than 4 dots"),
        ("x = {a" + ".a" * 50_000 + " = 1}", "a key has more than 4 dots"),
        ('x = {y = """a"""", a' + ".a" * 50_000 + ' = "x"}', "a key has more than 4 dots"),
        ("x = {y = '''a'''', a" + ".a" * 50_000 + " = 'x'}", "a key has more than 4 dots"),
        ('x = {y = "\\"", a' + ".a" * 50_000 + ' = "x"}', "a key has more than 4 dots"),
        ('"" = 1\na' + ".a" * 50_000 + ' = ""', "a key has more than 4 dots"),
        ("# ''' \"\"\"\na" + ".a" * 50_000 + " = 1 # '''", "a key has more than 4 dots"),
    ],
)
def test_toml_that_takes_too_much(tmp_path, text, said):
    """In half a GiB, interpreter included, and 10 seconds: tomllib alone takes 7 GB for some of them."""
    (tmp_path / "it.toml").write_text(text)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", IN_LITTLE_MEMORY, tmp_path / "it.toml"], capture_output=True, text=True, timeout=60
    )
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "text",
    [
        "[hardware.h100.sources]\na.b = 1.5",
        'a = "x.x.x.x.x.x.x.x"',
        "a = 'x.x.x.x.x.x.x.x'",
        'a = """\nx.x.x.x.x.x.x\n"x".x.x.x.x.x.x ""x.x.x.x.x.x.x"""""',
        "a = '''\nx.x.x.x.x.x.x\n'x'.x.x.x.x.x.x'''''",
        'a = "\\"x.x.x.x.x.x.x"',
        "a = '\\' # x.x.x.x.x.x.x.x",
        '"a.a.a.a.a.a.a.a".b = 1',
        "# a.a.a.a.a.a.a.a = 1",
        "a = [1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]",
        "a = [\n1.5,\n2.5, # 1.2.3.4.5.6\n3.5, 4.5, 5.5, 6.5, 7.5]",
        "a = {b = 1.5, c = 1.5, d = 1.5, e = 1.5, f = 1.5, g = 1.5}",
        "a = 1979-05-27T07:32:00.999999Z",
        "a.b.c.d.e = 1",
        "[a.b.c.d.e]\n[b.c.d.e.f]",
        "a = 1\r\nb = 'x'\r\n",
        "",
    ],
)
def test_what_is_right_is_read_as_tomllib_reads_it(tmp_path, text):
    (tmp_path / "it.toml").write_bytes(text.encode())
    assert read_toml(tmp_path / "it.toml", "it") == tomllib.loads(text)


def test_a_key_may_have_so_many_dots_and_no_more(tmp_path):
    (tmp_path / "it.toml").write_text("a" + ".a" * DOTS + " = 1")
    assert read_toml(tmp_path / "it.toml", "it")
    (tmp_path / "it.toml").write_text("a" + ".a" * (DOTS + 1) + " = 1")
    assert "more than 4 dots" in refusal(tmp_path / "it.toml")


@pytest.mark.parametrize(
    "piece",
    ["a = 1\n", 'a = """', "'''", '"\\', ".a", ". ", "[a.a.a.a.a]\n", "[[a.a]]\n", "x={", "a=[1,", "\\n", "#\r", '"'],
)
def test_a_full_mebibyte_of_anything_is_answered_in_seconds(tmp_path, piece):
    (tmp_path / "it.toml").write_text((piece * MOST)[:MOST])
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with contextlib.suppress(ArgumentError):
        read_toml(tmp_path / "it.toml", "it")
    assert time.monotonic() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


@pytest.mark.parametrize(
    "number",
    ["0x" + "f" * 5000, "0o" + "7" * 9000, "-9223372036854775809", "0b" + "1" * 64, "9" * 400, "0x8000000000000000"],
)
@pytest.mark.parametrize("text", ["dim = {}", "[a.b]\nc = [1, [{{d = {}}}]]"])
def test_whole_numbers_beyond_64_bits_are_refused(tmp_path, number, text):
    (tmp_path / "file").write_text(text.format(number))
    assert "is a whole number beyond 2**63" in refusal(tmp_path / "file")


def test_whole_numbers_of_64_bits_are_read(tmp_path):
    (tmp_path / "file").write_text(f"a = {2**63 - 1}\nb = -{2**63}\nc = true")
    assert read_toml(tmp_path / "file", "it") == {"a": 2**63 - 1, "b": -(2**63), "c": True}
