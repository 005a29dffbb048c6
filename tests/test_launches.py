"""Every address that a Triton kernel reads or writes lies in its tensors, checked on the CPU at any length.

The kernels' own source is interpreted on tensors without memory (see checked_launches.py), for random calls of up to a
million tokens on one device and over up to 16 ranks. Then defects are planted in that source, among them one that
reached a GPU and offsets one row off: the check must see each of them.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import longring
import longring.kernels.triton
from longring.errors import RowsLeftOut
from longring.testing.sampled import Given
from random_configurations import DTYPES, Configuration, Limits, _both_passes, draw

pytest.importorskip("triton", reason="needs the package triton")

import triton

from checked_launches import Launches, OutOfBounds, checked_launches
from longring.kernels.triton import parts, tiles
from on_meta import hopper_without_memory

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs Triton's interpreter")

KERNELS = {"_forward", "_terms", "_dq", "_dkv", "_merge", "_add"}
MILLION = 1_000_000
SEED = 17
LIMITS = Limits(most_tokens=MILLION, numbers=1 << 60, flops=1e30, tiles=60)
PARTS, EACH = 4, 4


def drawn(index: int) -> Configuration:
    """A random call: every other one of 100,000 tokens or more, two in three computed by our own kernel."""
    chance = Random(f"{SEED}/{index}/launches")
    least = 100_000 if index % 2 else 1
    it = next(
        it
        for attempt in count()
        if max((it := draw(SEED, 100 * index + attempt, LIMITS)).n_q, it.n_k) >= least and it.ranks != 1
    )
    return replace(it, kernel=chance.choice(["triton", "triton", "auto"]))


def without_memory(it: Configuration) -> Given:
    dtype = DTYPES[it.dtype]

    def empty(n: int, heads: int) -> torch.Tensor:
        is_unaligned = it.memory == "unaligned"
        size = (it.batch, heads, n, it.d) if it.memory == "heads first" else (it.batch, n, heads, it.d + is_unaligned)
        x = torch.empty(size, dtype=dtype, device="meta")
        return x.transpose(1, 2) if it.memory == "heads first" else x[..., 1:] if is_unaligned else x

    q, k, v, dout = (empty(n, h) for n, h in [(it.n_q, it.heads), *[(it.n_k, it.kv_heads)] * 2, (it.n_q, it.heads)])
    if it.memory == "packed":
        k, v = empty(it.n_k, 2 * it.kv_heads).split(it.kv_heads, 2)
    if it.dout_expanded:
        dout = dout[:1, :1, :1, :1].expand(dout.shape)
    dlse = torch.empty(it.batch, it.heads, it.n_q, device="meta") if it.with_dlse else None
    return Given(q, k, v, dout, dlse)


def checked(it: Configuration, **how: int) -> Launches:
    with hopper_without_memory(), checked_launches(seed=it.index, **how) as done, warnings.catch_warnings():
        warnings.simplefilter("ignore", RowsLeftOut)
        _both_passes(it, without_memory(it))
    return done


@pytest.mark.parametrize("part", range(PARTS))
def test_launches_of_random_calls_stay_within_their_tensors(part):
    programs: Counter[str] = Counter()
    for index in range(EACH * part, EACH * (part + 1)):
        programs += checked(drawn(index)).programs
    assert set(programs) == KERNELS


def test_every_kernel_is_among_them():
    """Those of the source that are launched: what stands before a grid in brackets, with arguments behind it."""
    sources = [path.read_text() for path in Path(longring.__file__ or "").parent.rglob("*.py")]
    calls = (each for source in sources if "@triton.jit" in source for each in ast.walk(ast.parse(source)))
    launched = [
        each.func.value for each in calls if isinstance(each, ast.Call) and isinstance(each.func, ast.Subscript)
    ]
    assert {each.id for each in launched if isinstance(each, ast.Name)} == KERNELS


def test_what_is_drawn_covers_what_there_is():
    found = [drawn(index) for index in range(PARTS * EACH)]
    assert max(it.n_k for it in found) > MILLION // 2
    assert max(it.ranks for it in found) > 12
    assert {it.kind.split()[0] for it in found} == {"dense", "window", "documents", "lengths", "dilated"}
    assert {"ring", "exchange", "gather", "hybrid", "ulysses", "double_ring"} <= {it.schedule for it in found}
    assert sum(it.segments is not None and it.ranks > 1 for it in found) >= 5


def longnet(n: int, ranks: int, schedule: str, layout: str = "contiguous", **more: Any) -> Configuration:
    told = {"segments": [n // 64, n // 16, n // 4, n], "rates": [1, 2, 4, 8], "ranks": ranks, "layout": layout}
    about = {"kernel": "triton", "schedule": schedule, **told, **more}
    return Configuration(SEED, 0, "dilated mod", n, n, 1, 16, 4, 64, "bfloat16", True, **about)


@pytest.mark.parametrize(
    ("ranks", "schedule", "layout", "kernel"),
    [(4, "exchange", "contiguous", "auto"), (8, "ring", "zigzag", "triton")],  # the first is what failed on a GPU once
)
def test_longnet_of_a_million_tokens_over_ranks(ranks, schedule, layout, kernel):
    done = checked(longnet(1 << 20, ranks, schedule, layout, kernel=kernel), launches=2)
    assert {"_merge", "_add"} <= set(done.programs)


# -------------------------------------------------------------------------------------------- what it must see

N = 304  # whole steps of 16 rows, so that nothing is between the terms of two squares; several blocks
ONE = Configuration(SEED, 0, "dense", N, N, 1, 2, 1, 64, "bfloat16", True, kernel="triton", with_dlse=True)
FULL = replace(ONE, causal=False)
DILATED = replace(longnet(N, 0, "auto"), heads=2, kv_heads=2, segments=[100, N], rates=[1, 2])  # rows merged one by one
LONG = replace(ONE, n_q=MILLION, n_k=MILLION, heads=32, kv_heads=32, d=128)  # more numbers than 32 bits count
EVEN = replace(longnet(1 << 16, 2, "gather", kernel="auto"), heads=8, kv_heads=8)

TILES = {
    "query rows": ("Q += _start(queries, many, head, q_b, q_n, q_h)", " + q_n"),
    "key rows": ("K += _start(keys, many, head // share, k_b, k_n, k_h)", " + k_n"),
    "value rows": ("V += _start(keys, many, head // share, v_b, v_n, v_h)", " + v_n"),
    "rows of dout": ("DO += _start(queries, many, head, do_b, do_n, do_h)", " + do_n"),
    "query rows of dk": ("q_from = Q + _start(queries, many, head, q_b, q_n, q_h)", " + q_n"),
    "rows of dout of dv": ("do_from = DO + _start(queries, many, head, do_b, do_n, do_h)", " + do_n"),
    "key rows of dk": ("K + _start(keys, many, kv_head, k_b, k_n, k_h)", " + k_n"),
    "value rows of dk": ("V + _start(keys, many, kv_head, v_b, v_n, v_h)", " + v_n"),
    "rows of out": ("_write(OUT", " + d"),
    "rows of lse": ("LSE + _berth(queries + LSE_BERTH, many, head, rows)", " + 1"),
    "rows of dq": ("_write(DQ", " + d"),
    "rows of dk": ("_write(DK", " + d"),
    "rows of dv": ("_write(DV", " + d"),
    "rows of delta": ("DELTA + at + rows * apart * delta_n", " + delta_n"),
    "rows of log2": ("LOG2 + at + rows * apart * delta_n", " + delta_n"),
    "lines of terms": ("line = _line(own_fields, many, head, mine)", " + 1"),
    "lines of delta": ("delta_from = TERMS + _line(own_fields, many, head, theirs)", " + 16"),
    "rows of the whole lse": ("LSE + b * lse_b + h * lse_h + at * lse_n", " + lse_n"),
    "rows of the whole dlse": ("SLOPE + b * slope_b + h * slope_h + at * slope_n", " + slope_n"),
    "rows of the whole log2": ("tl.store(LOG2 + line * n + at", " + 1"),
}
PLANTED = {
    **{f"one off: {what}": ("tiles", old, old + more, ONE) for what, (old, more) in TILES.items()},
    "blocks beyond the last key": ("tiles", "tl.minimum(first + hi + 1, theirs), 0)", "first + hi + 1, 0)", FULL),
    "32 bits": ("tiles", "blocks * rows).to(tl.int64)", "blocks * rows)", LONG),
    "one off: rows of the result": ("parts", "row.to(tl.int64) * by_row", "(row + 1).to(tl.int64) * by_row", DILATED),
    "one off: rows of a part": ("parts", "_begin(seat + 2, repeat, row,", "_begin(seat + 2, repeat, row + 1,", DILATED),
    "one off: lse of a part": ("parts", "_begin(seat + 3, repeat, row,", "_begin(seat + 3, repeat, row + 1,", DILATED),
    "one off: rows of an even part": ("parts", "out += i * tl.load", "out += (i + 1) * tl.load", EVEN),
    "one too many": ("parts", "else own < n", "else own <= n", DILATED),
    "what was wrong once": (
        "parts",
        "tl.load(seat) <= first + (ROWS - 1) * stride)",
        "tl.load(seat) < first + ROWS * stride)",
        EVEN,
    ),
}


def test_rows_that_are_taken_for_aligned_must_be(tmp_path):
    odd = replace(DILATED, d=20)
    checked(odd, launches=100)
    with planted("parts", "ALIGNED=_is_aligned(", "ALIGNED=True or (", tmp_path):
        checked(DILATED, launches=100)
        with pytest.raises(AssertionError, match="begin at no multiple of 16 bytes"):
            checked(odd, launches=100)


@contextmanager
def planted(name: str, old: str, new: str, folder: Path) -> Iterator[None]:
    """The kernels' module with other words in its source, in place of the one there is."""
    module = {"parts": parts, "tiles": tiles}[name]
    source = Path(module.__file__ or "").read_text()
    assert old in source, f"{name}.py does not say {old!r} any more"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"longring.kernels.triton.planted_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # of single entries: what is first imported meanwhile has to stay
        patch.setitem(sys.modules, spec.name, made)
        spec.loader.exec_module(made)
        patch.setitem(sys.modules, module.__name__, made)
        patch.setattr(longring.kernels.triton, name, made)
        yield


@pytest.mark.parametrize("it", [ONE, FULL, DILATED, LONG, EVEN], ids=["one", "full", "dilated", "long", "even"])
def test_nothing_is_seen_where_nothing_is_planted(it):
    checked(it, launches=4, programs=8, iterations=3)


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_seen(name, tmp_path):
    where, old, new, it = PLANTED[name]
    with planted(where, old, new, tmp_path), pytest.raises(OutOfBounds):
        checked(it, launches=100, programs=8, iterations=3)
