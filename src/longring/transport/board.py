"""The board: notes that ranks leave each other in the group's store once something takes long or goes wrong.

Nothing is written in the happy case. There is one verdict, and the first one written counts, so that every rank
raises the same. A store may be dead, or stopped and never answer: carriers ask it, and nobody waits long for them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch.distributed as dist

from .carriers import Errand, send_carrier

T = TypeVar("T")
PATIENCE = 2.0  # seconds a store has to answer in


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

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        shared = dist.distributed_c10d._get_process_group_store(group)
        place = f"longring/{group.group_name}/{self._life(shared, group.group_name)}"
        self._store = dist.PrefixStore(place, shared)
        self._reconnect = lambda: dist.PrefixStore(place, _reconnected(shared))
        self._has_own = False
        self._asked: Errand[Any] | None = None
        self.host = self.rank if _is_hosted_here(shared) else None  # of the store, as far as this rank has heard
        self._guess = _usual_host(group, shared)

    def _life(self, store: dist.Store, name: str) -> int:
        """The how manieth group of this name it is: a world made anew on its old store must not find old verdicts."""
        counted = send_carrier(lambda _: store.add(f"longring/{name}/lives of rank {self.rank}", 1))
        return counted.join() if counted.is_over(within=PATIENCE) and counted.error is None else 0

    @property
    def likely_host(self) -> int | None:
        return self._guess if self.host is None else self.host

    def all_were_heard(self) -> None:
        """If no rank said that it hosts the store, none does."""
        self._guess = None

    def verdict(self) -> Verdict | None:
        return self._ask(_read_verdict)

    def pronounce(self, verdict: Verdict) -> Verdict:
        """Write the verdict unless there is one, and return the one that counts."""
        return self._ask(lambda store: _write_verdict(store, verdict))

    def leave(self, note: Note) -> Verdict | None:
        """Leave a sign of life, and see whether there is a verdict."""

        def both(store: dist.Store) -> Verdict | None:
            store.set(f"note/{self.rank}", json.dumps(note))
            return _read_verdict(store)

        return self._ask(both)

    def notes(self, ranks: Iterable[int]) -> dict[int, Note]:
        return self._ask(lambda store: _read_notes(store, ranks))

    def is_first_to_judge(self) -> bool:
        """True on one rank only, which then collects what all the others say."""
        return self._ask(lambda store: store.add("judge", 1)) == 1

    def sign(self) -> int:
        """Say that this rank has seen the verdict; how many have."""
        return self._ask(lambda store: store.add("signed", 1))

    def signatures(self) -> int:
        return self._ask(lambda store: store.add("signed", 0))

    def _ask(self, question: Callable[[dist.Store], T]) -> T:
        if self._asked is not None and not self._asked.is_over():
            raise BoardSilent("the store still owes an answer")
        self._asked = errand = send_carrier(lambda _: question(self._store))
        is_answered = errand.is_over(within=PATIENCE if self._has_own else PATIENCE / 2)
        if not is_answered and not self._has_own:
            self._has_own = True
            self._asked = errand = send_carrier(lambda _: question(self._on_its_own()))
            is_answered = errand.is_over(within=PATIENCE)
        if not is_answered:
            raise BoardSilent(f"the store did not answer within {PATIENCE:g} s")
        if errand.error is not None:
            raise BoardSilent(f"the store is lost: {errand.error}")
        return errand.join()

    def _on_its_own(self) -> dist.Store:
        """A connection that others' waits do not hold up, where they have: whoever hosts the store looks up the name
        of who connects, and answers nobody while a name server is slow."""
        self._store = self._reconnect()
        return self._store


def _read_verdict(store: dist.Store) -> Verdict | None:
    return Verdict(*json.loads(store.get("verdict"))) if store.check(["verdict"]) else None


def _write_verdict(store: dist.Store, verdict: Verdict) -> Verdict:
    return Verdict(*json.loads(store.compare_set("verdict", "", json.dumps(verdict))))


def _read_notes(store: dist.Store, ranks: Iterable[int]) -> dict[int, Note]:
    """Only keys that are there are read: the store would wait for one that is not."""
    there = [rank for rank in ranks if store.check([f"note/{rank}"])]
    return {rank: Note(*json.loads(store.get(f"note/{rank}"))) for rank in there}


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
