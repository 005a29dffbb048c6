"""Useful work: what the pairs that count cost, and nothing that a kernel does besides."""

from __future__ import annotations

from ...geometry.layouts import deal
from ...geometry.patterns import Dense, Pattern, Problem
from ...geometry.task import Task
from ...plan.work import pairs
from .given import Shape

PRODUCTS = {"forward": 2, "backward": 5}  # matrix products for each pair: QK and PV; then QK again, dP, dQ, dK, dV


def pairs_of(shape: Shape, pattern: Pattern) -> int:
    """(query head, query, key) triples that count, as often as they do."""
    n = shape.n
    if pattern == Dense(causal=True):
        return shape.heads * n * (n + 1) // 2
    if pattern == Dense(causal=False):
        return shape.heads * n * n
    alone = deal("contiguous", n, 1)
    task = Task(pattern, Problem(1, n, n, shape.kv_heads, 0), alone, alone, shape.heads)
    return pairs(task, 0) * task.share


def flops(shape: Shape, pattern: Pattern, phase: str) -> int:
    """Multiplications and additions of a pass."""
    return PRODUCTS[phase] * 2 * shape.d * pairs_of(shape, pattern)
