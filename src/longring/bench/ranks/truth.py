"""What is right: sampled rows and columns in float64, and how far from them a result may be."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import LongringError
from ...functional import attention
from ...geometry.patterns import Pattern
from ...testing.sampled import Columns, Rows, Sum, exact_columns, exact_rows
from ..gpu.check import Errors, Result, allowed, errors_of, sampled, worst_error
from ..gpu.given import Given

SLACK = 2.0  # another order of the same sums


class Truth(NamedTuple):
    """The float64 answer at some positions."""

    rows: Tensor
    out: Sum
    dq: Sum
    columns: Tensor
    dk: Sum
    dv: Sum
    allowed: Errors


class Pieces(NamedTuple):
    """What one rank found at the positions that are judged, and which of them it holds."""

    rows: Tensor
    out: Tensor
    dq: Tensor
    columns: Tensor
    dk: Tensor
    dv: Tensor


def truth_of(x: Given, pattern: Pattern) -> Truth:
    """From q, k, v and dout alone, but for the lse of all rows, which dk and dv need, and which is checked itself."""
    rows, columns = sampled(x.q.shape[1], x.q.device), sampled(x.k.shape[1], x.k.device, seed=2)
    with torch.no_grad():
        out, lse = attention(x.q, x.k, x.v, pattern=pattern, return_lse=True)
    exact = exact_rows(x, pattern, rows)
    there = exact_columns(x, pattern, columns, out, lse)
    assert exact.dq is not None
    limits = _allowed(x, pattern, exact, rows, there, columns, (out, lse))
    errors = errors_of(x._replace(dout=None), pattern, Result(out, lse))
    if not all(errors[name] <= limits[name] for name in errors):
        raise LongringError(f"the lse that dk and dv would be judged by is wrong itself: {errors}, allowed {limits}")
    return Truth(rows, exact.out, exact.dq, columns, there.dk, there.dv, limits)


def _allowed(
    x: Given, pattern: Pattern, rows: Rows, at_rows: Tensor, columns: Columns, at_columns: Tensor, known: tuple
) -> Errors:
    """Twice what the definition loses in the same precision, and one rounding; 16 bits have a rule of their own.

    A backward also has to live with the rounding of its own forward: an lse that is off by x makes every weight off by
    x, and an out that is off moves what is subtracted from every gradient of a weight.
    """
    dtype = x.q.dtype
    if dtype.itemsize == 2:
        return allowed(dtype)
    finer = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps  # float64 cannot be its own yardstick
    near = exact_rows(x, pattern, at_rows, dtype=torch.float32)
    there = exact_columns(x, pattern, at_columns, *known, dtype=torch.float32)
    assert near.dq is not None
    assert rows.dq is not None
    lost = {
        "out": worst_error(near.out.value, rows.out),
        "dq": worst_error(near.dq.value, rows.dq),
        "dk": worst_error(there.dk.value, columns.dk),
        "dv": worst_error(there.dv.value, columns.dv),
    }
    eps = torch.finfo(dtype).eps
    seen = rows.lse > -torch.inf
    lse = float((near.lse - rows.lse)[seen].abs().max()) if bool(seen.any()) else 0.0
    size = float(rows.lse[seen].abs().max()) if bool(seen.any()) else 0.0
    limits = {name: SLACK * finer * error + eps for name, error in lost.items()}
    limits["lse"] = SLACK * finer * lse + eps * (1 + size)
    forward = limits["lse"] + limits["out"]
    return limits | {name: limits[name] + forward for name in ("dq", "dk", "dv")}


def pieces(truth: Truth, positions: Tensor, out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> Pieces:
    """Of a rank that holds the rows and columns at `positions`, in that order."""
    rows, columns = (torch.isin(positions, some).nonzero().squeeze(1) for some in (truth.rows, truth.columns))
    return Pieces(*(positions[rows], out[:, rows], dq[:, rows]), *(positions[columns], dk[:, columns], dv[:, columns]))


def errors_in(truth: Truth, found: list[Pieces]) -> Errors:
    """The worst of all ranks; infinite where a position is held by nobody."""
    errors: Errors = {"out": 0.0, "dq": 0.0, "dk": 0.0, "dv": 0.0}
    for part in found:
        here = {"out": part.rows, "dq": part.rows, "dk": part.columns, "dv": part.columns}
        for name, positions in here.items():
            if len(positions):
                want = _at(getattr(truth, name), truth.rows if name in ("out", "dq") else truth.columns, positions)
                errors[name] = max(errors[name], worst_error(getattr(part, name), want))
    for names, wanted, held in (
        (("out", "dq"), truth.rows, [part.rows for part in found]),
        (("dk", "dv"), truth.columns, [part.columns for part in found]),
    ):
        if not bool(torch.isin(wanted, torch.cat(held)).all()):
            errors |= dict.fromkeys(names, torch.inf)
    return errors


def _at(total: Sum, known: Tensor, positions: Tensor) -> Sum:
    where = torch.searchsorted(known, positions)
    return Sum(*(x[:, where] for x in total))
