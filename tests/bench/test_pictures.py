"""What a picture shows is what the definition counts."""

import struct
import sys

import pytest

from longring import Dense, Dilated, LongringError
from longring.bench.pictures import draw_tiles, steps_of
from longring.geometry.layouts import deal
from longring.geometry.patterns import Problem
from longring.geometry.task import Task
from longring.numerics.definition import pair_counts

PATTERNS = {
    "causal": Dense(causal=True),
    "full": Dense(causal=False),
    "window": Dense(causal=True, window=(5, 0)),
    "documents": Dense(causal=True, documents=[0, 3, 4, 17, 23]),
    "dilated": Dilated([4, 8, 16], [1, 2, 4]),
    "dilated block": Dilated([5, 9], [2, 3], causal=False, phase="block"),
}


def make_task(pattern, n=23, ranks=3, layout="zigzag", kv_heads=3, n_q=None):
    n_q = n if n_q is None else n_q
    queries, keys = deal(layout, n_q, ranks), deal(layout, n, ranks)
    return Task(pattern, Problem(1, n_q, n, kv_heads, n - n_q), queries, keys)


def summed(steps):
    return [
        [sum(counts) for counts in zip(*rows, strict=True)] for rows in zip(*(s.counts for s in steps), strict=True)
    ]


@pytest.mark.parametrize("schedule", ["ring", "exchange", "gather"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_the_steps_together_are_the_definition(pattern, layout, schedule):
    task = make_task(pattern, layout=layout)
    want = pair_counts(pattern, task.problem)
    for head in range(task.problem.kv_heads):
        assert summed(steps_of(task, schedule, kv_head=head)) == want[0, head].tolist()


def test_fewer_queries_than_keys():
    task = make_task(Dense(causal=True), n=19, n_q=7)
    assert summed(steps_of(task, "ring")) == pair_counts(task.pattern, task.problem)[0, 0].tolist()


def test_a_pair_is_computed_by_the_holder_of_its_query():
    task = make_task(Dense(causal=True))
    holder = {position: rank for rank, shard in enumerate(task.queries.shards) for piece in shard for position in piece}
    for step in steps_of(task, "ring"):
        for i, (workers, counts) in enumerate(zip(step.workers, step.counts, strict=True)):
            for worker, count in zip(workers, counts, strict=True):
                assert worker == (holder[i] if count else -1)


def test_at_step_s_a_rank_meets_the_keys_of_rank_r_minus_s():
    task = make_task(Dense(causal=False), n=12, ranks=4, layout="contiguous")
    for number, step in enumerate(steps_of(task, "ring")):
        for i, workers in enumerate(step.workers):
            for j, worker in enumerate(workers):
                assert worker in (-1, i // 3)
                assert (worker >= 0) == (j // 3 == (i // 3 - number) % 4)


@pytest.mark.parametrize(("pattern", "schedule"), [("causal", "ring"), ("dilated", "exchange"), ("causal", "gather")])
def test_a_picture_is_a_png_of_some_size(tmp_path, pattern, schedule):
    path = draw_tiles(make_task(PATTERNS[pattern]), schedule, tmp_path / "tiles.png", title="tiles", kv_heads=(0, 2))
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 500
    assert height > 400


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LongringError, match=r"pip install longring\[plot\]"):
        draw_tiles(make_task(PATTERNS["causal"]), "ring", tmp_path / "tiles.png")
