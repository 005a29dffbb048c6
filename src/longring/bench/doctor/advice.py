"""What is worth saying of a diagnosis: the worst first, each with what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from ...plan.advice import MILESTONES, VARIABLES
from ...plan.environment import LEVELS, Concern, Place, concerns
from .devices import FAILS
from .nvidia import gpu_names
from .transports import wrong_setting

if TYPE_CHECKING:
    from . import Diagnosis

OURS = ("LONGRING_TRANSPORT", "LONGRING_DEBUG", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "CUDA_VISIBLE_DEVICES")
LEAST_TORCH = (2, 11)
BUSY = 0.1  # of a GPU's memory in others' hands


def set_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that matter to longring and have a value."""
    names = (*(variable.name for variable in VARIABLES), *OURS)
    return {name: environment[name] for name in names if environment.get(name, "").strip()}


def concerns_of(found: Diagnosis, *, nodes: int, ranks_here: int) -> list[Concern]:
    place = Place(
        os.environ,
        backend="cpu:gloo,cuda:nccl" if found.gpus else "gloo",
        machines=nodes,
        ranks_here=ranks_here,
        cores=found.cpu.cores,
        interfaces=[interface.name for interface in found.network.interfaces],
        nccl=found.software.nccl,
    )
    said = [
        *concerns(place),
        *_about_ours(),
        *_about_torch(found),
        *_about_gpus(found),
        *_about_kernels(found),
        *_about_the_network(found, nodes),
        *_about_versions(found),
    ]
    return sorted(said, key=lambda concern: LEVELS.index(concern.level))


def _about_ours() -> Iterator[Concern]:
    setting = wrong_setting()
    if setting is not None:
        yield Concern("LONGRING_TRANSPORT", "wrong", setting)
    if os.environ.get("LONGRING_DEBUG", "0") not in ("", "0"):
        yield Concern("LONGRING_DEBUG", "slow", "LONGRING_DEBUG is set: looking for nan costs as much as computing")


def _about_torch(found: Diagnosis) -> Iterator[Concern]:
    version = found.software.packages["torch"] or "0"
    if _numbers(version) < LEAST_TORCH:
        yield Concern("torch", "wrong", f"torch {version} is older than 2.11, on which longring was built: update it")


def _about_gpus(found: Diagnosis) -> Iterator[Concern]:
    if not found.gpus and (there := gpu_names()):
        text = f"this machine has {there[0]}, which torch does not use: {found.no_gpu}"
        if torch.version.cuda is None:
            text += "; install one with CUDA from pytorch.org"
        yield Concern("GPU", "wrong" if (found.no_gpu or "").startswith(FAILS) else "slow", text)
    for gpu in found.gpus:
        if gpu.free_bytes < (1 - BUSY) * gpu.memory_bytes:
            used = 1 - gpu.free_bytes / gpu.memory_bytes
            text = f"{used:.0%} of the memory of GPU {gpu.index} are in use by other processes; nvidia-smi names them"
            yield Concern("GPU", "note", text)
    if len({gpu.name for gpu in found.gpus}) > 1:
        yield Concern("GPU", "slow", "the GPUs differ: a ring is as fast as its slowest rank")
    if found.links is not None and found.links.apart:
        pairs = ", ".join(f"{i}-{j}" for i, j in found.links.apart if i < j)
        yield Concern("P2P", "slow", f"GPUs {pairs} do not reach each other's memory: blocks go through the host")


def _about_kernels(found: Diagnosis) -> Iterator[Concern]:
    for kernels in found.kernels[1:]:  # those of GPUs
        kind = next(gpu.generation for gpu in found.gpus if f"cuda:{gpu.index}" == kernels.device)
        for reason, names in kernels.refusals.items():
            if "flash_attn_4" in names and "is not installed" in reason and kind in ("hopper", "blackwell"):
                text = f"flash_attn_4 {reason}: on an H200 it was the fastest for most shapes"
                yield Concern("flash-attn-4", "slow", text)
            if "cannot be imported" in reason:
                yield Concern(", ".join(names), "slow", f"{', '.join(names)} {reason}; another kernel is taken")


def _about_the_network(found: Diagnosis, nodes: int) -> Iterator[Concern]:
    if nodes == 1 or found.environment.get("GLOO_SOCKET_IFNAME"):
        return
    address = found.network.host_address
    if address is None or address.startswith("127."):
        leads = "nowhere" if address is None else f"to {address}"
        text = f"the name of this machine, {found.network.host}, leads {leads}: set GLOO_SOCKET_IFNAME"
        yield Concern("GLOO_SOCKET_IFNAME", "wrong", f"{text}, or the other machines will not reach it")


def _about_versions(found: Diagnosis) -> Iterator[Concern]:
    """What a newer NCCL would bring; torch has been checked."""
    has = found.software.nccl
    for milestone in MILESTONES:
        if milestone.library == "NCCL" and found.gpus and has is not None and has[:2] < milestone.version:
            wants, version = ".".join(map(str, milestone.version)), ".".join(map(str, has))
            yield Concern("NCCL", "note", f"NCCL is {version}; from {wants} on {milestone.brings}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
