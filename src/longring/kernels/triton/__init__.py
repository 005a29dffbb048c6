"""Kernels of our own, in Triton: imported only where they run."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch


def is_available(device: torch.device) -> bool:
    """Whether Triton is installed and runs there: a GPU since Volta, or a CPU on which it is asked to interpret."""
    if find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (7, 0)
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
