"""What a ring adds to one call: all ranks' work summed, against one call that does everything."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ...functional import attention
from ...geometry.patterns import Dense
from ...schedules.buffers import release_buffers
from ...simulation import simulate
from ..records import Row
from .contest import Differentiated, Stage, compare, contest
from .given import Given, Shape, given
from .virtual_ring import VirtualRing

CAUSAL = Dense(causal=True)
EFFICIENCY = "efficiency beside one call"


def run(stage: Stage) -> Iterator[Row]:
    for shape, ranks in stage.sizes.rings:
        yield from whole_ring(stage, shape, ranks)


def run_with_messages(stage: Stage) -> Iterator[Row]:
    for shape, ranks in stage.sizes.simulated:
        yield from with_messages(stage, shape, ranks)


def run_far(stage: Stage) -> Iterator[Row]:
    for shape, ranks, only in stage.sizes.far:
        yield from some_ranks(stage, shape, ranks, only)


def whole_ring(stage: Stage, shape: Shape, ranks: int) -> list[Row]:
    x = given(shape, stage.place)
    ring = VirtualRing(x, CAUSAL, ranks)
    rows = contest(stage, f"{ranks} ranks, {shape}", shape, CAUSAL, x, [one_call(x), ring])
    release_buffers()
    _relate(rows, ring.name, 1.0)
    return rows


def with_messages(stage: Stage, shape: Shape, ranks: int) -> list[Row]:
    """The same through `simulate`, which also copies every message and keeps a ledger of what each rank holds."""
    x = given(shape, stage.place)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        sim = simulate(q, k, v, ranks=ranks, pattern=CAUSAL, layout="zigzag", schedule="ring")
        return sim.out, sim.lse

    ring = Differentiated(f"simulated ring of {ranks}", x, attend)
    rows = contest(stage, f"{ranks} ranks, messages copied, {shape}", shape, CAUSAL, x, [one_call(x), ring])
    release_buffers()
    _relate(rows, ring.name, 1.0)
    return rows


def some_ranks(stage: Stage, shape: Shape, ranks: int, only: tuple[int, ...]) -> list[Row]:
    """Some ranks of a large ring, against their share of the work of one call."""
    x = given(shape, stage.place)
    ring = VirtualRing(x, CAUSAL, ranks, only=only)
    case = f"{len(only)} of {ranks} ranks, {shape}"
    few = {"repeats": stage.sizes.far_repeats, "is_warm": True}  # one call takes half a minute, and the check was one
    rows = contest(stage, case, shape, CAUSAL, x, [one_call(x), ring], **few)
    release_buffers()
    _relate(rows, ring.name, ring.share)
    for row in rows:
        if row.name == ring.name:
            row.note = row.note or f"ranks {', '.join(map(str, only))}; dk and dv are parts here and not checked"
    return rows


def one_call(x: Given) -> Differentiated:
    return Differentiated("one call", x, lambda q, k, v: attention(q, k, v, pattern=CAUSAL, return_lse=True))


def _relate(rows: list[Row], name: str, share: float) -> None:
    for whole in [row for row in rows if row.name == "one call"]:
        compare(rows, name, whole, EFFICIENCY, efficiency=True)
    for row in rows:
        if EFFICIENCY in row.ratios:
            row.ratios[EFFICIENCY] *= share
