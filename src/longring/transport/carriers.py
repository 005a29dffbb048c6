"""Daemon threads that wait in a caller's place.

A wait inside torch.distributed cannot be looked after or given up by the thread that is in it. So a carrier
waits, and the caller waits for the carrier, in slices. Carriers are daemons: a process ends while they are stuck.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Errand(Generic[T]):
    """What a carrier was sent to do, and what came of it."""

    def __init__(self, work: Callable[[Errand[T]], T]) -> None:
        self._work: Callable[[Errand[T]], T] | None = work
        self._over = threading.Event()
        self._result: T | None = None
        self.error: Exception | None = None
        self.waits_for: int | None = None  # the rank whose answer the carrier waits for, or waited for last

    def is_over(self, within: float = 0.0) -> bool:
        return self._over.is_set() or (within > 0 and self._over.wait(within))

    def join(self) -> T:
        """What it returned, or the error it raised; waits without a bound."""
        self._over.wait()
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]

    def run(self, before_over: Callable[[], None]) -> None:
        assert self._work is not None
        try:
            self._result = self._work(self)
        except Exception as error:
            self.error = error
        self._work = None  # lets go of the tensors
        before_over()
        self._over.set()


class _Carrier(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="longring carrier", daemon=True)
        self.inbox: SimpleQueue[list[Errand[Any]]] = SimpleQueue()

    def run(self) -> None:
        while True:
            *before, last = self.inbox.get()
            for errand in before:
                errand.run(lambda: None)
            last.run(self.rest)
            _under_way.difference_update([*before, last])
            before, last, errand = [], None, None  # or they would be held until the next ones

    def rest(self) -> None:
        """Free again before the caller hears of it, whose next errand then needs no new thread."""
        _idle.append(self)


_idle: list[_Carrier] = []
_under_way: set[Errand[Any]] = set()
_LAST_CALL = 2.0  # seconds that the end of the process waits for carriers


def send_carrier(work: Callable[[Errand[T]], T], *before: Errand[Any]) -> Errand[T]:
    """One carrier does the work, and the errands `before` it first."""
    errand = Errand(work)
    send(*before, errand)
    return errand


def send(*errands: Errand[Any]) -> None:
    """One carrier does them, one after the other."""
    _under_way.update(errands)
    if not errands:
        return
    try:
        carrier = _idle.pop()
    except IndexError:
        carrier = _Carrier()
        carrier.start()
    carrier.inbox.put(list(errands))


def failed(error: Exception, waits_for: int) -> Errand[Any]:
    """An errand that failed before a carrier was needed."""
    errand: Errand[Any] = Errand(lambda _: None)
    errand.run(lambda: None)
    errand.error, errand.waits_for = error, waits_for
    return errand


@atexit.register
def _bring_home() -> None:
    """Python ends a thread that comes back from torch while the interpreter shuts down, and C++ aborts at that."""
    end = time.monotonic() + _LAST_CALL
    for errand in list(_under_way):
        errand.is_over(within=end - time.monotonic())


def _forget() -> None:
    """A child has none of its parent's threads."""
    _idle.clear()
    _under_way.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
