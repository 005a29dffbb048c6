"""Which kernels `auto` takes on a device for usual shapes that come again and again, and why the others refuse."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from ...geometry.layouts import deal
from ...geometry.patterns import Dense, Dilated, Pattern, Problem
from ...geometry.stacks import Stack
from ...geometry.task import Task, tiles_over_all_keys
from ...geometry.tiles import Tile, pairs_in_band
from ...kernels.fused import FusedKernel
from ...kernels.rates import Pass
from ...kernels.select import ON_GPU, TORCH, select_kernel
from ...kernels.totals import is_lazy

TOKENS, HEADS, KV_HEADS = 32_768, 16, 4
SHAPES = (
    (torch.bfloat16, 64),
    (torch.bfloat16, 128),
    (torch.bfloat16, 256),
    (torch.float32, 128),
    (torch.float64, 128),
)
PATTERNS: dict[str, Pattern] = {
    "dense": Dense(causal=True),
    "window": Dense(causal=True, window=(4095, 0)),
    "dilated": Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16]),
}


@dataclass(frozen=True)
class Taken:
    """What computes one shape: by pattern and pass, each operation's share of the pairs, the largest first."""

    dtype: str
    head_dim: int
    deterministic: str  # the kernel with deterministic=True
    forward: dict[str, dict[str, float]]
    backward: dict[str, dict[str, float]]
    refused: dict[str, str]  # by kernel, why


@dataclass(frozen=True)
class Kernels:
    device: str
    taken: tuple[Taken, ...]

    @property
    def only(self) -> str | None:
        """What computes everything, if one operation does."""
        shares = [one for taken in self.taken for one in (*taken.forward.values(), *taken.backward.values())]
        names = {name for share in shares for name in share}
        return names.pop() if len(names) == 1 else None

    @property
    def refusals(self) -> dict[str, dict[str, list[Taken]]]:
        """By reason, who refuses which shapes."""
        found: dict[str, dict[str, list[Taken]]] = {}
        for taken in self.taken:
            for name, reason in taken.refused.items():
                found.setdefault(reason, {}).setdefault(name, []).append(taken)
        return found


def kernels_on(device: str) -> Kernels:
    return Kernels(device, tuple(_taken(*_like(device, dtype, head_dim)) for dtype, head_dim in SHAPES))


def _like(device: str, dtype: torch.dtype, head_dim: int) -> tuple[Tensor, Tensor]:
    """q and k of a usual size, which take no memory: nothing is computed with them."""
    one = torch.zeros(1, dtype=dtype, device=device)
    return one.expand(1, TOKENS, HEADS, head_dim), one.expand(1, TOKENS, KV_HEADS, head_dim)


def _taken(q: Tensor, k: Tensor) -> Taken:
    kernel, _ = select_kernel("auto", q, k)
    same_bits, _ = select_kernel("auto", q, k, deterministic=True)
    return Taken(
        dtype=str(q.dtype).removeprefix("torch."),
        head_dim=q.shape[3],
        deterministic=same_bits.name,
        forward={name: _shares(kernel, "forward", pattern, q, k) for name, pattern in PATTERNS.items()},
        backward={name: _shares(kernel, "backward", pattern, q, k) for name, pattern in PATTERNS.items()},
        refused={
            operation.name: reason
            for operation in (ON_GPU if q.device.type == "cuda" else dict.fromkeys((*ON_GPU, *TORCH)))
            if (reason := operation.refusal(q, q.shape[3])) is not None
        },
    )


def _shares(kernel: object, which: Pass, pattern: Pattern, q: Tensor, k: Tensor) -> dict[str, float]:
    if not isinstance(kernel, FusedKernel):
        return {"reference": 1.0}
    pairs: Counter[str] = Counter()
    asked = {"is_first": True, "can_be_done": is_lazy(q.device), "comes_again": True}
    for leg in kernel.recipe(which, _tiles(pattern), q, k, **asked):
        for step in leg.steps:
            name = "reference" if step.operation is None else step.operation.name
            pairs[name] += sum(_pairs(stack) for stack in step.stacks)
    return {name: count / pairs.total() for name, count in pairs.most_common()}


def _tiles(pattern: Pattern) -> tuple[Tile, ...]:
    """As one rank is given them that holds everything."""
    dealt = deal("contiguous", TOKENS, 1)
    task = Task(pattern, Problem(1, TOKENS, TOKENS, KV_HEADS, 0), dealt, dealt, HEADS)
    return tiles_over_all_keys(task, 0)


def _pairs(stack: Stack) -> int:
    place = stack.queries
    return place.many * place.heads * pairs_in_band(len(place.rows), len(stack.keys.rows), *stack.limits)
