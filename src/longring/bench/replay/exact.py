"""The float64 definition for a few queries or keys, from drawn numbers, a chunk of the other side at a time.

Beside each value stands what its error budgets are made of: the same sums in the precision under test, every
intermediate rounded to it (`rough`); as a fused kernel of 16 bits computes them, which rounds the weights and the
gradients of scores that go into a matrix product, and nothing else before the result (`fused`); and with every term
taken positive (`large`). And its *size*, the root of the sum of its terms' squares, by which rows are made comparable:
those that see a million keys have small outputs.
Scores need no running maximum: of numbers up to 3 ** 0.5 they stay far below what a float32 can exponentiate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .numbers import Numbers

AT_ONCE = {"cpu": 1 << 21, "cuda": 1 << 25}  # scores, or numbers of drawn rows


class Terms(NamedTuple):
    """What every answer depends on besides positions."""

    numbers: Numbers
    dtype: torch.dtype
    share: int  # query heads to a kv head
    scale: float

    @property
    def at_once(self) -> int:
        return AT_ONCE[self.numbers.device.type]

    @property
    def is_narrow(self) -> bool:
        """Whether it has 16 bits; more are computed in float32 here, which stands for float64 too."""
        return self.dtype.itemsize == 2

    def cast(self, x: Tensor) -> Tensor:
        """As they are kept in the dtype, with its range: small numbers of float16 lose bits."""
        return x.to(self.dtype).to(x.dtype) if self.is_narrow else x

    def rounded(self, x: Tensor) -> Tensor:
        """The float32 numbers to the bits of the dtype, whatever their exponents."""
        if not self.is_narrow:
            return x
        if self.dtype == torch.bfloat16:
            return x.to(self.dtype).float()
        digits, exponent = torch.frexp(x)
        return torch.ldexp(digits.to(self.dtype).float(), exponent)


class Judged(NamedTuple):
    """Vectors of one quantity, [vectors, d], or plain numbers, [vectors, 1]; the size is [vectors]."""

    value: Tensor
    rough: Tensor
    fused: Tensor  # the result is not rounded yet
    large: Tensor
    size: Tensor

    @classmethod
    def of(cls, several: list[Judged]) -> Judged:
        return cls(*(torch.cat(parts) for parts in zip(*several, strict=True)))


class Sum:
    """sum over j of coefficients [..., i, j] times rows [..., j, d]."""

    def __init__(self, *shape: int, device: torch.device) -> None:
        self.value = torch.zeros(shape, dtype=torch.float64, device=device)
        self.rough, self.fused, self.large = (torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(3))
        self.squares = torch.zeros(shape[:-1], dtype=torch.float64, device=device)

    def add(self, by: Coefficients, rows: Tensor) -> None:
        single = rows.float()
        self.value += by.exact @ rows
        self.rough += by.rough @ single
        self.fused += by.fused @ single
        self.large += by.large @ single.abs()
        self.squares += (by.squares @ rows.square().sum(-1, keepdim=True)).squeeze(-1)

    def judged(self, terms: Terms, over: Totals | None = None) -> Judged:
        """Divided by what normalises it, each in its own way, if there is such a thing."""
        over = over or Totals(*(torch.ones_like(x[..., 0]) for x in (self.value, self.fused, self.rough)))
        exact, single, narrow = (_seen(x).unsqueeze(-1) for x in over)
        return Judged(
            (self.value / exact).flatten(0, -2),
            terms.rounded(self.rough / narrow).flatten(0, -2),
            (self.fused / single).flatten(0, -2),
            (self.large / exact.float()).flatten(0, -2),
            (self.squares.sqrt() / exact.squeeze(-1)).flatten(),
        )


class Totals(NamedTuple):
    """Sums of exp(score): exactly, in float32, and of scores that were rounded to the dtype."""

    exact: Tensor
    single: Tensor
    narrow: Tensor


class Coefficients(NamedTuple):
    exact: Tensor
    rough: Tensor
    fused: Tensor
    large: Tensor
    squares: Tensor


class Weights(NamedTuple):
    """exactly, roughly, and in float32."""

    exact: Tensor
    rough: Tensor
    single: Tensor

    def coefficients(self, fused: Tensor) -> Coefficients:
        return Coefficients(self.exact, self.rough, fused, self.exact.float(), self.exact.square())


class Delta(NamedTuple):
    """rowsum(dout * out): exactly, roughly, from the rounded result, with every term taken positive, and squared."""

    exact: Tensor
    rough: Tensor
    fused: Tensor
    large: Tensor
    squares: Tensor

    @classmethod
    def of(cls, dout: Tensor, out: Tensor, rough_out: Tensor, kept_out: Tensor) -> Delta:
        return cls(
            (dout * out).sum(-1),
            (dout.float() * rough_out).sum(-1),
            (dout.float() * kept_out).sum(-1),
            (dout.abs() * out.abs()).sum(-1).float(),
            (dout * out).square().sum(-1),
        )


class Products(NamedTuple):
    """dout . v, likewise."""

    exact: Tensor
    rough: Tensor
    large: Tensor
    squares: Tensor


def _of_scores(terms: Terms, weights: Weights, products: Products, delta: Delta) -> Coefficients:
    """What the gradient of a score is: scale * weight * (dout . v - delta). A fused kernel scales the sum of them."""
    scale = terms.scale
    return Coefficients(
        scale * weights.exact * (products.exact - delta.exact),
        terms.rounded(scale * terms.rounded(weights.rough * (terms.rounded(products.rough) - delta.rough))),
        scale * terms.cast(weights.single * (products.rough - delta.fused)),
        scale * weights.exact.float() * (products.large + delta.large),
        # of their terms: by chance the sums themselves may be nearly 0, and what was rounded in them is not
        scale**2 * weights.exact.square() * (products.squares + delta.squares),
    )


# --------------------------------------------------------------------------------------------------- queries


class Asked(NamedTuple):
    """Queries whose keys are looked at together. With limits a key counts only if lo <= key - query <= hi."""

    batch: int
    kv_heads: range
    positions: tuple[int, ...]
    keys: tuple[range, ...]
    limits: tuple[int | None, int | None] | None = None


def answers(terms: Terms, asked: Asked, *, with_dq: bool) -> dict[str, Judged]:
    """out, lse and dq of the queries, in the order of kv heads, then positions, then query heads of a kv head."""
    q = _queries(terms, asked, "q")
    out, kinds = Sum(*q.shape, device=q.device), (torch.float64, torch.float32, torch.float32)
    total = Totals(*(torch.zeros(q.shape[:2], dtype=dtype, device=q.device) for dtype in kinds))
    for k, v, seen in _keys(terms, asked):
        exact, single, rough = _exponentials(terms, q, k, seen)
        for one, some in zip(total, (exact, single, rough), strict=True):
            one += some.sum(-1)
        # a kernel's weights are at most 1 here, whatever those of this sum are
        out.add(Weights(exact, terms.rounded(rough), single).coefficients(terms.rounded(single)), v)
    found = {"out": out.judged(terms, total), "lse": _lse(total)}
    if not with_dq:
        return found
    dout, dq = _queries(terms, asked, "dout"), Sum(*q.shape, device=q.device)
    by = Totals(*(_seen(x).unsqueeze(-1) for x in total))
    delta = Delta.of(dout, out.value / by.exact, out.rough / by.narrow, terms.cast(out.fused / by.single))
    delta = Delta(*(x.unsqueeze(-1) for x in delta))
    for k, v, seen in _keys(terms, asked):
        exact, single, rough = _exponentials(terms, q, k, seen)
        weights = Weights(exact / by.exact, terms.rounded(rough / by.narrow), single / by.single)
        dq.add(_of_scores(terms, weights, _products(dout, v), delta), k)
    return found | {"dq": dq.judged(terms)}


def _queries(terms: Terms, asked: Asked, tensor: str) -> Tensor:
    """[kv heads, positions * query heads of one, d]."""
    positions = torch.tensor(asked.positions, device=terms.numbers.device)
    by_kv_head = []
    for kv_head in asked.kv_heads:
        heads = range(kv_head * terms.share, (kv_head + 1) * terms.share)
        drawn = [terms.numbers.at(tensor, asked.batch, positions, head, terms.dtype) for head in heads]
        by_kv_head.append(torch.stack(drawn, dim=1).flatten(0, 1))
    return torch.stack(by_kv_head).double()


def _keys(terms: Terms, asked: Asked) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """(k, v [kv heads, keys, d], which query sees which [queries, keys]) a chunk at a time."""
    queries = torch.tensor(asked.positions, device=terms.numbers.device).repeat_interleave(terms.share).unsqueeze(1)
    most = max(1, terms.at_once // (len(asked.kv_heads) * max(len(queries), terms.numbers.d)))
    for keys in in_chunks(asked.keys, most, terms.numbers.device):
        k, v = (
            torch.stack([terms.numbers.at(x, asked.batch, keys, head, terms.dtype) for head in asked.kv_heads])
            for x in "kv"
        )
        yield k.double(), v.double(), None if asked.limits is None else _within(keys - queries, *asked.limits)


def in_chunks(ranges: tuple[range, ...], most: int, device: torch.device) -> Iterator[Tensor]:
    """All positions of the ranges, at most so many at a time."""
    waiting: list[range] = []
    room = most
    for r in ranges:
        while r:
            waiting.append(r[:room])
            room, r = room - len(waiting[-1]), r[room:]
            if not room:
                yield _together(waiting, device)
                waiting, room = [], most
    if waiting:
        yield _together(waiting, device)


def _together(ranges: list[range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(r.start, r.stop, r.step, device=device) for r in ranges])


def _within(distance: Tensor, lo: int | None, hi: int | None) -> Tensor:
    seen = torch.ones_like(distance, dtype=torch.bool)
    if lo is not None:
        seen &= distance >= lo
    if hi is not None:
        seen &= distance <= hi
    return seen


def _exponentials(terms: Terms, q: Tensor, k: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """exp(score): exactly, in float32, and of scores that were rounded to the dtype."""
    exact = (terms.scale * (q @ k.mT)).exp_()
    raw = q.float() @ k.float().mT
    plain = (terms.scale * raw).exp_()
    rough = terms.rounded(terms.scale * terms.rounded(raw)).exp_() if terms.is_narrow else plain
    return (exact, plain, rough) if seen is None else (exact * seen, plain * seen, rough * seen)


def _products(dout: Tensor, v: Tensor) -> Products:
    mine, theirs = dout.float(), v.float()
    squares = (mine.square() @ theirs.square().mT).double()
    return Products(dout @ v.mT, mine @ theirs.mT, mine.abs() @ theirs.abs().mT, squares)


def _seen(total: Tensor) -> Tensor:
    """What nothing was seen of is divided by 1."""
    return total.masked_fill(total == 0, 1.0)


def _lse(total: Totals) -> Judged:
    """In float32 whatever the inputs are."""
    value, rough = (x.log().flatten().unsqueeze(1) for x in (total.exact, total.single))
    large = torch.where(value > -torch.inf, value.abs() + 1.0, 0.0)
    return Judged(value, rough, rough, large.float(), large.squeeze(1))


# ------------------------------------------------------------------------------------------------------ keys


class Key(NamedTuple):
    """A key, and the queries to whose gradients it contributes here."""

    batch: int
    position: int
    kv_head: int
    queries: tuple[range, ...]


class Rows:
    """What the backward knows of whole query rows: out and lse as they were found."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out, lse

    def at(self, batch: int, rows: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """(out [rows, d], lse [rows]) in float64."""
        return self.out[batch, rows, head].double(), self.lse[batch, head, rows].double()


def contributions(terms: Terms, key: Key, rows: Rows, local: Local) -> dict[str, Judged]:
    """dk and dv of one key by some queries, [1, d] each."""
    numbers = terms.numbers
    here = torch.tensor([key.position], device=numbers.device)
    k, v = (numbers.at(x, key.batch, here, key.kv_head, terms.dtype).double() for x in "kv")
    dk, dv = (Sum(1, terms.numbers.d, device=numbers.device) for _ in "kv")
    for positions in in_chunks(key.queries, max(1, terms.at_once // numbers.d), numbers.device):
        at = local(positions)
        for head in range(key.kv_head * terms.share, (key.kv_head + 1) * terms.share):
            q, dout = (numbers.at(x, key.batch, positions, head, terms.dtype).double() for x in ("q", "dout"))
            out, lse = rows.at(key.batch, at, head)
            weights = _known_weights(terms, q, k, lse)
            products = Products(*(x.mT for x in _products(dout, v)))
            delta = Delta.of(dout, out, out.float(), terms.cast(out.float()))
            delta = Delta(*(x.unsqueeze(0) for x in delta))
            dv.add(weights.coefficients(terms.cast(weights.single)), dout)
            dk.add(_of_scores(terms, weights, products, delta), q)
    return {"dk": dk.judged(terms), "dv": dv.judged(terms)}


def _known_weights(terms: Terms, q: Tensor, k: Tensor, lse: Tensor) -> Weights:
    """[1, queries]."""
    exact = (terms.scale * (k @ q.mT) - lse).exp_()
    raw = k.float() @ q.float().mT
    rough = (terms.rounded(terms.scale * terms.rounded(raw)) - lse.float()).exp_()
    return Weights(exact, terms.rounded(rough), (terms.scale * raw - lse.float()).exp_())


class Local:
    """From positions to the rows that a rank holds them in."""

    def __init__(self, shard: tuple[range, ...]) -> None:
        self._pieces = shard

    def __call__(self, positions: Tensor) -> Tensor:
        rows, before = torch.full_like(positions, -1), 0
        for piece in self._pieces:
            inside = (positions >= piece.start) & (positions < piece.stop)
            rows = torch.where(inside, before + (positions - piece.start) // piece.step, rows)
            before += len(piece)
        assert bool((rows >= 0).all()), "a query that this rank does not hold"
        return rows
