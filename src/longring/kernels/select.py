"""Choosing a kernel. Asked by name, a kernel runs or raises; only `auto` looks for another."""

from __future__ import annotations

import logging

from torch import Tensor

from ..errors import KernelRefusal
from .contract import Kernel
from .reference import ReferenceKernel
from .sdpa import SdpaKernel

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (SdpaKernel(), ReferenceKernel())}  # best first

_log = logging.getLogger("longring")


def select_kernel(name: str, q: Tensor, k: Tensor, *, deterministic: bool = False) -> tuple[Kernel, str]:
    """(the kernel called `name`, or with "auto" the first in `KERNELS` that does not refuse; why it)."""
    if name == "auto":
        return _first_willing(q, k, deterministic)
    if not isinstance(name, str) or name not in KERNELS:
        raise KernelRefusal(f"kernel must be one of auto, {', '.join(KERNELS)}; got {name!r}")
    if reason := _refusal(KERNELS[name], q, k, deterministic):
        raise KernelRefusal(f"kernel {name!r} {reason}; pass kernel='auto' to let another be chosen")
    return KERNELS[name], "asked for by name"


def _refusal(kernel: Kernel, q: Tensor, k: Tensor, deterministic: bool) -> str | None:
    if deterministic and not kernel.is_deterministic:
        return "may give other bits from run to run, and deterministic=True was asked for"
    return kernel.refusal(q, k)


def _first_willing(q: Tensor, k: Tensor, deterministic: bool) -> tuple[Kernel, str]:
    refused: list[str] = []
    for kernel in KERNELS.values():
        reason = _refusal(kernel, q, k, deterministic)
        if reason is None:
            why = "; ".join(refused) or "the first choice"
            _log.debug("kernel %s: %s", kernel.name, why)
            return kernel, why
        refused.append(f"{kernel.name} {reason}")
    raise AssertionError("the reference kernel never refuses")
