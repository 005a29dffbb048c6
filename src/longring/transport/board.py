"""The board: notes that ranks leave each other in the group's store once something takes long or goes wrong.

Only an empty note of each rank is written in the happy case. There is one verdict, and the first one written counts,
so that every rank raises the same. A store may be dead, or stopped and never answer: carriers ask it, and each question
says how many seconds its answer may take.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch.distributed as dist

from .carriers import Errand, send_carrier

T = TypeVar("T")
PATIENCE = 3.0  # seconds that a store has to answer in, where nothing else is said
_SLICE = 0.02  # seconds between two looks at whether the answer is wanted still


class Verdict(NamedTuple):
    """What went wrong, for all ranks alike."""

    kind: Literal["mismatch", "lost", "failed"]
    rank: int | None
    text: str


class BoardSilent(Exception):
    """The store is dead or does not answer."""


class Note(NamedTuple):
    """A rank's sign of life while it waits. `terms` are there once ranks are known to disagree."""

    beats: int
    conversation: int
    waits_for: int | None
    what: str
    terms: dict[str, str] | None = None


class Board:
    """One rank's hand on the board."""

    _newest: ClassVar[Errand[str] | None] = None  # finds the place of the board made last

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._shared = dist.distributed_c10d._get_process_group_store(group)
        name, before = group.group_name, Board._newest
        self._place = Board._newest = send_carrier(lambda _: self._found_place(name, before))
        self._own: dist.Store | None = None
        self._asked: Errand[Any] | None = None
        self._is_apart = False  # whether what was asked last goes over a connection of its own
        self._lock = threading.Lock()
        self.host = self.rank if _is_hosted_here(self._shared) else None  # of the store, as far as this rank has heard
        self._guess = _usual_host(group, self._shared)

    def _found_place(self, name: str, before: Errand[str] | None) -> str:
        """Count the groups of this name: a world made again on its old store must not find old verdicts.

        In a carrier, since the store's host may be stopped; in the order in which boards are made, as on other ranks.
        Every rank leaves a note there, so that those of all ranks can be read at once.
        """
        if before is not None:
            before.is_over(within=PATIENCE)
        place = f"longring/{name}/{self._shared.add(f'longring/{name}/lives of rank {self.rank}', 1)}"
        dist.PrefixStore(place, self._shared).set(f"note/{self.rank}", json.dumps(Note(0, 0, None, "")))
        return place

    @property
    def likely_host(self) -> int | None:
        return self._guess if self.host is None else self.host

    def all_were_heard(self) -> None:
        """If no rank said that it hosts the store, none does."""
        self._guess = None

    @property
    def is_silent(self) -> bool:
        """Whether the store still owes an answer, and there is no other way to ask it."""
        return self._is_apart and self._asked is not None and not self._asked.is_over()

    def verdict(self, within: float = PATIENCE) -> Verdict | None:
        return self._ask(_read_verdict, within)

    def pronounce(self, verdict: Verdict, within: float = PATIENCE) -> Verdict:
        """Write the verdict unless there is one, and return the one that counts."""
        return self._ask(lambda store: _write_verdict(store, verdict), within)

    def leave(self, note: Note, within: float = PATIENCE, unless: Errand[Any] | None = None) -> Verdict | None:
        """Leave a sign of life, and see whether there is a verdict. No answer is waited for once `unless` is over."""

        def both(store: dist.Store) -> Verdict | None:
            store.set(f"note/{self.rank}", json.dumps(note))
            return _read_verdict(store)

        return self._ask(both, within, unless)

    def notes(self, ranks: Sequence[int], within: float = PATIENCE) -> dict[int, Note]:
        return self._ask(lambda store: _read_notes(store, ranks), within)

    def is_first_to_judge(self, within: float = PATIENCE) -> bool:
        """True on one rank only, which then collects what all the others say."""
        return self._ask(lambda store: store.add("judge", 1), within) == 1

    def number_of_readers(self, conversation: int, more: int, within: float = PATIENCE) -> int:
        """How many ranks ask to read the notes of all in this conversation: so many more with this one, or fewer."""
        return self._ask(lambda store: store.add(f"readers/{conversation}", more), within)

    def sign(self, within: float = PATIENCE) -> int:
        """Say that this rank has seen the verdict; how many have."""
        return self._ask(lambda store: store.add("signed", 1), within)

    def signatures(self, within: float = PATIENCE) -> int:
        return self._ask(lambda store: store.add("signed", 0), within)

    def _ask(self, question: Callable[[dist.Store], T], within: float, unless: Errand[Any] | None = None) -> T:
        """One thread at a time: the caller of a collective, or the carrier that watches transfers."""
        end = time.monotonic() + within
        if not self._lock.acquire(timeout=max(0.0, within)):
            raise BoardSilent("another question waits for its answer")
        try:
            return self._answer(question, end, unless)
        finally:
            self._lock.release()

    def _answer(self, question: Callable[[dist.Store], T], end: float, unless: Errand[Any] | None) -> T:
        now = time.monotonic()
        soon = end if self._is_apart else now + (end - now) / 3
        is_answered = self._asked is None or _is_over(self._asked, soon, unless)
        if not is_answered and self._is_apart:
            raise BoardSilent("the store still owes an answer")
        if is_answered:
            self._asked = errand = send_carrier(lambda _: question(self._store()))
            is_answered = _is_over(errand, soon, unless)
        if not is_answered and not self._is_apart and time.monotonic() < end and not (unless and unless.is_over()):
            self._is_apart = True
            self._asked = errand = send_carrier(lambda _: question(self._on_its_own()))
            is_answered = _is_over(errand, end, unless)
        if not is_answered:
            raise BoardSilent("the store did not answer in time")
        if errand.error is not None:
            raise BoardSilent(f"the store is lost: {errand.error}")
        return errand.join()

    def _store(self) -> dist.Store:
        return dist.PrefixStore(self._place.join(), self._shared) if self._own is None else self._own

    def _on_its_own(self) -> dist.Store:
        """A connection that others' waits do not hold up, where they have: whoever hosts the store looks up the name
        of who connects, and answers nobody while a name server is slow."""
        self._own = dist.PrefixStore(self._place.join(), _reconnected(self._shared))
        return self._own


def _forget() -> None:
    """A child has none of its parent's threads."""
    Board._newest = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _is_over(asked: Errand[Any], end: float, unless: Errand[Any] | None) -> bool:
    while not asked.is_over(within=min(_SLICE, end - time.monotonic()) if unless else end - time.monotonic()):
        if time.monotonic() >= end or (unless is not None and unless.is_over()):
            return asked.is_over()
    return True


def _read_verdict(store: dist.Store) -> Verdict | None:
    return Verdict(*json.loads(store.get("verdict"))) if store.check(["verdict"]) else None


def _write_verdict(store: dist.Store, verdict: Verdict) -> Verdict:
    return Verdict(*json.loads(store.compare_set("verdict", "", json.dumps(verdict))))


def _read_notes(store: dist.Store, ranks: Sequence[int]) -> dict[int, Note]:
    there = _there(store, [f"note/{rank}" for rank in ranks])
    found = store.multi_get(there) if there else []
    return {int(key.removeprefix("note/")): Note(*json.loads(text)) for key, text in zip(there, found, strict=True)}


def _there(store: dist.Store, keys: list[str]) -> list[str]:
    """The keys that can be read: the store would wait for one that is not there. One question where all are there."""
    if not keys or store.check(keys):
        return keys
    half = len(keys) // 2
    return _there(store, keys[:half]) + _there(store, keys[half:]) if half else []


def _reconnected(store: dist.Store) -> dist.Store:
    if hasattr(store, "clone"):
        return store.clone()  # type: ignore[attr-defined]
    below = underlying(store)
    return dist.TCPStore(below.host, below.port, is_master=False) if isinstance(below, dist.TCPStore) else store


def underlying(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _usual_host(group: dist.ProcessGroup, store: dist.Store) -> int | None:
    """Torch lets the world's first rank host the store, unless the launcher does."""
    is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ranks = dist.get_process_group_ranks(group)
    return ranks.index(0) if isinstance(underlying(store), dist.TCPStore) and not is_launchers and 0 in ranks else None


def _is_hosted_here(store: dist.Store) -> bool:
    """Whether the store dies with this process: it listens on the store's port. Known on Linux only."""
    below = underlying(store)
    if not isinstance(below, dist.TCPStore):
        return False
    try:
        return bool(_listening(below.port) & _own_sockets())
    except OSError:
        return False


def _listening(port: int) -> set[str]:
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}


def _own_sockets() -> set[str]:
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            found.add(os.readlink(entry.path))
        except OSError:  # closed meanwhile
            continue
    return found
