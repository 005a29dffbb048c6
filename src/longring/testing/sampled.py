"""The float64 answer for some rows and some keys, in chunks, and how far from it a result may be.

Which pairs count is asked of the definition; nothing is shared with tiles, kernels or merging.

Beside each sum stands its *size*: the root of the sum of its terms' squares. Rounding errors are in proportion to
that, also where the terms cancel, as in the gradient of a query that sees a single key. `allowed` is derived, never
tuned: one spacing of the inputs' dtype for the roundings of weights and results, plus what sums in the accumulator's
dtype lose: the products of a score, its exponential, and the partial sums of long rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry.patterns import Pattern, Problem
from ..numerics.definition import pair_counts_at
from ..numerics.online_softmax import accumulator_dtype

NUMBERS_AT_ONCE = 1 << 25  # 256 MiB of float64, a few of which are alive at a time
EXPONENTIAL = 4.0  # roundings in an exponential of a GPU's approximation


class Given(NamedTuple):
    """One call's tensors. Without dout there are no gradients; dlse is that of lse, if it has one."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None
    dlse: Tensor | None = None

    @property
    def upstream(self) -> Tensor:
        assert self.dout is not None, "made without a gradient to start a backward from"
        return self.dout

    @property
    def tensor_bytes(self) -> int:
        """One tensor of the call's size: the unit in which memory is told."""
        return self.q.numel() * self.q.element_size()

    def with_gradients(self) -> Given:
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        return self._replace(q=q, k=k, v=v)


class Sum(NamedTuple):
    value: Tensor  # [batch, rows, heads, d]
    size: Tensor  # [batch, rows, heads]
    allowed: Tensor  # [batch, rows, heads]: the distance from value that rounding explains


class Rows(NamedTuple):
    """What some queries get."""

    out: Sum
    lse: Tensor  # [batch, heads, rows]
    dq: Sum | None
    lse_allowed: Tensor


class Columns(NamedTuple):
    """What some keys and values get."""

    dk: Sum
    dv: Sum


def exact_rows(
    x: Given,
    pattern: Pattern,
    rows: Tensor,
    *,
    scale: float | None = None,
    query_offset: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Rows:
    """out, lse and, where there is an upstream gradient, dq of the queries at `rows`, from q, k, v, dout and dlse.

    In another dtype this is the same definition, no longer exact: it shows what rounding alone does.
    """
    scale, share, d = _scale(x, scale), x.q.shape[2] // x.k.shape[2], x.q.shape[3]
    q, unit = x.q[:, rows].to(dtype), _Unit.of(x.q)
    chunks = list(_chunks(x, pattern, rows, query_offset))
    lse = q.new_full((q.shape[0], q.shape[2], len(rows)), -torch.inf)
    highest, terms = lse.clone(), torch.zeros_like(lse)
    for columns, counts in chunks:
        scores = _scores(q, _wide(x.k, columns, share, dtype), counts, scale)
        lse, highest = torch.logaddexp(lse, scores.logsumexp(-1)), torch.maximum(highest, scores.amax(-1))
        terms += _by_heads((counts > 0).sum(-1), q.shape[2])
    known = _known(lse)
    out, out_size, out_noise = torch.zeros_like(q), q.new_zeros(q.shape[:3]), q.new_zeros(q.shape[:3])
    squares, mean_slip = q.new_zeros(q.shape[:3]), torch.zeros_like(lse)
    for columns, counts in chunks:
        k, v = (_wide(t, columns, share, dtype) for t in (x.k, x.v))
        scores = _scores(q, k, counts, scale)
        weights, norms = _weights(scores, lse), v.square().sum(-1)
        slip = _slip(scores, known, q, k, scale)
        out += torch.einsum("bhij,bjhd->bihd", weights, v)
        out_size += torch.einsum("bhij,bjh->bih", weights**2, norms)
        out_noise += torch.einsum("bhij,bjh->bih", (weights * slip) ** 2, norms)
        squares += torch.einsum("bhij,bjh->bih", (weights > 0).to(dtype), norms)
        mean_slip += (weights * slip).sum(-1)
    of_total = EXPONENTIAL + _added_up(terms, drift=True) + known.abs()  # of the sum of all weights
    lse_allowed = unit.sums / 2 * (of_total + mean_slip)
    size, added = out_size.sqrt_(), _added_up(terms).mT
    reach = torch.maximum(size, out.norm(dim=-1))
    in_sums = out_noise.sqrt_() + of_total.mT * out.norm(dim=-1) + added * reach
    out_allowed = unit.inputs * reach + unit.sums / 2 * in_sums
    # 16-bit weights of softmax are 1 at most: the smallest are rounded to multiples of the least number
    out_allowed += unit.least / 2 * (_weights(highest.unsqueeze(-1), lse).squeeze(-1).mT * squares.sqrt() + d**0.5)
    out_allowed *= terms.mT > 0
    lse_allowed = lse_allowed * (terms > 0)
    found = Sum(out, size, out_allowed)
    if x.dout is None:
        return Rows(found, lse, None, lse_allowed)
    up = _Upstream.of(x, rows, out, dtype)
    slipped = out_allowed / reach.clamp(min=torch.finfo(dtype).tiny)  # of out, which delta is made of
    delta_error = slipped * torch.maximum(up.products.abs() / 2, up.delta_size).mT
    dq, met = torch.zeros_like(q), torch.zeros_like(q)
    dq_size, dq_rounded, dq_noise, squares = (q.new_zeros(q.shape[:3]) for _ in range(4))
    for columns, counts in chunks:
        k, v = (_wide(t, columns, share, dtype) for t in (x.k, x.v))
        scores = _scores(q, k, counts, scale)
        weights, norms = _weights(scores, lse), k.square().sum(-1)
        dweights = torch.einsum("bihd,bjhd->bhij", up.dout, v)
        dq += scale * torch.einsum("bhij,bjhd->bihd", weights * (dweights - up.delta.unsqueeze(-1)), k)
        met += scale * torch.einsum("bhij,bjhd->bihd", weights, k)
        size, rounded, noise = up.terms(weights, dweights, _slip(scores, known, q, k, scale), v)
        seen = (weights > 0).to(dtype)
        for total, per_pair in ((dq_size, size), (dq_rounded, rounded), (dq_noise, noise)):
            total += scale**2 * torch.einsum("bhij,bjh->bih", per_pair, norms)
        squares += _scale_of_least(scale) ** 2 * torch.einsum("bhij,bjh->bih", seen, norms)
    norm = dq.norm(dim=-1)
    reach = torch.maximum(dq_rounded.sqrt_(), norm)
    allowed = torch.hypot(unit.inputs * reach, delta_error * met.norm(dim=-1)) + lse_allowed.mT * norm
    allowed += unit.sums / 2 * (dq_noise.sqrt_() + added * reach)
    allowed += unit.least / 2 * (squares.sqrt() + d**0.5)
    return Rows(found, lse, Sum(dq, dq_size.sqrt_(), allowed * (terms.mT > 0)), lse_allowed)


def exact_columns(
    x: Given,
    pattern: Pattern,
    columns: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float | None = None,
    query_offset: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Columns:
    """dk and dv of the keys at `columns`. out and lse of all rows are taken as they were found.

    What rounding those had, the backward under test had to live with as well.
    """
    scale, share, d = _scale(x, scale), x.q.shape[2] // x.k.shape[2], x.q.shape[3]
    k, v = _wide(x.k, columns, share, dtype), _wide(x.v, columns, share, dtype)
    unit = _Unit.of(x.q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    sizes = [k.new_zeros(k.shape[:3]) for _ in range(8)]
    dk_size, dk_rounded, dk_noise, dk_squares, dv_size, dv_noise, dv_squares, terms = sizes
    for rows, counts in _chunks(x, pattern, columns, query_offset, transposed=True):
        q, here = x.q[:, rows].to(dtype), lse[:, :, rows].to(dtype)
        up = _Upstream.of(x, rows, out[:, rows].to(dtype), dtype)
        scores = _scores(q, k, counts, scale)
        weights, slip = _weights(scores, here), _slip(scores, _known(here), q, k, scale)
        dweights = torch.einsum("bihd,bjhd->bhij", up.dout, v)
        seen, q_norms, norms = (weights > 0).to(dtype), q.square().sum(-1), up.dout.square().sum(-1)
        dv += torch.einsum("bhij,bihd->bjhd", weights, up.dout)
        dk += scale * torch.einsum("bhij,bihd->bjhd", weights * (dweights - up.delta.unsqueeze(-1)), q)
        size, rounded, noise = up.terms(weights, dweights, slip, v)
        for total, per_pair, per_row in (
            (dv_size, weights**2, norms),
            (dv_noise, (weights * slip) ** 2, norms),
            (dv_squares, seen, norms),
            (dk_size, size, scale**2 * q_norms),
            (dk_rounded, rounded + weights**2 * up.delta_size.unsqueeze(-1) ** 2, scale**2 * q_norms),
            (dk_noise, noise, scale**2 * q_norms),
            (dk_squares, seen, _scale_of_least(scale) ** 2 * q_norms),
        ):
            total += torch.einsum("bhij,bih->bjh", per_pair, per_row)
        terms += _by_heads((counts > 0).sum(2), k.shape[2]).mT
    kept = _over_shares(terms, share)

    def summed(total: Tensor, *parts: Tensor) -> Sum:
        value = _over_shares(total, share)
        size, rounded, noise, squares = (_over_shares(part, share).sqrt_() for part in parts)
        reach = torch.maximum(rounded, value.norm(dim=-1))
        allowed = unit.inputs * reach + unit.sums / 2 * (noise + _added_up(kept) * reach)
        return Sum(value, size, (allowed + unit.least / 2 * (squares + d**0.5)) * (kept > 0))

    of_dv = summed(dv, dv_size, dv_size, dv_noise, dv_squares)
    return Columns(summed(dk, dk_size, dk_rounded, dk_noise, dk_squares), of_dv)


# ---------------------------------------------------------------------------------------------------- errors


def error_ratios(got: Tensor, want: Sum) -> Tensor:
    """[batch, rows]: the distance of each row from `want` in units of what is allowed; infinite for nan.

    All heads together; of a single one, whose few numbers scatter more, twice as much is allowed, whether or not there
    are others. Where nothing is allowed, as in a row that sees no key, nothing but equality is right.
    """
    squares = (got.to(want.value.dtype) - want.value).square().sum(-1)
    of_each = _ratio(squares.sqrt(), 2 * want.allowed).amax(-1)
    if squares.shape[-1] == 1:
        return of_each
    return torch.maximum(_ratio(squares.sum(-1).sqrt(), want.allowed.square().sum(-1).sqrt()), of_each)


def lse_ratios(got: Tensor, want: Rows) -> Tensor:
    """[batch, heads, rows]: the same of lse, where -inf is right only for -inf."""
    distance = torch.where(got == want.lse, 0.0, (got.to(want.lse.dtype) - want.lse).abs())
    return _ratio(distance, want.lse_allowed)


def _ratio(distance: Tensor, allowed: Tensor) -> Tensor:
    ratio = distance / allowed  # 0 / 0 is right, anything else over 0 is not
    return torch.where(distance == 0, 0.0, ratio.nan_to_num(nan=torch.inf, posinf=torch.inf))


# ----------------------------------------------------------------------------------------------------- terms


class _Unit(NamedTuple):
    """Spacings at one."""

    inputs: float
    sums: float  # of the dtype that sums are kept in
    least: float  # the least positive number of the inputs' dtype

    @staticmethod
    def of(x: Tensor) -> _Unit:
        info, wide = torch.finfo(x.dtype), accumulator_dtype(x.dtype)
        own = 2.0 if wide == torch.float64 else 1.0  # what is judged against then errs as much
        return _Unit(own * info.eps, own * torch.finfo(wide).eps, info.tiny * info.eps)


class _Upstream(NamedTuple):
    """The gradients that come in, of some rows. [batch, heads, rows] but for dout."""

    dout: Tensor
    products: Tensor  # rowsum(dout * out)
    delta: Tensor  # the same without dlse
    delta_size: Tensor

    @staticmethod
    def of(x: Given, rows: Tensor, out: Tensor, dtype: torch.dtype) -> _Upstream:
        dout = x.upstream[:, rows].to(dtype)
        products = torch.einsum("bihd,bihd->bhi", dout, out)
        delta = products if x.dlse is None else products - x.dlse[:, :, rows].to(dtype)
        return _Upstream(dout, products, delta, torch.einsum("bihd,bihd->bhi", dout**2, out**2).sqrt_())

    def terms(self, weights: Tensor, dweights: Tensor, slip: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of weights * (dweights - delta), squared: its size, itself (which is rounded), and what sums lose of it."""
        delta, d = self.delta.unsqueeze(-1), v.shape[3]
        size = weights**2 * (dweights**2 + delta**2)
        products = torch.einsum("bihd,bjhd->bhij", self.dout**2, v**2) + self.delta_size.unsqueeze(-1) ** 2
        noise = (2 * slip**2 + d) * size + d * weights**2 * products
        return size, (weights * (dweights - delta)) ** 2, noise


def _slip(scores: Tensor, lse: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """By how many half spacings of the accumulator's dtype a weight may be off, relative to it.

    The products of a score are added up one by one: partial sums walk at random, and drift to where the score is. A
    rounding is two fifths of its largest in the mean; this is four times the mean of all. Then score and lse are
    rounded, and the exponential is.
    """
    scores = _known(scores)
    walk = scale**2 * torch.einsum("bihd,bjhd->bhij", q**2, k**2) + scores**2
    return EXPONENTIAL + (walk * q.shape[3]).sqrt_() + scores.abs() + lse.abs().unsqueeze(-1)


def _scale_of_least(scale: float) -> float:
    """By what the least number of the inputs' dtype is multiplied in dq and dk.

    Gradients of scores are rounded to that dtype, by some kernels before they are multiplied by the scale, by others
    afterwards: of 20,000 keys' in float16 and a scale below 1 most are then multiples of its least number.
    """
    return max(1.0, abs(scale))


def _added_up(terms: Tensor, *, drift: bool = False) -> Tensor:
    """By how many half spacings a sum may be off whose terms are added one by one, relative to its size.

    A rounding is two fifths of its largest in the mean. Partial sums of terms of either sign walk at random, to half
    the squares of all, and a row of such sums is off by their mean. One sum of positive terms drifts, to a third, and
    may be off by four times the mean; its terms are added by four threads at least.
    """
    return 1 + (4 * 0.4 * (terms / 3 / 4).sqrt() if drift else 1.4 * 0.4 * (terms / 2).sqrt())


def _over_shares(total: Tensor, share: int) -> Tensor:
    return total.unflatten(2, (-1, share)).sum(3)


def _by_heads(counted: Tensor, heads: int) -> Tensor:
    """[batch or 1, kv_heads or 1, some] as [batch or 1, heads, some]."""
    return counted.repeat_interleave(heads // counted.shape[1], 1)


def _known(logs: Tensor) -> Tensor:
    return logs.masked_fill(logs == -torch.inf, 0.0)


def _scale(x: Given, scale: float | None) -> float:
    return x.q.shape[3] ** -0.5 if scale is None else scale


def _chunks(
    x: Given, pattern: Pattern, some: Tensor, query_offset: int | None, transposed: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """All that meet `some`, a chunk at a time, with the counts [batch or 1, kv_heads or 1, queries, keys]."""
    n_q, heads, d = x.q.shape[1:]
    batch, n_k, kv_heads = x.k.shape[:3]
    problem = Problem(batch, n_q, n_k, kv_heads, n_k - n_q if query_offset is None else query_offset)
    pattern.check(problem)
    others_are = n_q if transposed else n_k
    most = max(1, NUMBERS_AT_ONCE // (batch * heads * max(d, len(some))))
    for start in range(0, others_are, most):
        others = torch.arange(start, min(start + most, others_are), device=x.k.device)
        counts = pair_counts_at(pattern, problem, *((others, some) if transposed else (some, others))).byte()
        met = counts.amax(dim=(0, 1, 3) if transposed else (0, 1, 2)) > 0
        kept = met.nonzero().squeeze(1)  # of LongNet's positions only few meet a given one
        if len(kept):
            yield others[kept], counts[:, :, kept] if transposed else counts[..., kept]


def _wide(x: Tensor, positions: Tensor, share: int, dtype: torch.dtype) -> Tensor:
    """[batch, positions, heads, d]: every query head with the keys of its kv head."""
    return x[:, positions].to(dtype).repeat_interleave(share, 2)


def _scores(q: Tensor, k: Tensor, counts: Tensor, scale: float) -> Tensor:
    """[batch, heads, i, j], log(count) added."""
    logs = counts.to(q.dtype).log()
    return scale * torch.einsum("bihd,bjhd->bhij", q, k) + (
        logs if logs.shape[1] == 1 else logs.repeat_interleave(q.shape[2] // logs.shape[1], 1)
    )


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    # a row that sees nothing has only scores of -inf, which weigh 0
    return (scores - _known(lse).unsqueeze(-1)).exp()
