"""Foreseen: the time that the event simulation predicts for rows of ours, beside what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import LongringError
from ...plan.events import play
from ...plan.hardware import DTYPES, Hardware, hardware
from .asked import asked

MOST_RANKS = 64
PHASES = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}
WORDS = (
    "Predicted is what the event simulation gives for the rates of longring plan's hardware cpu, which are those of "
    "one core, and for as many cores as there were for each rank."
)


def seconds(row: dict[str, Any], shape: dict[str, Any], record: dict[str, Any]) -> float | None:
    """None where nothing can be said: of others, of GPUs, of schedules that have no plan."""
    machine = record.get("machine") or {}
    if row.get("kind") != "ours" or machine.get("device") != "cpu" or not row.get("schedule") or not row.get("tokens"):
        return None
    ranks, cores = row.get("ranks") or 1, machine.get("cores") or 1
    arguments = {**(record.get("arguments") or {}), **shape}
    itemsize, head_dim = DTYPES.get(str(arguments.get("dtype"))), row.get("head_dim") or arguments.get("head_dim")
    if itemsize is None or not isinstance(head_dim, int) or ranks > MOST_RANKS:
        return None
    try:
        run = asked(arguments, **{key: row.get(key) for key in ("layout", "schedule", "tokens", "ranks")})
        place = _with_cores(hardware("cpu"), min(row.get("threads") or max(1, cores // ranks), cores / ranks))
        return (
            sum(
                play(
                    run.task,
                    run.schedule,
                    hardware=place,
                    head_dim=head_dim,
                    itemsize=itemsize,
                    node_ranks=run.node_ranks,
                    phase=phase,
                ).seconds
                for phase in PHASES.get(str(row.get("phase")), ())
            )
            or None
        )
    except LongringError:
        return None


def _with_cores(one: Hardware, cores: float) -> Hardware:
    return replace(
        one,
        forward_flops={dtype: cores * rate for dtype, rate in one.forward_flops.items()},
        backward_flops={dtype: cores * rate for dtype, rate in one.backward_flops.items()},
    )
