"""The lookout: every wait of a rank, bounded, with an eye on the board, and an answer to who is to blame."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import Disagreement, PeerLost
from .agreement import Differs, Signature, difference
from .board import Board, BoardSilent, Note, Verdict
from .carriers import Errand
from .journal import FlightRecord
from .lines import LineBroken

_FIRST_LOOK = 1.0  # seconds a rank waits before it looks at the board: nothing is written in a call that goes well
_COLLECT = 2.0  # seconds the others have to say what they were asked to do
_GRACE = 2.0  # seconds the host of the store stays for the others to read the verdict
_FEW = 256  # ranks: all of their notes can be read at once


class Lookout:
    """Where a rank waits. Once there is a verdict it never waits again."""

    def __init__(self, board: Board, record: FlightRecord, close: Callable[[], None]) -> None:
        self._board, self._record, self._close = board, record, close
        self._rank, self._size = board.rank, board.size
        self._beat = min(4.0, max(1.0, self._size / 256))
        self._beats = 0
        self._verdict: Verdict | None = None

    @property
    def is_broken(self) -> bool:
        return self._verdict is not None

    def say(self, words: dict[str, str], *, conversation: int, what: str) -> None:
        """What this rank was asked to do, on the board, whether or not the store is there to take it."""
        self._beats += 1
        terms = {"the number of this call": str(conversation), **words}
        with contextlib.suppress(BoardSilent):
            self._board.leave(Note(self._beats, conversation, None, what, terms))

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
        began = time.monotonic()
        wait = _Wait(errand, what, conversation, signature, began)
        pause = min(_FIRST_LOOK, timeout)
        while not errand.is_over(within=pause):
            verdict, left = self._look(wait), began + timeout - time.monotonic()
            if verdict is None and left <= 0:
                verdict = self._verdict_on_silence(wait)
            if verdict is not None:
                self._give_up(verdict, wait)
            pause = max(0.01, min(self._beat, left))
        if errand.error is not None:
            self._explain(errand.error, wait)

    def report(self, error: BaseException, *, what: str) -> None:
        """Tell the others that this rank fails, unless all know already that the group is broken."""
        if self._verdict is not None:
            return
        text = f"rank {self._rank} failed: {type(error).__name__}: {str(error)[:300]}"
        self._record.note("failed", what=what, text=text)
        self._adopt(self._pronounced(Verdict("failed", self._rank, text)))

    # ------------------------------------------------------------------------------------------- what went wrong

    def _explain(self, error: Exception, wait: _Wait) -> NoReturn:
        if isinstance(error, Differs):
            self._give_up(self._judge(wait), wait)
        if isinstance(error, LineBroken):
            self._give_up(self._verdict_on_broken_line(error), wait)
        raise error

    def _look(self, wait: _Wait) -> Verdict | None:
        """Show that this rank lives, and see what the others found."""
        try:
            return self._board.leave(self._note(wait))
        except BoardSilent:
            return None  # who hosts it may be lost, or busy: the timeout will tell

    def _note(self, wait: _Wait, terms: dict[str, str] | None = None) -> Note:
        self._beats += 1
        return Note(self._beats, wait.conversation, wait.errand.waits_for, wait.what, terms)

    def _verdict_on_broken_line(self, broken: LineBroken) -> Verdict:
        """The peer died, unless it left because it knew of somebody else's death."""
        text = f"rank {broken.peer} is lost: {broken}"
        return self._pronounced(Verdict("lost", broken.peer, text))

    def _verdict_on_silence(self, wait: _Wait) -> Verdict | None:
        """Follow who waits for whom, to a rank that gives no sign of life. None if the answer came after all."""
        first = wait.errand.waits_for
        if first is None:
            return None if wait.errand.is_over(within=1.0) else self._pronounced(Verdict("lost", None, "no answer"))
        try:
            before = self._notes_near(first)
            verdict = self._watch(wait, 1.5 * self._beat)
            if verdict is not None or wait.errand.is_over():
                return verdict
            path, suspect = self._follow(first, before, self._notes_near(first))
        except BoardSilent:
            return self._verdict_without_board(Verdict("lost", first, f"no answer from rank {first}"))
        if suspect is None:
            circle = " -> ".join(map(str, path))
            text = f"ranks wait for each other ({circle}): all ranks must make the same calls in the same order"
        else:
            text = f"no sign of life from rank {suspect}: stopped, cut off, or busy with something else"
        return self._pronounced(Verdict("lost", suspect, text))

    def _notes_near(self, first: int) -> dict[int, Note]:
        return self._board.notes(range(self._size) if self._size <= _FEW else [first])

    def _watch(self, wait: _Wait, seconds: float) -> Verdict | None:
        """Keep beating for a while, since others may be asking the same question about this rank."""
        end = time.monotonic() + seconds
        verdict = self._board.leave(self._note(wait))
        while verdict is None and (left := end - time.monotonic()) > 0 and not wait.errand.is_over(min(0.5, left)):
            verdict = self._board.leave(self._note(wait))
        return verdict

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
            verdict = self._board.leave(self._note(wait, terms))
            if verdict is None and not self._board.is_first_to_judge():
                verdict = self._judged_by_another()
            return verdict or self._pronounced(Verdict("mismatch", None, self._collected()))
        except BoardSilent:
            text = "ranks disagree, and the store that would tell in what is lost; all ranks must make the same call"
            return Verdict("mismatch", None, text)

    def _judged_by_another(self) -> Verdict | None:
        end = time.monotonic() + _COLLECT + 1.0
        while time.monotonic() < end:
            verdict = self._board.verdict()
            if verdict is not None:
                return verdict
            time.sleep(0.05)
        return None

    def _collected(self) -> str:
        end = time.monotonic() + _COLLECT
        said: dict[int, dict[str, str]] = {}
        while len(said) < self._size and time.monotonic() < end:
            missing = [rank for rank in range(self._size) if rank not in said]
            notes = self._board.notes(missing)
            said |= {rank: note.terms for rank, note in notes.items() if note.terms is not None}
            time.sleep(0.02)
        heard = ", ".join(map(str, sorted(said)))
        return difference(said, self._size) or (
            f"ranks disagree, but ranks {heard}, who could be asked, do not; all ranks must make the same call"
        )

    def _pronounced(self, verdict: Verdict) -> Verdict:
        try:
            return self._board.pronounce(verdict)
        except BoardSilent:
            return self._verdict_without_board(verdict)

    def _verdict_without_board(self, verdict: Verdict) -> Verdict:
        """The store went with its host: that is the first rank to suspect, whoever else left because of it."""
        host = self._board.likely_host
        if verdict.kind != "lost" or host in (None, self._rank):
            return verdict
        return Verdict("lost", host, f"rank {host} is lost: the group's store, which it hosts, is silent")

    def _adopt(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._close()
        self._stay_for_the_others(verdict)

    def _stay_for_the_others(self, verdict: Verdict) -> None:
        """The verdict is gone with the store's host, so the host leaves last."""
        expected = self._size - (verdict.kind == "lost" and verdict.rank is not None)
        try:
            signed = self._board.sign()
            end = time.monotonic() + _GRACE
            while self._board.host == self._rank and signed < expected and time.monotonic() < end:
                time.sleep(0.02)
                signed = self._board.signatures()
        except BoardSilent:
            pass

    def _give_up(self, verdict: Verdict, wait: _Wait) -> NoReturn:
        waited, peer = time.monotonic() - wait.began, wait.errand.waits_for
        self._adopt(verdict)
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


class _Wait:
    """One wait, as it is told to others."""

    def __init__(self, errand: Errand[Any], what: str, conversation: int, signature: Signature, began: float) -> None:
        self.errand, self.what, self.conversation = errand, what, conversation
        self.signature, self.began = signature, began
