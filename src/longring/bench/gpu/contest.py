"""A contest: several ways to the same result, each checked, then all timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ...geometry.patterns import Pattern
from ..records import Row, Spread
from .check import Errors, Result, allowed, check, errors_of
from .clock import Turn, both_ways, release, timed
from .direct import Direct, Found
from .given import Given, Place, Shape
from .sizes import Sizes
from .work import flops


@dataclass
class Stage:
    """Where scenarios play, how large they are, and what went wrong or was not there."""

    place: Place
    sizes: Sizes
    peers: Path | None = None
    missing: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    scenario: str = ""  # which plays now

    @property
    def device(self) -> torch.device:
        return self.place.device

    def begin(self, scenario: str) -> None:
        """One that is played again has not failed yet."""
        self.scenario = scenario
        self.failures = [failure for failure in self.failures if not failure.startswith(f"{scenario}: ")]

    def failed(self, what: str) -> None:
        self.failures.append(f"{self.scenario}: {what}")


class Entry:
    """A competitor."""

    name: str
    kind: str
    rows: Tensor | None = None  # positions, if it computes those alone
    share: float = 1.0  # of the whole work
    instead: Pattern | None = None  # what it computes where that is something else: its errors are told, not judged
    has_backward: bool = True

    def result(self) -> Result:
        """Everything it computes, once, with whatever is needed that is not to be timed. `backward` builds on it."""
        raise NotImplementedError

    def forward(self) -> Any:
        raise NotImplementedError

    def backward(self) -> Any:
        raise NotImplementedError

    def turn(self, phase: str) -> Turn:
        return Turn(getattr(self, phase))


class Differentiated(Entry):
    """A function of q, k and v whose backward is autograd's."""

    def __init__(
        self,
        name: str,
        x: Given,
        attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]],
        kind: str = "ours",
    ) -> None:
        self.name, self.kind = name, kind
        self._x, self._attend = x.with_gradients(), attend
        self._out: Tensor | None = None

    def result(self) -> Result:
        out, lse = self.remember()
        return Result(out.detach(), None if lse is None else lse.detach(), *self.backward())

    def remember(self) -> tuple[Tensor, Tensor | None]:
        """With all that autograd saves for the backward."""
        self._out, lse = self._attend(*self._x[:3])
        return self._out, lse

    def forget(self) -> None:
        self._out = None

    def forward(self) -> Any:
        with torch.no_grad():
            return self._attend(*self._x[:3])

    def backward(self) -> tuple[Tensor, ...]:
        assert self._out is not None
        return torch.autograd.grad(self._out, self._x[:3], self._x.upstream, retain_graph=True)


class Directly(Entry):
    """A fused kernel by itself."""

    kind = "kernel"

    def __init__(self, kernel: Direct, x: Given, causal: bool) -> None:
        self.name = kernel.name
        self._kernel, self._x, self._causal = kernel, x, causal
        self._found: Found | None = None

    def result(self) -> Result:
        self._found = self.forward()
        return Result(*self._found, *self.backward())

    def forward(self) -> Found:
        return self._kernel.forward(*self._x[:3], self._causal)

    def backward(self) -> tuple[Tensor, ...]:
        assert self._found is not None
        return self._kernel.backward(self._x.upstream, *self._x[:3], self._found, self._causal)


def contest(
    stage: Stage,
    case: str,
    shape: Shape,
    pattern: Pattern,
    x: Given,
    entries: Sequence[Entry],
    *,
    repeats: int | None = None,
    is_warm: bool = False,
) -> list[Row]:
    """A row for each entry and pass; an entry that fails or is wrong has one that says so, and is not timed."""
    rows: list[Row] = []
    fit: dict[str, tuple[Entry, Errors]] = {}
    lse: Tensor | None = None
    for entry in entries:
        try:
            errors, lse = _checked(entry, x, pattern, lse)
        except Exception as error:  # whatever a kernel or a peer raises, the others go on
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            rows.append(Row(case, "both", entry.name, entry.kind, note=f"not timed: {why}", tokens=shape.n))
            if entry.kind == "ours":
                stage.failed(f"{case}, {entry.name}: {why}")
            continue
        fit[entry.name] = entry, errors
    del lse
    release(stage.device)
    for phase in ("forward", "backward"):
        turns = {name: entry.turn(phase) for name, (entry, _) in fit.items() if _has(entry, phase)}
        keep = tuple(name for name in turns if fit[name][0].kind != "kernel")  # of those only the best matters
        rounds = repeats or stage.sizes.repeats
        times = timed(turns, stage.device, repeats=rounds, keep=keep, is_warm=is_warm) if turns else {}
        work = flops(shape, pattern, phase)
        for name, rounds_of_it in times.items():
            entry, errors = fit[name]
            spread = Spread.of(rounds_of_it)
            told = {quantity: error for quantity, error in errors.items() if _belongs(quantity, phase)}
            limits = {} if entry.instead else {quantity: allowed(x.q.dtype)[quantity] for quantity in told}
            rate = work * entry.share / spread.median / 1e12
            row = Row(case, phase, name, entry.kind, spread, rate, errors=told, allowed=limits, tokens=shape.n)
            row.rounds = tuple(rounds_of_it)
            rows.append(row)
    return rows


def _checked(entry: Entry, x: Given, pattern: Pattern, lse: Tensor | None) -> tuple[Errors, Tensor | None]:
    """Its errors, and an lse for those that have none of their own, from the first that has."""
    found = entry.result()
    if entry.instead is not None:
        return errors_of(x, entry.instead, found), lse
    judged = found
    if found.lse is None:  # dk and dv cannot be judged without anybody's
        judged = found._replace(lse=lse) if lse is not None else found._replace(dk=None, dv=None)
    errors = check(x, pattern, judged, rows=entry.rows)
    if found.lse is None:
        errors.pop("lse", None)
    return errors, found.lse if lse is None and entry.rows is None else lse


def _has(entry: Entry, phase: str) -> bool:
    return phase == "forward" or entry.has_backward


def _belongs(quantity: str, phase: str) -> bool:
    return (quantity in ("out", "lse")) == (phase == "forward")


def compare(rows: list[Row], name: str, other: Row | None, what: str, *, efficiency: bool = False) -> None:
    """Say of the rows called `name` how many times the other's time they take; or, as efficiency, the inverse.

    Both took turns: it is the median of what two rounds, one each way, say together, in which they ran within moments
    of each other and as often after as before.
    """
    for row in rows:
        if row.name == name and row.time and other and other.time and row.phase == other.phase:
            ratio = median(both_ways(row.rounds, other.rounds))
            row.ratios[what] = 1 / ratio if efficiency else ratio


def best(rows: list[Row], phase: str, kind: str) -> Row | None:
    fit = [row for row in rows if row.kind == kind and row.phase == phase and row.time]
    return min(fit, key=lambda row: row.time.median if row.time else 0.0, default=None)
