"""Data of strangers: pipes, devices and links where files should be, headers and numbers that take all memory."""

import json
import os
import resource
import subprocess
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from longring.errors import ArgumentError
from longring.train.corpus import open_corpus
from longring.train.token_files import MOST_DOCUMENTS, MOST_INFERRED


@contextmanager
def little_memory():
    """Half a GiB more than there is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 29), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refusal(path, **options):
    with little_memory(), pytest.raises(ArgumentError) as refused:
        open_corpus(path, **options)
    return str(refused.value)


def with_header(path, header, version=b"\x01\x00"):
    size = len(header).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    path.write_bytes(b"\x93NUMPY" + version + size + header + np.arange(10, dtype=np.int64).tobytes())
    return path


@pytest.fixture(params=["tokens.npy", "tokens.bin"])
def tokens(request, tmp_path):
    path = tmp_path / request.param
    np.save(path, np.arange(10)) if path.suffix == ".npy" else path.write_bytes(bytes(80))
    return path


@pytest.mark.parametrize("what", ["pipe", "link to a pipe", "/dev/zero", "/dev/random", "folder", "loop", "sparse"])
def test_no_other_thing_than_a_small_file_is_read_beside_tokens(tokens, what):
    beside = tokens.with_suffix(".json")
    if what == "pipe":
        os.mkfifo(beside)
    elif what == "link to a pipe":
        os.mkfifo(beside.with_name("elsewhere"))
        beside.symlink_to(beside.with_name("elsewhere"))
    elif what == "folder":
        beside.mkdir()
    elif what == "loop":
        beside.symlink_to(beside)
    elif what == "sparse":
        with beside.open("wb") as file:
            file.truncate(1 << 40)
    else:
        beside.symlink_to(what)
    if what == "loop" and tokens.suffix == ".npy":  # as if there were none, and a .npy needs none
        assert open_corpus(tokens).total == 10
        return
    said = refusal(tokens)
    assert "tokens.json" in said
    assert ("needs a tokens.json beside it" if what == "loop" else "cannot be read: ") in said


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, '{"vocabulary": ' + "9" * 5000 + "}", "\xff", "nan", '{"vocabulary": 1e400}'],
)
def test_json_beside_tokens_that_python_cannot_take(tokens, text):
    tokens.with_suffix(".json").write_text(text)
    said = refusal(tokens)
    assert "tokens.json" in said
    assert len(said) < 500


@pytest.mark.parametrize(
    "header",
    [
        b"-" * 9000 + b"1",
        b"(" * 9000,
        b"[" * 300 + b"]" * 300,
        b"{'descr': '" + b"a" * 5000 + b"', 'fortran_order': False, 'shape': (10,)}",
        b"{'descr': [('', '<i8')] * 9, 'fortran_order': False, 'shape': (10,)}",
        b"{'descr': ('<i8', (" + b"9," * 2000 + b")), 'fortran_order': False, 'shape': (10,)}",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (" + b"9" * 5000 + b",)}",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (10,), '\\d': 1}",
        b"__import__('os').system('touch hacked')",
        b"\x00" * 100,
        b"\n" * 60_000,
    ],
)
@pytest.mark.parametrize("version", [b"\x01\x00", b"\x02\x00"])
def test_headers_of_npy_that_python_cannot_take(tmp_path, monkeypatch, header, version):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = refusal(with_header(tmp_path / "a.npy", header, version))
    assert "a.npy" in said
    assert not (tmp_path / "hacked").exists()


def test_a_header_that_says_four_gigabytes_is_not_read(tmp_path):
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x02\x00\xff\xff\xff\xff")
    os.truncate(path, 1 << 33)
    assert "a.npy cannot be read as .npy: EOF" in refusal(path)


def test_an_absurd_vocabulary_must_be_named(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.array([1, 2, MOST_INFERRED - 1]))
    assert open_corpus(path).vocabulary == MOST_INFERRED + 1  # and one that ends documents
    np.save(path, np.array([1, 2, MOST_INFERRED]))
    assert "its largest token is 1048576, and a vocabulary above 1,048,576 must be named" in refusal(path)
    np.save(path, np.array([1, 2, 2**31 - 3]))
    said = refusal(path)
    assert said.endswith('write {"vocabulary": 2147483646} into a.json beside the file')
    path.with_suffix(".json").write_text(json.dumps({"vocabulary": 2147483646}))
    assert open_corpus(path).vocabulary == 2147483647


def test_a_folder_deeper_than_calls_of_python(tmp_path, monkeypatch):
    """1,500 levels, whose path is shorter than the system's limit."""
    monkeypatch.chdir(tmp_path)
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
    Path("a.txt").write_text("text")
    os.chdir(tmp_path)
    try:
        began = time.monotonic()
        corpus = open_corpus(tmp_path, without=tmp_path / "d" / "out")
        assert corpus.total == 4
        assert time.monotonic() - began < 30
    finally:
        subprocess.run(["rm", "-rf", "d"], check=True)  # pytest removes folders by recursion


def test_a_folder_deeper_than_the_system_can_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "d" * 200
    for _ in range(25):
        os.mkdir(name)
        os.chdir(name)
    os.chdir(tmp_path)
    assert "cannot be read (File name too long)" in refusal(tmp_path)


def test_the_folder_of_a_run_is_left_out_by_any_name(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a.txt").write_text("written by the run")
    (tmp_path / "b.txt").write_text("text")
    (tmp_path.parent / f"{tmp_path.name}-link").symlink_to(tmp_path)
    corpus = open_corpus(tmp_path, without=tmp_path.parent / f"{tmp_path.name}-link" / "run")
    assert (corpus.total, corpus.left_out["run"]) == (4, 1)


@pytest.mark.parametrize("name", ["n" * 300, "n" * 6000, "a/" * 3000, "n" * 251 + ".npy", "n" * 251 + ".bin"])
def test_names_that_are_too_long(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if len(name) == 255:
        np.save(tmp_path / name, np.arange(4)) if name.endswith("y") else (tmp_path / name).write_bytes(bytes(8))
    if name.endswith(".npy"):
        assert open_corpus(tmp_path / name).vocabulary == 5
    else:
        assert name[:20] in refusal(tmp_path / name)


def test_documents_beyond_number_are_refused(tmp_path):
    """A byte each, of a file that takes no space: each would take eighty bytes of memory."""
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (100000000, 1), }"
    path = tmp_path / "tokens.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with path.open("r+b") as file:
        file.truncate(10 + len(header) + 100_000_000)
    assert f"has more than {MOST_DOCUMENTS:,} documents" in refusal(path)


def test_closed_documents_beyond_number_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("longring.train.token_files.MOST_DOCUMENTS", 1000)
    (tmp_path / "tokens.bin").write_bytes(bytes([1, 0]) * 1001)
    (tmp_path / "tokens.json").write_text('{"dtype": "uint8", "vocabulary": 2, "end": 0}')
    assert "has more than 1,000 documents" in refusal(tmp_path / "tokens.bin")
    (tmp_path / "tokens.bin").write_bytes(bytes([1, 0]) * 1000)
    assert open_corpus(tmp_path / "tokens.bin").documents == 1000


def test_documents_of_many_files_beyond_number_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("longring.train.token_files.MOST_DOCUMENTS", 1000)
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.zeros((600, 2), np.uint8))
    assert "has more than 1,000 documents" in refusal(tmp_path)


def test_empty_documents_take_no_memory(tmp_path):
    with (tmp_path / "tokens.bin").open("wb") as file:
        file.truncate(100_000_000)
        file.seek(50_000_000)
        file.write(b"\x01\x01")
    (tmp_path / "tokens.json").write_text('{"dtype": "uint8", "vocabulary": 2, "end": 0}')
    with little_memory():
        corpus = open_corpus(tmp_path / "tokens.bin")
    assert corpus.lengths.tolist() == [2]
    assert corpus.places.tolist() == [50_000_000]
    assert corpus.left_out["document"] == 99_999_997  # of 99,999,998 ends one closes the document


def test_headers_of_fasta_beyond_number_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("longring.train.token_files.MOST_DOCUMENTS", 1000)
    (tmp_path / "a.fasta").write_text(">\n" * 1001)
    assert "has more than 1,000 documents" in refusal(tmp_path / "a.fasta")
