"""Conformance on real processes: every rank asks the same questions in the same order, and hears all answers.

Threads of one process are quick and enough for longring's own transports; whoever wants a group of torch.distributed
gets one here, and a new one after every refusal, so that what one question broke is not held against the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankFailed
from ..functional import attention
from ..geometry.patterns import Pattern
from ..launching import launch
from ..sharding import Sharding
from .conformance import Case, Finding, Report, conformance

SILENCE = 20.0  # seconds that a rank waits for another one within a question


def longring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any, pattern: Pattern, layout: str, length: int
) -> tuple[Tensor, Tensor]:
    """Ours, as conformance calls it."""
    sharding = Sharding(length, group, layout, pattern=pattern)
    return attention(q, k, v, pattern=pattern, sharding=sharding, return_lse=True)


def conformance_in_processes(
    find: Callable[[str], Callable[..., Any]],
    name: str,
    cases: Sequence[Case],
    *,
    ranks: Sequence[int],
    patience: float,
    **options: Any,
) -> Report:
    """All cases on processes of this machine, each of which finds the function by its name; seconds are for one case.

    A process that dies or does not end in time is no refusal: the case is wrong. Which it was is found by asking
    again, every case in processes of its own.
    """
    asked = find, name, cases, ranks, options
    try:
        return launch(_examined, *asked, ranks=max(ranks), backend="gloo", timeout=patience * len(cases))[0]
    except RankFailed as failure:
        if len(cases) == 1:
            return Report([_wrong(cases[0], ranks, str(failure))])
        again = {"ranks": ranks, "patience": patience, **options}
        reports = [conformance_in_processes(find, name, [case], **again) for case in cases]
        return Report([finding for report in reports for finding in report.findings])


def _wrong(case: Case, ranks: Sequence[int], message: str) -> Finding:
    return Finding(case.name, "any", max(ranks), "all", "wrong", torch.nan, torch.nan, message)


def _examined(
    find: Callable[[str], Callable[..., Any]],
    name: str,
    cases: Sequence[Case],
    ranks: Sequence[int],
    options: dict[str, Any],
) -> Report:
    """In every process."""
    fn = find(name)

    def of_torch(q: Tensor, k: Tensor, v: Tensor, *, group: _Seat, **asked: Any) -> Any:
        return fn(q, k, v, group=group.group, **asked)

    return conformance(of_torch, ranks=ranks, cases=cases, run=_Ranks().run, **options)


class _Seat(NamedTuple):
    rank: int
    group: Any  # of torch.distributed


class _Raised(NamedTuple):
    kind: str
    text: str


class _Ranks:
    """Starts nothing: this process is one of the ranks already."""

    def __init__(self) -> None:
        self._groups: dict[int, Any] = {}

    def run(self, size: int, program: Callable[[Any], Any]) -> list[Any]:
        """The first ranks of the world run the program in a group of their own; all hear what came of it."""
        rank, group = dist.get_rank(), self._group(size)
        mine = _tried(program, _Seat(rank, group)) if rank < size else None
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, mine)
        raised = next((each for each in said if isinstance(each, _Raised)), None)
        if raised is not None:  # on every rank, under its own name, so that all find the same
            del self._groups[size]
            raise type(raised.kind, (Exception,), {})(raised.text)
        return said[:size]

    def _group(self, size: int) -> Any:
        if size not in self._groups:
            self._groups[size] = dist.new_group(list(range(size)), timeout=timedelta(seconds=SILENCE))
        return self._groups[size]


def _tried(program: Callable[[Any], Any], seat: _Seat) -> Any:
    try:
        return program(seat)
    except Exception as error:  # any refusal is a finding, whatever the function under test raises
        return _Raised(type(error).__name__, str(error))
