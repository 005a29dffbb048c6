"""Do all ranks make the same call? Each hears it from all others, before anything they send is used.

In round k a rank writes to the rank 2**k above it and hears from the one 2**k below, which has heard from others
before: after log2(p) rounds of one small letter each rank knows of all. It runs beside the caller's own work.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from .board import Board
from .carriers import Errand
from .contract import Terms
from .lines import Letter, Lines, Posted, tag_of

_GREETING = struct.Struct("!16sqi?3x")  # fingerprint, conversation, who hosts the store, alarm
_TAG = tag_of("longring greeting")
_LONGEST = 16_000  # characters of a term in a note


class Signature(NamedTuple):
    """The terms of a call: 16 bytes to compare, words to explain a difference with."""

    fingerprint: bytes
    words: dict[str, str]


class Differs(Exception):
    """Somebody speaks of another call."""


def signed(terms: Terms) -> Signature:
    stamps = {name: _stamp(value) for name, value in sorted(terms.items())}
    digest = blake2b(digest_size=16)
    for name, (stamp, _) in stamps.items():
        digest.update(blake2b(name.encode(), digest_size=16).digest() + stamp)
    return Signature(digest.digest(), {name: words for name, (_, words) in stamps.items()})


_stamps: OrderedDict[int, tuple[object, bytes, str]] = OrderedDict()  # by identity, which holding it keeps unique


def _stamp(value: object) -> tuple[bytes, str]:
    """Digest and words of a term. Layouts have thousands of ranges, and the same ones come in every call."""
    if isinstance(value, (str, int, float, bool, torch.dtype, type(None), list, dict, set)):
        return _stamped(value)  # cheap, or free to change under the same identity
    known = _stamps.get(id(value))
    if known is None or known[0] is not value:
        known = _stamps[id(value)] = (value, *_stamped(value))
        while len(_stamps) > 64:
            _stamps.popitem(last=False)
    return known[1:]


def _stamped(value: object) -> tuple[bytes, str]:
    text = repr(value)
    stamp = blake2b(text.encode(), digest_size=16).digest()
    words = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... (digest {stamp.hex()[:8]})"
    return stamp, words


class Agreement:
    """One conversation's greetings."""

    def __init__(self, lines: Lines, board: Board, conversation: int, signature: Signature) -> None:
        self._lines, self._board, self._rank, self._size = lines, board, board.rank, board.size
        self._conversation, self._signature = conversation, signature
        self._hops = [1 << k for k in range((self._size - 1).bit_length())]

    def greet(self) -> None:
        """Write the first letter, and be ready for all that come."""
        self._answers = [torch.empty(_GREETING.size, dtype=torch.uint8, device="cpu") for _ in self._hops]
        receives = [self._letter(False, -hop, answer) for hop, answer in zip(self._hops, self._answers, strict=True)]
        self._heard = self._lines.post(receives)
        self._written = self._write(self._hops[:1])

    def reach(self, errand: Errand[None]) -> None:
        """In a carrier: return once every rank is known to agree; raise Differs as soon as one is known not to."""
        for number, answer in enumerate(self._answers):
            self._lines.wait(self._heard[number : number + 1], errand)
            later = self._hops[number + 1 :]
            if not self._agrees(answer):
                self.unheard = self._write(later, alarm=True)  # kept, or torch would call them back
                raise Differs
            self._written += self._write(later[:1])
        self._lines.wait(self._written, errand)

    def _write(self, hops: Sequence[int], *, alarm: bool = False) -> list[Posted]:
        return self._lines.post([self._letter(True, hop, self._greeting(alarm)) for hop in hops])

    def _letter(self, sent: bool, hop: int, greeting: Tensor) -> Letter:
        return Letter(sent, (self._rank + hop) % self._size, greeting, _TAG)

    def _greeting(self, alarm: bool) -> Tensor:
        host = -1 if self._board.host is None else self._board.host
        packed = _GREETING.pack(self._signature.fingerprint, self._conversation, host, alarm)
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def _agrees(self, answer: Tensor) -> bool:
        fingerprint, conversation, host, alarm = _GREETING.unpack(bytes(answer.tolist()))
        if host >= 0:
            self._board.host = host
        return not alarm and (fingerprint, conversation) == (self._signature.fingerprint, self._conversation)


def difference(said: Mapping[int, Mapping[str, str]], size: int) -> str | None:
    """Who differs from most, and in what; None if nobody does. `said` are each rank's terms."""
    names = list(dict.fromkeys(name for terms in said.values() for name in terms))
    differing = {name: text for name in names if (text := _odd_ones(name, said))}
    if "call" in differing:  # then nothing else can be compared
        differing = {"call": differing["call"]}
    odd = sorted(differing.values(), key=len)  # plain numbers come first
    if not odd:
        return None
    silent = sorted(set(range(size)) - set(said))
    more = [f"and {len(odd) - 6} more"] if len(odd) > 6 else []
    missing = [f"nothing was heard of {_ranks(silent)}"] if silent else []
    return "ranks disagree: " + "; ".join([*odd[:6], *more, *missing, "all ranks must make the same call"])


def _odd_ones(name: str, said: Mapping[int, Mapping[str, str]]) -> str | None:
    """Most ranks are the norm; where as many say one thing as another, the lowest rank is."""
    values = {rank: said[rank].get(name, "not given") for rank in sorted(said)}
    counts = Counter(values.values())
    if len(counts) == 1:
        return None
    norm = max(counts, key=lambda value: counts[value])  # the first of equals
    spoken = _apart(list(counts))
    holders = {value: _ranks([rank for rank, held in values.items() if held == value]) for value in counts}
    odd = ", ".join(f"{spoken[value]} on {holders[value]}" for value in counts if value != norm)
    return f"{name} is {odd}, and {spoken[norm]} on {holders[norm]}"


def _apart(values: list[str]) -> dict[str, str]:
    """Each value short, but with the place where they differ in it."""
    alike = next((i for i, letters in enumerate(zip(*values, strict=False)) if len(set(letters)) > 1), 0)
    start = max(0, alike - 30) if max(map(len, values)) > 90 else 0
    lead = "..." if start else ""
    return {value: lead + value[start : start + 90] + ("..." if len(value) > start + 90 else "") for value in values}


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
