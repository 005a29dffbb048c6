"""The lookout: every wait of a rank, bounded, with an eye on the board, and an answer to who is to blame.

A wait of `timeout` seconds ends within the timeout and half a second, with its answer or with a verdict that all ranks
share. Whether other ranks live is therefore watched before the timeout has passed, and what comes after it has
`LATEST` seconds in all: the last signs of life, the verdict, and telling the others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import Disagreement, PeerLost
from .agreement import Differs, Signature, difference
from .board import PATIENCE, Board, BoardSilent, Note, Verdict
from .carriers import Errand, send_carrier
from .journal import FlightRecord
from .lines import LineBroken

_FIRST_LOOK = 0.5  # seconds that a rank waits at most before it looks at the board
_BEATS = 10  # signs of life that a rank gives in a timeout, at least; and
_WATCHED = 5  # of so many that end with the timeout, a rank that lives has given one
_LAST_SIGNS = 0.15  # seconds after the timeout at which notes are read for the last time
LATEST = 0.3  # seconds after the timeout at which nothing is waited for any more
_LEAST = 0.1  # seconds that the store has for an answer however late it is
_POLL = 0.05  # seconds from one question for the verdict to the next
_READERS = 16  # ranks that read all notes: more would keep the store from everybody else
_FASTEST = 10_000  # questions per second that ranks ask the store together
_COLLECT = 1.0  # seconds the others have to say what they were asked to do
_JUDGED = 1.4  # seconds that ranks which disagree have to find in what
_STAY = 1.0  # seconds the host of the store stays in the call for the others to read the verdict
_GRACE = 2.0  # seconds its process stays for that


class Lookout:
    """Where a rank waits. Once there is a verdict it never waits again."""

    def __init__(self, board: Board, record: FlightRecord, close: Callable[[], None]) -> None:
        self._board, self._record, self._close = board, record, close
        self._rank, self._size = board.rank, board.size
        self._beats = 0
        self._verdict: Verdict | None = None
        self._lock = threading.Lock()  # a caller and the carrier that watches transfers may find out at once

    @property
    def is_broken(self) -> bool:
        return self._verdict is not None

    def say(self, words: dict[str, str], *, conversation: int, what: str) -> None:
        """What this rank was asked to do, on the board, whether or not the store is there to take it."""
        self._beats += 1
        terms = {"the number of this call": str(conversation), **words}
        with contextlib.suppress(BoardSilent):
            self._board.leave(Note(self._beats, conversation, None, what, terms), _COLLECT)

    def check(self) -> None:
        """Raise at once where the group is known to be broken."""
        if self._verdict is not None:
            kind, rank, text = self._verdict
            message = (
                f"rank {self._rank}: this group broke in an earlier call and cannot be used; make a new one ({text})"
            )
            raise Disagreement(message) if kind == "mismatch" else PeerLost(message, rank=rank)

    def until(self, errand: Errand[Any], *, what: str, conversation: int, signature: Signature, timeout: float) -> None:
        """Return when the errand is done; within the timeout, or else with an error that all ranks share."""
        wait = _Wait(errand, what, conversation, signature, timeout, self._size)
        while not errand.is_over(within=wait.until_next_look()):
            verdict = self._verdict or (self._look(wait) if wait.left() > 0 else self._verdict_on_silence(wait))
            if verdict is not None:
                self._give_up(verdict, wait)
        if self._verdict is not None:  # another thread's, which has ended what this one waited for
            self._give_up(self._verdict, wait)
        self._read_no_more(wait)
        if errand.error is not None:
            self._explain(errand.error, wait)

    def report(self, error: BaseException, *, what: str) -> None:
        """Tell the others that this rank fails, unless all know already that the group is broken."""
        if self._verdict is not None:
            return
        text = f"rank {self._rank} failed: {type(error).__name__}: {str(error)[:300]}"
        self._record.note("failed", what=what, text=text)
        self._adopt(self._written(Verdict("failed", self._rank, text), _GRACE), time.monotonic() + _GRACE)

    # ------------------------------------------------------------------------------------------- what went wrong

    def _explain(self, error: Exception, wait: _Wait) -> NoReturn:
        if isinstance(error, Differs):
            wait.ends = time.monotonic() + _JUDGED
            self._give_up(self._judge(wait), wait)
        if isinstance(error, LineBroken):
            self._give_up(self._verdict_on_broken_line(error, wait), wait)
        raise error

    def _look(self, wait: _Wait) -> Verdict | None:
        """Show that this rank lives, and see what the others found."""
        wait.has_looked()
        if self._board.is_silent:
            return None  # who hosts the store may be lost, or busy: the timeout will tell
        try:
            verdict = self._board.leave(self._note(wait), min(PATIENCE, max(_LEAST, wait.left())), wait.errand)
            if verdict is None and wait.is_to_watch() and self._is_reader(wait):
                wait.seen = self._board.notes(range(self._size), wait.patience())
            return verdict
        except BoardSilent:
            return None

    def _is_reader(self, wait: _Wait) -> bool:
        """Whether this rank reads the notes of all: those whose waits end first do, and the others hear of it."""
        if wait.is_reader is None:
            wait.is_reader = self._size <= _READERS or self._readers(wait, 1) <= _READERS
            if not wait.is_reader:
                self._readers(wait, -1)
        return wait.is_reader

    def _read_no_more(self, wait: _Wait) -> None:
        """Make room: who waits on, or waits later in this call, must find ranks that read and wait themselves."""
        if wait.is_reader and self._size > _READERS:
            with contextlib.suppress(BoardSilent):
                self._readers(wait, -1)

    def _readers(self, wait: _Wait, more: int) -> int:
        return self._board.number_of_readers(wait.conversation, more, wait.patience() if more > 0 else _LEAST)

    def _note(self, wait: _Wait, terms: dict[str, str] | None = None) -> Note:
        self._beats += 1
        return Note(self._beats, wait.conversation, wait.errand.waits_for, wait.what, terms)

    def _verdict_on_broken_line(self, broken: LineBroken, wait: _Wait) -> Verdict:
        """The peer died, unless it left because it knew of somebody else's death."""
        text = f"rank {broken.peer} is lost: {broken}"
        return self._pronounced(Verdict("lost", broken.peer, text), wait)

    def _verdict_on_silence(self, wait: _Wait) -> Verdict | None:
        """Follow who waits for whom, to a rank that gives no sign of life. None if the answer came after all."""
        if wait.errand.is_over(within=wait.left(_LAST_SIGNS)):
            return None
        first = wait.errand.waits_for
        if first is None:
            return self._pronounced(Verdict("lost", None, "no answer"), wait)
        suspected = Verdict("lost", first, f"no answer from rank {first}")
        try:
            if wait.seen is None:
                verdict = self._heard(wait)
            else:
                verdict = self._board.leave(self._note(wait), wait.patience())
                after = {} if verdict is not None else self._board.notes(range(self._size), wait.patience())
                suspected = _suspected(*self._follow(first, wait.seen, after))
        except BoardSilent:
            return self._verdict_without_board(suspected)
        if verdict is not None or wait.errand.is_over():
            return verdict
        return self._pronounced(suspected, wait)

    def _heard(self, wait: _Wait) -> Verdict | None:
        """The verdict of a rank that has read the notes. Ranks ask for it one after the other."""
        turn = _LAST_SIGNS + (LATEST - _LAST_SIGNS) * (1 + self._rank / self._size) / 3
        for moment in (turn, LATEST):
            if wait.errand.is_over(within=wait.left(moment)):
                return None
            verdict = self._board.verdict(wait.patience())
            if verdict is not None:
                return verdict
        return None

    def _follow(self, first: int, before: dict[int, Note], after: dict[int, Note]) -> tuple[list[int], int | None]:
        path, at = [self._rank], first
        while at not in path:
            path.append(at)
            beaten = before[at].beats if at in before else 0
            if at not in after or after[at].beats <= beaten:
                return path, at
            following = after[at].waits_for
            if following is None:  # it has just got what it waited for
                return path, at
            at = following
        return [*path, at], None

    # --------------------------------------------------------------------------------------- what all ranks raise

    def _judge(self, wait: _Wait) -> Verdict:
        """Ranks disagree: each says on the board what it was asked to do, and one compares."""
        terms = {"the number of this call": str(wait.conversation), **wait.signature.words}
        try:
            verdict = self._board.leave(self._note(wait, terms), wait.patience())
            if verdict is None and not self._board.is_first_to_judge(wait.patience()):
                verdict = self._judged_by_another(wait)
            return verdict or self._pronounced(Verdict("mismatch", None, self._collected(wait)), wait)
        except BoardSilent:
            text = "ranks disagree, and the store that would tell in what is lost; all ranks must make the same call"
            return Verdict("mismatch", None, text)

    def _judged_by_another(self, wait: _Wait) -> Verdict | None:
        while wait.left() > 0:
            verdict = self._board.verdict(wait.patience())
            if verdict is not None:
                return verdict
            time.sleep(max(_POLL, self._size / _FASTEST))
        return None

    def _collected(self, wait: _Wait) -> str:
        """What the ranks say within a second; or at once, where another rank was to ask them and did not."""
        end = min(time.monotonic() + _COLLECT, wait.ends)
        said: dict[int, dict[str, str]] = {}
        while True:
            missing = [rank for rank in range(self._size) if rank not in said]
            notes = self._board.notes(missing, wait.patience())
            said |= {rank: note.terms for rank, note in notes.items() if note.terms is not None}
            if len(said) == self._size or time.monotonic() >= end:
                break
            time.sleep(0.02)
        heard = ", ".join(map(str, sorted(said)))
        return difference(said, self._size) or (
            f"ranks disagree, but ranks {heard}, who could be asked, do not; all ranks must make the same call"
        )

    def _pronounced(self, verdict: Verdict, wait: _Wait) -> Verdict:
        return self._written(verdict, wait.patience())

    def _written(self, verdict: Verdict, within: float) -> Verdict:
        try:
            return self._board.pronounce(verdict, within)
        except BoardSilent:
            return self._verdict_without_board(verdict)

    def _verdict_without_board(self, verdict: Verdict) -> Verdict:
        """The store went with its host: that is the first rank to suspect, whoever else left because of it."""
        host = self._board.likely_host
        if verdict.kind != "lost" or host in (None, self._rank):
            return verdict
        return Verdict("lost", host, f"rank {host} is lost: the group's store, which it hosts, is silent")

    def _adopt(self, verdict: Verdict, end: float) -> None:
        with self._lock:
            is_known, self._verdict = self._verdict is not None, verdict
        if is_known:  # by the verdict of another thread of this rank
            return
        self._close()
        self._stay_for_the_others(verdict, end)

    def _stay_for_the_others(self, verdict: Verdict, end: float) -> None:
        """The verdict is gone with the store's host, so the host leaves last.

        It raises by `end`; where it has to stay longer, the end of its process waits.
        """
        expected = self._size - (verdict.kind == "lost" and verdict.rank is not None)
        try:
            signed = self._board.sign(max(0.0, end - time.monotonic()))
        except BoardSilent:  # the signature is on its way: late is no reason for the host to leave
            signed = 0
        if self._board.host == self._rank and signed < expected:
            send_carrier(lambda _: self._stay(verdict, expected)).is_over(within=end - time.monotonic())

    def _stay(self, verdict: Verdict, expected: int) -> None:
        end = time.monotonic() + _GRACE
        with contextlib.suppress(BoardSilent):
            self._board.pronounce(verdict, _GRACE)  # where there was no time to, or no answer
            while self._board.signatures() < expected and time.monotonic() < end:
                time.sleep(0.02)

    def _give_up(self, verdict: Verdict, wait: _Wait) -> NoReturn:
        waited, peer = time.monotonic() - wait.began, wait.errand.waits_for
        self._adopt(verdict, min(time.monotonic() + _STAY, wait.ends + LATEST))
        self._record.note("verdict", what=wait.what, kind=verdict.kind, suspect=verdict.rank, text=verdict.text)
        where = self._record.written()
        if verdict.kind == "mismatch":
            raise Disagreement(verdict.text + where)
        whom = "" if peer is None else f" for rank {peer}"
        text = f"the others gave this rank up ({verdict.text})" if verdict.rank == self._rank else verdict.text
        raise PeerLost(
            f"rank {self._rank} waited {waited:.1f} s{whom} ({wait.what}): {text}{where}",
            rank=verdict.rank,
            phase_and_step=wait.what,
        )


def _suspected(path: list[int], suspect: int | None) -> Verdict:
    if suspect is None:
        circle = " -> ".join(map(str, path))
        text = f"ranks wait for each other ({circle}): all ranks must make the same calls in the same order"
    else:
        text = f"no sign of life from rank {suspect}: stopped, cut off, or busy with something else"
    return Verdict("lost", suspect, text)


class _Wait:
    """One wait, as it is told to others, and its clock."""

    def __init__(
        self, errand: Errand[Any], what: str, conversation: int, signature: Signature, timeout: float, size: int
    ) -> None:
        self.errand, self.what, self.conversation, self.signature = errand, what, conversation, signature
        self.began = time.monotonic()
        self.ends = self.began + timeout
        usual = min(4.0, max(1.0, size / 256))  # seconds from one sign of life to the next
        self._beat = max(size / _FASTEST, min(usual, timeout / _BEATS))
        self._watched_from = self.ends - min(_WATCHED * self._beat, timeout / 2)
        self._next_look = self.began + min(_FIRST_LOOK, self._beat / 2)
        self.is_reader: bool | None = None  # not asked for yet
        self.seen: dict[int, Note] | None = None  # the notes of all ranks, where this one has read them

    def left(self, more: float = 0.0) -> float:
        """Seconds to the end of the timeout, or to so many seconds after it."""
        return self.ends + more - time.monotonic()

    def patience(self) -> float:
        """Seconds that the store has for an answer."""
        return max(_LEAST, min(PATIENCE, self.left(LATEST)))

    def is_to_watch(self) -> bool:
        return self.seen is None and time.monotonic() >= self._watched_from

    def until_next_look(self) -> float:
        now = time.monotonic()
        times = [self._next_look, self.ends, *([] if now >= self._watched_from else [self._watched_from])]
        return max(0.01, min(times) - now)

    def has_looked(self) -> None:
        self._next_look = time.monotonic() + self._beat
