"""Choosing a kernel. Asked by name, a kernel runs or raises; only `auto` looks for another."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ..errors import KernelRefusal
from ..tensors import spoken
from .contract import Kernel
from .fused import FusedKernel
from .operations.contract import Operation
from .operations.cpu import CpuFlash
from .operations.cuda import Cudnn, Efficient, Flash, behind_flash
from .operations.flash_attn import FlashAttn2, FlashAttn3, FlashAttn4
from .operations.triton import TritonTiles
from .recipes import forget
from .reference import ReferenceKernel

TORCH: tuple[Operation, ...] = (CpuFlash(), Cudnn(), Flash(), Efficient())
PACKAGES: tuple[Operation, ...] = (FlashAttn4(), FlashAttn3(), FlashAttn2())
OURS: tuple[Operation, ...] = (TritonTiles(),)
ON_GPU = (*PACKAGES, *TORCH[1:], *OURS)

KERNELS: dict[str, Kernel] = {
    "sdpa": FusedKernel("sdpa", TORCH),  # what PyTorch has, the fastest of it for every tile
    **{operation.name: FusedKernel(operation.name, [operation]) for operation in ON_GPU},
    "reference": ReferenceKernel(),
}
OTHER_BITS = "may give other bits from run to run, and deterministic=True was asked for"

_log = logging.getLogger("longring")


def check_kernel(name: str) -> None:
    if not isinstance(name, str) or (name != "auto" and name not in KERNELS):
        raise KernelRefusal(f"kernel must be one of auto, {', '.join(KERNELS)}; got {spoken(name)}")


def select_kernel(name: str, q: Tensor, k: Tensor, *, deterministic: bool = False) -> tuple[Kernel, str]:
    """(the kernel called `name`, or with "auto" the fastest that does not refuse; why it)."""
    check_kernel(name)
    _notice_another_flash()
    if name == "auto":
        return _fastest(q, k, deterministic)
    reason, kernel = None, KERNELS[name]
    if deterministic:
        kernel = kernel.with_the_same_bits()
        reason = OTHER_BITS if kernel is None or _is_for_others(kernel, KERNELS[name], q, k) else None
    reason = reason or (None if kernel is None else kernel.refusal(q, k))
    if reason is not None or kernel is None:
        raise KernelRefusal(f"kernel {name!r} {reason}; pass kernel='auto' to let another be chosen")
    return kernel, "asked for by name"


def _is_for_others(strict: Kernel, kernel: Kernel, q: Tensor, k: Tensor) -> bool:
    """Whether what is left of the kernel, strict about bits, refuses tensors that it took before."""
    return strict.refusal(q, k) is not None and kernel.refusal(q, k) is None


def _fastest(q: Tensor, k: Tensor, deterministic: bool) -> tuple[Kernel, str]:
    """Remembered, since what an operation refuses is a matter of device, dtype and head dimension, and slow to ask."""
    asked = q.device, q.dtype, q.shape[3], deterministic
    if asked not in _chosen:
        _chosen[asked] = _choose(q, deterministic)
    kernel, why = _chosen[asked]
    _log.debug("kernel %s: %s", kernel.name, why)
    return kernel, why


_chosen: dict[tuple[torch.device, torch.dtype, int, bool], tuple[Kernel, str]] = {}
_behind_flash: list[str | None] = [None]


def _notice_another_flash() -> None:
    """What was found out with another flash attention in PyTorch does not hold any more."""
    if _behind_flash != [now := behind_flash()]:
        _behind_flash[:] = [now]
        _chosen.clear()
        forget()


def _choose(q: Tensor, deterministic: bool) -> tuple[Kernel, str]:
    willing: list[Operation] = []
    refused: list[str] = []
    for operation in (*PACKAGES, *TORCH, *OURS):
        strict = operation.with_the_same_bits() if deterministic else operation
        reason = OTHER_BITS if strict is None else strict.refusal(q, q.shape[3])
        if strict is not None and reason is None:
            willing.append(strict)
        else:
            refused.append(f"{operation.name} {reason}")
    if not willing:
        return KERNELS["reference"], "; ".join(refused)
    if len(willing) == 1 and willing[0] not in TORCH:
        return FusedKernel(willing[0].name, willing), "; ".join(refused)
    if all(operation in TORCH for operation in willing):
        return KERNELS["sdpa"], "the first choice"
    name = " or ".join(operation.name for operation in willing)
    return FusedKernel(name, willing), "the fastest of them for every tile, forward and backward"
