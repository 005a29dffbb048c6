"""What each contender does on a rank: which tokens it holds there, and how it attends."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...errors import ArgumentError
from ...functional import attention, explain
from ...geometry.patterns import Dense, Dilated
from ...sharding import Sharding
from ..gpu.packages import clones_in, fkodom_attention, torchscale_attention
from ..records import cores
from .case import Case, Contender

PATIENCE = 1800.0  # seconds after which a rank that does not answer is lost
ONE_PROCESS = "SDPA in one process"
ALONE = "longring in one process"
DATA_PARALLEL = "FSDP users' setting"
DEEPSPEED = "DeepSpeed Ulysses"
CONTEXT_PARALLEL = "torch context_parallel"
TORCHSCALE, FKODOM = "torchscale", "fkodom"


@dataclass(frozen=True)
class Seat:
    positions: Tensor  # of the tokens that this rank holds
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    threads: int | None = None  # that torch computes with here; None: as many as the rank was given
    waits: bool = False  # while others compute
    sequences: int = 1  # that all ranks together compute at a time
    chosen: dict[str, str] = field(default_factory=dict)  # schedule, layout and kernel, where it has them


def take_seat(contender: Contender, case: Case) -> Seat:
    make = SEATS.get(contender.name, _ours)
    return make(contender, case)


# ---------------------------------------------------------------------------------------------------------- ours


def _ours(contender: Contender, case: Case) -> Seat:
    assert contender.kind == "ours", f"nobody knows how {contender.name} is seated"
    sharding = Sharding(case.shape.n, _group(contender.nodes), contender.layout or "auto", pattern=case.pattern)
    options: dict[str, Any] = {"pattern": case.pattern, "sharding": sharding, "timeout": PATIENCE}
    options |= {"schedule": contender.schedule or "auto", "kernel": contender.kernel or "auto"}
    mine = [torch.empty(1, sharding.local_length, heads, case.shape.d, dtype=case.torch_dtype) for heads in case.heads]
    found = explain(*mine, **options)
    chosen = {"schedule": found.schedule.name, "layout": sharding.layout, "kernel": found.kernel.name}
    return Seat(sharding.positions, lambda q, k, v: attention(q, k, v, **options), chosen=chosen)


def _group(nodes: int) -> Any:
    return dist.group.WORLD if nodes == 1 else dist.init_device_mesh("cpu", (nodes, dist.get_world_size() // nodes))


# ------------------------------------------------------------------------------------------------- torch by itself


def _sdpa(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    pattern = case.pattern
    if pattern != Dense(causal=getattr(pattern, "causal", False)):
        raise ArgumentError(f"torch's fused attention computes causal and full attention, not {pattern!r}")
    shared = case.shape.heads != case.shape.kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=pattern.causal, enable_gqa=shared).transpose(1, 2)

    return attend


def _one_process(contender: Contender, case: Case) -> Seat:
    """Rank 0 with all cores, while the others wait: what a machine does without ranks."""
    attend = _sdpa(case) if contender.name == ONE_PROCESS else _alone(case)
    waits = dist.get_rank() > 0
    return Seat(_all(case)[: 0 if waits else None], attend, threads=cores(), waits=waits)


def _alone(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: attention(q, k, v, pattern=case.pattern)


def _data_parallel(_: Contender, case: Case) -> Seat:
    """Every rank a whole sequence: attention has no parameters, so this is all that FSDP or DDP make of it."""
    return Seat(_all(case), _sdpa(case), sequences=case.ranks)


def _all(case: Case) -> Tensor:
    return torch.arange(case.shape.n)


# ------------------------------------------------------------------------------------------------------- packages


def _deepspeed(_: Contender, case: Case) -> Seat:
    if case.shape.n % case.ranks:  # its messages would not fit, and Gloo takes the process down at that
        raise NotImplementedError(f"it needs equal shards, and {case.ranks} ranks do not divide {case.shape.n} tokens")
    with _quietly():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        deepspeed: Any = importlib.import_module("deepspeed")
        layer: Any = importlib.import_module("deepspeed.sequence.layer")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed.ops.__compatible_ops__ = {}  # or its all-reduce, which is not used here, is compiled for minutes
        deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    group: Any = dist.group.WORLD
    attend = layer.DistributedAttention(_local(_sdpa(case)), group, scatter_idx=2, gather_idx=1)
    sharding = Sharding(case.shape.n, group, "contiguous")
    return Seat(sharding.positions, lambda q, k, v: attend(q, k, v, 0))


def _local(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Any:
    return lambda q, k, v, *_: attend(q, k, v).contiguous()


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _context_parallel(_: Contender, case: Case) -> Seat:
    """torch's own ring, which deals tokens of causal attention in zigzag."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import context_parallel

    rules: Any = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    if torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default not in rules:
        # causal it would raise, else look for a rule for minutes, and then have no backward
        raise NotImplementedError(f"torch {torch.__version__} has no sharding rule for the CPU's fused attention")
    attend, causal = _sdpa(case), getattr(case.pattern, "causal", False)
    mesh = dist.init_device_mesh("cpu", (case.ranks,))
    sharding = Sharding(case.shape.n, dist.group.WORLD, "zigzag" if causal else "contiguous")

    def in_context(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        some = torch.arange(case.shape.n)  # it insists on a buffer to deal; ours is dealt already
        with context_parallel(mesh, buffers=[some], buffer_seq_dims=[0], no_restore_buffers={some}):
            return attend(q, k, v)

    return Seat(sharding.positions, in_context)


def _dilated_package(contender: Contender, case: Case) -> Seat:
    assert isinstance(case.pattern, Dilated)
    if case.ranks > 1:
        raise ArgumentError(f"{contender.name} is compared on one rank")
    with clones_in(case.peers), _quietly():
        if contender.name == FKODOM:
            return Seat(_all(case), fkodom_attention(case.pattern))
        return Seat(_all(case), torchscale_attention(case.shape.heads, case.shape.d, case.pattern))


SEATS: dict[str, Callable[[Contender, Case], Seat]] = {
    ONE_PROCESS: _one_process,
    ALONE: _one_process,
    DATA_PARALLEL: _data_parallel,
    DEEPSPEED: _deepspeed,
    CONTEXT_PARALLEL: _context_parallel,
    TORCHSCALE: _dilated_package,
    FKODOM: _dilated_package,
}
