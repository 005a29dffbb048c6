"""Random problems: what is asked, over how many tokens, and who holds what. Small enough for brute force."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from longring.geometry.layouts import Documents, Layout, deal, from_ranges
from longring.geometry.patterns import Dense, Dilated, Pattern, Problem
from longring.geometry.ranges import as_ranges
from longring.geometry.task import Task

sequence_lengths = st.integers(1, 24) | st.integers(1, 200)  # mostly small: corners are dense there
steps = st.integers(1, 7)


@st.composite
def ranges(draw: st.DrawFn, *, low: int = -20, high: int = 60) -> range:
    """A range with a positive step, empty or not."""
    start = draw(st.integers(low, high))
    return range(start, draw(st.integers(start, high)), draw(steps))


# ------------------------------------------------------------------------------------------- what is asked


@st.composite
def problems(draw: st.DrawFn, *, lengths: SearchStrategy[int] = sequence_lengths) -> Problem:
    n_k = draw(lengths)
    n_q = draw(st.just(n_k) | lengths)
    offset = draw(st.just(n_k - n_q) | st.integers(-n_q - 2, n_k + 2))
    return Problem(draw(st.integers(1, 3)), n_q, n_k, draw(st.integers(1, 6)), offset)


@st.composite
def boundaries(draw: st.DrawFn, length: int) -> list[int]:
    """[0, b1, ..., length]."""
    inner = draw(st.sets(st.integers(1, length - 1), max_size=5)) if length > 1 else set()
    return [0, *sorted(inner), length]


def documents(length: int, batch: int) -> SearchStrategy[list[int] | list[list[int]]]:
    """One list for the batch, or one per row."""
    return boundaries(length) | st.lists(boundaries(length), min_size=batch, max_size=batch)


def windows(length: int) -> SearchStrategy[tuple[int | None, int | None]]:
    side = st.none() | st.just(-1) | st.integers(0, 4) | st.integers(0, length + 2)
    return st.tuples(side, side)


@st.composite
def dense_patterns(draw: st.DrawFn, problem: Problem) -> Dense:
    """Causal or not, with any of a window, documents and lengths."""
    return Dense(
        causal=draw(st.booleans()),
        window=draw(st.none() | windows(problem.n_k)),
        documents=draw(st.none() | documents(problem.n_k, problem.batch)),
        lengths=draw(st.none() | st.lists(st.integers(0, problem.n_k), min_size=problem.batch, max_size=problem.batch)),
    )


@st.composite
def limits_only(draw: st.DrawFn, problem: Problem) -> Dense:
    """Dense patterns in which nothing but the distance decides, the ones whose runs are compressed."""
    return Dense(causal=draw(st.booleans()), window=draw(st.none() | windows(problem.n_k)))


@st.composite
def dilated_patterns(draw: st.DrawFn, problem: Problem) -> Dilated:
    """One to three branches of any segment length and rate: neither need divide anything."""
    branches = draw(st.lists(st.tuples(st.integers(1, problem.n_k + 5), steps), min_size=1, max_size=3))
    segments, rates = zip(*branches, strict=True)
    return Dilated(
        segments,
        rates,
        causal=draw(st.booleans()),
        phase=draw(st.sampled_from(["mod", "block"])),
        documents=draw(st.none() | documents(problem.n_k, problem.batch)),
    )


def patterns(problem: Problem) -> SearchStrategy[Pattern]:
    return dense_patterns(problem) | dilated_patterns(problem)


# ------------------------------------------------------------------------------------------- who holds what


@st.composite
def named_layouts(draw: st.DrawFn, length: int, ranks: int, documents: Documents | None = None) -> Layout:
    """A layout by name; "dealt" only where there are documents to deal by."""
    name = draw(st.sampled_from(["contiguous", "zigzag", "striped", *(["dealt"] if documents else [])]))
    align = None if name == "striped" else draw(st.none() | st.integers(1, 8))
    return deal(name, length, ranks, documents=documents, align=align)


@st.composite
def assignments(draw: st.DrawFn, length: int, ranks: int) -> Layout:
    """Each position on any rank, as `Sharding.from_ranges` allows."""
    owners = Random(draw(st.integers(0, 2**16))).choices(range(ranks), k=length)
    return from_ranges(as_ranges([i for i in range(length) if owners[i] == rank]) for rank in range(ranks))


def layouts(length: int, ranks: int, documents: Documents | None = None) -> SearchStrategy[Layout]:
    by_name = named_layouts(length, ranks, documents)
    return by_name | by_name | by_name | assignments(length, ranks)


@st.composite
def tasks(
    draw: st.DrawFn,
    *,
    patterns: Callable[[Problem], SearchStrategy[Pattern]] = patterns,
    lengths: SearchStrategy[int] = sequence_lengths,
    max_ranks: int = 9,
) -> Task:
    """One call of attention as integers. Queries are dealt as the keys are, or in a way of their own."""
    problem = draw(problems(lengths=lengths))
    pattern = draw(patterns(problem))
    ranks = draw(st.integers(1, max_ranks))
    keys = draw(layouts(problem.n_k, ranks, pattern.documents))
    if problem.n_q == problem.n_k and draw(st.booleans()):
        return Task(pattern, problem, keys, keys)
    return Task(pattern, problem, draw(layouts(problem.n_q, ranks)), keys)
