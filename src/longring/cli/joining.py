"""The ranks that a command runs on: those of a world that somebody started, or ones that it starts here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from .. import errors
from ..errors import ArgumentError, CheckpointError, RankFailed

T = TypeVar("T")

MOST_LOCAL = 4  # ranks on cores, unless somebody says how many
MOST_STARTED = 1024  # processes of this machine; more of them is a slip of the keyboard


def is_joined() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def ranks_and_device(ranks: int | None, device: str) -> tuple[int, str]:
    """How many there are or will be, and "cpu" or "cuda"; what was asked for may be None and "auto"."""
    ranks, local = _world(ranks)
    if device != "cpu":
        from ..launching import ranks_on_gpus

        if ranks is None and (gpus := ranks_on_gpus(1)):
            ranks = local = gpus
        gpus = ranks_on_gpus(local or 1)
        if device == "cuda" and (not gpus or gpus < (local or 1)):
            raise ArgumentError(f"--device cuda needs a GPU for each of {local or 1} ranks, and there are {gpus}")
        device = "cuda" if gpus and gpus >= (local or 1) else "cpu"
    return ranks or min(MOST_LOCAL, _cores()), device


def on_ranks(program: Callable[..., T], *args: Any, ranks: int, device: str) -> T:
    """What the first rank returned; in a world that was started, this one."""
    from ..launching import launch

    if ranks > MOST_STARTED and not is_joined():
        raise ArgumentError(
            f"--ranks must be at most {MOST_STARTED:,} where they are processes of this machine, got {ranks:,}; "
            "on several machines start them by torchrun"
        )
    try:
        return launch(program, *args, ranks=ranks, backend="gloo" if device == "cpu" else "auto")[0]
    except RankFailed as failure:
        raise _as_said(failure) from failure


def _world(asked: int | None) -> tuple[int | None, int | None]:
    """(ranks, those of this machine), as somebody started them, or as they were asked for."""
    if not is_joined():
        return asked, asked
    ranks = int(os.environ["WORLD_SIZE"])
    if asked not in (None, ranks):
        raise ArgumentError(f"--ranks {asked}, but this world was started with {ranks}; leave --ranks out")
    return ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _as_said(failure: RankFailed) -> Exception:
    """What all ranks refuse alike is no failure of one of them."""
    kind = getattr(errors, failure.error_type or "", None)
    if isinstance(kind, type) and issubclass(kind, (ArgumentError, CheckpointError)):
        return kind(failure.error_text)
    return failure
