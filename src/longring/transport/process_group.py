"""Messages over a torch.distributed group: any backend with point-to-point, the world or a part of it.

CPU tensors go over Gloo and CUDA tensors over NCCL. Where the group has Gloo alone, CUDA tensors go through
symmetric memory between ranks of one machine, and through pinned memory on the host otherwise.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PeerLost, TransportError
from .agreement import Agreement, Signature, signed
from .board import Board
from .carriers import Errand, failed, send, send_carrier
from .contract import Pending, Receives, Sends, Terms
from .journal import Entry, FlightRecord, Journal
from .lines import Letter, LineBroken, Lines, Posted, backend_for, check_device, tag_of
from .lookout import LATEST, Lookout
from .opening import Refused, opened
from .staging import Staged
from .streams import Crossing, crossing
from .symmetric import Ferried, Region, Vigil

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")
REFUSED = "an argument was refused"


class ProcessGroupTransport:
    """One rank of a group. Keep one for a group: it counts the calls, which all ranks make in the same order."""

    def __init__(self, group: dist.ProcessGroup, node_ranks: int | None = None) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self.group_name: str = group.group_name  # as torch.distributed knows it
        self._node_ranks = self._size if node_ranks is None else node_ranks
        self._lines = Lines(group)
        self._control: Lines | None = self._lines if backend_for(group, _CPU) == "gloo" else None
        self._has_nccl = backend_for(group, _CUDA) not in (None, "gloo")
        self._patience = _own_timeout(group)
        self._record = FlightRecord(self._rank)
        self._board = Board(group)
        self._lookout = Lookout(self._board, self._record, self._close)
        self._members = tuple(dist.get_process_group_ranks(group))
        self._conversations = 0
        self._declined: Talk | None = None
        self._agreed: set[bytes] = set()  # fingerprints of calls that all ranks have made before
        self._last_posted = threading.Event()
        self._last_posted.set()
        self._journals: list[Journal] = []
        self._vigil = Vigil()
        self._symmetric: Region | Refused | None = None  # not asked for yet
        self.bytes_sent = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def node_ranks(self) -> int:
        return self._node_ranks

    def __repr__(self) -> str:
        return f"ProcessGroupTransport(rank {self.rank} of {self.size})"

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    def decline(self, error: Exception) -> None:
        if self._lookout.is_broken or self._size == 1:
            return
        self._await_declined()
        self._declined = self._begin({"call": REFUSED}, None)
        self._declined.say(f"{REFUSED} ({error})")
        if self._declined.is_answered(within=1.0):  # so that who ends now has been heard
            with contextlib.suppress(TransportError):
                self._await_declined()

    def _await_declined(self, timeout: float | None = None) -> None:
        """A call that was declined goes on beside the caller, and ends before the next begins, within its timeout."""
        declined, self._declined = self._declined, None
        if declined is not None:
            declined._timeout = declined._timeout if timeout is None else timeout
            with declined:
                pass

    def converse(self, terms: Terms, *, timeout: float | None = None) -> Talk:
        self._await_declined(timeout)
        return self._begin(terms, timeout)

    def _begin(self, terms: Terms, timeout: float | None) -> Talk:
        self._lookout.check()
        self._check_group()
        facts = {**terms, "longring's version": _version(), "ranks of a node": self.node_ranks}
        opens = terms.get("device") == "cuda" and self._wants_symmetric(facts)
        self._conversations += 1
        return Talk(self, self._conversations, signed(facts), timeout, opens=opens)

    def _wants_symmetric(self, facts: dict[str, object]) -> bool:
        """Whether CUDA tensors may go through symmetric memory; all ranks must see it alike."""
        self._check_refusal()
        asked = way_for_cuda()
        facts["way of CUDA tensors"] = asked or "any"
        return self._size > 1 and asked != "staged" and (asked == "symmetric" or not self._has_nccl)

    def _check_refusal(self) -> None:
        if isinstance(self._symmetric, Refused) and way_for_cuda() == "symmetric":
            raise TransportError(f"LONGRING_TRANSPORT=symmetric cannot be had: {self._symmetric.reason}")

    @property
    def symmetric_bytes(self) -> int:
        """Of this rank's GPU, beside what torch's allocator counts."""
        return self._symmetric.nbytes if isinstance(self._symmetric, Region) else 0

    def _check_group(self) -> None:
        try:
            dist.get_process_group_ranks(self._lines.group)
        except (KeyError, ValueError, RuntimeError):
            raise TransportError(f"rank {self.rank}: the group was destroyed; make a new one") from None

    @contextmanager
    def recording(self) -> Iterator[Journal]:
        """A journal of every post made meanwhile."""
        journal = Journal()
        self._journals.append(journal)
        try:
            yield journal
        finally:
            self._journals.remove(journal)

    def _control_lines(self, timeout: float) -> Lines:
        """Lines for greetings, which are read on the host: a group without Gloo gets a companion that has it."""
        if self._control is None:
            self._companion = _companion(self._lines.group, timeout)
            self._control = Lines(self._companion)
        return self._control

    def _close(self) -> None:
        for lines in {self._lines, self._control or self._lines}:
            lines.close()
        if isinstance(self._symmetric, Region):
            self._symmetric.release()

    def _enter_post(self, what: str, sends: list[Letter], receives: list[Letter]) -> Entry:
        sent, received = (sum(letter.tensor.nbytes for letter in letters) for letters in (sends, receives))
        self.bytes_sent += sent
        entry = Entry(what, sent, received, time.monotonic())
        for journal in self._journals:
            journal.entries.append(entry)
        peers = {"to": [letter.peer for letter in sends], "from": [letter.peer for letter in receives]}
        self._record.note("post", what=what, bytes_sent=sent, bytes_received=received, **peers)
        return entry


class Talk:
    """One call. Beside the caller's own work the ranks greet each other; what arrives is used once all agree.

    A call that all have made before is posted at once: on Gloo the tag of a message keeps it from a receive of
    another call. Anything else is posted when all agree. A known call is greeted by its caller, and whoever
    waits for its first message waits for the answers too: handing work to threads costs more than a letter.
    """

    def __init__(
        self,
        transport: ProcessGroupTransport,
        number: int,
        signature: Signature,
        timeout: float | None,
        *,
        opens: bool = False,
    ) -> None:
        self._transport, self._number, self._signature = transport, number, signature
        self._is_watched = timeout is not None
        self._timeout = transport._patience if timeout is None else timeout
        self._counts: dict[tuple[bool, int], int] = defaultdict(int)
        self._what = f"{signature.words.get('call', 'a call')}, before the first step"
        self._all_agree = False
        transport._record.note("call", number=number, terms=signature.words)
        lines = transport._control_lines(self._timeout)
        self._agreement = Agreement(lines, transport._board, number, signature)
        self._is_known = signature.fingerprint in transport._agreed
        self._greeting = self._greeted() if self._is_known else Errand(self._greet)
        self._is_asked = False
        self._opening: Errand[None] | None = None
        if opens and transport._symmetric is None:
            self._device = torch.device("cuda", torch.cuda.current_device())  # a carrier has another
            self._opening = Errand(self._open)
        if not self._is_known or self._opening is not None:
            send(*self._unasked(), *filter(None, [self._opening]))

    def _greeted(self) -> Errand[None]:
        try:
            self._agreement.greet()
        except LineBroken as broken:
            return failed(broken, broken.peer)
        return Errand(self._agreement.reach)

    def _greet(self, errand: Errand[None]) -> None:
        self._agreement.greet()
        self._agreement.reach(errand)

    def _open(self, errand: Errand[None]) -> None:
        """In a carrier of every rank, once all are known to make this call."""
        self._greeting.join()
        self._transport._symmetric = opened(self._transport._lines.group, self._device, errand)

    def _ask(self) -> None:
        """See to it that a carrier waits for the answers."""
        send(*self._unasked())

    def _unasked(self) -> list[Errand[None]]:
        """The errand that waits for the answers, if no carrier has it yet."""
        is_open = not self._is_asked and not self._greeting.is_over()
        self._is_asked = True
        return [self._greeting] if is_open else []

    def is_answered(self, within: float) -> bool:
        """Whether it is known by now if all agree."""
        self._ask()
        return self._greeting.is_over(within)

    def say(self, call: str) -> None:
        """Leave on the board what this rank was asked to do, for others who will want to know."""
        words = {**self._signature.words, "call": repr(call)}
        self._signature = self._signature._replace(words=words)
        self._transport._lookout.say(words, conversation=self._number, what=call)

    def post(self, sends: Sends, receives: Receives, *, what: str) -> Pending:
        transport = self._transport
        for peer, tensor in (*sends, *receives):
            _check_message(transport, peer, tensor)
        self._what = what
        outgoing = [self._letter(True, peer, tensor) for peer, tensor in sends if tensor.numel()]
        incoming = [self._letter(False, peer, buffer) for peer, buffer in receives if buffer.numel()]
        entry = transport._enter_post(what, outgoing, incoming)
        return self._on_its_way([*incoming, *outgoing], entry)

    def _on_its_way(self, letters: list[Letter], entry: Entry) -> Pending:
        device = letters[0].tensor.device if letters else _CPU
        if device.type == "cuda" and self._opening is not None:
            self._until_all_agree(entry.what)  # once in the life of a group
        region, has_nccl = self._transport._symmetric, self._transport._has_nccl
        if letters and isinstance(region, Region) and region.shore.device.type == device.type:
            return Ferried(self, region, letters, entry)
        if device.type == "cuda" and not has_nccl:
            return Staged(self, letters, entry)
        return InFlight(self, letters, entry)

    def _letter(self, sent: bool, peer: int, tensor: Tensor) -> Letter:
        number = self._counts[sent, peer]
        self._counts[sent, peer] += 1
        facts = self._signature.fingerprint, self._number, number, tensor.nbytes, tensor.dtype
        return Letter(sent, peer, tensor, tag_of(*facts))

    def _is_safe_at_once(self, letters: list[Letter]) -> bool:
        return self._is_known and all(letter.tensor.device.type == "cpu" for letter in letters) and self._has_tags()

    def _has_tags(self) -> bool:
        return self._transport._control is self._transport._lines

    def _until(self, errand: Errand[Any], what: str, timeout: float | None = None) -> None:
        timeout = self._timeout if timeout is None else timeout
        self._transport._lookout.until(
            errand, what=what, conversation=self._number, signature=self._signature, timeout=timeout
        )

    def _until_all_agree(self, what: str) -> None:
        if self._all_agree:
            return
        self._ask()
        self._until(self._greeting, what)
        if self._opening is not None:
            self._until_open(self._opening, what)
        transport = self._transport
        transport._board.all_were_heard()
        if len(transport._agreed) > 10_000:  # documents that change with every call must not pile up
            transport._agreed.clear()
        transport._agreed.add(self._signature.fingerprint)
        self._all_agree = True

    def _until_open(self, opening: Errand[None], what: str) -> None:
        self._until(opening, what)
        self._opening = None
        self._transport._check_refusal()

    def __enter__(self) -> Talk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._until_all_agree(self._what)
        else:
            self._ask()
            self._transport._lookout.report(error, what=self._what)


class InFlight:
    """Messages of one post, which a carrier waits for."""

    def __init__(self, talk: Talk, letters: list[Letter], entry: Entry) -> None:
        self._talk, self._letters, self._entry = talk, letters, entry
        self._crossing: Crossing = crossing([letter.tensor for letter in letters])
        if not letters:
            entry.done_at, self._errand = entry.posted_at, None
            return
        transport = talk._transport
        self._previous, self._posted = transport._last_posted, threading.Event()
        transport._last_posted = self._posted
        if talk._is_safe_at_once(letters):
            self._errand = self._sent_at_once()
        else:
            talk._ask()
            self._errand = send_carrier(self._carry)
        if self._crossing.is_by_stream and talk._is_watched:
            # The caller may be in a CUDA call that waits for the device, and the device for this very message: a
            # kernel that is loaded when it is first launched waits so. Another thread then has to end the waiting.
            half, errand = talk._timeout / 2, self._errand  # from there on, others see that this rank lives
            transport._vigil.watch(errand, lambda: talk._until(errand, entry.what, timeout=half), quiet=half)

    def _sent_at_once(self) -> Errand[None]:
        try:
            posted = self._talk._transport._lines.post(self._letters)
        except LineBroken as broken:
            return failed(broken, broken.peer)
        finally:
            self._posted.set()
        return send_carrier(lambda errand: self._finish(posted, errand), *self._talk._unasked())

    def _carry(self, errand: Errand[None]) -> None:
        """In a carrier: once all agree, and after what was posted before."""
        try:
            errand.waits_for = self._letters[0].peer
            self._talk._greeting.join()
            self._previous.wait()
            with self._crossing.posting():
                posted = self._talk._transport._lines.post(self._letters)
                if self._crossing.is_by_stream:  # the wait is the stream's, and comes before the next post there
                    self._talk._transport._lines.wait(posted, errand)
                    self._crossing.mark_done()
                    posted = []
        finally:
            self._posted.set()
        self._finish(posted, errand)

    def _finish(self, posted: list[Posted], errand: Errand[None]) -> None:
        self._talk._transport._lines.wait(posted, errand)
        if self._talk._is_watched:
            self._crossing.watch()
        self._entry.done_at = time.monotonic()
        self._talk._transport._record.note("done", what=self._entry.what)

    def wait(self) -> None:
        self._talk._until_all_agree(self._entry.what)
        if self._errand is not None:
            self._talk._until(self._errand, self._entry.what)
            self._crossing.hand_over()
            self._letters = []  # whoever keeps this object does not keep the tensors


def _check_message(transport: ProcessGroupTransport, peer: int, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise TransportError(f"rank {transport.rank} can only send and receive contiguous tensors")
    if not 0 <= peer < transport.size or peer == transport.rank:
        raise TransportError(f"rank {transport.rank} of {transport.size} cannot exchange a message with rank {peer}")
    check_device(transport._lines.group, tensor, transport.rank)


def way_for_cuda() -> str | None:
    """How CUDA tensors are to travel, where LONGRING_TRANSPORT says it."""
    asked = os.environ.get("LONGRING_TRANSPORT", "")
    if asked not in ("", "symmetric", "staged"):
        raise TransportError(f'LONGRING_TRANSPORT must be "symmetric" or "staged", or not be set; got {asked!r}')
    return asked or None


def _own_timeout(group: dist.ProcessGroup) -> float:
    """How long the group itself would wait, in seconds."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return options._timeout.total_seconds()
    return dist.distributed_c10d.default_pg_timeout.total_seconds()


def _version() -> str:
    return sys.modules["longring"].__version__  # an import would turn the order of the rooms around


def _companion(group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroupGloo:
    """Gloo beside the group's own backend, known to this transport alone: torch's list of groups stays as it is."""
    store = dist.PrefixStore("longring/greetings", dist.distributed_c10d._get_process_group_store(group))
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # in a carrier: a store whose host is stopped never answers
    made = send_carrier(lambda _: dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout)))
    try:
        if made.is_over(within=timeout + LATEST):
            return made.join()
        text = "no answer"
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
    raise PeerLost(f"rank {rank} waited for all {size} ranks to make their first call: {text}")


def new_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """A group that its members make alone, without the rest of the world."""
    group = dist.new_group(list(ranks), use_local_synchronization=True, **options)
    assert isinstance(group, dist.ProcessGroup)  # only members come here
    return group


def node_ranks_of(group: dist.ProcessGroup) -> int:
    """How many consecutive ranks share a machine, where the launcher says so and the group is the whole world."""
    size = dist.get_world_size(group)
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    is_world = dist.get_process_group_ranks(group) == list(range(dist.get_world_size()))
    return int(local) if is_world and local.isdigit() and int(local) > 0 and size % int(local) == 0 else size
