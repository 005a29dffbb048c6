"""DeepSpeed: gradients of one process out of an engine that averages some ranks' gradients and sums others'."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError


def backward(engine: Any, loss: Tensor, *, group: Any = None, **options: Any) -> None:
    """`engine.backward` of a loss of `longring.nn.cross_entropy(..., gradients="mean")`, for right gradients.

    An engine averages over the ranks it reduces gradients over, which is what such a loss expects. But over sequence
    parallel ranks that it was told of, by an `mpu`, it sums, except where ZeRO 3 scatters. And told of them by
    `mesh_param` it leaves them out altogether, so that their weights drift apart: refused.

    group:    the ranks that hold the tokens of the loss, as for `cross_entropy`; all there are unless said.
    options:  those of `engine.backward`.
    """
    _check_ranks(engine, _ranks(group))
    engine.backward(loss / _summed_over(engine), **options)


def _check_ranks(engine: Any, wanted: list[int]) -> None:
    reduced = sorted(dist.get_process_group_ranks(engine.seq_data_parallel_group))
    missing = sorted(set(wanted) - set(reduced))
    if missing:
        raise ArgumentError(
            f"the loss has tokens of ranks {wanted}, but on rank {dist.get_rank()} DeepSpeed reduces gradients over "
            f"{reduced} alone, without {missing}; call deepspeed.initialize without mesh_param (and without "
            "data_parallel_size and sequence_parallel_size), or with "
            "mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp"
        )


def _summed_over(engine: Any) -> int:
    """How many ranks' gradients are summed where others are averaged."""
    if engine.sequence_parallel_size == 1 or engine.zero_optimization_stage() < 3:
        return engine.sequence_parallel_size
    if engine.zero_reduce_scatter():
        return 1
    raise ArgumentError(
        "with an mpu and zero_optimization.reduce_scatter false, ZeRO 3 sums some gradients over sequence parallel "
        "ranks and averages others, by their size; leave reduce_scatter on, or the mpu out"
    )


def _ranks(group: Any) -> list[int]:
    if group is None:
        return list(range(dist.get_world_size()))
    if isinstance(group, dist.DeviceMesh):
        return sorted(group.mesh.flatten().tolist())
    if isinstance(group, dist.ProcessGroup):
        return sorted(dist.get_process_group_ranks(group))
    raise ArgumentError(f"group must be a torch ProcessGroup or a DeviceMesh, got {group!r}")
