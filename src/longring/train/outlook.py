"""What a run will take, before it is started: everything here is predicted, attention by `longring.plan`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, cast

from ..plan.forecast import Choice, Question, forecast
from ..plan.hardware import Hardware, all_hardware
from .config import Config
from .job import OPTIMISER_STATES, new_model

FLOPS_OF_A_WEIGHT = 6  # multiply and add, forward and twice backward, for each token
OF_WIDTH, OF_HIDDEN = 4, 4  # rows as wide as the model, and as its feed-forward, that a layer keeps for its backward
ITEMSIZE = {"bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class Outlook:
    """Of one rank, the fullest or busiest: bytes that it holds, bytes that it sends in a step, seconds of a step."""

    hardware: str
    schedule: str
    layout: str
    parameters: int
    memory: dict[str, int]
    sent: dict[str, int]
    seconds: dict[str, float]
    steps: int
    tokens_per_step: int

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "memory_bytes": sum(self.memory.values()),
            "bytes_sent": sum(self.sent.values()),
            "step_seconds": self.step_seconds,
            "run_seconds": self.steps * self.step_seconds,
        }


def outlook(config: Config, *, vocabulary: int, gpu: str | None = None) -> Outlook:
    """Of a settled config. `gpu` is what torch calls the device; without it, a core of a server."""
    model = new_model(config, vocabulary, device="meta")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    machine = _machine(gpu)
    best = _attention(config, machine)
    return Outlook(
        hardware=machine.name,
        schedule=best.schedule,
        layout=best.layout,
        parameters=parameters,
        memory=_memory(config, best, parameters, vocabulary),
        sent=_sent(config, best, parameters),
        seconds=_seconds(config, best, machine, parameters),
        steps=config.steps,
        tokens_per_step=cast(int, config.batch) * cast(int, config.context),
    )


def _machine(gpu: str | None) -> Hardware:
    known = all_hardware()
    if gpu is None:
        return known["cpu"]
    named = [one for name, one in known.items() if name in gpu.lower()]
    return named[0] if named else known["h200"]


def _attention(config: Config, machine: Hardware) -> Choice:
    """Of a ring, as if every sequence were one document: the most that it can be."""
    heads, context_ranks = cast(int, config.heads), cast(int, config.context_ranks)
    nodes = context_ranks // config.node_ranks if config.node_ranks else 1
    question = Question(
        pattern=config.pattern(),
        tokens=cast(int, config.context),
        ranks=context_ranks,
        nodes=nodes,
        heads=heads,
        kv_heads=cast(int, config.kv_heads),
        head_dim=cast(int, config.dim) // heads,
        dtype=cast(str, config.dtype),
        hardware=machine,
        batch=config.micro_batch,
        layers=cast(int, config.layers),
    )
    layout = "auto" if config.layout == "dealt" else config.layout
    return forecast(question, schedule=config.schedule, layout=layout).recommended


def _rounds(config: Config) -> int:
    """Forward and backward passes of a ring in one step."""
    return cast(int, config.batch) // (config.data_ranks * config.micro_batch)


def _memory(config: Config, best: Choice, parameters: int, vocabulary: int) -> dict[str, int]:
    rows = config.micro_batch * -(-cast(int, config.context) // cast(int, config.context_ranks))
    weight = 8 if config.dtype == "fp64" else 4
    itemsize = ITEMSIZE[cast(str, config.dtype)]
    mine = -(-parameters // cast(int, config.ranks)) if config.fsdp else parameters
    dim, layers = cast(int, config.dim), cast(int, config.layers)
    layer = rows * itemsize * (OF_WIDTH * dim + OF_HIDDEN * cast(int, config.feedforward))
    is_thrifty = config.activation_checkpointing
    at_work = max(best.memory.forward_bytes, best.memory.backward_bytes)
    return {
        "weights": weight * mine,
        "gradients": weight * mine,
        "optimiser": OPTIMISER_STATES * weight * mine,
        "attention": at_work if is_thrifty else best.memory.peak_bytes,
        "other activations": layer + layers * rows * dim * itemsize if is_thrifty else layers * layer,
        "logits": rows * vocabulary * 2 * max(4, itemsize),
    }


def _sent(config: Config, best: Choice, parameters: int) -> dict[str, int]:
    ranks, layers = cast(int, config.ranks), cast(int, config.layers)
    forward = best.forward.traffic.bytes_sent * (2 if config.activation_checkpointing else 1)
    gradients = 2 * (ranks - 1) * parameters * (8 if config.dtype == "fp64" else 4) // ranks
    gathered = gradients // 2 * 2 * _rounds(config) if config.fsdp else 0
    found = {"attention": _rounds(config) * layers * (forward + best.backward.traffic.bytes_sent)}
    return (
        found
        | {"gradients": gradients // 2 if config.fsdp else gradients}
        | ({"weights": gathered} if gathered else {})
    )


def _seconds(config: Config, best: Choice, machine: Hardware, parameters: int) -> dict[str, float]:
    again = 1.0 if config.activation_checkpointing else 0.0
    crowd = _crowd(config, machine)
    layers = cast(int, config.layers)
    attention = layers * (best.backward.seconds + (1 + again) * best.forward.seconds)
    rows = config.micro_batch * cast(int, config.context) / cast(int, config.context_ranks)
    rate = machine.flops("forward", itemsize=ITEMSIZE[cast(str, config.dtype)])
    rest = parameters * rows * (FLOPS_OF_A_WEIGHT + 2 * again) / rate
    moved = _sent(config, best, parameters)
    reduced = (sum(moved.values()) - moved["attention"]) / machine.inside.bytes_per_second
    rounds = _rounds(config)
    return {
        "attention": crowd * rounds * attention,
        "other computing": crowd * rounds * rest,
        "gradients": reduced,
    }


def _crowd(config: Config, machine: Hardware) -> float:
    """Ranks for each core, where ranks are on cores: below 1 a rank has several threads."""
    if machine.device != "cpu":
        return 1.0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cast(int, config.ranks) / cores
