"""FASTA: sequences of letters under header lines, read by letter though the file has lines.

One pass over the file notes where letters lie: for every document its first byte and the one behind its last, and a
place now and then between them. A read begins at the nearest place before it and skips the ends of lines.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from .files import File, read_bytes, stream
from .token_files import check_count

SUFFIXES = {".fa", ".fasta", ".fna"}
BETWEEN = 1 << 16  # bytes from one noted place to the next at most: what a read may skip
_NO_LETTER = b"\r\n\t "


@dataclass(frozen=True, eq=False)
class Fasta:
    """Letters of one file, counted from 0 over all of its documents."""

    file: File
    letters: NDArray[np.int64]  # of noted places: how many letters come before,
    offsets: NDArray[np.int64]  # and at which byte
    upper: bool  # soft-masked letters, which are lower case, as the others

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Letters start..stop-1, which lie in one document."""
        if start == stop:
            return np.empty(0, np.uint8)
        # of several places before the same letter the last is where its document begins, the first where one ended
        first = int(np.searchsorted(self.letters, start, side="right")) - 1
        last = int(np.searchsorted(self.letters, stop, side="left"))
        text = read_bytes(self.file, int(self.offsets[first]), int(self.offsets[last]))
        text = text.translate(None, _NO_LETTER)
        skipped = start - int(self.letters[first])
        text = text[skipped : skipped + stop - start]
        return np.frombuffer(text.upper() if self.upper else text, np.uint8)


@dataclass(frozen=True, eq=False)
class Indexed:
    """A file that was read through: its documents' first letters and lengths."""

    fasta: Fasta
    places: NDArray[np.int64]
    lengths: NDArray[np.int64]
    empty: int  # headers with nothing below them


def index_fasta(file: File, *, upper: bool) -> Indexed:
    """One pass, in blocks, of which none is kept."""
    walk = Walk(file)
    for block in stream(file, block=BETWEEN):
        walk.over(block)
        check_count(file.path, len(walk.starts))
    walk.end()
    places = np.array(walk.starts, np.int64)
    lengths = np.diff(places, append=walk.seen)
    filled = lengths > 0
    fasta = Fasta(file, np.array(walk.letters, np.int64), np.array(walk.offsets, np.int64), upper)
    return Indexed(fasta, places[filled], lengths[filled], int((~filled).sum()))


class Walk:
    """Block after block through a file, whose headers and lines end anywhere in them."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.letters, self.offsets = array("q"), array("q")  # eight bytes a number, where a list has an object
        self.starts = array("q")  # letters before each document
        self.seen = 0  # letters so far
        self.at = 0  # bytes before this block
        self.in_header = False
        self.at_line_start = True
        self.has_begun = False

    def over(self, block: bytes) -> None:
        if self.has_begun and not self.in_header:
            self._note(0)
        place = 0
        while place < len(block):
            place = self._header(block, place) if self.in_header else self._letters(block, place)
        self.at += len(block)

    def end(self) -> None:
        if self.in_header:
            self._start(0)
        self._note(0)

    def _header(self, block: bytes, place: int) -> int:
        """Past the header's end, where a document starts."""
        end = block.find(b"\n", place) + 1
        if not end:
            return len(block)
        self.in_header, self.at_line_start = False, True
        self._start(end)
        return end

    def _letters(self, block: bytes, place: int) -> int:
        """Into the next header, behind its '>'."""
        stop = self._next_header(block, place)
        found = len(block[place:stop].translate(None, _NO_LETTER))
        if found and not self.has_begun:
            raise ArgumentError(f"{self.file.path} does not begin with a header line, as FASTA does: '>' and a name")
        self.seen += found
        if stop == len(block):
            self.at_line_start = block.endswith(b"\n")
            return stop
        if self.has_begun:
            self._note(stop)
        self.in_header = self.has_begun = True
        return stop + 1

    def _next_header(self, block: bytes, place: int) -> int:
        if self.at_line_start and block.startswith(b">", place):
            return place
        found = block.find(b"\n>", place)
        return len(block) if found < 0 else found + 1

    def _start(self, place: int) -> None:
        self.starts.append(self.seen)
        self._note(place)

    def _note(self, place: int) -> None:
        self.letters.append(self.seen)
        self.offsets.append(self.at + place)


def write_fasta(path: Path, sequences: Iterable[Any], *, width: int = 60) -> None:
    """Sequences of letters, each bytes or an array of them, under headers that number them."""
    with path.open("wb") as file:
        for number, sequence in enumerate(sequences):
            letters = sequence if isinstance(sequence, bytes) else np.asarray(sequence).astype(np.uint8).tobytes()
            if strange := [byte for byte in set(letters) if not 32 < byte < 127 or byte == ord(">")]:
                raise ArgumentError(f"sequence {number} holds a byte that is no letter of FASTA: {min(strange)}")
            file.write(f">sequence {number}\n".encode())
            file.writelines(letters[i : i + width] + b"\n" for i in range(0, len(letters), width))
