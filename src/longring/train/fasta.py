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
    letters, offsets = array("q"), array("q")  # eight bytes a number, not an object
    starts = array("q")
    held = 0  # letters before this place
    at = 0
    in_header, at_line_start, begun = False, True, False

    def note(offset: int) -> None:
        letters.append(held)
        offsets.append(offset)

    for block in stream(file, block=BETWEEN):
        place = 0
        if begun and not in_header:
            note(at)
        while place < len(block):
            if in_header:
                end = block.find(b"\n", place)
                if end < 0:
                    break
                in_header, at_line_start, place = False, True, end + 1
                starts.append(held)
                note(at + place)
                continue
            header = _next_header(block, place, at_line_start)
            found = len(block[place:header].translate(None, _NO_LETTER))
            if found and not begun:
                raise ArgumentError(f"{file.path} does not begin with a header line, as FASTA does: '>' and a name")
            held += found
            if header > place:
                at_line_start = block[header - 1] == ord("\n")
            if header < len(block):
                if begun:
                    note(at + header)
                in_header, begun, header = True, True, header + 1
            place = header
        at += len(block)
    if in_header:  # the file ends in it
        starts.append(held)
        note(at)
    note(at)
    return _settled(file, upper, letters, offsets, starts, held)


def _next_header(block: bytes, place: int, at_line_start: bool) -> int:
    """Where the next line that is a header begins, or the end of the block."""
    if at_line_start and block.startswith(b">", place):
        return place
    found = block.find(b"\n>", place)
    return len(block) if found < 0 else found + 1


def _settled(
    file: File, upper: bool, letters: array[int], offsets: array[int], starts: array[int], held: int
) -> Indexed:
    fasta = Fasta(file, np.array(letters, np.int64), np.array(offsets, np.int64), upper)
    places = np.array(starts, np.int64)
    lengths = np.diff(places, append=held)
    filled = lengths > 0
    return Indexed(fasta, places[filled], lengths[filled], int((~filled).sum()))


def write_fasta(path: Path, sequences: Iterable[Any], *, width: int = 60) -> None:
    """Sequences of letters, each bytes or an array of them, under headers that number them."""
    with path.open("wb") as file:
        for number, sequence in enumerate(sequences):
            letters = sequence if isinstance(sequence, bytes) else np.asarray(sequence).astype(np.uint8).tobytes()
            if strange := [byte for byte in set(letters) if not 32 < byte < 127 or byte == ord(">")]:
                raise ArgumentError(f"sequence {number} holds a byte that is no letter of FASTA: {min(strange)}")
            file.write(f">sequence {number}\n".encode())
            file.writelines(letters[i : i + width] + b"\n" for i in range(0, len(letters), width))
