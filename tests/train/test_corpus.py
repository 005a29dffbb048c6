"""Corpora: what is read of files and folders, and what is left out or refused."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longring.errors import ArgumentError, DataChanged
from longring.train import fasta, files
from longring.train.corpus import open_corpus
from longring.train.fasta import write_fasta
from longring.train.token_files import write_tokens


def texts(corpus):
    """Every document, whole, as bytes."""
    return [corpus.tokens(d, 0, int(corpus.lengths[d])).astype(np.uint8).tobytes() for d in range(corpus.documents)]


def numbers(corpus):
    return [corpus.tokens(d, 0, int(corpus.lengths[d])).tolist() for d in range(corpus.documents)]


def refusal(path, **options):
    with pytest.raises(ArgumentError) as raised:
        open_corpus(path, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# -------------------------------------------------------------------------------------------------- files, folders


def test_a_file_is_one_document_of_bytes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("naïve\n".encode())
    corpus = open_corpus(path)
    assert texts(corpus) == ["naïve\n".encode()]
    assert (corpus.vocabulary, corpus.end, corpus.documents) == (257, 256, 1)
    assert bytes(corpus.tokens(0, 2, 4)) == "ï".encode()
    assert corpus.describe() == "a.txt: 1 document, 7 tokens, in 1 text file of 7 B"


def test_a_folder_is_its_files_in_the_order_of_their_names(tmp_path):
    for name in ("b.txt", "a/z.py", "a.txt", "a-b.txt", "B.txt", "ü.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    corpus = open_corpus(tmp_path)
    assert [text.decode() for text in texts(corpus)] == ["B.txt", "a-b.txt", "a.txt", "a/z.py", "b.txt", "ü.txt"]


def test_what_is_left_out_is_counted(tmp_path):
    outside = tmp_path / "outside.txt"
    outside.write_text("outside")
    folder = tmp_path / "folder"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config").write_text("hidden")
    (folder / ".env").write_text("hidden")
    (folder / "kept.txt").write_text("kept")
    (folder / "empty.txt").write_text("")
    (folder / "binary.so").write_bytes(b"\x7fELF\0")
    (folder / "late.txt").write_bytes(b"x" * 8192 + b"\0")  # text as far as anybody looks
    (folder / "out").symlink_to(outside)
    (folder / "loop").symlink_to(folder)
    (folder / "again.txt").symlink_to(folder / "kept.txt")
    os.mkfifo(folder / "pipe")  # which an open would wait for
    corpus = open_corpus(folder)
    assert texts(corpus) == [b"kept", b"x" * 8192 + b"\0"]
    assert dict(corpus.left_out) == {"hidden": 2, "empty": 1, "binary": 1, "link": 3, "special": 1}
    said = "left out: 1 binary file, 1 empty file, 2 hidden names, 3 links, 1 special file"
    assert corpus.describe().endswith(said)


def test_runs_are_no_data(tmp_path):
    """Neither the one that is about to begin there, nor those that were; the same files elsewhere are."""
    for name in ("a.txt", "out/new/kept.txt", "runs/old/config.json", "runs/old/metrics.jsonl", "runs/old/lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "runs" / "config.json").write_text("{}")
    corpus = open_corpus(tmp_path, without=tmp_path / "runs" / ".." / "out" / "new")
    assert [text.decode() for text in texts(corpus)] == ["a.txt", "{}"]
    assert corpus.describe().endswith("; left out: 2 folders of a run")


def test_a_file_that_is_merely_called_lock_is_data(tmp_path):
    for name, text in {"a": "a", "b": "[1]", "c": '{"process": 1}', "d": "[" * 2000}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text(text)
    assert open_corpus(tmp_path).documents == 4


def test_a_link_may_be_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("a")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    assert texts(open_corpus(tmp_path / "link")) == [b"a"]


def test_bytes_are_of_every_file(tmp_path):
    (tmp_path / "a.dat").write_bytes(b"\0\1\2")
    (tmp_path / "b.fa").write_bytes(b">x\nAC\n")
    assert texts(open_corpus(tmp_path, kind="bytes")) == [b"\0\1\2", b">x\nAC\n"]
    assert texts(open_corpus(tmp_path, kind="text")) == [b">x\nAC\n"]


def test_many_files_have_few_maps_open(tmp_path):
    for number in range(200):
        (tmp_path / f"{number:03}.txt").write_text(f"text {number}")
    corpus = open_corpus(tmp_path)
    open_before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert texts(corpus) == [f"text {number}".encode() for number in range(200)]
    if open_before:
        assert len(os.listdir("/proc/self/fd")) <= open_before + files.MAPS


def test_a_corpus_can_be_sent_to_another_process(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    corpus = open_corpus(tmp_path)
    assert texts(corpus) == texts(pickle.loads(pickle.dumps(corpus)))


def test_without_a_path_it_is_pythons_own_library():
    corpus = open_corpus(None)
    names = [source.file.name for source in corpus.sources]
    assert names == sorted(names)
    assert {"ast.py", "json/decoder.py", "unittest/case.py"} <= {*names}
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert all(name.endswith(".py") for name in names)
    assert corpus.total > 5_000_000
    assert corpus.describe().startswith(f"Python {sys.version_info[0]}.{sys.version_info[1]} library: ")
    place = names.index("ast.py")
    assert texts_of(corpus, place) == Path(corpus.sources[place].file.path).read_bytes()


def texts_of(corpus, document):
    return bytes(corpus.tokens(document, 0, int(corpus.lengths[document])))


def test_a_python_without_source_says_so(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "nowhere"):
        monkeypatch.setattr("longring.train.corpus.sysconfig.get_path", lambda name, at=folder: str(at))
        assert refusal(None) == f"this Python has no source of its library at {folder}; give a file or folder"


# ----------------------------------------------------------------------------------------------------- fingerprint


def test_the_fingerprint_is_of_names_sizes_and_samples(tmp_path):
    def made(folder, changes=()):
        folder = tmp_path / folder
        folder.mkdir()
        for name, text in {"a.txt": b"a" * 100, "large.txt": bytes(range(1, 251)) * 400, **dict(changes)}.items():
            (folder / name).write_bytes(text)
        return open_corpus(folder).fingerprint

    large = bytearray(bytes(range(1, 251)) * 400)
    first = made("first")
    assert first == made("second")  # wherever the folder is
    changed = [made("renamed", {"b.txt": b"a"}), made("another text", {"a.txt": b"a" * 99 + b"b"})]
    for place in (0, len(large) // 2, len(large) - 1):
        changed.append(made(f"at {place}", {"large.txt": large[:place] + b"!" + large[place + 1 :]}))
    changed.append(made("longer", {"large.txt": large + b"!"}))
    changed.append(open_corpus(tmp_path / "first", kind="bytes").fingerprint)
    assert changed.pop() == first  # which reads the same here
    assert len({first, *changed}) == 1 + len(changed)


def test_the_fingerprint_is_of_the_way_it_is_read(tmp_path):
    (tmp_path / "a.fa").write_text(">x\nACgt\n")
    opened = [open_corpus(tmp_path, kind=kind).fingerprint for kind in ("auto", "text")]
    opened.append(open_corpus(tmp_path, case="upper").fingerprint)
    assert len(set(opened)) == 3


# ------------------------------------------------------------------------------------------------------------ FASTA


def slow_fasta(text):
    """The definition: lines, of which headers begin documents."""
    documents = []
    for line in text.decode().split("\n"):
        if line.startswith(">"):
            documents.append("")
        elif line.strip():
            documents[-1] += line.strip().replace(" ", "")
    return [document.encode() for document in documents if document]


lines = st.one_of(
    st.text("ACGTNacgt>*", max_size=9).map(lambda line: "A" + line),  # a '>' inside a line is no header
    st.just(""),
    st.text("AC>", max_size=6).map(lambda name: ">" + name),
    st.just("AC GT"),
)


@given(
    body=st.lists(lines, max_size=12),
    blank=st.integers(0, 2),
    ending=st.sampled_from(["\n", "\r\n"]),
    closed=st.booleans(),
    between=st.integers(1, 9),
)
def test_fasta_by_letter_is_what_its_lines_say(tmp_path_factory, body, blank, ending, closed, between):
    text = (ending * blank + ending.join([">first", *body]) + ending * closed).encode()
    path = tmp_path_factory.mktemp("fasta") / "a.fa"
    path.write_bytes(text)
    expected = slow_fasta(text.replace(b"\r\n", b"\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fasta, "BETWEEN", between)  # blocks that end anywhere
        if not expected:
            assert "holds nothing to read" in refusal(path)
            return
        corpus = open_corpus(path)
    assert texts(corpus) == expected
    for document, letters in enumerate(expected):
        for start in range(len(letters) + 1):
            for stop in range(start, len(letters) + 1):
                assert bytes(corpus.tokens(document, start, stop)) == letters[start:stop]


def test_fasta_of_many_blocks_keeps_its_case_unless_told(tmp_path):
    rng = np.random.default_rng(0)
    sequences = [rng.choice(list(b"ACGTacgtN"), size).astype(np.uint8).tobytes() for size in (300_000, 1, 70_001)]
    path = tmp_path / "genome.fna"
    with path.open("wb") as file:
        for number, sequence in enumerate(sequences):
            file.write(f">chromosome {number}\n".encode())
            file.writelines(sequence[i : i + 61] + b"\n" for i in range(0, len(sequence), 61))
    kept, upper = open_corpus(path), open_corpus(path, case="upper")
    assert texts(kept) == sequences
    assert texts(upper) == [sequence.upper() for sequence in sequences]
    assert bytes(kept.tokens(0, 131_000, 131_333)) == sequences[0][131_000:131_333]
    assert kept.describe().startswith("genome.fna: 3 documents, 370,002 tokens, in 1 FASTA file of ")


def test_a_few_letters_of_a_long_sequence_are_a_short_read(tmp_path, monkeypatch):
    write_fasta(tmp_path / "a.fa", [b"ACGT" * 500_000])
    corpus = open_corpus(tmp_path / "a.fa")
    read = []

    def counted(file, start, stop):
        read.append(stop - start)
        return files.read_bytes(file, start, stop)

    monkeypatch.setattr(fasta, "read_bytes", counted)
    for start in range(0, 2_000_000, 99_999):
        assert bytes(corpus.tokens(0, start, start + 4)) in b"ACGTACGT"
    assert max(read) <= 2 * fasta.BETWEEN


def test_headers_with_nothing_below_are_counted(tmp_path):
    (tmp_path / "a.fa").write_text(">a\n>b\nAC\n>c")
    corpus = open_corpus(tmp_path)
    assert texts(corpus) == [b"AC"]
    assert corpus.describe().endswith("left out: 2 empty documents")


def test_fasta_and_text_in_one_folder(tmp_path):
    (tmp_path / "a.fasta").write_text(">x\nAC\nGT\n>y\nTT\n")
    (tmp_path / "readme.txt").write_text(">x\nAC\n")
    (tmp_path / "z.FA").write_text(">x\nGG\n")
    mixed = open_corpus(tmp_path)
    assert texts(mixed) == [b"ACGT", b"TT", b">x\nAC\n", b"GG"]
    assert "in 2 FASTA files and 1 text file of" in mixed.describe()
    only = open_corpus(tmp_path, kind="fasta")
    assert texts(only) == [b"ACGT", b"TT", b"GG"]
    assert only.describe().endswith("left out: 1 file of another kind")
    assert texts(open_corpus(tmp_path / "readme.txt", kind="fasta")) == [b"AC"]


def test_what_does_not_begin_with_a_header_is_no_fasta(tmp_path):
    (tmp_path / "a.fa").write_text("\nACGT\n>x\nAC\n")
    assert "a.fa does not begin with a header line" in refusal(tmp_path)


# ----------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "i4", "<i8", "u8"])
def test_npy_of_any_whole_numbers(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.array([3, 1, 99, 4], dtype))
    corpus = open_corpus(tmp_path / "a.npy")
    assert numbers(corpus) == [[3, 1, 99, 4]]
    assert (corpus.vocabulary, corpus.end) == (101, 100)
    assert corpus.tokens(0, 1, 3).tolist() == [1, 99]


def test_rows_are_documents(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(12, dtype=np.uint16).reshape(3, 4))
    assert numbers(open_corpus(tmp_path)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_bin_is_what_the_json_beside_it_says(tmp_path):
    np.array([5, 6, 9, 9, 7, 9], "<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "a.json").write_text('{"dtype": "uint16", "vocabulary": 50}')
    corpus = open_corpus(tmp_path)
    assert numbers(corpus) == [[5, 6, 9, 9, 7, 9]]
    assert (corpus.vocabulary, corpus.end) == (51, 50)
    (tmp_path / "a.json").write_text('{"dtype": "uint16", "vocabulary": 50, "end": 9}')
    assert not corpus.left_out  # the JSON is no file of another kind
    ended = open_corpus(tmp_path / "a.bin")
    assert numbers(ended) == [[5, 6], [7]]
    assert (ended.vocabulary, ended.end) == (50, 9)
    assert ended.left_out["document"] == 1
    assert ended.fingerprint != corpus.fingerprint


@given(documents=st.lists(st.lists(st.integers(0, 40), max_size=6), max_size=8), block=st.integers(1, 30))
def test_tokens_that_were_written_are_read(tmp_path_factory, documents, block):
    path = tmp_path_factory.mktemp("tokens") / "a.bin"
    write_tokens(path, [np.array(document, np.int64) for document in documents], vocabulary=41)
    filled = [document for document in documents if document]
    if not filled:
        assert refusal(path)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longring.train.token_files.STREAM", block)  # reads that end inside numbers
        corpus = open_corpus(path)
    assert numbers(corpus) == filled
    assert (corpus.vocabulary, corpus.end) == (42, 41)


def test_npy_amid_code_is_one_of_its_binaries(tmp_path):
    np.save(tmp_path / "golden.npy", np.arange(5))
    (tmp_path / "a.py").write_text("pass")
    corpus = open_corpus(tmp_path)
    assert texts(corpus) == [b"pass"]
    assert dict(corpus.left_out) == {"binary": 1}
    assert numbers(open_corpus(tmp_path, kind="tokens")) == [[0, 1, 2, 3, 4]]


def test_a_token_beyond_the_vocabulary_is_named_when_it_is_read(tmp_path):
    np.array([5, 50, 7], "<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "a.json").write_text('{"dtype": "uint16", "vocabulary": 50}')
    corpus = open_corpus(tmp_path)
    with pytest.raises(ArgumentError, match=r"a\.bin: token 50 at place 1 is not from 0 to 49"):
        corpus.tokens(0, 0, 3)
    np.save(tmp_path / "b.npy", np.array([5, -3]))
    assert "b.npy: tokens must be from 0 to 2**31 - 2, got -3" in refusal(tmp_path / "b.npy")
    np.save(tmp_path / "b.npy", np.array([5, 2**40]))
    assert f"got {2**40}" in refusal(tmp_path / "b.npy")


# -------------------------------------------------------------------------------------------------------- bad input


def test_bad_paths(tmp_path):
    assert refusal(tmp_path / "nowhere") == f"there is no file or folder {tmp_path}/nowhere"
    assert refusal(tmp_path) == f"{tmp_path} holds nothing to read"
    (tmp_path / "a.txt").write_text("")
    assert refusal(tmp_path / "a.txt") == f"{tmp_path}/a.txt is empty"
    assert refusal(tmp_path) == f"{tmp_path} holds nothing to read; left out: 1 empty file"
    assert "neither a file nor a folder" in refusal(Path("/dev/null"))
    assert "cannot be read" in refusal(tmp_path / "a.txt" / "below")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "cannot be read" in refusal(tmp_path / "loop")
    (tmp_path / "b.gz").write_bytes(b"\x1f\x8b\0")
    assert refusal(tmp_path / "b.gz").endswith("b.gz is packed; unpack it first")
    (tmp_path / "b.o").write_bytes(b"\0")
    assert "has a NUL byte in its first 8 KiB" in refusal(tmp_path / "b.o")


def test_bad_options(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    assert "kind must be one of auto, text, fasta, tokens, bytes, got 'csv'" in refusal(tmp_path, kind="csv")
    assert "case must be 'kept' or 'upper', got 'lower'" in refusal(tmp_path, case="lower")
    assert "case 'upper' is for FASTA" in refusal(tmp_path, case="upper")
    assert "standard library is text; kind 'fasta' needs a path" in refusal(None, kind="fasta")
    assert "a.txt is no file of tokens" in refusal(tmp_path / "a.txt", kind="tokens")
    assert "left out: 1 file of another kind" in refusal(tmp_path, kind="tokens")


def test_unreadable_files_are_named(tmp_path, monkeypatch):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("text")
    real = files._looked_at

    def denied(path, name):  # as an administrator one may read everything
        if name > "0.txt":
            raise ArgumentError(f"{path} cannot be read: Permission denied")
        return real(path, name)

    monkeypatch.setattr(files, "_looked_at", denied)
    said = refusal(tmp_path)
    assert "1.txt, 2.txt, 3.txt and 2 more cannot be read (Permission denied); mend it" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="an administrator may read everything")
def test_permissions(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.txt").chmod(0)
    assert "a.txt cannot be read" in refusal(tmp_path)
    assert "Permission denied" in refusal(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.array([{}, "x"], dtype=object), "must hold whole numbers [tokens] or [documents, tokens], got object [2]"),
        (np.array([1.0]), "must hold whole numbers [tokens] or [documents, tokens], got float64 [1]"),
        (np.array([True]), "got bool [1]"),
        (np.array(3), "got int64 []"),
        (np.zeros((2, 2, 2), np.int32), "got int32 [2, 2, 2]"),
        (np.zeros((0, 4), np.int32), "got int32 [0, 4]"),
        (np.asfortranarray(np.arange(6).reshape(2, 3)), "Fortran order"),
    ],
)
def test_bad_npy(tmp_path, array, says):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    assert says in refusal(tmp_path / "a.npy")


def test_a_npy_that_is_none_or_cut_off(tmp_path):
    (tmp_path / "a.npy").write_text("no array")
    assert "a.npy cannot be read as .npy" in refusal(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.arange(1000))
    os.truncate(tmp_path / "a.npy", 500)
    assert "a.npy has 500 bytes where its header says 8,128: it was cut off" in refusal(tmp_path / "a.npy")
    with (tmp_path / "a.npy").open("wb") as file:
        np.save(file, np.arange(3))
        np.save(file, np.arange(3))
    assert "holds several arrays" in refusal(tmp_path / "a.npy")
    np.savez(tmp_path / "b.npz", np.arange(3))
    (tmp_path / "b.npz").rename(tmp_path / "b.npy")
    assert "b.npy cannot be read as .npy" in refusal(tmp_path / "b.npy")


@pytest.mark.parametrize(
    "shape",
    ["(-1,)", "(True,)", "('a',)", "(99999999999999999999999,)", "(4611686018427387904, 4)", "[40]", "(40,", "-"],
)
def test_a_npy_with_a_strange_header(tmp_path, shape):
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\1\0" * 40)
    assert "a.npy" in refusal(tmp_path / "a.npy")


class Ran:
    """Pickled, it would make a folder when it is read."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_no_code_of_a_npy_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.array([Ran()], dtype=object), allow_pickle=True)
    assert refusal(tmp_path / "a.npy")
    (tmp_path / "a.npy").write_bytes(pickle.dumps(Ran()))
    assert refusal(tmp_path / "a.npy")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        (None, 'needs a a.json beside it that says what its numbers are, such as {"dtype": "uint16"'),
        ("[", "a.json is no JSON"),
        ("[]", "must be an object with no other keys than dtype, vocabulary and end, got []"),
        ({"dtype": "uint16", "vocabulary": 9, "eos": 3}, "no other keys than dtype, vocabulary and end"),
        ({"dtype": "float32", "vocabulary": 9}, "dtype must be one of uint8, uint16"),
        ({"dtype": "O", "vocabulary": 9}, "got 'O'"),
        ({"dtype": ["u2"], "vocabulary": 9}, "dtype must be one of"),
        ({"vocabulary": 9}, "must say dtype and vocabulary"),
        ({"dtype": "uint16"}, "must say dtype and vocabulary"),
        ({"dtype": "uint16", "vocabulary": 0}, "vocabulary must be a whole number from 1 to 2**31 - 1, got 0"),
        ({"dtype": "uint16", "vocabulary": 2**63}, f"got {2**63}"),
        ({"dtype": "uint16", "vocabulary": 9, "end": 9}, "end must be a token of the vocabulary, which is 9, got 9"),
        ({"dtype": "uint32", "vocabulary": 9}, "has 6 bytes, which is no whole number of uint32"),
    ],
)
def test_bad_bin(tmp_path, said, refused):
    (tmp_path / "a.bin").write_bytes(b"\1\0" * 3)
    if said is not None:
        (tmp_path / "a.json").write_text(said if isinstance(said, str) else json.dumps(said))
    assert refused in refusal(tmp_path / "a.bin")


def test_files_of_one_corpus_have_one_end(tmp_path):
    for name, end in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.bin").write_bytes(b"\0\0")
        (tmp_path / f"{name}.json").write_text(json.dumps({"dtype": "uint16", "vocabulary": 9, "end": end}))
    assert "must have one end: it is 1 in a.bin and 2 in b.bin" in refusal(tmp_path)


def test_bad_places(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    corpus = open_corpus(tmp_path)
    with pytest.raises(ArgumentError, match="has documents 0 to 0, got 1"):
        corpus.tokens(1, 0, 1)
    with pytest.raises(ArgumentError, match="document 0 has 4 tokens, got 2 to 5"):
        corpus.tokens(0, 2, 5)


def test_a_file_that_changed_is_an_error_and_no_crash(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_bytes(b"x" * 100_000)
    corpus = open_corpus(tmp_path)
    corpus.tokens(0, 0, 10)
    os.truncate(tmp_path / "a.txt", 50_000)
    with pytest.raises(DataChanged, match=r"a\.txt had 100,000 bytes when it was opened and has 50,000 now"):
        corpus.tokens(0, 90_000, 90_001)
    os.truncate(tmp_path / "b.txt", 50_000)
    with pytest.raises(DataChanged, match=r"b\.txt had 97\.66 KiB when it was opened, and has less now"):
        corpus.tokens(1, 90_000, 90_001)
    (tmp_path / "c.txt").unlink()
    with pytest.raises(DataChanged, match=r"c\.txt cannot be read any more: No such file"):
        corpus.tokens(2, 0, 1)


# ----------------------------------------------------------------------------------------------------------- memory


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux how much is in memory")
def test_an_index_does_not_hold_the_letters(tmp_path):
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    path = tmp_path / "large.fa"
    line = b"ACGT" * 15 + b"\n"
    with path.open("wb") as file:
        for number in range(4):
            file.write(f">{number}\n".encode())
            file.writelines(line * 10_000 for _ in range(50))  # 30 MB each
    np.save(tmp_path / "large.npy", np.ones(30_000_000, np.uint16))
    before = resident()
    corpus = open_corpus(path)
    tokens = open_corpus(tmp_path / "large.npy")
    assert corpus.total == 4 * 60 * 500_000
    assert bytes(corpus.tokens(3, 29_999_996, 30_000_000)) == b"ACGT"
    for start in range(0, 30_000_000, 1_000_000):
        corpus.tokens(2, start, start + 1_000_000)
        tokens.tokens(0, start, start + 1_000_000)
    assert resident() - before < 30_000_000
