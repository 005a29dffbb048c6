"""Who meets whom, for one query or one key, read off the definition of a pattern; nothing is shared with tiles.

Ranges in which a position may occur several times: as often as the pair counts.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import PatternError
from ...geometry.head_split import HeadSplit
from ...geometry.patterns import Dense, Dilated, Pattern

Met = tuple[range, ...]


def check_known(pattern: Pattern) -> None:
    """Refuse what a single query could not be followed through here."""
    is_known = pattern.documents is None and not isinstance(pattern, HeadSplit)
    if not is_known or (isinstance(pattern, Dense) and pattern.lengths is not None):
        raise PatternError(f"replay knows dense attention with a window, and dilated attention; got {pattern!r}")


def keys_of(pattern: Pattern, n: int, query: int, kv_head: int, kv_heads: int) -> Met:
    """The keys that the query at a position sees."""
    if isinstance(pattern, Dense):
        lo, hi = pattern.limits
        first, last = 0 if lo is None else query + lo, n - 1 if hi is None else query + hi
        return _some([range(max(first, 0), min(last, n - 1) + 1)])
    fellows = _fellows(pattern, n, query, kv_head, kv_heads)
    return _some(range(r.start, min(r.stop, query + 1), r.step) if pattern.causal else r for r in fellows)


def queries_of(pattern: Pattern, n: int, key: int, kv_head: int, kv_heads: int) -> Met:
    """The queries that see the key at a position."""
    if isinstance(pattern, Dense):
        lo, hi = pattern.limits
        first, last = 0 if hi is None else key - hi, n - 1 if lo is None else key - lo
        return _some([range(max(first, 0), min(last, n - 1) + 1)])
    fellows = _fellows(pattern, n, key, kv_head, kv_heads)
    return _some(range(key, r.stop, r.step) if pattern.causal else r for r in fellows)


def _fellows(pattern: Dilated, n: int, position: int, kv_head: int, kv_heads: int) -> Met:
    """Of every branch that keeps the position all that it keeps in the same segment."""
    found = []
    for w, r in pattern.branches:
        phase = phase_of(pattern, r, kv_head, kv_heads)
        if position % w % r == phase:
            start = position // w * w
            found.append(range(start + phase, min(start + w, n), r))
    return tuple(found)


def phase_of(pattern: Dilated, rate: int, kv_head: int, kv_heads: int) -> int:
    return kv_head % rate if pattern.phase == "mod" else kv_head // -(-kv_heads // rate)


def _some(ranges: Iterable[range]) -> Met:
    return tuple(r for r in ranges if r)
