"""Sampled rows of what a rank found, against the float64 definition from the same numbers, within error budgets.

Rows are divided by their size first, so that none hides behind another. Two questions to each quantity: are the rows
together as close as they should be, and is the worst of them? Both budgets are made as in `longring.testing`: twice the
error of the definition in the same precision, for these very rows, and the rounding of the result and its terms.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...geometry.layouts import Shard, size
from ...geometry.patterns import Dense, Dilated
from ...geometry.ranges import meet
from ...geometry.task import Task
from ...numerics.online_softmax import accumulator_dtype
from .exact import Asked, Judged, Key, Local, Rows, Terms, answers, contributions
from .pairs import keys_of, phase_of, queries_of
from .peers import Sent, position_of, row_of

SLACK = 2.0  # that of longring.testing, which is no room below this one
FEW_HEADS = 4  # of which rows are drawn branch by branch
AFFORDABLE = 1 << 24  # pairs of a query head and a key: below, every row of the rank is computed in float64


class Results(NamedTuple):
    """What a rank found: whole tensors of its own rows, and some vectors of what it sent."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    sent: Sequence[Sent] = ()


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


class Vector(NamedTuple):
    """A query, or a key, of one kv head (and so of all its query heads)."""

    batch: int
    position: int
    kv_head: int


# -------------------------------------------------------------------------------------------------- sampling


def sampled_rows(task: Task, shard: Shard, samples: int, seed: int) -> list[Vector]:
    """At least so many rows of a shard: the first and last of every piece, and random ones.

    Dense: with all heads. Dilated: of one kv head each; half of them are drawn branch by branch, since of those whose
    rate is high a random row sees nothing.
    """
    if not shard:
        return []
    chance = random.Random(seed)
    rows = range(size(shard))
    drawn = {position_of(shard, row) for row in chance.sample(rows, min(len(rows), samples))}
    drawn |= {position for piece in shard for position in (piece[0], piece[-1])}
    batch, kv_heads = range(task.problem.batch), range(task.problem.kv_heads)
    if isinstance(task.pattern, Dense):
        some = {position: chance.choice(batch) for position in sorted(drawn)}
        return [Vector(b, position, head) for position, b in some.items() for head in kv_heads]
    found = {Vector(chance.choice(batch), position, chance.choice(kv_heads)) for position in sorted(drawn)}
    kept = list(_kept(task.pattern, shard, len(kv_heads)))
    for number in range(samples // 2 if kept else 0):
        head, ranges = kept[number % len(kept)]
        found.add(Vector(chance.choice(batch), chance.choice(chance.choice(ranges)), head))
    return sorted(found)


def _kept(pattern: Dilated, shard: Shard, kv_heads: int) -> Iterator[tuple[int, list[range]]]:
    """(kv head, some positions of the shard that it keeps) for a few heads, of every branch each."""
    for kv_head in range(min(kv_heads, FEW_HEADS)):
        for w, r in pattern.branches:
            phase = phase_of(pattern, r, kv_head, kv_heads)
            segments = ((piece, index) for piece in shard for index in _first_middle_last(piece, w))
            found = [meet(piece, range(index * w + phase, (index + 1) * w, r)) for piece, index in segments]
            if any(found):
                yield kv_head, [some for some in found if some]


def _first_middle_last(piece: range, w: int) -> list[int]:
    first, last = piece[0] // w, piece[-1] // w
    return sorted({first, (first + last) // 2, last})


def sampled_numbers(count: int, samples: int, seed: int) -> list[int]:
    """Of things numbered from 0: the first, the last and random ones."""
    if not count:
        return []
    chance = random.Random(seed)
    return sorted({0, count - 1, *chance.sample(range(count), min(count, samples))})


# -------------------------------------------------------------------------------------------------- the checks


@dataclass
class Judge:
    """The float64 definition of one rank's rows."""

    task: Task
    rank: int
    terms: Terms
    watch: Callable[[str, int, int], None] = field(default=lambda what, done, of: None)

    @property
    def _own(self) -> Shard:
        return self.task.queries.shards[self.rank]

    def forward(self, found: Results, vectors: Sequence[Vector]) -> list[Check]:
        return self._queries(found, vectors, ("out", "lse"))

    def both(self, found: Results, vectors: Sequence[Vector], own_keys: Sequence[Vector]) -> list[Check]:
        """out, lse and dq of some queries; the rank's contributions to dk and dv of own keys, and of others'."""
        checks = self._queries(found, vectors, ("out", "lse", "dq"))
        rows, note = self._known_rows(found)
        mine = [(key, *self._vectors_of(found, key)) for key in own_keys]
        checks += self._keys("own rows", mine, rows, note)
        theirs = [(Vector(s.batch, s.position, s.kv_head), s.dk, s.dv) for s in found.sent]
        return checks + self._keys("rows of others", theirs, rows, note)

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

    def _keys(self, whose: str, keys: Sequence[tuple[Vector, Tensor, Tensor]], known: Rows, note: str) -> list[Check]:
        if not keys:
            return []
        judged: dict[str, list[Judged]] = {"dk": [], "dv": []}
        local = Local(self._own)
        for number, (key, _, _) in enumerate(keys):
            self.watch(f"checking dk and dv of {whose}", number, len(keys))
            exact = contributions(self.terms, Key(*key, self._own_queries(key)), known, local)
            for name in judged:
                judged[name].append(exact[name])
        rows = [key.position for key, _, _ in keys]
        got = {"dk": [dk for _, dk, _ in keys], "dv": [dv for _, _, dv in keys]}
        return [
            self._verdict(f"{name}, {whose}", torch.stack(got[name]), Judged.of(judged[name]), rows, note)
            for name in judged
        ]

    def _own_queries(self, key: Vector) -> tuple[range, ...]:
        problem = self.task.problem
        seeing = queries_of(self.task.pattern, problem.n_k, key.position, key.kv_head, problem.kv_heads)
        return tuple(both for piece in self._own for r in seeing if (both := meet(piece, r)))

    # ---- budgets

    def _verdict(self, name: str, got: Tensor, want: Judged, rows: list[int], note: str = "") -> Check:
        errors, yardstick, rounding = row_errors(got, want, self.terms.dtype, is_lse=name == "lse")
        worst = int(errors.argmax())
        return Check(
            name,
            sorted(set(rows)),
            len(rows),
            _rms(errors),
            SLACK * _rms(yardstick) + _rms(rounding),
            float(errors.max()),
            SLACK * float(yardstick.max()) + float(rounding.max()),
            rows[worst],
            note,
        )


def row_errors(got: Tensor, want: Judged, dtype: torch.dtype, *, is_lse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row by its size: the error, that of the definition in the same precision, and one rounding."""
    wide = accumulator_dtype(dtype)
    # float64 cannot be its own yardstick: float32's error, by as much smaller as its rounding is
    narrow = torch.float32 if dtype == torch.float64 else dtype
    finer = torch.finfo(dtype).eps / torch.finfo(narrow).eps
    size_ = want.size.clamp(min=torch.finfo(torch.float64).tiny)
    kept = torch.finfo(wide if is_lse else dtype).eps
    rounding = kept * _norms(want.value) + torch.finfo(wide).eps * _norms(want.large.double())
    return (
        _distances(got.double(), want.value) / size_,
        finer * _distances(want.rough.double(), want.value) / size_,
        rounding / size_,
    )


def _distances(got: Tensor, want: Tensor) -> Tensor:
    """By row; -inf equals -inf, and nan equals nothing."""
    apart = torch.where(got == want, 0.0, got - want).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    return apart.norm(dim=-1)


def _norms(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0).norm(dim=-1)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
