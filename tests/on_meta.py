"""The engine as on an NVIDIA GPU of the Hopper generation, on tensors without memory (device "meta")."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch

from choices import forget_choices
from longring import autograd, call, simulation
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
        for module in (call, simulation):  # which refuses tensors without memory
            stack.enter_context(patch.object(module, "check_tensors", lambda *_: None))
        stack.enter_context(patch.object(autograd, "_full_precision", lambda _: nullcontext()))  # has no meta device
        stack.enter_context(patch.object(torch.Tensor, "__bool__", lambda _: True))  # as of an lse's gradient: not 0
        yield
    forget_choices()
