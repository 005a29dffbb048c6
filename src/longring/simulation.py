"""All ranks of a group played in one process, on whole tensors, as one node of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .autograd import ExactAttention
from .call import (
    Choice,
    check_offset,
    check_pattern,
    check_places,
    check_scale,
    choose_kernel,
    make_journey,
    pick_schedule,
    refuse_unknown,
)
from .errors import ArgumentError, LayoutError
from .geometry.layouts import LAYOUTS, Layout, Shard, deal
from .geometry.patterns import Dense, Pattern, Problem
from .geometry.task import Task
from .kernels.contract import Gradients, Kernel, Upstream
from .numerics.online_softmax import Partial, accumulator_dtype
from .plan.choose import choose_layout
from .plan.traffic import backward_bytes, forward_bytes
from .schedules.gather import place_rows, take_rows
from .schedules.select import SCHEDULES
from .tensors import check_real, check_tensors, spoken
from .transport.ledger import Ledger
from .transport.loopback import Loopback, check_node_ranks, run_ranks

CAUSAL = Dense(causal=True)


class Costs(NamedTuple):
    """What the ranks did, measured, and what the plan said they would send: one number per rank."""

    bytes_sent: tuple[int, ...]
    predicted_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]


@dataclass
class Simulation:
    """out and lse of the whole sequence, differentiable, and what each rank sent and held at most so far.

    `sim.out.backward(...)` runs the schedule's backward on all ranks; afterwards the numbers include it,
    and `sim.backward` has its own.
    """

    out: Tensor
    lse: Tensor
    layout: str
    schedule: Choice
    kernel: Choice
    _job: _AllRanks = field(repr=False)

    @property
    def forward(self) -> Costs:
        return self._job.costs["forward"]

    @property
    def backward(self) -> Costs | None:
        """None until the backward pass has run."""
        return self._job.costs.get("backward")

    @property
    def bytes_sent(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(costs.bytes_sent for costs in self._job.costs.values()), strict=True)))

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(map(max, zip(*(costs.peak_bytes for costs in self._job.costs.values()), strict=True)))


def simulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranks: int,
    pattern: Pattern = CAUSAL,
    layout: str = "auto",
    align: int | None = None,
    schedule: str = "auto",
    node_ranks: int | None = None,
    kernel: str = "auto",
    query_offset: int | None = None,
    scale: float | None = None,
    **not_built: Any,
) -> Simulation:
    """`attention` of whole tensors, computed by `ranks` virtual ranks that exchange real messages.

    Queries and keys are dealt by `layout` ("auto" looks at the pattern). Each rank has tensors of its own,
    so that what it holds can be counted as on a machine of its own. `node_ranks` consecutive ranks stand for one
    node, which "hybrid" and "double_ring" look at.

    >>> q = k = v = torch.randn(1, 64, 2, 8)
    >>> sim = simulate(q, k, v, ranks=4, schedule="gather")
    >>> sim.layout, sim.bytes_sent == sim.forward.predicted_bytes
    ('zigzag', True)
    """
    refuse_unknown("simulate", not_built)
    check_real(q, k, v)
    check_tensors(q, k, v)
    if q.shape[1] == 0 or k.shape[1] == 0:
        raise ArgumentError(f"q and k need at least one token, got {q.shape[1]} and {k.shape[1]}")
    offset = check_offset(query_offset, q.shape[1], k.shape[1])
    problem = Problem(q.shape[0], q.shape[1], k.shape[1], k.shape[2], offset)
    check_places(q, k, problem)
    check_pattern(pattern, problem)
    name = _layout_for(layout, pattern, problem)
    task = Task(pattern, problem, *_dealt(name, pattern, problem, ranks, align), q.shape[2])
    chosen, kernel_choice = choose_kernel(kernel, q, k, deterministic=False)
    close = check_node_ranks(node_ranks, ranks)
    picked = pick_schedule(schedule, task, q, close)
    job = _AllRanks(task, picked.name, close, chosen, check_scale(scale, q))
    out, lse = ExactAttention.apply(q, k, v, job)  # type: ignore[misc]
    return Simulation(out, lse, name, picked, kernel_choice, job)


def _dealt(name: str, pattern: Pattern, problem: Problem, ranks: int, align: int | None) -> tuple[Layout, Layout]:
    documents = pattern.documents if name == "dealt" else None
    keys = deal(name, problem.n_k, ranks, documents=documents, align=align)
    return (keys if problem.n_q == problem.n_k else deal(name, problem.n_q, ranks, align=align)), keys


def _layout_for(layout: str, pattern: Pattern, problem: Problem) -> str:
    if not isinstance(layout, str):
        raise LayoutError(f"layout must be one of auto, {', '.join(LAYOUTS)}; got {spoken(layout)}")
    name = choose_layout(pattern, problem.n_k)[0] if layout == "auto" else layout
    if name == "dealt" and problem.n_q != problem.n_k:  # documents are boundaries of keys
        if layout == "auto":
            return "zigzag"
        raise LayoutError(
            f"layout 'dealt' deals queries as it deals keys, but there are {problem.n_q} and {problem.n_k}; use another"
        )
    return name


@dataclass
class _AllRanks:
    """Every rank's part of the call, each in a thread of its own, with a ledger of what it holds."""

    task: Task
    schedule: str
    node_ranks: int
    kernel: Kernel
    scale: float
    costs: dict[str, Costs] = field(default_factory=dict)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Partial:
        def program(transport: Loopback) -> tuple[Tensor, Tensor]:
            mine = self._shards(transport.rank, [q], [k, v])
            total = SCHEDULES[self.schedule].forward(self._journey(transport), *mine)
            return total.out.to(q.dtype), total.lse.to(accumulator_dtype(q.dtype)).mT.contiguous()

        parts = self._play("forward", program, q)
        out, lse = (q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype)))
        _assemble([out, lse], parts, self.task.queries.shards)
        return Partial(out, lse.mT.contiguous())

    def backward(self, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        dout, dlse, out, lse = upstream
        rows = [q, dout, out, lse.mT, *([] if dlse is None else [dlse.mT])]

        def program(transport: Loopback) -> tuple[Tensor, ...]:
            q_, dout_, out_, lse_, *rest = self._shards(transport.rank, rows, [k, v])
            *dlse_, k_, v_ = rest
            mine = Upstream(dout_, dlse_[0].mT if dlse_ else None, out_, lse_.mT)
            found = SCHEDULES[self.schedule].backward(self._journey(transport), mine, q_, k_, v_)
            return tuple(g.to(q.dtype) for g in found)

        parts = self._play("backward", program, q)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        _assemble([dq], [part[:1] for part in parts], self.task.queries.shards)
        _assemble([dk, dv], [part[1:] for part in parts], self.task.keys.shards)
        return Gradients(dq, dk, dv)

    def _shards(self, rank: int, rows: Sequence[Tensor], keys: Sequence[Tensor]) -> list[Tensor]:
        mine = [take_rows(x.detach(), self.task.queries.shards[rank]) for x in rows]
        return mine + [take_rows(x.detach(), self.task.keys.shards[rank]) for x in keys]

    def _journey(self, transport: Loopback) -> Any:
        return make_journey(self.task, transport, self.kernel, self.schedule, self.scale, timeout=None)

    def _play(self, phase: str, program: Callable[[Loopback], Any], q: Tensor) -> list[Any]:
        ranks = self.task.ranks
        ledgers = [Ledger() for _ in range(ranks)]
        sent = [0] * ranks

        def counted(transport: Loopback) -> Any:
            result = program(transport)
            sent[transport.rank] = transport.bytes_sent
            return result

        with torch.no_grad():
            parts = run_ranks(
                ranks,
                counted,
                node_ranks=self.node_ranks,
                take_turns=True,
                context=lambda transport: ledgers[transport.rank],
            )
        predict = {"forward": forward_bytes, "backward": backward_bytes}[phase]
        size = {"head_dim": q.shape[3], "itemsize": q.element_size(), "node_ranks": self.node_ranks}
        predicted = tuple(predict(self.task, self.schedule, rank, **size) for rank in range(ranks))
        self.costs[phase] = Costs(tuple(sent), predicted, tuple(ledger.peak_bytes for ledger in ledgers))
        return parts


def _assemble(whole: list[Tensor], parts: Sequence[Sequence[Tensor]], shards: tuple[Shard, ...]) -> None:
    for part, shard in zip(parts, shards, strict=True):
        place_rows(whole, list(part), shard)
