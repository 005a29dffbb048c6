"""Sampled rows of what a rank found, against the float64 definition from the same numbers, within error budgets.

Rows are divided by their size first, so that none hides behind another. Two questions to each quantity: are the rows
together as close as they should be, and is the worst of them?

In 16 bits the rows together may be three times as far off as a fused kernel's arithmetic is on these very rows: its
roundings are random, and of thousands of them the mean is known well. The worst row may be as far off as everywhere in
`longring.testing`: twice the error of the definition in the same precision, and the rounding of the result and its
terms. In 32 and 64 bits both are judged by that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...geometry.layouts import Shard, size
from ...geometry.parcels import Parcel
from ...geometry.patterns import Dense
from ...geometry.task import Task
from ...numerics.online_softmax import accumulator_dtype
from .exact import Asked, Judged, Key, Local, Rows, Terms, answers, contributions
from .gradients import KINDS, Gradients
from .pairs import keys_of
from .peers import Sent
from .places import Vector, own_queries, row_of

SLACK = 2.0  # that of longring.testing, which is no room below this one
FUSED_SLACK = 3.0  # times the arithmetic of a fused kernel; below 1 % in bfloat16, so that a hundredth too much is seen
AFFORDABLE = 1 << 24  # pairs of a query head and a key: below, every row of the rank is computed in float64


class Results(NamedTuple):
    """What a rank found: whole tensors of its own rows, and some vectors of what it sent."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    sent: Sequence[Sent] = ()


class Joined(NamedTuple):
    """Gradients of one key as the rank left them, and what was in them of others."""

    sent: Sent
    dk: Tensor
    dv: Tensor

    @property
    def got(self) -> dict[str, Tensor]:
        return {"dk": self.sent.dk, "dv": self.sent.dv}

    @property
    def came(self) -> dict[str, Tensor]:
        return {"dk": self.dk, "dv": self.dv}

    @property
    def has_brought(self) -> bool:
        return bool(self.dk.any() or self.dv.any())


class Check(NamedTuple):
    """One quantity: the error of all sampled rows together, and of the worst, each with what is allowed."""

    quantity: str
    rows: list[int]  # global positions
    vectors: int  # rows times heads
    error: float
    allowed: float
    worst_error: float
    worst_allowed: float
    worst_row: int
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed and self.worst_error <= self.worst_allowed

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"ok": self.ok}


# ------------------------------------------------------------------------------------------------- the checks


@dataclass
class Judge:
    """The float64 definition of one rank's rows; `arriving` are the gradients that it is brought."""

    task: Task
    rank: int
    terms: Terms
    gradients: Gradients
    arriving: Sequence[Parcel] = ()
    watch: Callable[[str, int, int], None] = field(default=lambda what, done, of: None)

    @property
    def _own(self) -> Shard:
        return self.task.queries.shards[self.rank]

    def forward(self, found: Results, vectors: Sequence[Vector]) -> list[Check]:
        return self._queries(found, vectors, ("out", "lse"))

    def both(self, found: Results, vectors: Sequence[Vector], own_keys: Sequence[Vector]) -> list[Check]:
        """out, lse and dq of some queries; dk and dv of own keys, and of others' as they were sent."""
        checks = self._queries(found, vectors, ("out", "lse", "dq"))
        known, note = self._known_rows(found)
        mine = self._brought([Sent(key, *self._vectors_of(found, key)) for key in own_keys])
        alone, joined = _parted(mine, lambda one: not one.has_brought)
        theirs, passed_on = _parted(self._brought(found.sent), lambda one: bool(self._own_queries(one.sent.key)))
        checks += self._keys("own rows", alone, known, note, is_rounded=True)
        checks += self._keys("with what came home", joined, known, note, is_rounded=True)
        checks += self._keys("rows of others", theirs, known, note, is_rounded=False)
        return checks + self._unchanged("only passed on", passed_on)

    # ---- queries

    def _queries(self, found: Results, vectors: Sequence[Vector], quantities: tuple[str, ...]) -> list[Check]:
        judged: dict[str, list[Judged]] = {name: [] for name in quantities}
        got: dict[str, list[Tensor]] = {name: [] for name in quantities}
        rows: list[int] = []
        asked = list(self._asked(vectors))
        for number, one in enumerate(asked):
            self.watch("checking rows", number, len(asked))
            exact = answers(self.terms, one, with_dq="dq" in quantities)
            for name in quantities:
                judged[name].append(exact[name])
                got[name].append(self._found_for(found, name, one))
            rows += [p for _ in one.kv_heads for p in one.positions for _ in range(self.terms.share)]
        if not asked:
            return []
        return [self._verdict(name, torch.cat(got[name]), Judged.of(judged[name]), rows) for name in quantities]

    def _asked(self, vectors: Sequence[Vector]) -> Iterator[Asked]:
        """Together where all see nearly all keys, one by one where each sees a few of its own."""
        pattern, problem = self.task.pattern, self.task.problem
        if isinstance(pattern, Dense) and pattern.limits[0] is None:
            for batch in sorted({vector.batch for vector in vectors}):
                rows = tuple(sorted({vector.position for vector in vectors if vector.batch == batch}))
                seen = [keys_of(pattern, problem.n_k, row, 0, problem.kv_heads) for row in rows]
                last = max(r.stop for some in seen for r in some)
                yield Asked(batch, range(problem.kv_heads), rows, (range(last),), pattern.limits)
            return
        for batch, row, head in vectors:
            keys = keys_of(pattern, problem.n_k, row, head, problem.kv_heads)
            yield Asked(batch, range(head, head + 1), (row,), keys)

    def _found_for(self, found: Results, name: str, asked: Asked) -> Tensor:
        """In the order of `answers`."""
        rows = [row_of(self._own, position) for position in asked.positions]
        heads = range(asked.kv_heads.start * self.terms.share, asked.kv_heads.stop * self.terms.share)
        if name == "lse":
            x = found.lse[asked.batch, heads.start : heads.stop][:, rows].unsqueeze(-1)
        else:
            x = getattr(found, name)[asked.batch, rows, heads.start : heads.stop].transpose(0, 1)
        return x.unflatten(0, (len(asked.kv_heads), -1)).transpose(1, 2).reshape(-1, x.shape[-1])

    # ---- keys

    def _known_rows(self, found: Results) -> tuple[Rows, str]:
        """out and lse of every row of this rank: in float64 where that costs little."""
        if not self._is_small:
            return Rows(found.out, found.lse), "with the forward's own lse and out for the rank's queries"
        problem, share = self.task.problem, self.terms.share
        out, lse = found.out.double(), found.lse.double()
        own = [position for piece in self._own for position in piece]
        every = [Vector(b, p, h) for b in range(problem.batch) for p in own for h in range(problem.kv_heads)]
        for asked in self._asked(every):
            exact = answers(self.terms, asked, with_dq=False)
            rows = [row_of(self._own, position) for position in asked.positions]
            for place, kv_head in enumerate(asked.kv_heads):
                heads = slice(kv_head * share, (kv_head + 1) * share)
                some = slice(place * len(rows) * share, (place + 1) * len(rows) * share)
                out[asked.batch, rows, heads] = exact["out"].value[some].unflatten(0, (len(rows), share))
                lse[asked.batch, heads, rows] = exact["lse"].value[some].view(len(rows), share).T
        return Rows(out, lse), "with lse and out of the rank's queries in float64"

    @property
    def _is_small(self) -> bool:
        return size(self._own) * self.task.heads * self.task.problem.batch * self.task.problem.n_k <= AFFORDABLE

    def _vectors_of(self, found: Results, key: Vector) -> tuple[Tensor, Tensor]:
        assert found.dk is not None, "a backward was asked for"
        assert found.dv is not None
        row = row_of(self.task.keys.shards[self.rank], key.position)
        return found.dk[key.batch, row, key.kv_head], found.dv[key.batch, row, key.kv_head]

    def _brought(self, found: Sequence[Sent]) -> list[Joined]:
        brought = self.gradients.brought(self.arriving, [one.key for one in found])
        return [Joined(one, *(brought[kind][number] for kind in KINDS)) for number, one in enumerate(found)]

    def _keys(self, whose: str, keys: Sequence[Joined], known: Rows, note: str, *, is_rounded: bool) -> list[Check]:
        """What was brought and the rank's own contribution together."""
        if not keys:
            return []
        judged: dict[str, list[Judged]] = {kind: [] for kind in KINDS}
        local = Local(self._own)
        for number, one in enumerate(keys):
            self.watch(f"checking dk and dv of {whose}", number, len(keys))
            key = one.sent.key
            exact = contributions(self.terms, Key(*key, self._own_queries(key)), known, local)
            for kind in KINDS:
                judged[kind].append(exact[kind])
        rows = [one.sent.key.position for one in keys]
        checks = []
        for kind in KINDS:
            got, brought = (
                torch.stack([x[kind] for x in some]) for some in ([one.got for one in keys], [one.came for one in keys])
            )
            want = Judged.of(judged[kind])
            checks.append(self._verdict(f"{kind}, {whose}", got, want, rows, note, Result(brought, is_rounded)))
        return checks

    def _unchanged(self, how: str, keys: Sequence[Joined]) -> list[Check]:
        """Of keys that no query of this rank sees: to the bit what was brought."""
        checks = []
        rows = [one.sent.key.position for one in keys]
        for kind in KINDS if keys else ():
            got, came = (
                torch.stack([x[kind] for x in some]) for some in ([one.got for one in keys], [one.came for one in keys])
            )
            size_ = came.norm(dim=-1)
            errors = _distances(got.double(), came) / torch.where(size_ > 0, size_, 1.0)
            worst = int(errors.argmax())
            numbers = _rms(errors), 0.0, float(errors[worst]), 0.0
            checks.append(Check(f"{kind}, {how}", sorted(set(rows)), len(rows), *numbers, rows[worst]))
        return checks

    def _own_queries(self, key: Vector) -> tuple[range, ...]:
        return own_queries(self.task, self.rank, key.position, key.kv_head)

    # ---- budgets

    def _verdict(
        self, name: str, got: Tensor, want: Judged, rows: list[int], note: str = "", result: Result | None = None
    ) -> Check:
        dtype, is_lse = self.terms.dtype, name == "lse"
        errors = row_errors(got, want, dtype, result or Result(torch.zeros_like(want.value)), is_lse=is_lse)
        together = SLACK * _rms(errors.rough) + _rms(errors.rounding)
        if self.terms.is_narrow and not is_lse:
            together = FUSED_SLACK * _rms(errors.fused) + _rms(errors.wide_rounding)
        worst = int(errors.found.argmax())
        return Check(
            name,
            sorted(set(rows)),
            len(rows),
            _rms(errors.found),
            together,
            float(errors.found.max()),
            SLACK * float(errors.rough.max()) + float(errors.rounding.max()),
            rows[worst],
            note,
        )


class Result(NamedTuple):
    """What is in a result besides the rank's own sums, and whether all of it is rounded to the dtype."""

    brought: Tensor
    is_rounded: bool = True


class RowErrors(NamedTuple):
    """Of each row by its size: the error, and those that budgets are made of."""

    found: Tensor
    rough: Tensor  # of the definition in the same precision
    rounding: Tensor  # one of the result and its terms
    fused: Tensor  # of a fused kernel: its products, each tile's result rounded, and the sum of those
    wide_rounding: Tensor  # one of the terms where they are summed up


def row_errors(got: Tensor, want: Judged, dtype: torch.dtype, result: Result, *, is_lse: bool) -> RowErrors:
    wide = accumulator_dtype(dtype)
    # float64 cannot be its own yardstick: float32's error, by as much smaller as its rounding is
    narrow = torch.float32 if dtype == torch.float64 else dtype
    finer = torch.finfo(dtype).eps / torch.finfo(narrow).eps
    brought, is_rounded = result
    total = want.value + brought
    kept, summed = torch.finfo(wide if is_lse else dtype).eps, torch.finfo(wide).eps
    of_terms = summed * (_norms(want.large.double()) + _norms(brought))
    of_result = kept * _norms(total if is_rounded else want.value)
    tile = _distances(want.value.to(dtype), want.value)
    fused = want.fused.double() + brought
    fused = _distances(fused.to(dtype) if is_rounded else fused, total)
    by = _sizes(want, brought, is_rounded=is_rounded)
    return RowErrors(
        _distances(got.double(), total) / by,
        finer * _distances(want.rough.double(), want.value) / by,
        (of_result + of_terms) / by,
        (fused.square() + tile.square()).sqrt() / by,
        of_terms / by,
    )


def _sizes(want: Judged, brought: Tensor, *, is_rounded: bool) -> Tensor:
    """Of the sum where that is what is rounded; else of the rank's own part, which the other cannot blur."""
    other = brought.norm(dim=-1)
    both = (want.size.square() + other.square()).sqrt() if is_rounded else torch.where(want.size > 0, want.size, other)
    return both.clamp(min=torch.finfo(torch.float64).tiny)


def _distances(got: Tensor, want: Tensor) -> Tensor:
    """By row; -inf equals -inf, and nan equals nothing."""
    apart = torch.where(got == want, 0.0, got - want).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    return apart.norm(dim=-1)


def _norms(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0).norm(dim=-1)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _parted(some: Sequence[Joined], is_first: Callable[[Joined], bool]) -> tuple[list[Joined], list[Joined]]:
    return [one for one in some if is_first(one)], [one for one in some if not is_first(one)]
