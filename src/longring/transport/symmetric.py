"""CUDA tensors between the ranks of one machine: torch's symmetric memory, copied through by streams alone.

Every rank maps every other's outbox, and flags in the host's memory. A post gives the streams of its lanes all there
is to do (lanes.py) and returns; nobody on the host waits for a message, and no multiprocessor does. What a caller
computes with comes after it on its own stream.

More lanes than the hardware has queues share them, and then a wait holds up what was queued behind it, of other lanes
as well. Nobody waits in a circle nevertheless, because all ranks queue in one order: post by post as the itinerary has
them, in a post piece by piece, and of each piece what is sent before what is received. So a step's sends belong into
the post of its receives.

A rank that is lost leaves streams that would wait for ever. So transfers are watched: by the caller where the call
has a timeout, which then raises in that call; else by a vigil beside it, and what is raised then is raised by the
group's next wait or call. Either way the streams are let go once there is a verdict, and what had not arrived by
then arrives as bytes of ones, which is nan in every floating-point format: a result is right, or nan, or an error.
Where the device does not even take those, the process is ended with a message. So it happens where a caller without a
timeout launched, behind a message that never came, a kernel that its process had not used before: CUDA loads it then,
waits with that for all that was launched, and lets no thread launch anything meanwhile.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor

from ..errors import TransportError
from .carriers import Errand, send_carrier
from .journal import Entry
from .lanes import Belt, End, Receiving, Sending, Shared, as_bytes, move_all
from .lines import Letter, LineBroken

if TYPE_CHECKING:
    from .process_group import Talk

_ONES = 255
_PAUSE = 0.0005  # seconds between two looks at a transfer
_NO_HURRY = 0.01  # where no caller waits for it
_QUIET = 1.0  # seconds that a transfer may take before others are told of it
_PULSE = 1.0  # seconds between two looks at whether a peer's process is there
_GRACE = 3.0  # seconds the other ranks have to hear of the verdict, before slots they read are overwritten
_LAST_CALL = 2.0  # seconds that the end of the process waits for transfers


class Shore(Protocol):
    device: torch.device

    def belt(self) -> Belt: ...

    def rescuers(self) -> Sequence[Belt]:
        """Belts of which at least one is not held up, whatever waits on the others."""
        ...

    def computed(self) -> Any: ...

    def hand_over(self, mark: Any) -> None: ...


class Transfer(Errand[None]):
    """The messages of one post, under way on their belts: an errand that no carrier runs."""

    def __init__(
        self, region: Region, letters: Sequence[Letter], computed: Any, ends: Sequence[tuple[int, Any]]
    ) -> None:
        super().__init__(lambda _: None)
        self._region, self._computed, self.pause = region, computed, _PAUSE
        self._letters = list(letters)  # a belt may not find memory that was given to others
        self._ends, self._has_passed = list(ends), False
        self._next_pulse = time.monotonic() + _PULSE
        self._silent: int | None = None  # whose process was not there at the last look
        self.waits_for = ends[0][0]

    def is_over(self, within: float = 0.0) -> bool:
        end = time.monotonic() + within
        while self.error is None and not self.has_passed():
            self._feel_the_pulse()
            if time.monotonic() >= end:
                return self.error is not None
            time.sleep(self.pause)
        return True

    def has_passed(self) -> bool:
        """Asked by several threads: by the caller, the vigil and the rescue."""
        if not self._has_passed:
            late = next((peer for peer, mark in self._ends if not mark.query()), None)
            self._has_passed = late is None
            self.waits_for = self.waits_for if late is None else late
        return self._has_passed

    def _feel_the_pulse(self) -> None:
        """A process that is gone answers no more, but what it had given its streams may have arrived since."""
        if time.monotonic() < self._next_pulse or self.waits_for is None:
            return
        self._next_pulse = time.monotonic() + _PULSE
        if self._region.is_alive(self.waits_for) or not self._computed.query():  # then this rank is late, not the other
            self._silent = None
        elif self._silent == self.waits_for and not self.has_passed():
            self.error = LineBroken(self.waits_for, "its process has ended")
        else:
            self._silent = self.waits_for

    def break_off(self) -> None:
        if self.error is None and self.waits_for is not None and not self.has_passed():
            self.error = LineBroken(self.waits_for, "the group is lost")

    def hand_over(self) -> None:
        """In the caller: what it does from now on comes after the transfer, also what reuses its memory."""
        for _, mark in self._ends:
            self._region.shore.hand_over(mark)
        self._letters = []


class Region:
    """The memories of all ranks, as this one sees them."""

    def __init__(
        self,
        rank: int,
        shared: Shared,
        shore: Shore,
        processes: Mapping[int, int],
        keep: object = None,
    ) -> None:
        self.rank, self.shore, self.nbytes = rank, shore, shared.plan.lanes_bytes
        self._shared, self._processes, self._keep = shared, processes, keep
        self._ends: dict[tuple[bool, int], End] = {}
        self._under_way: deque[Transfer] = deque()
        self._lock = threading.Lock()
        self._freeing: Errand[None] | None = None
        _regions.add(self)

    def post(self, letters: Sequence[Letter]) -> Transfer:
        """Everything is queued, nothing is waited for. Letters are in order for each peer and direction."""
        for letter in letters:
            self._check(letter.tensor)
        ways: dict[tuple[bool, int], list[Tensor]] = {}
        for letter in sorted(letters, key=lambda letter: not letter.sent):
            ways.setdefault((letter.sent, letter.peer), []).append(as_bytes(letter.tensor))
        with self._lock:
            if self._freeing is not None:
                raise TransportError(f"rank {self.rank}: the group is lost; make a new one")
            while self._under_way and self._under_way[0].has_passed():
                self._under_way.popleft()
            ends = {way: self._end(*way) for way in ways}
            computed = self.shore.computed()
            for end in ends.values():
                end.belt.follow(computed)
            move_all([(ends[way], messages) for way, messages in ways.items()])
            transfer = Transfer(self, letters, computed, [(end.other, end.belt.mark()) for end in ends.values()])
            self._under_way.append(transfer)
        return transfer

    def _check(self, tensor: Tensor) -> None:
        if tensor.device != self.shore.device:
            raise TransportError(
                f"rank {self.rank}: symmetric memory of this group is on {self.shore.device}, and the tensor is on "
                f"{tensor.device}; call torch.cuda.set_device before the first call with the group"
            )

    def _end(self, sent: bool, peer: int) -> End:
        if (sent, peer) not in self._ends:
            kind = Sending if sent else Receiving
            self._ends[sent, peer] = kind.over(self._shared, self.rank, peer, self.shore.belt())
        return self._ends[sent, peer]

    def is_alive(self, peer: int) -> bool:
        """As far as can be known: a process of another namespace cannot be seen, and counts as alive."""
        process = self._processes.get(peer)
        if process is None:
            return True
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"

    # ------------------------------------------------------------------------------------------ when a rank is lost

    def release(self) -> None:
        """Let every belt of this rank go, for good: with ones for what has not arrived."""
        with self._lock:
            if self._freeing is not None:
                return
            for transfer in self._under_way:
                transfer.break_off()
            self._freeing = send_carrier(self._free)

    def _free(self, errand: Errand[None]) -> None:
        """Living ranks still count their flags up from lower numbers: they are set again until all is over."""
        if self._is_quiet():
            return
        spoiling = send_carrier(self._spoil)  # the driver may keep whoever asks it for anything
        if not spoiling.is_over(within=_GRACE) or spoiling.error is not None:
            self._end_the_process()
        began = time.monotonic()
        while not self._is_quiet() and time.monotonic() < began + 4 * _GRACE:
            for (sent, _), end in self._ends.items():
                if not sent or time.monotonic() > began + _GRACE:
                    end.let_go()
            time.sleep(0.005)

    def _spoil(self, errand: Errand[None]) -> None:
        """Ones into every slot that this rank would still read; what was read before is right."""
        ends = [end for (sent, _), end in self._ends.items() if not sent]
        marks = []
        for rescuer in self.shore.rescuers():
            for slot in (slot for end in ends for slot in end.slots):
                rescuer.fill(slot, _ONES)
            marks.append(rescuer.mark())
        while not any(mark.query() for mark in marks):
            time.sleep(0.005)

    def _end_the_process(self) -> NoReturn:
        late = next((transfer.waits_for for transfer in self._under_way if not transfer._has_passed), None)
        text = f"rank {self.rank} waited for rank {late}, a rank of the group is lost, and the device takes no orders"
        sys.stderr.write(f"longring: {text}; ending the process. A timeout= of the call raises an error instead\n")
        sys.stderr.flush()
        os._exit(1)

    def _is_quiet(self) -> bool:
        return all(transfer.has_passed() for transfer in self._under_way)

    def settle(self) -> None:
        """At the end of the process: transfers may end, but a belt that waits must not hold up the end."""
        end = time.monotonic() + _LAST_CALL
        while not self._is_quiet() and self._freeing is None and time.monotonic() < end:
            time.sleep(0.01)
        if not self._is_quiet():
            self.release()
        if self._freeing is not None:
            self._freeing.is_over(within=2 * _GRACE)


_regions: weakref.WeakSet[Region] = weakref.WeakSet()


@atexit.register
def _settle_all() -> None:
    for region in list(_regions):
        region.settle()


# -------------------------------------------------------------------------------------------------------- one post


class Ferried:
    """Messages of one post, on belts."""

    def __init__(self, talk: Talk, region: Region, letters: list[Letter], entry: Entry) -> None:
        self._talk, self._entry = talk, entry
        talk._transport._vigil.check()
        talk._ask()
        self._transfer = region.post(letters)
        if not talk._is_watched:
            self._transfer.pause = _NO_HURRY
            talk._transport._vigil.watch(self._transfer, self._see_to_it)

    def _see_to_it(self) -> None:
        self._talk._until(self._transfer, self._entry.what)
        self._entry.done_at = time.monotonic()
        self._talk._transport._record.note("done", what=self._entry.what)

    def wait(self) -> None:
        self._talk._until_all_agree(self._entry.what)
        if self._talk._is_watched or self._transfer.error is not None:
            self._see_to_it()
        self._transfer.hand_over()


class Vigil:
    """Watches, in one carrier, transfers that no caller waits for, in the order of their posts."""

    def __init__(self) -> None:
        self._watched: deque[tuple[Transfer | Errand[Any], Callable[[], None], float]] = deque()
        self._lock = threading.Lock()
        self._is_kept = False
        self.error: TransportError | None = None

    def watch(self, transfer: Transfer | Errand[Any], see_to_it: Callable[[], None], quiet: float = _QUIET) -> None:
        """`see_to_it` returns when the transfer is over, and raises when it cannot be; called after `quiet` seconds."""
        with self._lock:
            self._watched.append((transfer, see_to_it, quiet))
            is_kept, self._is_kept = self._is_kept, True
        if not is_kept:
            send_carrier(self._keep)

    def check(self) -> None:
        """Raise what was found meanwhile."""
        if self.error is not None:
            raise self.error

    def _keep(self, errand: Errand[None]) -> None:
        while (watched := self._next()) is not None:
            transfer, see_to_it, quiet = watched
            transfer.is_over(within=quiet)
            try:
                see_to_it()
            except TransportError as error:
                self.error = error

    def _next(self) -> tuple[Transfer | Errand[Any], Callable[[], None], float] | None:
        with self._lock:
            if self.error is not None:
                self._watched.clear()
            self._is_kept = bool(self._watched)
            return self._watched.popleft() if self._watched else None
