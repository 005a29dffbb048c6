"""Error budgets: how far from the definition a result may be, derived from its dtype and never tuned.

The yardstick is the definition itself, evaluated in the same precision: twice its error is allowed (a
different order of the same sums), and one rounding of the result and of its largest intermediate terms.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..geometry.patterns import Pattern
from ..numerics.online_softmax import accumulator_dtype
from .oracle import Result, magnitudes, oracle

SLACK = 2.0


class Verdict(NamedTuple):
    """One quantity against the definition; errors are relative, by the Frobenius norm."""

    quantity: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed and self.error < inf  # nan is never right, whatever was allowed


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| by the Frobenius norm; infinite where one is finite and the other is not."""
    norm = float(_finite(want.detach().double()).norm())
    return distance(got, want) / norm if norm else distance(got, want)


def distance(got: Tensor, want: Tensor) -> float:
    """|got - want| by the Frobenius norm, where -inf equals -inf and nan equals nothing."""
    got, want = got.detach().double(), want.detach().double()
    if got.shape != want.shape or bool(got.isnan().any()):
        return float("inf")
    if not torch.equal(got.isinf(), want.isinf()) or not torch.equal(got[got.isinf()], want[want.isinf()]):
        return float("inf")
    return float((_finite(got) - _finite(want)).norm())


def budgets(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, dout: Tensor, dlse: Tensor | None = None, **where: Any
) -> tuple[Result, dict[str, float]]:
    """(the float64 answer, the error allowed for each quantity, relative to its norm)."""
    want = oracle(q, k, v, pattern, dout, dlse, **where)
    # float64 cannot be its own yardstick: float32's error, by as much smaller as its rounding is
    narrow = torch.float32 if q.dtype == torch.float64 else q.dtype
    finer = torch.finfo(q.dtype).eps / torch.finfo(narrow).eps
    rough = oracle(q, k, v, pattern, dout, dlse, **where, dtype=narrow)
    wide = accumulator_dtype(q.dtype)
    if wide != q.dtype:  # 16 bits: lse is kept in the accumulator's dtype whatever the inputs are
        rough = rough._replace(lse=oracle(q, k, v, pattern, dout, dlse, **where, dtype=wide).lse)
    terms = magnitudes(q, k, v, pattern, dout, dlse, **where)
    allowed = {}
    for name in Result._fields:
        exact, near, large = (getattr(result, name) for result in (want, rough, terms))
        norm = float(_finite(exact).norm())
        dtype = wide if name == "lse" else q.dtype
        rounding = torch.finfo(dtype).eps * norm + torch.finfo(wide).eps * float(large.norm())
        budget = SLACK * finer * distance(near, exact) + rounding
        allowed[name] = budget / norm if norm else budget
    return want, allowed


def judge(
    got: Result,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    dout: Tensor,
    dlse: Tensor | None = None,
    **where: Any,
) -> list[Verdict]:
    """Every quantity of a result against the definition and its budget."""
    want, allowed = budgets(q, k, v, pattern, dout, dlse, **where)
    return [
        Verdict(name, relative_error(getattr(got, name), getattr(want, name)), allowed[name])
        for name in Result._fields
        if getattr(got, name) is not None
    ]


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0)
