"""The demonstration: patterns, layouts and schedules on processes of this machine, forward and backward, counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import LongringError, TransportError
from ..functional import attention
from ..geometry.patterns import Dense, Dilated, Pattern
from ..launching import launch
from ..schedules.buffers import release_buffers
from ..sharding import Sharding
from ..simulation import Simulation, simulate
from ..transport.ledger import Ledger

PATIENCE = 60.0  # seconds after which a rank that does not answer is lost


class Size(NamedTuple):
    """How large a demonstration is."""

    tokens: int
    ranks: int
    heads: int
    kv_heads: int
    head_dim: int
    seed: int


@dataclass(frozen=True)
class Case:
    """One row of the demonstration."""

    name: str
    pattern: Pattern
    layout: str
    schedule: str
    dtype: torch.dtype = torch.float32
    nodes: int = 1  # that the ranks pass for, equally many in each


class Answer(NamedTuple):
    """What attention gives back, forward and backward."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Part(NamedTuple):
    """What one rank has of a case: its rows of the answer, where they belong, and what they cost it."""

    answer: Answer
    positions: Tensor
    peak_bytes: int
    forward_bytes: int
    backward_bytes: int
    threads: int  # that torch computed with: with another number of them it may round otherwise


@dataclass(frozen=True)
class Played:
    """What a case gave, and for every rank what it held and sent, beside what the plan and `simulate` said."""

    case: Case
    kernel: str
    answer: Answer
    peak_bytes: tuple[int, ...]
    peak_bytes_alone: int
    forward_bytes: tuple[int, ...]
    forward_predicted: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    backward_predicted: tuple[int, ...]
    equals_simulated: bool  # bit for bit

    @property
    def share_of_one_rank(self) -> float:
        """The fullest rank's bytes over those of one rank that does everything."""
        return max(self.peak_bytes) / self.peak_bytes_alone

    @property
    def bytes_sent(self) -> int:
        """By the rank that sent most, forward and backward."""
        return max(map(sum, zip(self.forward_bytes, self.backward_bytes, strict=True)))

    @property
    def bytes_predicted(self) -> int:
        return max(map(sum, zip(self.forward_predicted, self.backward_predicted, strict=True)))

    @property
    def bytes_agree(self) -> bool:
        """Rank by rank and pass by pass, not only at the busiest rank."""
        return (self.forward_bytes, self.backward_bytes) == (self.forward_predicted, self.backward_predicted)


def cases(size: Size) -> list[Case]:
    """Every schedule and every layout that so many ranks can show."""
    return [case for case in _all_cases(size.tokens) if size.ranks % case.nodes == 0]


def left_out(size: Size) -> list[Case]:
    return [case for case in _all_cases(size.tokens) if size.ranks % case.nodes]


def _all_cases(tokens: int) -> list[Case]:
    causal = Dense(causal=True)
    window = Dense(causal=True, window=(max(1, tokens // 8), 0))
    segments, rates = _branches(tokens)
    return [
        Case("causal", causal, "zigzag", "ring"),
        Case("causal", causal, "contiguous", "ring"),
        Case("causal", causal, "striped", "ring"),
        Case("causal", causal, "zigzag", "bidirectional"),
        Case("causal", causal, "zigzag", "double_ring", nodes=2),
        Case("causal", causal, "zigzag", "gather"),
        Case("causal", causal, "contiguous", "ulysses"),
        Case("causal", causal, "zigzag", "hybrid", nodes=2),
        Case("causal, bf16", causal, "zigzag", "ring", torch.bfloat16),
        Case("window", window, "contiguous", "exchange"),
        Case("documents", Dense(causal=True, documents=_documents(tokens)), "dealt", "exchange"),
        Case("dilated", Dilated(segments, rates), "contiguous", "exchange"),
        Case("dilated, block", Dilated(segments, rates, phase="block"), "contiguous", "ring"),
    ]


def _branches(tokens: int) -> tuple[list[int], list[int]]:
    """A short branch of about an eighth of the tokens, and two that are longer and sparser."""
    shortest = 1 << max(0, (tokens // 8).bit_length() - 1)
    return [shortest, 4 * shortest, 16 * shortest], [1, 2, 4]


def _documents(tokens: int) -> list[int]:
    """Long and short ones, cut where no rank ends."""
    inside = {tokens * part // 100 for part in (4, 5, 33, 52, 86)}
    return sorted({0, tokens} | inside)


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def inputs(size: Size, dtype: torch.dtype) -> Inputs:
    """The same random numbers for every case, rounded to its dtype."""
    random = torch.Generator().manual_seed(size.seed)
    heads = size.heads, size.kv_heads, size.kv_heads, size.heads
    return Inputs(*(torch.randn(1, size.tokens, h, size.head_dim, generator=random).to(dtype) for h in heads))


# ------------------------------------------------------------------------------------------------ in processes


def play(chosen: list[Case], size: Size) -> list[tuple[Part, ...]]:
    """Every case on real processes: for each case, each rank's part."""
    try:
        of_ranks = launch(attend, chosen, size, ranks=size.ranks, backend="gloo")
    except LongringError:
        raise
    except (OSError, EOFError, RuntimeError) as failure:  # of the system, the fork server, the store
        raise TransportError(f"{size.ranks} processes could not be started: {failure!r}") from failure
    return list(zip(*of_ranks, strict=True))


def attend(chosen: list[Case], size: Size) -> list[Part]:
    """What each process does: its part of every case."""
    return [_part(case, inputs(size, case.dtype), _group(case.nodes)) for case in chosen]


def _group(nodes: int) -> Any:
    return dist.group.WORLD if nodes == 1 else dist.init_device_mesh("cpu", (nodes, dist.get_world_size() // nodes))


def _part(case: Case, given: Inputs, group: Any) -> Part:
    release_buffers()  # or those that an earlier case made would be held and not counted
    sharding = Sharding(given.q.shape[1], group, case.layout, pattern=case.pattern)
    options = {"pattern": case.pattern, "sharding": sharding, "schedule": case.schedule, "timeout": PATIENCE}
    start = _sent(sharding)
    with Ledger() as ledger:
        q, k, v, dout = (sharding.shard(x) for x in given)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out, lse = attention(q, k, v, return_lse=True, **options)
        middle = _sent(sharding)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    return Part(
        answer=Answer(out.detach(), lse.detach(), *gradients),
        positions=sharding.positions,
        peak_bytes=ledger.peak_bytes,
        forward_bytes=middle - start,
        backward_bytes=_sent(sharding) - middle,
        threads=torch.get_num_threads(),
    )


def _sent(sharding: Sharding) -> int:
    return getattr(sharding.transport, "bytes_sent", 0)  # a process alone has nothing to count


# ------------------------------------------------------------------------------------------------ put together


def compare(case: Case, parts: Sequence[Part], given: Inputs) -> Played:
    """The ranks' parts as one, beside the plan, a process that does everything alone, and `simulate`.

    To be called with as many threads as the parts were made with.
    """
    answer = _together(parts)
    sim, simulated = _simulated(case, len(parts), given)
    alone = _part(replace(case, schedule="ring"), given, None)  # alone, the others copy more than they need
    assert sim.backward is not None
    return Played(
        case=case,
        kernel=sim.kernel.name,
        answer=answer,
        peak_bytes=tuple(part.peak_bytes for part in parts),
        peak_bytes_alone=alone.peak_bytes,
        forward_bytes=tuple(part.forward_bytes for part in parts),
        forward_predicted=sim.forward.predicted_bytes,
        backward_bytes=tuple(part.backward_bytes for part in parts),
        backward_predicted=sim.backward.predicted_bytes,
        equals_simulated=all(map(torch.equal, answer, simulated)),
    )


def _together(parts: Sequence[Part]) -> Answer:
    order = torch.cat([part.positions for part in parts]).argsort()

    def whole(rows: Sequence[Tensor], dim: int) -> Tensor:
        return torch.cat(list(rows), dim).index_select(dim, order)

    out, lse, *gradients = zip(*(part.answer for part in parts), strict=True)
    return Answer(whole(out, 1), whole(lse, 2), *(whole(rows, 1) for rows in gradients))


@contextmanager
def threads(number: int) -> Iterator[None]:
    """So many threads for torch, for as long as this lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _simulated(case: Case, ranks: int, given: Inputs) -> tuple[Simulation, Answer]:
    q, k, v = (x.clone().requires_grad_() for x in given[:3])
    options = {"pattern": case.pattern, "layout": case.layout, "schedule": case.schedule}
    sim = simulate(q, k, v, ranks=ranks, node_ranks=ranks // case.nodes, **options)
    dq, dk, dv = torch.autograd.grad(sim.out, (q, k, v), given.dout)
    return sim, Answer(sim.out.detach(), sim.lse.detach(), dq, dk, dv)
