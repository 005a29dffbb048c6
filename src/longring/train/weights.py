"""The weights of another run, without the rest of what it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import ArgumentError, CheckpointError
from . import checkpoints, states
from .checkpoints import Found


def newest(folder: Path, *, group: Any, timeout: float | None, of: str) -> Found:
    """The newest complete checkpoint of a run's folder, which must have one; `of` names who asked for it."""
    found = checkpoints.find(folder, group=group, timeout=timeout)
    if found:
        return found
    skipped = "".join(f"; skipped {name}: {why}" for name, why in found.skipped)
    what = "holds no complete checkpoint" if os.path.exists(folder) else "does not exist"
    raise ArgumentError(f"{of} {folder} {what}{skipped}. It is to be the folder that longring train --out names")


def load_weights(found: Found, model: nn.Module, *, group: Any, timeout: float | None) -> None:
    """Into a model of the same shape, whole or dealt, whatever ranks wrote them."""
    state = states.collect(model)
    checkpoints.load(found, state, group=group, timeout=timeout)
    checkpoints.together(
        f"loading {found.path}", lambda: check_finite(state["model"], "weights"), group=group, timeout=timeout
    )
    states.restore(state, model)


def check_finite(tensors: dict[str, Any], what: str) -> None:
    """Refuse nan and inf in what this rank has of them, before a loss of nan has to say it."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and not torch.isfinite(local(tensor)).all():
            raise CheckpointError(
                f"its {what} {name} have nan or inf in them, as they were saved; move its folder "
                "elsewhere to take the one before, if there is one"
            )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
