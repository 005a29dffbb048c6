"""CUDA tensors between the ranks of one machine: torch's symmetric memory, copied through by streams alone.

Every rank maps every other's outbox, and flags in the host's memory. A post gives the streams of its lanes all there
is to do (lanes.py) and returns; nobody on the host waits for a message, and no multiprocessor does. What a caller
computes with comes after it on its own stream.

A rank that is lost leaves streams that would wait for ever. So transfers are watched: by the caller where the call
has a timeout, which then raises in that call; else by a vigil beside it, and what is raised then is raised by the
group's next wait or call. Either way the streams are let go once there is a verdict, and what had not arrived by
then arrives as bytes of ones, which is nan in every floating-point format: a result is right, or nan, or an error.
Where the device does not even take those, the process is ended with a message.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from . import driver
from .carriers import Errand, send_carrier
from .journal import Entry
from .lanes import Belt, End, Plan, Receiving, Sending, Shared, as_bytes, move_all
from .lines import Letter, LineBroken

if TYPE_CHECKING:
    from .process_group import Talk

T = TypeVar("T")

OUTBOX = 128 << 20  # bytes of a rank's lanes together: what is larger goes through in pieces
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
        self._spoil()
        began = time.monotonic()
        while not self._is_quiet() and time.monotonic() < began + 4 * _GRACE:
            for (sent, _), end in self._ends.items():
                if not sent or time.monotonic() > began + _GRACE:
                    end.let_go()
            time.sleep(0.005)

    def _spoil(self) -> None:
        """Ones into every slot that this rank would still read; what was read before is right."""
        ends = [end for (sent, _), end in self._ends.items() if not sent]
        marks = []
        for rescuer in self.shore.rescuers():
            for slot in (slot for end in ends for slot in end.slots):
                rescuer.fill(slot, _ONES)
            marks.append(rescuer.mark())
        end = time.monotonic() + _GRACE
        while not any(mark.query() for mark in marks):
            if time.monotonic() > end:
                self._end_the_process()
            time.sleep(0.005)

    def _end_the_process(self) -> NoReturn:
        text = (
            f"rank {self.rank}: a rank of the group is lost, and the device does nothing any more; ending the process"
        )
        sys.stderr.write(f"longring: {text}\n")
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
        self._watched: deque[tuple[Transfer, Callable[[], None]]] = deque()
        self._lock = threading.Lock()
        self._is_kept = False
        self.error: TransportError | None = None

    def watch(self, transfer: Transfer, see_to_it: Callable[[], None]) -> None:
        """`see_to_it` returns when the transfer is over, and raises when it cannot be."""
        with self._lock:
            self._watched.append((transfer, see_to_it))
            is_kept, self._is_kept = self._is_kept, True
        if not is_kept:
            send_carrier(self._keep)

    def check(self) -> None:
        """Raise what was found meanwhile."""
        if self.error is not None:
            raise self.error

    def _keep(self, errand: Errand[None]) -> None:
        while (watched := self._next()) is not None:
            transfer, see_to_it = watched
            transfer.is_over(within=_QUIET)  # alone: who asks the board keeps callers from it
            try:
                see_to_it()
            except TransportError as error:
                self.error = error

    def _next(self) -> tuple[Transfer, Callable[[], None]] | None:
        with self._lock:
            if self.error is not None:
                self._watched.clear()
            self._is_kept = bool(self._watched)
            return self._watched.popleft() if self._watched else None


# -------------------------------------------------------------------------------------------------- how it is opened


class Introduction(NamedTuple):
    """What a rank says of itself before memory is shared."""

    machine: str
    host: str
    process: int
    obstacle: str | None
    flags: str | None = None  # the file that they are in, made by the first rank


class Refused(NamedTuple):
    """Why a group has no symmetric memory; the same on all its ranks."""

    reason: str


def opened(group: dist.ProcessGroup, device: torch.device, errand: Errand[Any]) -> Region | Refused:
    """In a carrier of every rank: share memory, if all can. What one cannot, none does."""
    rank, plan = dist.get_rank(group), Plan(dist.get_world_size(group), OUTBOX)
    exchange = _Exchange(group, errand)
    lanes, obstacle = _tried(lambda: _allocated(group, plan, device))
    with _file_for_flags(plan) if rank == 0 else contextlib.nullcontext() as path:
        said = [Introduction(*each) for each in exchange.all_of("introduction", _introduction(obstacle, path))]
        reason = common_obstacle(said)
        if reason is not None:
            return Refused(reason)
        found, failure = _tried(lambda: _mapped(group, plan, lanes, said[0].flags))
        failures = {other: text for other, text in enumerate(exchange.all_of("outcome", failure)) if text}
    if found is None or failures:
        return Refused("; ".join(f"rank {other}: {text}" for other, text in failures.items()))
    shared, handle, flags = found
    with torch.cuda.device(device):
        region = Region(rank, shared, driver.CudaShore(device), _seen(said), (lanes, handle))
    weakref.finalize(region, driver.unregister, flags).atexit = False
    return region


def _tried(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """What came of it, or why nothing did."""
    try:
        return work(), None
    except (RuntimeError, OSError, AttributeError) as error:
        return None, str(error).partition("\n")[0] or type(error).__name__


def _allocated(group: dist.ProcessGroup, plan: Plan, device: torch.device) -> Tensor:
    obstacle = driver.obstacle()
    if obstacle is not None:
        raise TransportError(obstacle)
    with torch.cuda.device(device):
        return _symmetric().empty_strided_p2p((plan.lanes_bytes,), (1,), torch.uint8, device, group.group_name)


@contextlib.contextmanager
def _file_for_flags(plan: Plan) -> Iterator[str]:
    """All zeros; its name goes once all have opened it."""
    memory = Path("/dev/shm")
    handle, path = tempfile.mkstemp(prefix="longring-flags-", dir=memory if memory.is_dir() else None)
    try:
        os.truncate(handle, plan.size * plan.flags_bytes)
        os.close(handle)
        yield path
    finally:
        os.unlink(path)


def _mapped(group: dist.ProcessGroup, plan: Plan, mine: Tensor | None, path: str | None) -> tuple[Shared, Any, Tensor]:
    """In every rank at once, which torch requires of a rendezvous."""
    assert mine is not None  # or this rank would have had an obstacle
    assert path is not None  # which the first rank has made
    with torch.cuda.device(mine.device):
        handle = _symmetric().rendezvous(mine, group.group_name)
        lanes = [handle.get_buffer(rank, (plan.lanes_bytes,), torch.uint8) for rank in range(plan.size)]
        flags = torch.from_file(path, shared=True, size=plan.size * plan.flags_bytes, dtype=torch.uint8)
        driver.register(flags)
    return Shared(plan, flags.chunk(plan.size), lanes), handle, flags


def _symmetric() -> Any:
    return torch._C._distributed_c10d._SymmetricMemory  # type: ignore[attr-defined]


def _introduction(obstacle: str | None, flags: str | None) -> Introduction:
    return Introduction(_machine(), socket.gethostname(), os.getpid(), obstacle, flags)


def _machine() -> str:
    """Equal where processes can hand each other memory: one kernel, one namespace of processes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def _seen(said: Sequence[Introduction]) -> dict[int, int]:
    return {rank: each.process for rank, each in enumerate(said)} if Path("/proc/self/stat").exists() else {}


def common_obstacle(said: Sequence[Introduction]) -> str | None:
    """The same answer on every rank, from what all have said."""
    for rank, each in enumerate(said):
        if each.obstacle is not None:
            return f"rank {rank}: {each.obstacle}"
        if each.machine != said[0].machine:
            return f"rank {rank} on {each.host} shares no memory with rank 0 on {said[0].host}"
    return None


class _Exchange:
    """Through the group's store, once in its life."""

    def __init__(self, group: dist.ProcessGroup, errand: Errand[Any]) -> None:
        store = dist.distributed_c10d._get_process_group_store(group)
        self._rank, self._size, self._errand = dist.get_rank(group), dist.get_world_size(group), errand
        name = f"longring/{group.group_name}/symmetric"
        life = store.add(f"{name}/lives of rank {self._rank}", 1)  # a world made anew finds none of the old notes
        self._store = dist.PrefixStore(f"{name}/{life}", store)

    def all_of(self, what: str, mine: object) -> list[Any]:
        self._store.set(f"{what}/{self._rank}", json.dumps(mine))
        said = [self._of(what, rank) for rank in range(self._size)]
        self._store.add(f"{what}/read", 1)
        with contextlib.suppress(RuntimeError):  # who hosts the store may leave once all have read
            while self._store.add(f"{what}/read", 0) < self._size:
                time.sleep(0.01)
        return said

    def _of(self, what: str, rank: int) -> Any:
        """Asked again and again: a long wait would keep the store from everyone else in this process."""
        self._errand.waits_for = rank
        try:
            while not self._store.check([f"{what}/{rank}"]):
                time.sleep(0.01)
            return json.loads(self._store.get(f"{what}/{rank}"))
        except RuntimeError as error:
            raise LineBroken(rank, str(error).partition("\n")[0]) from None
