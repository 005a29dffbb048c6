"""What the ranks of test worlds do with groups of torch beside rings: functions of (group, ...), over NCCL or Gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from training_runs import CONTEXT, DATA, Place, Run, made, optimiser_of, trained, whole_parameters

import longring as lr
from longring.integrations.same_batch import check_same_batch
from longring.testing import Result, judge
from longring.transport.select import transport_for

LENGTH, TIMEOUT = 211, 60.0
PATTERNS = {"zigzag": lr.Dense(causal=True), "contiguous": lr.Dilated([32, 64, 256], [1, 2, 4])}


def device() -> str:
    return "cuda" if "nccl" in str(dist.get_backend_config()) else "cpu"


def attention_on_a_mesh(group: Any, shape: tuple[int, int]) -> list[str]:
    """Each row a ring of its own, with other numbers; then all ranks, rows being nodes. What broke its budget."""
    mesh = dist.init_device_mesh(device(), shape, mesh_dim_names=("data", "context"))
    broken = []
    for layout, pattern in PATTERNS.items():
        for schedule in ("ring", "exchange", "gather"):
            broken += judged(mesh["context"], layout, pattern, schedule, seed=mesh.get_local_rank("data"))
        for schedule in ("ring", "double_ring", "hybrid"):
            broken += judged(mesh, layout, pattern, schedule, seed=7)
    return broken


def judged(group: Any, layout: str, pattern: Any, schedule: str, seed: int) -> list[str]:
    s = lr.Sharding(LENGTH, group, layout)
    draw = torch.Generator().manual_seed(seed)
    whole = [torch.randn((1, LENGTH, heads, 16), generator=draw).to(device()) for heads in (8, 4, 4, 8)]
    q, k, v, dout = (s.shard(x).detach() for x in whole)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    options = {"pattern": pattern, "sharding": s, "schedule": schedule, "timeout": TIMEOUT}
    out, lse = lr.attention(q, k, v, return_lse=True, **options)
    parts = [out, lse.transpose(1, 2).contiguous(), *torch.autograd.grad(out, (q, k, v), dout)]
    got = [s.unshard(x.detach(), timeout=TIMEOUT) for x in parts]
    found = judge(Result(got[0], got[1].transpose(1, 2), *got[2:]), *whole[:3], pattern, whole[3])
    return [f"{schedule}, {pattern}: {one}" for one in found if not one.ok]


def different_batches(group: Any) -> list[str]:
    """In a group of all backends and, on GPUs, in one of NCCL alone: the same batch on each device, then another."""
    groups = [dist.new_group()] + ([dist.new_group(backend="nccl")] if device() == "cuda" else [])
    ids, said = torch.arange(3_000).reshape(3, 1_000), []
    for each in groups:
        transport = transport_for(each)
        for place in sorted({"cpu", device()}):
            check_same_batch(transport, {"input_ids": ids.to(place)}, {"documents": None}, timeout=TIMEOUT)
        try:
            check_same_batch(transport, {"input_ids": ids.to(device()) + transport.rank}, {}, timeout=TIMEOUT)
        except lr.Disagreement as error:
            said.append(str(error))
    return said


def fsdp2(group: Any) -> Run:
    """Parameters over all ranks, layer by layer; tokens over rings of two."""
    place = Place.on_a_mesh(device=device())
    everywhere = dist.init_device_mesh(device(), (DATA * CONTEXT,))
    model = made(torch.float64).to(device())
    for layer in model.stack.layers:
        fully_shard(layer, mesh=everywhere)
    model = fully_shard(model, mesh=everywhere)
    return Run(trained(place, model, optimiser_of(model)), whole_parameters(model))
