"""Stacks to test with, and what each of them should give, by eager attention in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longring.geometry.itinerary import tiles_between
from longring.geometry.layouts import deal
from longring.geometry.packs import apart
from longring.geometry.patterns import Pattern, Problem
from longring.geometry.task import Task
from longring.geometry.tiles import Tile, without_bands
from longring.kernels.places import Place, Stack, stacks
from longring.numerics.online_softmax import merge_
from longring.testing import Result

LIMITS = {"full": (None, None), "causal": (None, 0), "flipped": (0, None)}


def draw(*shapes: Sequence[int], dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=numbers, dtype=torch.float64).to(device, dtype) for shape in shapes]


def pattern_tiles(pattern: Pattern, batch: int, n: int, heads: int, kv_heads: int) -> tuple[Tile, ...]:
    whole = deal("contiguous", n, 1)
    return tiles_between(Task(pattern, Problem(batch, n, n, kv_heads, 0), whole, whole, heads), 0, 0)


def pattern_stacks(pattern: Pattern, batch: int, n: int, heads: int, kv_heads: int) -> list[Stack]:
    tiles = pattern_tiles(pattern, batch, n, heads, kv_heads)
    return stacks([piece for tile in tiles for piece in without_bands(tile)], heads // kv_heads)


def some_stack(rng: random.Random, batch: int, n: int, kv_heads: int, share: int) -> Stack:
    """Anywhere in the tensors: batch rows or repeats, some heads, skewed or not, queries and keys apart."""
    shape = rng.choice(["full", "causal", "flipped"])
    is_repeated = rng.random() < 0.5
    first, heads = _some(rng, kv_heads)
    head_step = rng.choice([1, 2]) if share == 1 and heads > 1 and first + 2 * (heads - 1) < kv_heads else 1
    rows = range(first, first + head_step * (heads - 1) + 1, head_step)
    at, many = _some(rng, batch)
    where = (range(at, at + 1), rng.randint(2, 3)) if is_repeated else (range(at, at + many), 1)
    height = rng.randint(1, n // 3)
    width = height if shape != "full" else rng.randint(1, n // 3)
    queries, keys = (_some_place(rng, n, *where, rows, length, share) for length in (height, width))
    return Stack(queries, keys._replace(share=1), *LIMITS[shape])


def _some(rng: random.Random, n: int) -> tuple[int, int]:
    first = rng.randrange(n)
    return first, rng.randint(1, n - first)


def _some_place(
    rng: random.Random, n: int, batch: range, repeats: int, kv_heads: range, length: int, share: int
) -> Place:
    skew = rng.randint(0, 1) if share == 1 else 0
    room = n - skew * (len(kv_heads) - 1)
    step = rng.randint(1, max(1, min(4, room // (repeats * length))))
    spacing = room // repeats
    start = rng.randint(0, max(0, spacing - (length - 1) * step - 1))
    return Place(batch, repeats, spacing, kv_heads, skew, range(start, start + (length - 1) * step + 1, step), share)


def attended(q: Tensor, k: Tensor, v: Tensor, stack: Stack, scale: float) -> tuple[Tensor, Tensor]:
    scores, values = _scores(q, k, stack, scale), _wide(v, stack)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ values, lse


def gradients(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, stack: Stack, scale
) -> tuple[Tensor, Tensor, Tensor]:
    delta = (dout.double() * out.double()).sum(-1).transpose(1, 2)
    delta = delta if dlse is None else delta - dlse.double()
    dout = stack.queries.view(dout.double())
    weights = (_scores(q, k, stack, scale) - stack.queries.row_view(lse.double()).unsqueeze(-1)).exp()
    dscores = weights * (dout @ _wide(v, stack).mT - stack.queries.row_view(delta).unsqueeze(-1)) * scale
    dk, dv = dscores.mT @ stack.queries.view(q.double()), weights.mT @ dout
    dk, dv = (x.unflatten(1, (-1, stack.queries.share)).sum(2) for x in (dk, dv))
    return dscores @ _wide(k, stack), dk, dv


def _scores(q: Tensor, k: Tensor, stack: Stack, scale: float) -> Tensor:
    scores = scale * (stack.queries.view(q.double()) @ _wide(k, stack).mT)
    gap = torch.arange(scores.shape[-1], device=q.device) - torch.arange(scores.shape[-2], device=q.device)[:, None]
    lo, hi = stack.limits
    hidden = torch.zeros_like(gap, dtype=torch.bool) if lo is None else gap < lo
    return scores.masked_fill(hidden if hi is None else hidden | (gap > hi), -torch.inf)


def _wide(x: Tensor, stack: Stack) -> Tensor:
    return stack.keys.view(x.double()).repeat_interleave(stack.queries.share, 1)


def merged(parts: Sequence[tuple[Tensor, Tensor]], found: Sequence[Stack], q: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of whole rows, float64."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float64, device=q.device)
    for (part, log), stack in zip(parts, found, strict=True):
        merge_(stack.queries.view(out), stack.queries.row_view(lse), part.double(), log)
    return out, lse


def through_stacks(
    forward: Callable[..., list],
    backward: Callable[..., tuple],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    found: Sequence[Stack],
    scale: float,
    dout: Tensor,
    dlse: Tensor | None,
) -> Result:
    """Whole rows by the functions under test: every stack, merged and summed."""
    pack = apart(found)
    out, lse = merged(forward(q, k, v, pack, scale), found, q)
    sums = [torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, k, v)]
    for *grads, stack in zip(*backward(dout, out, lse, dlse, q, k, v, pack, scale), found, strict=True):
        for total, grad, place in zip(sums, grads, (stack.queries, stack.keys, stack.keys), strict=True):
            place.view(total).add_(grad)
    return Result(out, lse, *sums)
