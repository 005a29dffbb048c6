"""Counts and sizes as people write them and read them: 1M, 1Mi, 1e6 and 1_000_000; 24.5 GiB, 3.2 ms."""

from __future__ import annotations

import re
from decimal import Decimal

from ..errors import ArgumentError

_THOUSANDS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZES = {**_THOUSANDS, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_WHOLE = r"\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*"  # commas between thousands only: in 1,5 it would be a decimal point
_COUNT = re.compile(rf"(?P<number>-?(?:{_WHOLE})(?:\.\d+)?(?:e[+]?\d{{1,2}})?)\s*(?P<unit>[KMGT]?i?)", re.IGNORECASE)
MOST_SECONDS = 10**9  # thirty years are told to the second, and longer than that by their power of ten
LONGEST = 1000  # letters of a count; Decimal's time grows with the square of its digits
BRANCHES = 64  # of LongNet, each with a tile plan of its own
MOST = 10**15  # more tokens or bytes than any machine will see is a slip of the keyboard


def count(text: str | int, *, of: str = "a count", least: int = 1, most: int = MOST) -> int:
    """The whole number that `text` says; `of` names what is counted, for whoever reads the error."""
    text = str(text)
    if len(text) > LONGEST:
        raise ArgumentError(
            f"{of} must be a number of at most {LONGEST} letters, got {len(text):,}, beginning with {text[:40]!r}"
        )
    found = _COUNT.fullmatch(text.strip())
    unit = found and _SIZES.get(found["unit"].upper())
    if not found or unit is None:
        raise ArgumentError(f"{of} must be a number like 4096, 1_000_000, 1e6, 64K, 1M or 1Mi, got {text!r}")
    number = Decimal(found["number"].replace("_", "").replace(",", "")) * unit
    if number != int(number) or not least <= number <= most:
        raise ArgumentError(f"{of} must be a whole number from {least} to {spoken_count(most)}, got {text!r}")
    return int(number)


def split_branches(text: str) -> list[str]:
    """Parts of LongNet's LENGTH:RATE,... in --dilated."""
    if (several := text.count(",") + 1) > BRANCHES:
        raise ArgumentError(f"--dilated takes at most {BRANCHES} branches, got {several:,}")
    return text.split(",")


def spoken_count(number: float) -> str:
    """1M for a round number, else with its thousands set apart."""
    for unit, size in sorted(_THOUSANDS.items(), key=lambda pair: -pair[1]):
        if unit and number % size == 0 and 1 <= number // size < 10_000:
            return f"{number // size:.0f}{unit}"
    return f"{number:,.0f}"


def spoken_bytes(number: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.4g} {unit}" if number < 1000 * size else f"{number / size:,.0f} {unit}"
    return f"{number:.0f} B"


def spoken_seconds(seconds: float) -> str:
    if seconds >= MOST_SECONDS:
        return f"{seconds:.3g} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds > 0 else "0 s"
