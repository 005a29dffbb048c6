"""Versions, read from what is installed without importing it."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata

import torch
import torch.distributed as dist

from ...launching import nccl_version
from .nvidia import ask_nvidia

PACKAGES = (
    "torch",
    "numpy",
    "triton",
    "flash-attn-4",
    "flash_attn_3",
    "flash-attn",
    "transformers",
    "accelerate",
    "deepspeed",
    "lightning",
    "fairscale",
    "matplotlib",
)


@dataclass(frozen=True)
class Software:
    system: str
    python: str
    packages: dict[str, str | None]  # None: not installed
    cuda: dict[str, str | None]  # None: not there

    @property
    def nccl(self) -> tuple[int, ...] | None:
        version = self.cuda["NCCL"]
        return None if version is None else tuple(map(int, version.split(".")))


def read_software() -> Software:
    return Software(
        system=platform.platform(),
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        cuda={
            "CUDA": torch.version.cuda,
            "ROCm": torch.version.hip,
            "cuDNN": _cudnn(),
            "NCCL": _nccl(),
            "NVIDIA driver": ask_nvidia("--query-gpu=driver_version", "--format=csv,noheader", lines=1),
        },
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cudnn() -> str | None:
    """91900 is 9.19.0, and 8902 was 8.9.2."""
    number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if number is None:
        return None
    size = 10_000 if number >= 90_000 else 1000
    return f"{number // size}.{number % size // 100}.{number % 100}"


def _nccl() -> str | None:
    return ".".join(map(str, nccl_version())) if dist.is_nccl_available() else None
