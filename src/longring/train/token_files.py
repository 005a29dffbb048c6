"""Tokens that somebody made already: .npy, or .bin with a JSON beside it that says what its numbers are."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ..errors import ArgumentError
from ..plan.user_files import read_text
from .files import STREAM, File, read_bytes, stream

SUFFIXES = {".npy", ".bin"}
MOST = 2**31 - 1  # tokens of a vocabulary
MOST_INFERRED = 2**20  # tokens of a vocabulary that nobody named: a stray number would make an embedding of 137 GB
MOST_DOCUMENTS = 10_000_000  # each of them takes 80 bytes and more of memory, however short it is
MOST_ABOUT = 1 << 16  # bytes of the JSON beside a file
MOST_HEADER = 1 << 16  # bytes at the beginning of a .npy
_KEYS = {"dtype", "vocabulary", "end"}
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


@dataclass(frozen=True)
class About:
    """What the JSON beside a file says; a .npy needs none."""

    dtype: np.dtype[Any] | None = None
    vocabulary: int | None = None
    end: int | None = None  # the token that closes documents in the file


@dataclass(frozen=True, eq=False)
class Tokens:
    """Numbers of one file, and which of them are documents."""

    file: File
    dtype: np.dtype[Any]
    offset: int  # bytes before the first number
    vocabulary: int
    end: int | None
    places: NDArray[np.int64] = field(repr=False)
    lengths: NDArray[np.int64] = field(repr=False)
    empty: int = 0

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Numbers start..stop-1, each of them looked at: one outside the vocabulary would be another's embedding."""
        size = self.dtype.itemsize
        found = np.frombuffer(read_bytes(self.file, self.offset + start * size, self.offset + stop * size), self.dtype)
        if found.size and (int(found.max()) >= self.vocabulary or int(found.min()) < 0):
            wrong = int(np.flatnonzero((found >= self.vocabulary) | (found < 0))[0])
            raise ArgumentError(
                f"{self.file.path}: token {found[wrong]} at place {start + wrong:,} is not from 0 to "
                f"{self.vocabulary - 1}, which is the vocabulary"
            )
        return found.astype(self.dtype.newbyteorder("="), copy=False)


def beside(path: Path) -> Path:
    """Where the JSON of a file of tokens stands."""
    return path.with_suffix(".json")


def open_tokens(file: File) -> Tokens:
    about = _about(file)
    if file.suffix == ".npy":
        dtype, offset, shape = _npy_header(file)
    else:
        dtype, offset, shape = _of_bin(file, about)
    if about.dtype not in (None, dtype):
        raise ArgumentError(f"{file.path} holds {dtype}, but {beside(file.path).name} says {about.dtype}")
    vocabulary = about.vocabulary or _inferred(file, dtype, offset)
    if len(shape) == 2:
        if about.end is not None:
            raise ArgumentError(f"{file.path}: its rows are documents; {beside(file.path).name} must not name an end")
        check_count(file.path, shape[0])
        places = np.arange(shape[0], dtype=np.int64) * shape[1]
        return Tokens(file, dtype, offset, vocabulary, about.end, places, np.full(shape[0], shape[1], np.int64))
    places, lengths, empty = _documents(file, dtype, offset, shape[0], about.end)
    return Tokens(file, dtype, offset, vocabulary, about.end, places, lengths, empty)


# ------------------------------------------------------------------------------------------- what the numbers are


def _about(file: File) -> About:
    path = beside(file.path)
    if not os.path.exists(path):
        if file.suffix == ".bin":
            raise ArgumentError(
                f"{file.path} needs a {path.name} beside it that says what its numbers are, such as "
                '{"dtype": "uint16", "vocabulary": 50257}'
            )
        return About()
    try:
        said = json.loads(read_text(path, str(path), most=MOST_ABOUT))
    except ArgumentError:
        raise
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is no JSON: {error}") from None
    if not isinstance(said, dict) or not said.keys() <= _KEYS:
        raise ArgumentError(f"{path} must be an object with no other keys than dtype, vocabulary and end, got {said!r}")
    return _checked(path, said)


def _checked(path: Path, said: dict[str, Any]) -> About:
    vocabulary, end = said.get("vocabulary"), said.get("end")
    if vocabulary is not None and not (_is_whole(vocabulary) and 1 <= vocabulary <= MOST):
        raise ArgumentError(f"{path}: vocabulary must be a whole number from 1 to 2**31 - 1, got {vocabulary!r}")
    if end is not None and (vocabulary is None or not (_is_whole(end) and 0 <= end < vocabulary)):
        raise ArgumentError(f"{path}: end must be a token of the vocabulary, which is {vocabulary!r}, got {end!r}")
    return About(_dtype(path, said["dtype"]) if "dtype" in said else None, vocabulary, end)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dtype(path: Path, name: Any) -> np.dtype[Any]:
    known = [f"{sign}int{bits}" for sign in ("u", "") for bits in (8, 16, 32, 64)]
    if name not in known:
        raise ArgumentError(f"{path}: dtype must be one of {', '.join(known)}, got {name!r}")
    return np.dtype(name).newbyteorder("<")  # a file is the same on every machine


def _npy_header(file: File) -> tuple[np.dtype[Any], int, tuple[int, ...]]:
    """(dtype, bytes before the numbers, shape). Numpy reads the header alone: nothing of the file is ever unpickled."""
    try:
        with file.path.open("rb") as opened, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python, about how a stranger's header is written
            head = BytesIO(opened.read(MOST_HEADER))
            version = npy.read_magic(head)
            if version not in _HEADERS:
                raise ValueError(f"its format is {version}")
            shape, by_columns, dtype = _HEADERS[version](head)
            offset = head.tell()
    except Exception as error:  # numpy parses an expression of Python, which fails in many ways
        raise ArgumentError(f"{file.path} cannot be read as .npy: {str(error) or type(error).__name__}") from None
    if dtype.kind not in "ui" or len(shape) not in (1, 2) or not all(_is_whole(n) and n > 0 for n in shape):
        raise ArgumentError(
            f"{file.path} must hold whole numbers [tokens] or [documents, tokens], got {dtype} {list(shape)}"
        )
    if by_columns and len(shape) == 2:
        raise ArgumentError(f"{file.path} holds columns one after another (Fortran order); save rows")
    if (size := offset + prod(shape) * dtype.itemsize) != file.size:
        raise ArgumentError(
            f"{file.path} has {file.size:,} bytes where its header says {size:,}: "
            "it was cut off, or holds several arrays"
        )
    return dtype, offset, shape


def _of_bin(file: File, about: About) -> tuple[np.dtype[Any], int, tuple[int, ...]]:
    if about.dtype is None or about.vocabulary is None:
        raise ArgumentError(f"{beside(file.path)} must say dtype and vocabulary")
    count, rest = divmod(file.size, about.dtype.itemsize)
    if rest:
        raise ArgumentError(f"{file.path} has {file.size:,} bytes, which is no whole number of {about.dtype.name}")
    return about.dtype, 0, (count,)


# -------------------------------------------------------------------------------------- in one pass over the file


def _blocks(file: File, dtype: np.dtype[Any], offset: int) -> Iterable[NDArray[Any]]:
    """Reads may end inside a number: its beginning waits for the next."""
    rest = b""
    for part in stream(file, offset, block=STREAM):
        part = rest + part
        whole = len(part) // dtype.itemsize * dtype.itemsize
        rest = part[whole:]
        yield np.frombuffer(part[:whole], dtype)


def _inferred(file: File, dtype: np.dtype[Any], offset: int) -> int:
    found = _largest(file, dtype, offset) + 1
    if found > MOST_INFERRED:
        raise ArgumentError(
            f"{file.path}: its largest token is {found - 1}, and a vocabulary above {MOST_INFERRED:,} must be named; "
            f'if the number is right, write {{"vocabulary": {found}}} into {beside(file.path).name} beside the file'
        )
    return found


def _largest(file: File, dtype: np.dtype[Any], offset: int) -> int:
    least, most = 0, 0
    for block in _blocks(file, dtype, offset):
        if block.size:
            least, most = min(least, int(block.min())), max(most, int(block.max()))
    if least < 0 or most >= MOST:
        raise ArgumentError(f"{file.path}: tokens must be from 0 to 2**31 - 2, got {least if least < 0 else most}")
    return most


def _documents(
    file: File, dtype: np.dtype[Any], offset: int, count: int, end: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """(places, lengths, how many were empty): cut where the end stands, which is in none of them."""
    if end is None:
        return np.zeros(1, np.int64), np.array([count], np.int64), 0
    places, lengths, found, empty, at, start = [], [], 0, 0, 0, 0
    for block in _blocks(file, dtype, offset):
        ends = np.flatnonzero(block == end) + at
        at += block.size
        if ends.size:
            starts = np.concatenate([[start], ends[:-1] + 1])
            filled = ends > starts  # the others are dropped here: they may be as many as there are tokens
            places.append(starts[filled])
            lengths.append((ends - starts)[filled])
            found += places[-1].size
            empty += ends.size - places[-1].size
            start = int(ends[-1]) + 1
            check_count(file.path, found)
    if start < count:  # else the last document is closed, and none comes after it
        places.append(np.array([start]))
        lengths.append(np.array([count - start]))
    return np.concatenate(places).astype(np.int64), np.concatenate(lengths).astype(np.int64), empty


def check_count(path: Path | str, documents: int) -> None:
    if documents > MOST_DOCUMENTS:
        raise ArgumentError(
            f"{path} has more than {MOST_DOCUMENTS:,} documents, which are too many for memory; join short ones, or "
            "train on a part of them"
        )


# --------------------------------------------------------------------------------------------------------- writing


def write_tokens(path: Path, documents: Iterable[Any], *, vocabulary: int) -> None:
    """Documents of tokens below `vocabulary`, one after another, as a .bin and the JSON beside it.

    Each is closed by the token `vocabulary`, which becomes the end-of-document token.
    """
    if path.suffix != ".bin":
        raise ArgumentError(f"tokens are written as .bin, got {path.name}")
    if not (_is_whole(vocabulary) and 1 <= vocabulary < MOST):
        raise ArgumentError(f"vocabulary must be a whole number from 1 to 2**31 - 2, got {vocabulary!r}")
    dtype = np.dtype("<u2" if vocabulary < 2**16 else "<u4")
    with path.open("wb") as file:
        for number, document in enumerate(documents):
            tokens = np.asarray(document)
            if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
                raise ArgumentError(
                    f"document {number} must be whole numbers [tokens], got {tokens.dtype} {tokens.shape}"
                )
            if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
                raise ArgumentError(f"document {number} has tokens that are not from 0 to {vocabulary - 1}")
            file.write(np.append(tokens, vocabulary).astype(dtype).tobytes())
    said = {"dtype": dtype.name, "vocabulary": vocabulary + 1, "end": vocabulary}
    beside(path).write_text(json.dumps(said) + "\n", encoding="utf-8")
