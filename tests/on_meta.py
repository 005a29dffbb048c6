"""The engine as on an NVIDIA GPU of the Hopper generation, on tensors without memory (device "meta")."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from choices import forget_choices
from longring.kernels import fused, totals
from longring.kernels.operations import cuda


@contextmanager
def hopper_without_memory() -> Iterator[None]:
    """Operations are chosen, launched and merged as on an H200 without packages; PyTorch's own compute shapes only."""
    forget_choices()
    with ExitStack() as stack:
        for module in (totals, fused):
            stack.enter_context(patch.object(module, "is_lazy", lambda _: True))
        stack.enter_context(patch.object(cuda, "not_on_cuda", lambda _: None))
        stack.enter_context(patch.object(cuda, "capability", lambda _: (9, 0)))
        stack.enter_context(patch.object(torch.version, "hip", None))
        yield
    forget_choices()
