"""Checked before timed: sampled rows and columns of a result against float64, each judged on its own.

A norm over all sampled rows would hide the long ones, whose outputs are small, behind the short ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...geometry.patterns import Pattern
from ...testing.sampled import Sum, exact_columns, exact_rows
from .given import Given

SAMPLES = 24


class Wrong(AssertionError):
    """A result outside of its budget: it is not timed."""


class Result(NamedTuple):
    """What is to be checked; None where it was not computed."""

    out: Tensor
    lse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


Errors = dict[str, float]


def allowed(dtype: torch.dtype) -> Errors:
    """Of the worst sampled row, in 16 bits: one spacing of the dtype for out, two for gradients.

    A kernel that rounds weights and result has about a third of this; one that forgets a block of sixty-four has
    twenty times it.
    """
    eps = torch.finfo(dtype).eps
    return {"out": eps, "lse": 2**-10, "dq": 2 * eps, "dk": 2 * eps, "dv": 2 * eps}


def sampled(n: int, device: torch.device, *, within: Tensor | None = None, seed: int = 1) -> Tensor:
    """The first, the last, those at both sides of the middle, and random ones; of `within` where that is given."""
    places = torch.arange(n) if within is None else within.cpu()
    random = torch.Generator().manual_seed(seed)
    indices = torch.randint(len(places), (SAMPLES,), generator=random)
    ends = torch.tensor([0, len(places) // 2 - 1, len(places) // 2, len(places) - 1]).clamp(0)
    return places[torch.cat([indices, ends]).unique()].to(device)


def check(x: Given, pattern: Pattern, found: Result, *, rows: Tensor | None = None) -> Errors:
    """The errors of the worst sampled rows and columns. Raises Wrong where one is above what is allowed.

    `rows` are the positions of which `found` has out, lse and dq, if it has not all of them.
    """
    errors = errors_of(x, pattern, found, rows=rows)
    limits = allowed(x.q.dtype)
    beyond = {name: error for name, error in errors.items() if not error <= limits[name]}
    if beyond:
        told = ", ".join(f"{name} {error:.2g} (allowed {limits[name]:.2g})" for name, error in beyond.items())
        raise Wrong(f"against float64 on sampled rows: {told}")
    return errors


def errors_of(x: Given, pattern: Pattern, found: Result, *, rows: Tensor | None = None) -> Errors:
    at = sampled(x.q.shape[1], x.q.device, within=rows)
    here = at if rows is None else torch.searchsorted(rows, at)
    want = exact_rows(x if found.dq is not None else x._replace(dout=None), pattern, at)
    errors = {"out": worst_error(found.out[:, here], want.out)}
    if found.lse is not None:
        errors["lse"] = float((found.lse[:, :, here].double() - want.lse).abs().max())
    if found.dq is not None:
        assert want.dq is not None
        errors["dq"] = worst_error(found.dq[:, here], want.dq)
    if found.dk is not None and found.dv is not None:
        assert found.lse is not None, "dk and dv need the lse of all rows"
        columns = sampled(x.k.shape[1], x.k.device, seed=2)
        there = exact_columns(x, pattern, columns, found.out, found.lse)
        errors["dk"] = worst_error(found.dk[:, columns], there.dk)
        errors["dv"] = worst_error(found.dv[:, columns], there.dv)
    return errors


def worst_error(got: Tensor, want: Sum) -> float:
    """The largest error of a row over its size, all heads together; nan is infinite."""
    distance = (got.double() - want.value).square_().sum((2, 3))
    size = want.size.square().sum(2)
    errors = (distance / size.clamp(min=torch.finfo(torch.float64).tiny)).sqrt_()
    return float(errors.nan_to_num(nan=torch.inf).max())
