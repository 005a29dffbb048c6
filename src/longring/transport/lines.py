"""The point-to-point lines of a process group: posting, waiting in a carrier, closing.

What torch's Gloo does, and this file is built around: a receiver that expects fewer bytes than were sent takes
its process down; a wait that has begun cannot be given up; a wait that times out closes every line of the group
for good, which is how a carrier is freed once the group is lost anyway.
"""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from .carriers import Errand, send_carrier

_LONG = timedelta(days=30)  # a carrier's own wait: bounds are kept by those who wait for the carrier
_AT_ONCE = timedelta(milliseconds=1)


class Letter(NamedTuple):
    sent: bool  # or received
    peer: int
    tensor: Tensor
    tag: int


class LineBroken(Exception):
    """The line to a peer was closed under a message."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(f"the line to rank {peer} broke: {reason}")
        self.peer = peer


class Posted(NamedTuple):
    peer: int
    work: Any
    tensors: list[Tensor]  # torch cancels a message whose tensor is gone


class Lines:
    """One rank's ends of all lines."""

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)
        self._has_devices = any(device.type != "cpu" for device in getattr(group, "_device_types", []))
        self._lock = threading.Lock()
        self._waited: set[Any] = set()
        self._closed = False

    @property
    def group(self) -> Any:
        group = self._group()
        if group is None:
            raise TransportError("the process group is gone; pass one that still exists")
        return group

    def post(self, letters: Sequence[Letter]) -> list[Posted]:
        """Start all of them: on a GPU in one batch, as NCCL needs it; else one by one, so that who failed is known."""
        group = self.group
        if letters and letters[0].tensor.device.type == "cpu":
            return [_start_one(letter, group) for letter in letters]
        return _start_batch(letters, group) if letters else []

    def wait(self, posted: Sequence[Posted], errand: Errand[Any]) -> None:
        """Wait in a carrier for one after the other. Raises LineBroken with the peer whose line broke."""
        for peer, work, tensors in posted:
            errand.waits_for = peer
            try:
                if tensors[0].device.type == "cpu":
                    self._wait_on_host(work)
                else:
                    work.wait()  # makes the stream wait; with a bound it would hold up the host
            except RuntimeError as error:
                raise LineBroken(peer, _in_short(error)) from None

    def _wait_on_host(self, work: Any) -> None:
        with self._lock:
            self._waited.add(work)
            closed = self._closed
        try:
            work.wait(_AT_ONCE if closed else _LONG)
        finally:
            with self._lock:
                self._waited.discard(work)

    def close(self) -> None:
        """Free every carrier that waits, for good: nothing can be sent or received afterwards."""
        with self._lock:
            self._closed = True
            is_waited_for, group = bool(self._waited), self._group()
        if is_waited_for and group is not None:
            send_carrier(lambda _: _break_off(group)).is_over(within=0.1)
        if self._has_devices and group is not None:
            send_carrier(lambda _: group.abort())  # a lost peer leaves kernels that would never end


def _break_off(group: Any) -> None:
    """Close every line, by waiting in vain for a letter that nobody writes.

    Not by waiting for one that a carrier waits for: Gloo wakes one of those who wait for a message, and where a line
    breaks in the meantime the carrier might not be the one.
    """
    nothing, tag = torch.empty(1, dtype=torch.uint8), tag_of("a letter that nobody writes")
    for peer in range(group.size()):
        with contextlib.suppress(RuntimeError):  # in vain; or the line to this peer was closed already
            if peer != group.rank():
                group.recv([nothing], peer, tag).wait(_AT_ONCE)


def _start_one(letter: Letter, group: Any) -> Posted:
    """Without the checks of torch.distributed's isend and irecv, which take longer than the sending."""
    start = group.send if letter.sent else group.recv
    try:
        return Posted(letter.peer, start([letter.tensor], letter.peer, letter.tag), [letter.tensor])
    except RuntimeError as error:
        raise LineBroken(letter.peer, _in_short(error)) from None


def _start_batch(letters: Sequence[Letter], group: dist.ProcessGroup) -> list[Posted]:
    peer, tensors = letters[0].peer, [letter.tensor for letter in letters]
    try:
        works = dist.batch_isend_irecv([_operation(letter, group) for letter in letters])
    except RuntimeError as error:
        raise LineBroken(peer, _in_short(error)) from None
    return [Posted(peer, work, tensors) for work in works]


def tag_of(*facts: object) -> int:
    """31 bits: Gloo hands a message only to a receive of the same tag, so what differs in a fact never meets."""
    digest = blake2b(repr(facts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def _operation(letter: Letter, group: dist.ProcessGroup) -> dist.P2POp:
    kind: Callable[..., Any] = dist.isend if letter.sent else dist.irecv
    return dist.P2POp(kind, letter.tensor, group=group, tag=letter.tag, group_peer=letter.peer)


def _in_short(error: Exception) -> str:
    """Gloo's first sentence, without the place in its source."""
    first = re.sub(r"^\[[^]]*\] ", "", str(error).split("\n", 1)[0])
    return first.split(". This is typically", 1)[0][:200]


def check_device(group: dist.ProcessGroup, tensor: Tensor, rank: int) -> None:
    """Refuse what the group's backends cannot carry, before torch fails at it in words of its own."""
    backend = backend_for(group, tensor.device)
    carries = backend is not None and (backend != "gloo" or tensor.device.type == "cpu")
    if not carries and not (tensor.device.type == "cuda" and backend_for(group, torch.device("cpu")) == "gloo"):
        raise TransportError(
            f"rank {rank}: this group cannot carry tensors on {tensor.device} from rank to rank "
            f"(its backend there: {backend or 'none'}); use a group with NCCL or Gloo for CUDA tensors, "
            "with Gloo for CPU tensors"
        )


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str | None:
    try:
        return group._get_backend(device).name().lower()
    except RuntimeError:
        return None
