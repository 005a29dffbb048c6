"""What a run must remember to go on as if nothing had happened: weights, optimiser, schedule, random numbers.

    state = states.collect(model, optimiser, schedule)
    checkpoints.load(found, state, group=group)
    states.restore(state, model, optimiser, schedule)

Names are those of the model as it was written down, whether it stands alone, in DDP or in FSDP2, so that a run goes on
in another of them.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import CheckpointError


def collect(
    model: nn.Module, optimiser: Optimizer | None = None, schedule: LRScheduler | None = None
) -> dict[str, Any]:
    """A state to save, or to load into. Under FSDP2 each rank has its part of it."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimiser is not None:
        state["optimiser"] = get_optimizer_state_dict(model, optimiser)
    if schedule is not None:
        state["schedule"] = schedule.state_dict()
    return state


def restore(
    state: dict[str, Any], model: nn.Module, optimiser: Optimizer | None = None, schedule: LRScheduler | None = None
) -> None:
    """Give a state that was loaded to those it is of."""
    set_model_state_dict(model, state["model"])
    if optimiser is not None:
        set_optimizer_state_dict(model, optimiser, state["optimiser"])
    if schedule is not None:
        schedule.load_state_dict(state["schedule"])


def random_states() -> dict[str, Any]:
    """Where the random numbers of this process are: Python's, numpy's, torch's, and those of its current GPU."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)),
        "torch": _bytes(torch.get_rng_state()),
        "cuda": _bytes(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def check_random_states(states: dict[str, Any]) -> None:
    """Refuse, by CheckpointError, what `random_states` cannot have said: numpy would read beyond its numbers."""
    try:
        version, inner, gauss = states["python"]
        _insist(version == 3 and _are_words(inner, tuple, 625) and (gauss is None or type(gauss) is float), "Python")
        random.Random(0).setstate((version, inner, gauss))
        name, keys, position, has_gauss, gauss = states["numpy"]
        are_numbers = _are_words([position, has_gauss], list, 2) and type(gauss) is float
        _insist(name == "MT19937" and _are_words(keys, list, 624) and are_numbers and position <= 624, "numpy")
        _insist(type(states["torch"]) is bytes, "torch")
        torch.Generator().set_state(_tensor(states["torch"]))
        _insist(states["cuda"] is None or (type(states["cuda"]) is bytes and len(states["cuda"]) == 16), "the GPU")
    except CheckpointError:
        raise
    except (TypeError, ValueError, RuntimeError, KeyError):
        raise CheckpointError("its random numbers are in a state in which no generator is") from None


def _insist(holds: bool, whose: str) -> None:
    if not holds:
        raise CheckpointError(f"the random numbers of {whose} are in a state in which no generator is")


def _are_words(told: Any, kind: type, count: int) -> bool:
    return type(told) is kind and len(told) == count and all(type(word) is int and 0 <= word < 2**32 for word in told)


def set_random_states(states: dict[str, Any]) -> None:
    """Go on from there. A GPU that the saving process had not, or that this one has not, is left as it is."""
    check_random_states(states)
    random.setstate(states["python"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_tensor(states["torch"]))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(states["cuda"]))


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
