"""Ranks that do something together: each does its part, rank 0 hears how it went everywhere, and all get an answer.

A part that fails on one rank fails on all of them, with the reason, and the group can be used afterwards. A rank that
is lost is a PeerLost on all others, within the timeout.
"""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ArgumentError, CheckpointError
from ...transport.contract import Conversation, Transport, check_timeout
from ...transport.lines import backend_for
from ...transport.select import transport_for, world_size

T = TypeVar("T")
R = TypeVar("R")
SLOWEST = 50e6  # bytes per second of the slowest disk that is waited for
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Failure(NamedTuple):
    rank: int
    text: str
    is_argument: bool  # the caller's mistake, not the disk's


class _Refusal(NamedTuple):
    """What all ranks raise."""

    text: str
    is_argument: bool


def together(what: str, part: Callable[[], None], *, group: Any, timeout: float | None) -> None:
    """Do `part` on every rank; where it fails on one, all raise what that one says."""
    meeting = Meeting(group, timeout=timeout)
    meeting.hold(what, part, lambda reports: reports)


class Meeting:
    """The ranks of a group, or this process alone."""

    def __init__(self, group: Any, *, timeout: float | None) -> None:
        if group is None and world_size() > 1:
            raise ArgumentError(
                f"there are {world_size()} ranks, and no group says which of them take part; give group="
            )
        self._transport: Transport = transport_for(group)
        self._timeout = check_timeout(timeout)
        self.rank, self.ranks = self._transport.rank, self._transport.size
        self._device = _device(self._transport)

    def hold(
        self,
        what: str,
        part: Callable[[], T],
        decide: Callable[[list[T]], Sequence[R]],
        *,
        moved: int = 0,
        **alike: object,
    ) -> R:
        """Do `part` on every rank, `decide` on rank 0 with all that came of it, and give each rank its answer.

        What is `alike` is compared first. A rank that is busy reading or writing its share of the `moved` bytes is not
        taken for lost.
        """
        mine = _outcome(self.rank, part)
        with self._transport.converse({"call": what, **alike}, timeout=self._patience(moved)) as talk:
            answers: list[Any] = []
            reports = self._gathered(talk, mine, what)
            if self.rank == 0:
                answers = _answers(reports, decide)
            answer = self._dealt(talk, answers, what)
        # raised out here, where all have left the call in order: the group stays whole
        if isinstance(answer, _Refusal):
            raise (ArgumentError if answer.is_argument else CheckpointError)(f"{what}: {answer.text}")
        return answer

    def _patience(self, moved: int) -> float | None:
        return None if self._timeout is None else self._timeout + moved / SLOWEST

    def _gathered(self, talk: Conversation, mine: Any, what: str) -> list[Any]:
        others = range(1, self.ranks)
        if self.rank != 0:
            self._send(talk, {0: mine}, what)
            return []
        return [mine, *self._received(talk, others, what).values()]

    def _dealt(self, talk: Conversation, answers: list[Any], what: str) -> Any:
        if self.rank != 0:
            return self._received(talk, [0], what)[0]
        self._send(talk, {rank: answers[rank] for rank in range(1, self.ranks)}, what)
        return answers[0]

    def _send(self, talk: Conversation, messages: dict[int, Any], what: str) -> None:
        if not messages:
            return
        letters = [(rank, _bytes(message).to(self._device)) for rank, message in messages.items()]
        sizes = [(rank, torch.tensor([len(letter)], device=self._device)) for rank, letter in letters]
        pending = talk.post(sizes, [], what=what), talk.post(letters, [], what=what)
        for post in pending:
            post.wait()

    def _received(self, talk: Conversation, ranks: Sequence[int], what: str) -> dict[int, Any]:
        if not ranks:
            return {}
        sizes = [(rank, torch.zeros(1, dtype=torch.int64, device=self._device)) for rank in ranks]
        talk.post([], sizes, what=what).wait()
        letters = [(rank, torch.empty(int(size), dtype=torch.uint8, device=self._device)) for rank, size in sizes]
        talk.post([], letters, what=what).wait()
        # from a rank of our own world, as torch's own object collectives do: nothing of a checkpoint passes here unread
        return {rank: pickle.loads(letter.cpu().numpy().tobytes()) for rank, letter in letters}


def _bytes(message: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)


def _device(transport: Transport) -> torch.device:
    name = getattr(transport, "group_name", None)
    if (
        name is not None
        and backend_for(dist.distributed_c10d._resolve_process_group(name), torch.device("cpu")) is None
    ):
        return torch.device("cuda", torch.cuda.current_device())  # NCCL alone carries no messages of the host
    return torch.device("cpu")


def _outcome(rank: int, part: Callable[[], T]) -> T | Failure:
    try:
        return part()
    except Exception as error:  # whatever it is, the others wait to hear of it
        return _failure(rank, error)


def _answers(reports: list[Any], decide: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    failures = [report for report in reports if isinstance(report, Failure)]
    if not failures:
        answers = _outcome(0, lambda: decide(reports))
        if not isinstance(answers, Failure):
            assert len(answers) == len(reports)
            return list(answers)
        failures = [answers]
    refusal = _Refusal(_told(failures, len(reports)), all(failure.is_argument for failure in failures))
    return [refusal] * len(reports)


def _told(failures: list[Failure], ranks: int) -> str:
    by_text: dict[str, list[str]] = {}
    for failure in failures:
        by_text.setdefault(failure.text, []).append(str(failure.rank))
    if ranks == 1:
        return "; ".join(by_text)
    return "; ".join(f"rank{'s'[: len(who) > 1]} {', '.join(who)}: {text}" for text, who in by_text.items())


def _failure(rank: int, error: Exception) -> Failure:
    """What went wrong, in words that can be read on another rank."""
    return Failure(rank, _words(error), isinstance(error, ArgumentError))


def _words(error: Exception) -> str:
    if isinstance(error, (ArgumentError, CheckpointError)):
        return str(error)
    from_system = _from_system(error)
    if from_system is None:
        return f"{type(error).__name__}: {error}"
    where = f" ({from_system.filename})" if from_system.filename else ""
    advice = "; free some space, or keep fewer checkpoints" if from_system.errno in _FULL else ""
    return f"{from_system.strerror or from_system}{where}{advice}"


def _from_system(error: BaseException | None) -> OSError | None:
    """What the system said: torch.save hides it behind an error about positions."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None
