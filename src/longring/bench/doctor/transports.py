"""How tensors would travel between ranks of this machine, and why not otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from ...errors import TransportError
from ...transport import driver
from ...transport.process_group import way_for_cuda


@dataclass(frozen=True)
class Way:
    name: str
    carries: str
    taken: str | None  # when; None: not here
    refusal: str | None  # why not


def ways(gpus: int) -> tuple[Way, ...]:
    """Every way there is, with so many GPUs that torch may use."""
    return (_gloo(), _nccl(gpus), _symmetric(gpus), _staged(gpus))


def wrong_setting() -> str | None:
    """What is wrong with LONGRING_TRANSPORT."""
    try:
        way_for_cuda()
    except TransportError as error:
        return str(error)
    return None


def _asked() -> str | None:
    return None if wrong_setting() else way_for_cuda()


def _gloo() -> Way:
    available = dist.is_gloo_available()
    refusal = None if available else "this torch was built without it"
    return Way("gloo", "CPU tensors, over TCP", "for every CPU tensor" if available else None, refusal)


def _nccl(gpus: int) -> Way:
    refusal = _no_gpu(gpus) or (None if dist.is_nccl_available() else "this torch was built without it")
    if refusal is None and _asked() == "symmetric":
        refusal = "LONGRING_TRANSPORT=symmetric asks for another way"
    taken = f"in groups that have it, as longring.launch makes them of up to {gpus} ranks, a GPU each"
    return Way("nccl", "CUDA tensors, over NVLink, PCI or the network", None if refusal else taken, refusal)


def _symmetric(gpus: int) -> Way:
    refusal = _no_gpu(gpus) or driver.obstacle()
    if refusal is None and _asked() == "staged":
        refusal = "LONGRING_TRANSPORT=staged asks for another way"
    taken = "always: LONGRING_TRANSPORT asks for it" if _asked() == "symmetric" else "in groups that have Gloo alone"
    return Way("symmetric", "CUDA tensors, by copy engines on one machine", None if refusal else taken, refusal)


def _staged(gpus: int) -> Way:
    refusal, taken = _no_gpu(gpus), "in groups that have Gloo alone, where memory cannot be shared"
    return Way("staged", "CUDA tensors, through the host's memory and Gloo", None if refusal else taken, refusal)


def _no_gpu(gpus: int) -> str | None:
    return None if gpus else "there is no GPU"
