"""Cases of attention that ranks compute in processes of their own, and whole results put together from theirs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import longring as lr
from longring.errors import RowsLeftOut
from longring.geometry.layouts import deal
from longring.geometry.plans import PLANS
from longring.testing import Result, judge

LENGTH, HEADS, KV_HEADS, D = 45, 6, 3, 8  # which nothing divides; two query heads share one of the keys
TIMEOUT = 60.0

PATTERNS = {
    "causal": lr.Dense(),
    "full": lr.Dense(causal=False),
    "window": lr.Dense(window=(7, 0)),
    "documents": lr.Dense(documents=[0, 5, 6, 30, LENGTH]),
    "dilated": lr.Dilated([8, 16, 64], [1, 2, 4]),
}
LAYOUTS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class Case:
    schedule: str
    layout: str
    pattern: str
    dtype: torch.dtype
    node_ranks: int | None = None

    @property
    def name(self) -> str:
        return f"{self.schedule}, {self.layout}, {self.pattern}, {str(self.dtype).removeprefix('torch.')}"


def every_case(dtypes: tuple[torch.dtype, ...]) -> list[Case]:
    """Each schedule with each layout and pattern; documents also dealt by their work."""
    found = [
        Case(schedule, layout, pattern, dtype)
        for schedule, layout, pattern, dtype in product(PLANS, LAYOUTS, PATTERNS, dtypes)
    ]
    return found + [Case(schedule, "dealt", "documents", dtype) for schedule, dtype in product(PLANS, dtypes)]


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout and dlse of the whole sequence."""
    generator = torch.Generator().manual_seed(7)
    shapes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    q, k, v, dout = (torch.randn(2, LENGTH, h, D, generator=generator).to(dtype) for h in shapes)
    return q, k, v, dout, torch.randn(2, HEADS, LENGTH, generator=generator)


def tensors(batch, n_q, n_k, heads, kv_heads, d, dtype=torch.float64, seed=0):
    """q, k, v, dout and dlse of any shape, the same for every dtype but for rounding."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(batch, n_q, heads, d), (batch, n_k, kv_heads, d), (batch, n_k, kv_heads, d)]
    q, k, v = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)
    dout = torch.randn(shapes[0], generator=draw, dtype=torch.float64).to(dtype)
    dlse = torch.randn(batch, heads, n_q, generator=draw, dtype=torch.float64)
    return q, k, v, dout, dlse if dtype == torch.float64 else dlse.float()


def keeps_the_budget(
    pattern, n, *, batch=2, scale=None, dtype=torch.float32, heads=(4, 4), d=8, with_dlse=True, **options
) -> None:
    """Alone, or on ranks that are simulated, against the definition."""
    q, k, v, dout, dlse = tensors(batch, n, n, *heads, d, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RowsLeftOut)
        if options:
            sim = lr.simulate(q, k, v, pattern=pattern, **options)
            out, lse = sim.out, sim.lse
        else:
            out, lse = lr.attention(q, k, v, pattern=pattern, return_lse=True, scale=scale)
    outs, grads = ((out, lse), (dout, dlse)) if with_dlse else ((out,), (dout,))
    got = Result(out.detach(), lse.detach(), *torch.autograd.grad(outs, (q, k, v), grads))
    verdicts = judge(got, q, k, v, pattern, dout, dlse if with_dlse else None, scale=scale)
    assert all(verdict.ok for verdict in verdicts), verdicts


def sharding_of(case: Case, group: Any) -> lr.Sharding:
    documents = PATTERNS[case.pattern].documents if case.layout == "dealt" else None
    return lr.Sharding(LENGTH, group, case.layout, documents=documents)


def attend(cases: list[Case], group: Any = None) -> list[Result]:
    """This rank's part of every case, forward and backward, lse included."""
    torch.set_num_threads(1)  # as where the same is simulated: how many there are decides the order of sums
    return [_attend(case, group or dist.group.WORLD) for case in cases]


def attend_on_a_mesh(cases: list[Case], shape: tuple[int, int]) -> list[Result]:
    """The same over a mesh of (nodes, ranks of a node)."""
    return attend(cases, dist.init_device_mesh("cpu", shape))


def _attend(case: Case, group: Any) -> Result:
    s = sharding_of(case, group)
    q, k, v, dout, dlse = inputs(case.dtype)
    q, k, v = (s.shard(x).requires_grad_() for x in (q, k, v))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lr.RowsLeftOut)
        out, lse = lr.attention(
            q,
            k,
            v,
            pattern=PATTERNS[case.pattern],
            sharding=s,
            schedule=case.schedule,
            return_lse=True,
            timeout=TIMEOUT,
        )
    gradients = torch.autograd.grad((out, lse), (q, k, v), (s.shard(dout), s.shard(dlse, dim=2)))
    return Result(out.detach(), lse.detach(), *gradients)


def whole(case: Case, parts: list[Result]) -> Result:
    """Every rank's rows where they belong."""
    documents = PATTERNS[case.pattern].documents if case.layout == "dealt" else None
    dealt = deal(case.layout, LENGTH, len(parts), documents=documents)
    rows = [torch.tensor([p for r in shard for p in r], dtype=torch.int64) for shard in dealt.shards]
    together = []
    for name in Result._fields:
        tensors = [getattr(part, name) for part in parts]
        dim = 2 if name == "lse" else 1
        shape = list(tensors[0].shape)
        shape[dim] = LENGTH
        into = torch.empty(shape, dtype=tensors[0].dtype)
        for at, tensor in zip(rows, tensors, strict=True):
            into.index_copy_(dim, at, tensor)
        together.append(into)
    return Result(*together)


def simulated(case: Case, ranks: int) -> Result:
    q, k, v, dout, dlse = inputs(case.dtype)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lr.RowsLeftOut)
        sim = lr.simulate(
            q,
            k,
            v,
            ranks=ranks,
            pattern=PATTERNS[case.pattern],
            layout=case.layout,
            schedule=case.schedule,
            node_ranks=case.node_ranks,
        )
    gradients = torch.autograd.grad((sim.out, sim.lse), (q, k, v), (dout, dlse))
    return Result(sim.out.detach(), sim.lse.detach(), *gradients)
