"""Ranks as threads in virtual time, of which one runs at a time: they wait for each other as over a network, and a test
with thousands of ranks and timeouts of minutes takes seconds and has the same result each time.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import Any

from longring.transport.board import BoardSilent, Note, Verdict


class VirtualTime:
    """Stands in for the module `time` of the code under test."""

    def __init__(self) -> None:
        self.now, self._count = 0.0, 0
        self._due: list[tuple[float, int, threading.Semaphore]] = []
        self._over = threading.Semaphore(0)
        self._running = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        mine = threading.Semaphore(0)
        self._schedule(self.now + max(0.0, seconds), mine)
        self._next()
        mine.acquire()

    def run(self, programs: list[tuple[float, Callable[[], None]]]) -> None:
        """Run programs, each from its time on, to the end."""
        for begins, program in programs:
            self._start(program, begins)
        if self._running:
            self._next()
            self._over.acquire()

    def carrier(self, work: Callable[[Any], Any]) -> Task:
        """Stands in for `send_carrier`."""
        task = Task(self)
        self._start(lambda: task.run(work), self.now)
        return task

    def _start(self, program: Callable[[], None], begins: float) -> None:
        turn = threading.Semaphore(0)
        self._schedule(begins, turn)
        self._running += 1

        def live() -> None:
            turn.acquire()
            try:
                program()
            finally:
                self._running -= 1
                self._next() if self._due else self._over.release()

        threading.Thread(target=live, daemon=True).start()

    def _schedule(self, at: float, turn: threading.Semaphore) -> None:
        self._count += 1
        heapq.heappush(self._due, (at, self._count, turn))

    def _next(self) -> None:
        at, _, turn = heapq.heappop(self._due)
        self.now = max(self.now, at)
        turn.release()


class Task:
    """Work beside the caller's."""

    def __init__(self, time: VirtualTime) -> None:
        self._time, self._done = time, False

    def run(self, work: Callable[[Any], Any]) -> None:
        work(self)
        self._done = True

    def is_over(self, within: float = 0.0) -> bool:
        end = self._time.now + within
        while not self._done and self._time.now < end:
            self._time.sleep(min(0.01, end - self._time.now))
        return self._done


class Store:
    """What ranks have written, and a server that answers one question after the other.

    `request` and `key` are seconds of the server's time, `travel` those of a question on its way there and back.
    """

    def __init__(self, time: VirtualTime, *, request: float = 20e-6, key: float = 1e-6, travel: float = 200e-6) -> None:
        self.time, self.request, self.key, self.travel = time, request, key, travel
        self.notes: dict[int, Note] = {}
        self.numbers: dict[str, int] = {}
        self.verdict: Verdict | None = None
        self._busy_until = 0.0
        self.stopped_at = float("inf")

    def add(self, name: str, number: int = 1) -> int:
        self.numbers[name] = self.numbers.get(name, 0) + number
        return self.numbers[name]

    def answered_at(self, requests: int, keys: int) -> float:
        self._busy_until = max(self._busy_until, self.time.now) + requests * self.request + keys * self.key
        answered = self._busy_until + requests * self.travel
        return answered if answered < self.stopped_at else float("inf")


class StoreBoard:
    """One rank's `Board`, on a store in virtual time."""

    def __init__(self, store: Store, rank: int, size: int, host: int | None = None) -> None:
        self.rank, self.size, self.likely_host = rank, size, host
        self.host = host if host == rank else None
        self._store, self._answered = store, 0.0
        store.notes.setdefault(rank, Note(0, 0, None, ""))

    @property
    def is_silent(self) -> bool:
        return self._store.time.now < self._answered

    def _ask(self, within: float, question: Callable[[], Any], requests: int = 1, keys: int = 1) -> Any:
        store, end = self._store, self._store.time.now + within
        if self.is_silent:
            store.time.sleep(min(end, self._answered) - store.time.now)
            if self.is_silent:
                raise BoardSilent("the store still owes an answer")
        self._answered = store.answered_at(requests, keys)
        store.time.sleep(min(end, self._answered) - store.time.now)
        if self.is_silent:
            raise BoardSilent("the store did not answer in time")
        return question()

    def verdict(self, within: float = 3.0) -> Verdict | None:
        return self._ask(within, lambda: self._store.verdict)

    def pronounce(self, verdict: Verdict, within: float = 3.0) -> Verdict:
        def write() -> Verdict:
            self._store.verdict = self._store.verdict or verdict
            return self._store.verdict

        return self._ask(within, write)

    def leave(self, note: Note, within: float = 3.0, unless: Any = None) -> Verdict | None:
        def write() -> Verdict | None:
            self._store.notes[self.rank] = note
            return self._store.verdict

        return self._ask(within, write, requests=2, keys=2)

    def notes(self, ranks: Any, within: float = 3.0) -> dict[int, Note]:
        notes, many = self._store.notes, len(list(ranks))
        return self._ask(within, lambda: {rank: notes[rank] for rank in ranks if rank in notes}, 2, 2 * many)

    def number_of_readers(self, conversation: int, more: int, within: float = 3.0) -> int:
        return self._ask(within, lambda: self._store.add(f"readers/{conversation}", more))

    def is_first_to_judge(self, within: float = 3.0) -> bool:
        return self._ask(within, lambda: self._store.add("judge") == 1)

    def sign(self, within: float = 3.0) -> int:
        return self._ask(within, lambda: self._store.add("signed"))

    def signatures(self, within: float = 3.0) -> int:
        return self._ask(within, lambda: self._store.add("signed", 0))


class Message:
    """An errand that waits for a message, which comes at `arrives`."""

    def __init__(
        self, time: VirtualTime, source: int | None, arrives: float = float("inf"), error: Exception | None = None
    ) -> None:
        self._time, self.waits_for, self._arrives, self.error = time, source, arrives, error

    def is_over(self, within: float = 0.0) -> bool:
        if within > 0 and self._arrives > self._time.now:
            self._time.sleep(min(within, self._arrives - self._time.now))
        return self._time.now >= self._arrives
