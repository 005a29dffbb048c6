"""A corpus: documents of tokens that stay in their files, whatever their size.

Text and code are their bytes; FASTA is the letters under each header; files of tokens are what they say. A document is
a file, the letters under one header, a row, or what lies between two end tokens.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from ..plan.quantities import spoken_bytes
from . import fasta, token_files
from .draws import ODD, named, scrambled
from .files import PACKED, File, Found, find_files, read_bytes

KINDS = ("auto", "text", "fasta", "tokens", "bytes")
CASES = ("kept", "upper")
BYTES = 256  # tokens of text; the next one ends a document


class Source(Protocol):
    """One file, read by token."""

    @property
    def file(self) -> File: ...

    def read(self, start: int, stop: int) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Text:
    """Bytes of one file."""

    file: File

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        return np.frombuffer(read_bytes(self.file, start, stop), np.uint8)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents, in the order of their files' names and of their places there. A value: the same wherever it is opened.

    vocabulary:   how many tokens there are, the one that ends a document included.
    end:          that one. It is in no document: whoever lays documents end to end puts it between them.
    fingerprint:  changes when the data does, as far as names, sizes and samples of the files show.
    keys:         64 bits a document that only its file's name and its number there decide.
    """

    name: str
    kind: str
    vocabulary: int
    end: int
    fingerprint: str
    lengths: NDArray[np.int64] = field(repr=False)  # of each document, in tokens
    keys: NDArray[np.uint64] = field(repr=False)
    sources: tuple[Source, ...] = field(repr=False)
    places: NDArray[np.int64] = field(repr=False)  # where in its file each document begins
    firsts: NDArray[np.int64] = field(repr=False)  # of each file: its first document
    left_out: Counter[str] = field(default_factory=Counter, repr=False)

    @property
    def documents(self) -> int:
        return len(self.lengths)

    @cached_property
    def total(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    def tokens(self, document: int, start: int, stop: int) -> NDArray[Any]:
        """Tokens start..stop-1 of a document; nothing else is read."""
        if not 0 <= document < self.documents:
            raise ArgumentError(f"{self.name} has documents 0 to {self.documents - 1}, got {document}")
        if not 0 <= start <= stop <= self.lengths[document]:
            raise ArgumentError(f"document {document} has {self.lengths[document]} tokens, got {start} to {stop}")
        source = self.sources[int(np.searchsorted(self.firsts, document, side="right")) - 1]
        place = int(self.places[document])
        return source.read(place + start, place + stop)

    def describe(self) -> str:
        """How much of what there is, and what was left out; one line."""
        files = Counter(_spoken_kind(source) for source in self.sources)
        read = " and ".join(_several(count, f"{kind} file") for kind, count in files.items())
        size = spoken_bytes(sum(source.file.size for source in self.sources))
        said = f"{self.name}: {_several(self.documents, 'document')}, {self.total:,} tokens, in {read} of {size}"
        gone = ", ".join(_several(count, _LEFT_OUT[reason]) for reason, count in sorted(self.left_out.items()))
        return said + (f"; left out: {gone}" if gone else "")


_LEFT_OUT = {
    "hidden": "hidden name",
    "link": "link",
    "special": "special file",
    "empty": "empty file",
    "binary": "binary file",
    "other": "file of another kind",
    "document": "empty document",
    "run": "folder of a run",
}


def _several(count: int, thing: str) -> str:
    if count == 1:
        return f"1 {thing}"
    first, of, rest = thing.partition(" of ")
    return f"{count:,} {first}s{of}{rest}"


def _spoken_kind(source: Source) -> str:
    return {Text: "text", fasta.Fasta: "FASTA"}.get(type(source), "token")


# -------------------------------------------------------------------------------------------------------- opening


def open_corpus(path: Path | None, *, kind: str = "auto", case: str = "kept", without: Path | None = None) -> Corpus:
    """The documents of a file or folder, or of this Python's standard library where path is None.

    Folders of runs are left out, and the folder `without` is.

    kind:  "text" (bytes; what has a NUL byte near its beginning is left out), "bytes" (of every file, whatever it
           holds), "fasta", "tokens" (.npy, or .bin with a JSON beside it), or "auto": by the names of the files.
    case:  "upper" reads the lower-case letters of FASTA as upper case.
    """
    if kind not in KINDS:
        raise ArgumentError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if case not in CASES:
        raise ArgumentError(f"case must be 'kept' or 'upper', got {case!r}")
    if path is None:
        if kind not in ("auto", "text"):
            raise ArgumentError(f"Python's standard library is text; kind {kind!r} needs a path")
        found, name, kind = _standard_library(), f"Python {sys.version_info[0]}.{sys.version_info[1]} library", "text"
    else:
        path = Path(path)
        found, name = find_files(path, without=without), Path(os.path.realpath(path)).name or str(path)
    is_single = path is not None and os.path.isfile(path)
    kind = _settled_kind(found, kind)
    sources, documents = _opened(found, kind, case == "upper", is_single)
    if not sources:
        raise ArgumentError(_refusal_of_nothing(path, found.left_out))
    if case == "upper" and not any(isinstance(source, fasta.Fasta) for source in sources):
        raise ArgumentError(f"case 'upper' is for FASTA, and {name} has none")
    return _corpus(name, kind, case, sources, documents, found.left_out)


def _settled_kind(found: Found, kind: str) -> str:
    """Tokens, where nothing else is there: amid code, .npy files are some of its binaries."""
    if kind != "auto":
        return kind
    others = [file for file in found.files if file.suffix not in {*token_files.SUFFIXES, ".json"}]
    has_tokens = any(_is_of_tokens(file) for file in found.files)
    is_single = len(found.files) == 1 and found.files[0].suffix == ".bin"  # whose JSON is missing, as its error says
    return "tokens" if not others and (has_tokens or is_single) else "auto"


def _is_of_tokens(file: File) -> bool:
    return file.suffix == ".npy" or (file.suffix == ".bin" and os.path.exists(token_files.beside(file.path)))


def _refusal_of_nothing(path: Path | None, left_out: Counter[str]) -> str:
    if path is None:
        return f"this Python has no source of its library at {sysconfig.get_path('stdlib')}; give a file or folder"
    gone = ", ".join(_several(count, _LEFT_OUT[reason]) for reason, count in sorted(left_out.items()))
    return f"{path} holds nothing to read" + (f"; left out: {gone}" if gone else "")


class Documents:
    """Places and lengths, file by file, before they are one array each."""

    def __init__(self) -> None:
        self.places: list[NDArray[np.int64]] = []
        self.lengths: list[NDArray[np.int64]] = []

    def add(self, places: Any, lengths: Any) -> None:
        self.places.append(np.asarray(places, np.int64))
        self.lengths.append(np.asarray(lengths, np.int64))


def _opened(found: Found, kind: str, upper: bool, is_single: bool) -> tuple[list[Source], Documents]:
    """Every file as what it is; what it cannot be is left out of a folder, and refused where it was named."""
    sources: list[Source] = []
    documents = Documents()
    beside = {token_files.beside(file.path) for file in found.files if file.suffix in token_files.SUFFIXES}
    for file in found.files:
        if kind == "tokens" and file.path in beside:
            continue  # it says what the numbers are
        reason = _reason_against(file, kind, is_single)
        if reason and is_single:
            raise ArgumentError(_refusal_of_file(file, kind))
        if reason:
            found.left_out[reason] += 1
            continue
        opened = _source(file, kind, upper)
        if isinstance(opened, Text):
            sources.append(opened)
            documents.add([0], [file.size])
            continue
        found.left_out["document"] += opened.empty
        if len(opened.lengths):
            sources.append(opened.fasta if isinstance(opened, fasta.Indexed) else opened)
            documents.add(opened.places, opened.lengths)
    found.left_out += Counter()  # drops what is zero
    return sources, documents


def _reason_against(file: File, kind: str, is_single: bool) -> str | None:
    if not file.size:
        return "empty"  # in a folder these are gone already
    if kind == "tokens" and file.suffix not in token_files.SUFFIXES:
        return "other"
    if kind == "fasta" and file.suffix not in fasta.SUFFIXES and not is_single:
        return "other"
    if kind in ("auto", "text", "fasta") and file.is_binary:
        return "binary"
    return None


def _refusal_of_file(file: File, kind: str) -> str:
    if not file.size:
        return f"{file.path} is empty"
    if kind == "tokens":
        return f"{file.path} is no file of tokens: these are .npy, or .bin with a JSON beside it"
    if file.suffix in PACKED:
        return f"{file.path} is packed; unpack it first"
    return f"{file.path} has a NUL byte in its first 8 KiB, so it is no text; kind 'bytes' takes it as it is"


def _source(file: File, kind: str, upper: bool) -> Text | fasta.Indexed | token_files.Tokens:
    if kind == "tokens":
        return token_files.open_tokens(file)
    if kind == "fasta" or (kind == "auto" and file.suffix in fasta.SUFFIXES):
        return fasta.index_fasta(file, upper=upper)
    return Text(file)


def _corpus(
    name: str, kind: str, case: str, sources: Sequence[Source], documents: Documents, left_out: Counter[str]
) -> Corpus:
    vocabulary, end = _vocabulary(sources)
    counts = np.array([len(lengths) for lengths in documents.lengths], np.int64)
    token_files.check_count(name, int(counts.sum()))
    firsts = np.cumsum(counts) - counts
    return Corpus(
        name=name,
        kind=kind,
        vocabulary=vocabulary,
        end=end,
        fingerprint=_fingerprint(case, vocabulary, end, sources),
        lengths=np.concatenate(documents.lengths),
        keys=_keys(sources, counts, firsts),
        sources=tuple(sources),
        places=np.concatenate(documents.places),
        firsts=firsts,
        left_out=left_out,
    )


def _vocabulary(sources: Iterable[Source]) -> tuple[int, int]:
    """(tokens in all, the one that ends a document): the files' own, or one more than they have."""
    files = [source for source in sources if isinstance(source, token_files.Tokens)]
    if not files:
        return BYTES + 1, BYTES
    for other in files:
        if other.end != files[0].end:
            raise ArgumentError(
                f"files of one corpus must have one end: it is {files[0].end} in {files[0].file.name} and "
                f"{other.end} in {other.file.name}"
            )
    most = max(file.vocabulary for file in files)
    return (most + 1, most) if files[0].end is None else (most, files[0].end)


def _keys(sources: Sequence[Source], counts: NDArray[np.int64], firsts: NDArray[np.int64]) -> NDArray[np.uint64]:
    names = np.array([named(os.fsencode(source.file.name)) for source in sources], np.uint64)
    numbers = np.arange(counts.sum()) - np.repeat(firsts, counts)
    return scrambled(np.repeat(names, counts) + numbers.astype(np.uint64) * np.uint64(ODD))


def _fingerprint(case: str, vocabulary: int, end: int, sources: Iterable[Source]) -> str:
    """Of names, sizes and samples; names have their length before them, so that no two lists of files read alike."""
    found = blake2b(f"{case} {vocabulary} {end}".encode(), digest_size=16)
    for source in sources:
        kind = _spoken_kind(source)
        name = os.fsencode(source.file.name)
        found.update(f"\n{kind} {source.file.size} {len(name)} ".encode() + name + source.file.digest)
    return found.hexdigest()


# ----------------------------------------------------------------------------------------- the standard library

_NOT_READ = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def _standard_library() -> Found:
    """Its .py files, without tests, and without what the build wrote, which differs from machine to machine."""

    def wanted(name: str, is_folder: bool) -> bool:
        last = name.rpartition("/")[2]
        return last not in _NOT_READ if is_folder else last.endswith(".py") and not last.startswith("_sysconfigdata")

    folder = Path(sysconfig.get_path("stdlib"))
    return find_files(folder, wanted) if folder.is_dir() else Found([])
