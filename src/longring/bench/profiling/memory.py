"""What a rank holds, by component and over time.

Every storage that an operation makes is followed from its making to its end, and gets its name from what the engine
does with it: what is received into, sent from and computed with is named by the post or the step; what a step made is
a result in the making if it is there at the end of the pass and not longer, a buffer if it stays for later calls, and
workspace otherwise; inputs and results are named by the caller. A prediction knows finer names, and is told in the
same ones.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...schedules.labels import Activity
from ...transport.ledger import Ledger

OUT = "out"  # and what it is merged in
GRADIENTS = "dq, dk, dv"  # and what they are summed up in
WORKSPACE = "workspace"
KEYS = "K/V buffers"
BY_HEADS = "rows by heads"
TRAVELLING = "travelling dK/dV"
SYMMETRIC = "symmetric memory"
OTHER = "other"
RECEIVED = {"keys and values": KEYS, "gradients": TRAVELLING, "rows by heads": BY_HEADS}
"""What is received in a post, by what the engine calls it."""

PREDICTED = {
    **dict.fromkeys(("dq", "dk", "dv", "dK/dV of all ranks"), GRADIENTS),
    **dict.fromkeys(("K/V arriving", "K/V at hand", "K/V leaving", "K/V of all ranks", "K/V at desks"), KEYS),
    **dict.fromkeys(("dK/dV of visitors", "dK/dV arriving", "dK/dV leaving"), TRAVELLING),
    **dict.fromkeys(("queries at desks", "leaving for desks or home", "arriving at desks or home"), BY_HEADS),
    "free buffers": KEYS,
    SYMMETRIC: SYMMETRIC,
    **{name: name for name in ("q", "k", "v", OUT, "lse", "dout")},
}
"""What the prediction calls by a finer name; any further is workspace."""


def in_these_names(predicted: Mapping[str, int], phase: str) -> dict[str, int]:
    """A prediction's components, by the names of this account."""
    names = {**PREDICTED, "results at desks": _result(phase)}
    found: Counter[str] = Counter()
    for name, size in predicted.items():
        found[names.get(name, WORKSPACE)] += size
    return dict(found)


def _result(phase: str | None) -> str:
    return GRADIENTS if phase == "backward" else OUT


class Sample(NamedTuple):
    """What was held from a moment on."""

    at: float
    components: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.components.values())


@dataclass
class _Storage:
    """One piece of memory. Its latest name counts from when it was given; its first from the beginning."""

    size: int
    born: float
    died: float | None = None
    made_in: str | None = None  # the phase of the activity, None between two
    names: list[tuple[float, str]] = field(default_factory=list)
    own_name: str | None = None  # of an input or a result: it was this all along

    def stretches(self, ends: Mapping[str, tuple[float, float]]) -> Iterator[tuple[float, str, str | None]]:
        """(from when, name, name before), given when the last activity of each phase began and the phase was over."""
        if self.own_name is not None:
            names = [(self.born, self.own_name)]
        else:
            names = self.names or [(self.born, self._guess(ends))]
        before = None
        for number, (at, name) in enumerate(names):
            if name != before:
                yield (at if number else self.born), name, before
            before = name

    def _guess(self, ends: Mapping[str, tuple[float, float]]) -> str:
        if self.made_in is None:
            return OTHER
        last, over = ends[self.made_in]
        died = math.inf if self.died is None else self.died
        if died > over:
            return TRAVELLING if self.made_in == "backward" else KEYS
        return _result(self.made_in) if died >= last else WORKSPACE


class Account(Ledger):
    """A ledger with a line for every storage. To be entered as a mode, and to watch, in the thread that computes."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[_Storage] = []
        self._alive: dict[int, _Storage] = {}
        self._phase: str | None = None
        self._ends: dict[str, float] = {}  # by phase: when its latest activity began

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if not storage.nbytes():
            return
        made = _Storage(storage.nbytes(), time.monotonic(), made_in=self._phase)
        self._storages.append(made)
        self._alive[storage._cdata] = made
        weakref.finalize(storage, self._end, storage._cdata, made).atexit = False

    def _end(self, address: int, made: _Storage) -> None:
        made.died = time.monotonic()
        if self._alive.get(address) is made:
            del self._alive[address]

    @contextmanager
    def __call__(self, activity: Activity) -> Iterator[None]:
        """Watch: note what memory is used for."""
        self._phase = activity.doing.phase
        self._ends[self._phase] = time.monotonic()
        self._name_messages(activity)
        self._name_operands(activity)
        try:
            yield
        finally:
            self._phase = None

    def _name_messages(self, activity: Activity) -> None:
        name = RECEIVED.get(activity.doing.what, BY_HEADS)
        for _, buffer in activity.receives:
            self._name(buffer, name)
        for _, tensor in activity.sends:
            self._name(tensor, name, unless=(KEYS, TRAVELLING, BY_HEADS))

    def _name_operands(self, activity: Activity) -> None:
        q, k, v, *rows = activity.reads or (None, None, None)
        for x in (k, v):
            self._name(x, KEYS, unless=(BY_HEADS,))
        for x in (q, *rows):
            self._name(x, BY_HEADS)

    def _name(self, x: Tensor | None, name: str, unless: Sequence[str] = ()) -> None:
        made = None if x is None else self._alive.get(x.untyped_storage()._cdata)
        if made is not None and not (made.names and made.names[-1][1] in (name, *unless)):
            made.names.append((time.monotonic(), name))

    def own(self, name: str, *tensors: Tensor) -> None:
        """Name inputs and results, which a caller has anyway."""
        for x in tensors:
            made = self._alive.get(x.untyped_storage()._cdata)
            if made is not None:
                made.own_name = name

    def samples(self, phases: Mapping[str, tuple[float, float]] | None = None) -> list[Sample]:
        """What was held, from every change on, in order. `phases` say from when until when each was."""
        ends = {phase: (last, (phases or {}).get(phase, (0, math.inf))[1]) for phase, last in self._ends.items()}
        changes: list[tuple[float, int, str]] = []
        for made in self._storages:
            last = OTHER
            for at, name, before in made.stretches(ends):
                changes.append((at, made.size, name))
                if before is not None:
                    changes.append((at, -made.size, before))
                last = name
            if made.died is not None:
                changes.append((made.died, -made.size, last))
        return _summed(changes)


def _summed(changes: list[tuple[float, int, str]]) -> list[Sample]:
    held: Counter[str] = Counter()
    samples: list[Sample] = []
    for at, size, name in sorted(changes):  # at one moment what goes comes first
        held[name] += size
        now = Sample(at, {name: size for name, size in held.items() if size})
        if samples and samples[-1].at == at:
            samples[-1] = now
        else:
            samples.append(now)
    return samples


def highest(samples: Sequence[Sample]) -> Sample:
    return max(samples, key=lambda sample: sample.bytes, default=Sample(0.0, {}))


def thinned(samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most about so many of them: of neighbours in time the highest, so that no peak is lost."""
    if len(samples) <= most:
        return list(samples)
    start, end = samples[0].at, samples[-1].at
    width = (end - start) / (most - 1) or 1.0
    found: dict[int, Sample] = {}
    for sample in samples:
        place = int((sample.at - start) / width)
        if place not in found or sample.bytes > found[place].bytes:
            found[place] = sample
    return [found[place] for place in sorted(found)]
