"""What a machine has for longring, and what stands in the way: looked at, never changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...plan.environment import Concern
from .advice import concerns_of, set_variables
from .devices import Cpu, Gpu, Links, read_cpu, read_gpus, read_links
from .kernels import Kernels, kernels_on
from .network import Network, read_network
from .software import Software, read_software
from .transports import Way, ways


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found, and what is worth saying of it."""

    software: Software
    cpu: Cpu
    gpus: tuple[Gpu, ...]
    no_gpu: str | None  # why there is none
    links: Links | None  # between GPUs, where there are several
    kernels: tuple[Kernels, ...]  # on the CPU, and on each kind of GPU
    transports: tuple[Way, ...]
    network: Network
    environment: Mapping[str, str]  # variables that are set and matter
    concerns: tuple[Concern, ...]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "concerns": [concern._asdict() for concern in self.concerns]}


def diagnose(*, nodes: int = 1, ranks_here: int | None = None) -> Diagnosis:
    """Look at this machine, as one of `nodes` on which ranks will run."""
    found, no_gpu = read_gpus()
    seen = {
        "software": read_software(),
        "cpu": read_cpu(),
        "gpus": found,
        "no_gpu": no_gpu,
        "links": read_links(found),
        "kernels": (kernels_on("cpu"), *(kernels_on(f"cuda:{gpu.index}") for gpu in _one_of_each(found))),
        "transports": ways(len(found)),
        "network": read_network(),
        "environment": set_variables(os.environ),
    }
    concerns = concerns_of(Diagnosis(**seen, concerns=()), nodes=nodes, ranks_here=ranks_here or max(1, len(found)))
    return Diagnosis(**seen, concerns=tuple(concerns))


def _one_of_each(found: tuple[Gpu, ...]) -> list[Gpu]:
    """GPUs of one name choose alike."""
    return list({gpu.name: gpu for gpu in reversed(found)}.values())[::-1]
