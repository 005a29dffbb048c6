"""What there is to compute with: the CPU, the GPUs, and how GPUs reach each other."""

from __future__ import annotations

import os
import platform
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from ...kernels.rates import generation
from .nvidia import ask_nvidia, gpu_names

FAILS = "torch fails on it"


@dataclass(frozen=True)
class Cpu:
    name: str
    cores: int  # that this process may use
    cores_of_machine: int
    threads: int  # that torch computes with
    instructions: str
    memory_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    capability: tuple[int, int]
    generation: str  # as kernels/rates.py calls it
    processors: int
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Links:
    """Between the GPUs of this machine."""

    direct: tuple[tuple[bool, ...], ...]  # whether GPU i reaches the memory of GPU j
    topology: str | None  # as nvidia-smi draws it

    @property
    def apart(self) -> list[tuple[int, int]]:
        """Pairs that reach each other only through the host."""
        size = range(len(self.direct))
        return [(i, j) for i in size for j in size if i != j and not self.direct[i][j]]


def read_cpu() -> Cpu:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = _memory()
    return Cpu(
        name=_cpu_name(),
        cores=cores,
        cores_of_machine=os.cpu_count() or cores,
        threads=torch.get_num_threads(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        memory_bytes=memory.get("MemTotal"),
        free_bytes=memory.get("MemAvailable"),
    )


def _cpu_name() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> dict[str, int]:
    pairs = (line.partition(":")[::2] for line in _lines("/proc/meminfo"))
    return {name: int(value.split()[0]) << 10 for name, value in pairs if value.strip().endswith("kB")}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # not Linux
        return []


def read_gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """(those that torch may use, why there are none)."""
    with warnings.catch_warnings(record=True) as said:  # that is where torch tells what its driver lacks
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            try:
                return tuple(map(_gpu, range(torch.cuda.device_count()))), None
            except RuntimeError as error:  # a GPU that is lost, full or of another driver must not end a diagnosis
                return (), f"{FAILS}: {str(error).strip().partition(chr(10))[0]}"
    return (), _why_none([str(warning.message) for warning in said])


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    free, _ = torch.cuda.mem_get_info(index)
    return Gpu(
        index=index,
        name=properties.name,
        capability=(properties.major, properties.minor),
        generation=generation((properties.major, properties.minor)),
        processors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        free_bytes=free,
    )


def _why_none(said: list[str]) -> str:
    there = gpu_names()
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch was built without CUDA"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if there and hidden is not None and not hidden.strip("-1 "):
        return f"CUDA_VISIBLE_DEVICES={hidden} hides {len(there)} of them"
    return said[0].splitlines()[0] if said else "torch finds none"


def read_links(found: tuple[Gpu, ...]) -> Links | None:
    """None where there are no two GPUs."""
    if len(found) < 2:
        return None
    numbers = [gpu.index for gpu in found]
    direct = tuple(tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in numbers) for i in numbers)
    return Links(direct, ask_nvidia("topo", "-m"))
