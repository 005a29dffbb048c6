"""How the ranks of a group come to share memory: all of them, or none, and for a reason that all know.

Each introduces itself in the group's store, with what stands in its way. Where nothing does, torch maps every rank's
outbox into every other, and the first rank's file of flags is mapped by all.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from . import driver
from .carriers import Errand
from .lanes import Plan, Shared
from .lines import LineBroken
from .symmetric import Region

T = TypeVar("T")

OUTBOX = 112 << 20  # bytes of a rank's lanes together: what is larger goes through in pieces


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
