"""What every rank runs: every schedule with every pattern, judged and counted; then links; then faults."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import longring as lr

from ...geometry.patterns import Pattern, Problem
from ...geometry.plans import PLANS
from ...geometry.task import Task
from ...plan.traffic import backward_bytes, forward_bytes
from ...testing import Result, budgets, relative_error
from .faults import faults
from .links import links
from .ranks import FAILED, NOT_RUN, PASSED, Add, Ranks, Row, Wanted

HEADS, KV_HEADS, HEAD_DIM = 6, 3, 64  # which few numbers of ranks divide; two query heads share a kv head
TOKENS = {"cpu": 307, "cuda": 4099}  # at least; primes
TOKENS_A_RANK = 5  # at least
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
PASSES = ("forward", "backward")

Errors = dict[str, tuple[float, float]]
"""By quantity: the relative error, and what is allowed."""


def verify(wanted: Wanted) -> dict[str, Any]:
    """All checks, on one rank of an initialised world: their rows, and what the ranks are. The same on every rank."""
    ranks, rows = Ranks.joined(wanted), []
    described = ranks.described()
    try:
        for check in (exactness, links, faults):
            check(ranks, rows.append)
    except (RuntimeError, OSError) as error:  # of the control group: a process is gone, and nothing can be agreed on
        rows.append(Row("world", "all ranks live", FAILED, f"rank {ranks.rank}: {_in_short(error)}"))
    return described | {"rows": rows}


# ----------------------------------------------------------------------------------------------------------- cases


class Case(NamedTuple):
    schedule: str
    words: str  # of its pattern
    pattern: Pattern
    layout: str
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.schedule}, {self.words}, {self.layout}, {DTYPES[self.dtype]}"

    @property
    def question(self) -> tuple[str, torch.dtype]:
        """Cases of one question have one right answer."""
        return self.words, self.dtype


def cases(n: int) -> list[Case]:
    """Every schedule with every pattern, in 32 and in 16 bits; each layout has its patterns."""
    shortest = 1 << max(0, (n // 16).bit_length() - 1)
    branches = [shortest, 4 * shortest, 32 * shortest], [1, 2, 4]  # the longest is longer than the sequence
    documents = sorted({n * part // 100 for part in (0, 4, 5, 33, 86, 100)})
    patterns: list[tuple[str, Pattern, str]] = [
        ("causal", lr.Dense(causal=True), "zigzag"),
        ("full", lr.Dense(causal=False), "contiguous"),
        ("window", lr.Dense(causal=True, window=(n // 7, 0)), "contiguous"),
        ("documents", lr.Dense(causal=True, documents=documents), "dealt"),
        ("dilated", lr.Dilated(*branches), "contiguous"),
        ("dilated block", lr.Dilated(*branches, phase="block"), "striped"),
    ]
    return [
        Case(schedule, words, pattern, layout, dtype)
        for dtype in DTYPES
        for words, pattern, layout in patterns
        for schedule in PLANS
    ]


def length_for(ranks: int, device: str) -> int:
    """A prime, which neither ranks nor the blocks of kernels divide."""
    n = max(TOKENS[device], TOKENS_A_RANK * ranks)
    while any(n % i == 0 for i in range(2, math.isqrt(n) + 1)):
        n += 1
    return n


def inputs(n: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, dout and dlse of the whole sequence, the same on every rank."""
    random = torch.Generator().manual_seed(n)
    made = [torch.randn(1, n, h, HEAD_DIM, generator=random).to(dtype) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [*made, torch.randn(1, HEADS, n, generator=random)]


# ------------------------------------------------------------------------------------------------------- exactness


def exactness(ranks: Ranks, add: Add) -> None:
    """Forward, and the gradients of out and lse, of every case; each question is judged by one of the ranks."""
    n = length_for(ranks.size, ranks.device.type)
    chosen = [case for case in cases(n) if ranks.wanted.includes(case.name)]
    questions = list(dict.fromkeys(case.question for case in chosen))
    rows, kept = [], {}
    for number, case in enumerate(chosen):
        answer = None
        row = Row("exactness", case.name, NOT_RUN, ranks.why_not() or "not judged")
        if ranks.reason is None:
            answer = _run(ranks, case, n, row)
        add(row)
        rows.append(row)
        if answer is not None and questions.index(case.question) % ranks.size == ranks.rank:
            kept[number] = case, answer
    for judged in ranks.all_say(_judged(ranks, kept, n)):
        for number, errors in judged.items():
            _conclude(rows[number], errors)


class Played(NamedTuple):
    """A case on one rank: the gathered answer, and bytes sent and planned in each pass."""

    answer: Result
    sent: list[int]
    planned: list[int]


def _run(ranks: Ranks, case: Case, n: int, row: Row) -> Result | None:
    """The gathered answer, if all ranks have one; what is to be said already is in the row."""
    began, played, problem = time.monotonic(), None, None
    try:
        played = attend(ranks, case, n)
    except Exception as error:  # whatever goes wrong on this rank is told to all
        problem = isinstance(error, lr.ArgumentError), _in_short(error)
    said = ranks.all_say((problem, None if played is None else (played.sent, played.planned)))
    row.numbers["seconds"] = time.monotonic() - began
    problems = [(rank, *problem) for rank, (problem, _) in enumerate(said) if problem is not None]
    if problems and len(problems) == ranks.size and all(is_refusal for _, is_refusal, _ in problems):
        row.detail = problems[0][2]
    elif problems:
        row.status, row.detail = FAILED, "; ".join(f"rank {rank}: {text}" for rank, _, text in problems[:3])
        ranks.reason = f"ranks failed in {case.name}"  # and the group is not to be used again
    else:
        _count(row, [counts for _, counts in said])
    return played.answer if played is not None and not problems else None


def attend(ranks: Ranks, case: Case, n: int) -> Played:
    """On this rank: both passes, and what all of them gave."""
    s = lr.Sharding(n, group_for(ranks, case.schedule), case.layout, pattern=case.pattern)
    *whole, dlse = (x.to(ranks.device) for x in inputs(n, case.dtype))
    q, k, v, dout = (s.shard(x) for x in whole)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    timeout, counts = ranks.wanted.timeout, [_sent(s)]
    options: dict[str, Any] = {"pattern": case.pattern, "sharding": s, "schedule": case.schedule, "timeout": timeout}
    out, lse = lr.attention(q, k, v, return_lse=True, **options)
    counts.append(_sent(s))
    gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, s.shard(dlse, dim=2)))
    counts.append(_sent(s))
    got = [s.unshard(x.detach(), timeout=timeout) for x in (out, *gradients)]
    whole_lse = s.unshard(lse.detach(), dim=2, timeout=timeout)
    task = Task(case.pattern, Problem(1, n, n, KV_HEADS, 0), s.dealt, s.dealt, HEADS)
    size = {"head_dim": HEAD_DIM, "itemsize": case.dtype.itemsize, "node_ranks": s.transport.node_ranks}
    planned = [count(task, case.schedule, s.rank, **size) for count in (forward_bytes, backward_bytes)]
    return Played(Result(got[0], whole_lse, *got[1:]), [b - a for a, b in pairwise(counts)], planned)


def _sent(s: lr.Sharding) -> int:
    return getattr(s.transport, "bytes_sent", 0)  # a process alone counts nothing


def group_for(ranks: Ranks, schedule: str) -> Any:
    """All ranks; where they are on one node, for schedules that look at nodes its halves pass for two."""
    is_one_node = lr.Sharding(1, dist.group.WORLD).transport.node_ranks == ranks.size
    if schedule not in ("hybrid", "double_ring") or not is_one_node or ranks.size % 2 or ranks.size < 4:
        return dist.group.WORLD
    return _halves(ranks.device.type, ranks.size)


@cache
def _halves(device: str, size: int) -> dist.DeviceMesh:
    return dist.init_device_mesh(device, (2, size // 2))


def _count(row: Row, counts: Iterable[Any]) -> None:
    """Bytes over all ranks, and which rank sent others than planned."""
    counts = list(counts)
    row.numbers["bytes_sent"] = sum(sum(sent) for sent, _ in counts)
    row.numbers["bytes_planned"] = sum(sum(planned) for _, planned in counts)
    for rank, (sent, planned) in enumerate(counts):
        for phase, ours, theirs in zip(PASSES, sent, planned, strict=True):
            if ours != theirs:
                row.status = FAILED
                row.detail = f"rank {rank} sent {ours:,} bytes {phase}, and {theirs:,} were planned"
                return


# --------------------------------------------------------------------------------------------------------- judging


def _judged(ranks: Ranks, kept: dict[int, tuple[Case, Result]], n: int) -> dict[int, Errors | str]:
    """The errors of the answers that this rank judges, or why it could not judge them."""
    found: dict[int, Errors | str] = {}
    known: dict[Any, tuple[Result, dict[str, float]]] = {}
    for number, (case, got) in sorted(kept.items(), key=lambda one: one[1][0].words):
        try:
            if case.question not in known:
                known.clear()  # one at a time: on a GPU they are large
                q, k, v, dout, dlse = (x.to(ranks.device) for x in inputs(n, case.dtype))
                known[case.question] = budgets(q, k, v, case.pattern, dout, dlse)
            want, allowed = known[case.question]
            pairs = zip(Result._fields, got, want, strict=True)
            found[number] = {name: (relative_error(ours, theirs), allowed[name]) for name, ours, theirs in pairs}
        except RuntimeError as error:  # no memory for the definition, which holds every score
            found[number] = f"not judged: {_in_short(error)}"
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _conclude(row: Row, errors: Errors | str) -> None:
    if isinstance(errors, str):
        row.detail = row.detail if row.status == FAILED else errors
        return
    row.numbers |= {"errors": {name: error for name, (error, _) in errors.items()}}
    row.numbers |= {"allowed": {name: allowed for name, (_, allowed) in errors.items()}}
    row.numbers["budget_used"] = max(error / allowed if allowed else math.inf for error, allowed in errors.values())
    wrong = [
        f"the relative error of {name} is {error:.1e}, and {allowed:.1e} is allowed"
        for name, (error, allowed) in errors.items()
        if not error <= allowed < math.inf  # nan is wrong, too
    ]
    was = [row.detail] if row.status == FAILED else []
    row.status = FAILED if was or wrong else PASSED
    row.detail = "; ".join([*was, *wrong])


def _in_short(error: Exception) -> str:
    first = (str(error).strip() or "no text").splitlines()[0]
    return first if isinstance(error, lr.LongringError) else f"{type(error).__name__}: {first}"
