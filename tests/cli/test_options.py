"""Options that commands share: what they read, and what they refuse by name."""

import os
import sys

import pytest

from longring import Dense, Dilated
from longring.cli import main
from longring.cli.options import bytes_of, check_apart, check_writable, kv_heads_of, pattern_of
from longring.errors import ArgumentError


def refused(*arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["longring", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize("option", ["--tokens", "--ranks", "--heads", "--kv-heads", "--head-dim"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1X", "", "1e99"])
def test_a_bad_count_is_one_line_that_names_the_option_and_the_value(option, value, monkeypatch, capsys):
    said = refused("demo", option, value, monkeypatch=monkeypatch, capsys=capsys)
    assert said.startswith(f"error: {option} must be a ")
    assert said.endswith(f"got {value!r}\n")


def test_patterns():
    assert pattern_of(causal=True, window=None, dilated=None) == Dense(causal=True)
    assert pattern_of(causal=False, window=None, dilated=None) == Dense(causal=False)
    assert pattern_of(causal=True, window=4, dilated=None) == Dense(causal=True, window=(3, 0))
    assert pattern_of(causal=False, window=4, dilated=None) == Dense(causal=False, window=(3, 3))
    branches = Dilated(segment_lengths=(2048, 4096), dilation_rates=(1, 2), causal=False)
    assert pattern_of(causal=False, window=None, dilated="2048:1, 4096:2") == branches
    assert pattern_of(causal=False, window=None, dilated="2Ki:1,4Ki:2") == branches


@pytest.mark.parametrize(
    ("dilated", "said"),
    [
        ("2048", "LENGTH:RATE pairs"),
        ("", "LENGTH:RATE pairs"),
        ("2048:1,", "LENGTH:RATE pairs"),
        ("2048:", "a rate of --dilated must be"),
        (":2", "a segment length of --dilated must be"),
        ("2048:0", "a rate of --dilated must be"),
        ("2048:1:2", "a rate of --dilated must be"),
    ],
)
def test_bad_branches(dilated, said):
    with pytest.raises(ArgumentError, match=said):
        pattern_of(causal=True, window=None, dilated=dilated)


def test_a_window_is_for_dense_attention():
    with pytest.raises(ArgumentError, match="leave out --window or --dilated"):
        pattern_of(causal=True, window=4, dilated="2048:1")


def test_heads_and_dtypes():
    assert (kv_heads_of(8, None), kv_heads_of(8, 2)) == (8, 2)
    with pytest.raises(ArgumentError, match="got 8 and 3"):
        kv_heads_of(8, 3)
    assert (bytes_of("bf16"), bytes_of("fp64")) == (2, 8)
    with pytest.raises(ArgumentError, match="one of bf16, fp16, fp32, fp64, got 'int8'"):
        bytes_of("int8")


def test_a_path_that_can_be_written_is_left_as_it_was(tmp_path):
    check_writable(None)
    new, old = tmp_path / "new" / "report.html", tmp_path / "old.html"
    old.write_text("kept")
    check_writable(new)
    check_writable(old)
    assert (new.exists(), new.parent.is_dir(), old.read_text()) == (False, True, "kept")


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "report.html"):
        with pytest.raises(ArgumentError, match=f"^--report {path} cannot be written: "):
            check_writable(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ArgumentError, match="Permission denied"):
        check_writable(tmp_path / "report.html")


def test_two_outputs_in_one_file_are_refused(tmp_path):
    check_apart(out=tmp_path / "a", report=tmp_path / "b", trace=None)
    with pytest.raises(ArgumentError, match="--out and --report are the same file"):
        check_apart(out=tmp_path / "a", report=tmp_path / "c" / ".." / "a")


def test_very_many_branches_are_refused():
    with pytest.raises(ArgumentError, match="at most 64 branches, got 65"):
        pattern_of(causal=True, window=None, dilated=",".join(["8:1"] * 65))
