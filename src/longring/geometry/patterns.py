"""Patterns: which pairs (query, key) count, and how often.

A pattern is a frozen value. On a given problem it is a collection of *groups*: a group says that its
queries meet its keys wherever lo <= key - query <= hi. A pair counts once for every group it is in.
Positions are global; `lo` or `hi` is None where there is no limit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from ..errors import PatternError
from .layouts import Documents, Shard
from .ranges import shared


@dataclass(frozen=True, slots=True)
class Problem:
    """The global facts of one call: all that tiles depend on besides pattern and layouts."""

    batch: int
    n_q: int
    n_k: int
    kv_heads: int
    offset: int  # query i stands at position i + offset

    @property
    def query_positions(self) -> range:
        return range(self.offset, self.offset + self.n_q)


class Group(NamedTuple):
    """Positions that meet: for these batch rows and kv heads, wherever lo <= key - query <= hi.

    The same stands `times` times, each so far `apart` from the last, and each in one piece of queries and of keys.
    """

    batch: range
    kv_heads: range
    queries: range
    keys: range
    lo: int | None
    hi: int | None
    times: int = 1
    apart: int = 0


class Span(NamedTuple):
    """Positions first..last; none if last is before first."""

    first: int
    last: int

    def within(self, other: Span) -> Span:
        return Span(max(self.first, other.first), min(self.last, other.last))

    def up_to(self, last: int) -> Span:
        return Span(self.first, min(self.last, last))


# ------------------------------------------------------------------------------------------------ dense


@dataclass(frozen=True)
class Dense:
    """Every pair, or those that `causal`, `window`, `documents` and `lengths` leave.

    causal:     key j counts for query i only if j <= i.
    window:     (left, right): only if i - left <= j <= i + right; -1 or None is no limit on that side.
    documents:  boundaries [0, b1, ..., n], as in `cu_seqlens`: only inside one document. One list for the
                batch, or one list per batch row.
    lengths:    one number per batch row: keys at or beyond it do not exist for that row.
    """

    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    documents: Any = None
    lengths: Any = None

    def __post_init__(self) -> None:
        _check_bool("causal", self.causal)
        object.__setattr__(self, "window", _clean_window(self.window))
        object.__setattr__(self, "documents", _unless_unknown(clean_documents, self.documents))
        object.__setattr__(self, "lengths", _unless_unknown(_clean_lengths, self.lengths))

    @property
    def only_limits(self) -> tuple[int | None, int | None] | None:
        """(lo, hi) of key - query if all positions form one group, so that only distances matter."""
        return self.limits if self.documents is None and self.lengths is None else None

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """(lo, hi) of key - query, from the window and causality together."""
        left, right = self.window or (None, None)
        hi = right if not self.causal else 0 if right is None else min(0, right)
        return (None if left is None else -left), hi

    def check(self, problem: Problem) -> None:
        _check_documents(self.documents, problem)
        if self.lengths is None:
            return
        if len(self.lengths) != problem.batch:
            raise PatternError(f"lengths must hold one number for each of {problem.batch} rows, got {self.lengths}")
        if any(length > problem.n_k for length in self.lengths):
            raise PatternError(f"lengths must not exceed the {problem.n_k} keys, got {self.lengths}")

    def sees(self, problem: Problem, first: int, last: int) -> Span:
        """(first, last) key that queries at positions first..last could see: never too few."""
        lo, hi = self.limits
        span = Span(0, problem.n_k - 1)
        if self.lengths is not None:
            span = span.up_to(max(self.lengths) - 1)
        if self.documents is not None:
            span = span.within(_span_of_documents(self.documents, first, last))
        return span.within(Span(first + lo if lo is not None else 0, last + hi if hi is not None else span.last))

    def groups(self, problem: Problem, near: Shard, far: Shard | None = None) -> Iterator[Group]:
        """Those with a query in `near`. With `far`, some that have no key there may be left out."""
        lo, hi = self.limits
        heads = range(problem.kv_heads)
        for batch, boundaries, end in self._rows(problem):
            if boundaries is None:
                if end:
                    yield Group(batch, heads, problem.query_positions, range(end), lo, hi)
                continue
            for document in _documents_near(boundaries, near):
                keys = range(document.start, min(document.stop, end))
                if keys:
                    yield Group(batch, heads, document, keys, lo, hi)

    def _rows(self, problem: Problem) -> Iterator[tuple[range, tuple[int, ...] | None, int]]:
        """(batch rows that look alike, their document boundaries, where their keys end)."""
        documents = self.documents or (None,)
        if len(documents) == 1:
            documents = documents * problem.batch
        lengths = self.lengths or (problem.n_k,) * problem.batch
        start = 0
        for row in range(1, problem.batch + 1):
            if row == problem.batch or (documents[row], lengths[row]) != (documents[start], lengths[start]):
                yield range(start, row), documents[start], lengths[start]
                start = row


# ---------------------------------------------------------------------------------------------- dilated


@dataclass(frozen=True)
class Dilated:
    """LongNet's dilated attention: branches of (segment length w, dilation rate r).

    In a branch, position i belongs to segment i // w, and a kv head keeps it if (i % w) % r equals the
    head's phase; kept positions of one segment meet. A pair counts once for every branch it meets in.

    phase:      "mod" (the paper: head g has phase g % r) or "block" (the authors' code: g // ceil(kv_heads / r)).
    documents:  boundaries [0, b1, ..., n]: positions restart at each document.
    """

    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    causal: bool = True
    phase: str = "mod"
    documents: Any = None

    def __post_init__(self) -> None:
        _check_bool("causal", self.causal)
        segments = _clean_counts("segment_lengths", self.segment_lengths)
        rates = _clean_counts("dilation_rates", self.dilation_rates)
        if len(segments) != len(rates):
            raise PatternError(
                f"segment_lengths and dilation_rates must pair up, got {len(segments)} and {len(rates)}: "
                f"{list(segments)} and {list(rates)}"
            )
        if self.phase not in ("mod", "block"):
            raise PatternError(f"phase must be 'mod' or 'block', got {self.phase!r}")
        object.__setattr__(self, "segment_lengths", segments)
        object.__setattr__(self, "dilation_rates", rates)
        object.__setattr__(self, "documents", _unless_unknown(clean_documents, self.documents))

    @property
    def only_limits(self) -> None:
        """Segments begin at fixed positions: distances alone never decide."""
        return None

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.segment_lengths, self.dilation_rates, strict=True))

    def check(self, problem: Problem) -> None:
        _check_documents(self.documents, problem)

    @property
    def mixed_rates(self) -> tuple[int, ...]:
        """The rates of all branches that a row's result is mixed from."""
        return tuple(self.dilation_rates)

    @property
    def leaves_rows_out(self) -> bool:
        """Whether some rows of some heads are kept by no branch, and so see nothing."""
        return min(self.mixed_rates) > 1

    def only(self, keep: Callable[[int], bool]) -> Dilated | None:
        """The branches whose segment length is kept, or None if there are none."""
        kept = [number for number, w in enumerate(self.segment_lengths) if keep(w)]
        return self.some(kept) if kept else None

    def some(self, numbers: Sequence[int]) -> Dilated:
        """Its branches of these numbers."""
        segments, rates = zip(*(self.branches[number] for number in numbers), strict=True)
        return replace(self, segment_lengths=segments, dilation_rates=rates)

    def sees(self, problem: Problem, first: int, last: int) -> Span:
        """(first, last) key that queries at positions first..last could see: never too few."""
        span = Span(0, problem.n_k - 1)
        if self.documents is not None:
            span = span.within(_span_of_documents(self.documents, first, last))
        else:
            segments = self.segment_lengths
            start, stop = min(first // w * w for w in segments), max((last // w + 1) * w for w in segments)
            span = span.within(Span(start, stop - 1))
        return span.up_to(last) if self.causal else span

    def groups(self, problem: Problem, near: Shard, far: Shard | None = None) -> Iterator[Group]:
        """Those with a query in `near`. With `far`, some that have no key there may be left out."""
        for number, (w, r) in enumerate(self.branches):
            by_phase = self._phases(problem.kv_heads, number)
            for batch, segment, key_stop, times in self._segments(problem, near, far, w):
                for phase, heads in by_phase.items():
                    queries = range(segment.start + phase, segment.stop, r)
                    keys = range(segment.start + phase, min(segment.stop, key_stop), r)
                    if keys:
                        yield Group(batch, heads, queries, keys, None, 0 if self.causal else None, times, w)

    def _phases(self, kv_heads: int, number: int) -> dict[int, range]:
        """For every phase in the branch of this number, the kv heads that have it."""
        return phases(kv_heads, self.dilation_rates[number], self.phase)

    def _segments(
        self, problem: Problem, near: Shard, far: Shard | None, w: int
    ) -> Iterator[tuple[range, range, int, int]]:
        """(batch rows, segment, where its keys end, how many alike follow each other from it on).

        Without documents a query may stand behind the last key.
        """
        if self.documents is None:
            spans = _spans_near(near, w)
            # a rank has thousands of segments of its own, and shares few of them with each of a thousand others
            one_by_one = ((index, 1) for index in _in_order(spans))
            for index, times in one_by_one if far is None else _alike(near, far, w):
                yield range(problem.batch), range(index * w, (index + 1) * w), problem.n_k, times
            return
        for row, boundaries in enumerate(self.documents):
            batch = range(problem.batch) if len(self.documents) == 1 else range(row, row + 1)
            for document in _documents_near(boundaries, near):
                inside = tuple(range(r.start - document.start, r.stop - document.start, r.step) for r in near)
                for index in _in_order(_spans_near(inside, w, len(document))):
                    start = document.start + index * w
                    yield batch, range(start, min(start + w, document.stop)), document.stop, 1


Pattern = Dense | Dilated


@dataclass(frozen=True)
class Table:
    """Documents or lengths of a program that is being traced: their numbers are known when it runs.

    A pattern keeps them as they are, and is made anew from the numbers before anybody looks at them.
    """

    values: Any

    def known(self) -> Any:
        return self.values


@dataclass(frozen=True)
class PaddingApart:
    """Documents for dilated attention of n tokens whose rows end in padding, which is a document of its own.

    Boundaries come and go with the numbers of `lengths`, and so are made of them only when those are known.
    """

    documents: Any
    lengths: Any
    batch: int
    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _unless_unknown(_clean_lengths, self.lengths))

    def known(self) -> list[list[int]]:
        """Boundaries for each row by which its padding is the last document, which nothing before it meets."""
        dense = with_known_tables(Dense(documents=self.documents, lengths=self.lengths))
        dense.check(Problem(self.batch, self.n, self.n, 1, 0))
        rows = dense.documents or ((0, self.n),)
        if len(rows) == 1:
            rows = rows * self.batch
        return [
            sorted({0, *(boundary for boundary in row if boundary < length), length, self.n})
            for row, length in zip(rows, dense.lengths, strict=True)
        ]


def tables_of(pattern: Any) -> list[Any]:
    """What the tables for documents and for lengths hold, each None if there is no such table."""
    documents = getattr(pattern, "documents", None)
    holder = documents if isinstance(documents, PaddingApart) else pattern
    held = (getattr(holder, name, None) for name in ("documents", "lengths"))
    return [values.values if isinstance(values, Table) else None for values in held]


def with_known_tables(pattern: Any) -> Any:
    documents, lengths = getattr(pattern, "documents", None), getattr(pattern, "lengths", None)
    if isinstance(documents, Table | PaddingApart):
        pattern = replace(pattern, documents=documents.known())
    return replace(pattern, lengths=lengths.known()) if isinstance(lengths, Table) else pattern


def phases(kv_heads: int, rate: int, phase: str) -> dict[int, range]:
    """For every phase that some kv head has, the kv heads that have it."""
    if phase == "mod":
        return {f: range(f, kv_heads, rate) for f in range(min(rate, kv_heads))}
    size = -(-kv_heads // rate)
    return {f: range(f * size, min((f + 1) * size, kv_heads)) for f in range(-(-kv_heads // size))}


def _spans_near(near: Shard, w: int, length: int | None = None) -> list[range]:
    """Indices of the segments of length w in which a position of `near` could lie, rising, from 0 on."""
    spans: list[range] = []
    for r in near:
        first = max(0, r.start // w)
        stop = r[-1] // w + 1 if length is None else min(r[-1], length - 1) // w + 1
        if spans and first < spans[-1].stop:
            first = spans[-1].stop
        if first < stop:
            spans.append(range(first, stop))
    return spans


def _in_order(spans: Iterable[range]) -> Iterator[int]:
    return (index for span in spans for index in span)


APART = 3
"""Segments that are told one by one before the rest of a run: the first may continue what was cut before it."""


def _alike(near: Shard, far: Shard, w: int) -> Iterator[tuple[int, int]]:
    """(index of a segment that both sides may have a part of, how many alike follow each other from it on)."""
    runs = sorted(_whole_in_both(near, far, w), key=lambda run: run.start)
    for span in shared(_spans_near(near, w), _spans_near(far, w)):
        at = span.start
        for run in runs:
            if run.start in span and len(run) > APART + 1:
                yield from ((index, 1) for index in range(at, run.start + APART))
                yield run.start + APART, len(run) - APART
                at = run.stop
        yield from ((index, 1) for index in range(at, span.stop))


def _whole_in_both(near: Shard, far: Shard, w: int) -> Iterator[range]:
    """Indices of the segments that lie in one piece of either side, where rows follow each other as positions do."""
    for a in near:
        for b in far:
            if a.step == b.step == 1:
                yield range(-(-max(a.start, b.start, 0) // w), min(a.stop, b.stop) // w)


def _span_of_documents(documents: Documents, first: int, last: int) -> Span:
    """From where the document of `first` begins to where that of `last` ends, in whichever batch row that is wider."""
    starts = [row[max(bisect_right(row, first) - 1, 0)] for row in documents]
    stops = [row[min(max(bisect_right(row, last), 1), len(row) - 1)] for row in documents]
    return Span(min(starts), max(stops) - 1)


def _documents_near(boundaries: tuple[int, ...], near: Shard) -> Iterator[range]:
    """The documents in which a position of `near` could lie, each once, rising."""
    done = 0
    for r in near:
        first = max(done, bisect_right(boundaries, r.start) - 1, 0)
        stop = min(bisect_left(boundaries, r[-1] + 1), len(boundaries) - 1)
        for start, end in pairwise(boundaries[first : stop + 1]):
            yield range(start, end)
        done = max(done, stop)


# -------------------------------------------------------------------------------------- what users give


def _unless_unknown(clean: Callable[[Any], Any], values: Any) -> Any:
    return values if isinstance(values, Table | PaddingApart) else clean(values)


def clean_documents(documents: Any) -> Documents | None:
    """One list of boundaries, or one per batch row, as tuples."""
    if documents is None:
        return None
    rows = _to_list("documents", documents)
    if not rows:
        raise PatternError("documents must be boundaries [0, ..., n], got an empty list")
    nested = [list(row) if isinstance(row, (list, tuple, range)) else row for row in rows]
    if not any(isinstance(row, list) for row in nested):
        nested = [nested]
    return tuple(_clean_boundaries(row) for row in nested)


def _clean_boundaries(row: Any) -> tuple[int, ...]:
    if not isinstance(row, list) or not all(_is_whole(b) for b in row):
        raise PatternError(f"documents must be whole numbers [0, ..., n], or one such list per row; got {row!r}")
    if len(row) < 2 or row[0] != 0:
        raise PatternError(f"documents must begin with 0 and end with the length, got {row}")
    for a, b in pairwise(row):
        if b <= a:
            raise PatternError(f"documents must rise from boundary to boundary, but {b} follows {a} in {row}")
    return tuple(row)


def _check_documents(documents: Documents | None, problem: Problem) -> None:
    if documents is None:
        return
    if len(documents) not in (1, problem.batch):
        raise PatternError(f"documents must be one list or one for each of {problem.batch} rows, got {len(documents)}")
    for row in documents:
        if row[-1] != problem.n_k:
            raise PatternError(f"documents must end at the {problem.n_k} keys of the sequence, but end at {row[-1]}")


def _clean_window(window: Any) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise PatternError(f"window must be (left, right), got {window!r}")
    window = [_plain(value) for value in window]
    for side, value in zip(("left", "right"), window, strict=True):
        if value is not None and (not _is_whole(value) or value < -1):
            raise PatternError(f"window's {side} must be at least 0, or -1 or None for no limit; got {value!r}")
    left, right = (None if value == -1 else value for value in window)
    return None if left is None and right is None else (left, right)


def _clean_lengths(lengths: Any) -> tuple[int, ...] | None:
    if lengths is None:
        return None
    values = _to_list("lengths", lengths)
    if not values or not all(_is_whole(value) and value >= 0 for value in values):
        raise PatternError(f"lengths must be one whole number of at least 0 per batch row, got {values}")
    return tuple(values)


def _clean_counts(name: str, values: Any) -> tuple[int, ...]:
    listed = _to_list(name, values)
    if not listed or not all(_is_whole(value) and value >= 1 for value in listed):
        raise PatternError(f"{name} must be a list of whole numbers of at least 1, got {listed}")
    return tuple(listed)


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise PatternError(f"{name} must be True or False, got {value!r}")


def _is_whole(value: Any) -> bool:
    # torch.export has symbols for lengths that are no ints, and geometry does not know torch
    return (isinstance(value, int) and not isinstance(value, bool)) or type(value).__name__ == "SymInt"


def _plain(value: Any) -> Any:
    """A number of torch or numpy as one of Python; whole ones may be a compiler's symbols, not to be looked into."""
    return value if _is_whole(value) or not hasattr(value, "tolist") else value.tolist()


def _to_list(name: str, values: Any) -> list[Any]:
    """Tensors and arrays by their own `tolist`, so that geometry need not know torch."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, dict)):
        return [_plain(value) for value in values]
    raise PatternError(f"{name} must be a list of whole numbers, got {values!r}")
