"""CUDA tensors over a backend of the host: through pinned memory, which a carrier fills, sends and empties.

Right everywhere and fast nowhere: what was computed comes to the host, goes over Gloo, and back to a GPU. The caller
waits on the host for all of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .carriers import Errand, send_carrier
from .journal import Entry
from .lanes import as_bytes
from .lines import Letter
from .streams import crossing

if TYPE_CHECKING:
    from .process_group import Talk


class Stages:
    """Pinned memory, made once and used again: pinning costs more than the copy. One that became too small goes."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> Tensor:
        """At least so many bytes."""
        with self._lock:
            for index, stage in enumerate(self._free):  # the smallest comes first
                if stage.numel() >= size:
                    return self._free.pop(index)
            if self._free:
                self._free.pop(0)
        return self._make(size)

    def give_back(self, stage: Tensor) -> None:
        with self._lock:
            self._free.append(stage)
            self._free.sort(key=Tensor.numel)


PINNED = Stages(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))


class Staged:
    """Messages of one post, which a carrier brings from device to device."""

    def __init__(self, talk: Talk, letters: list[Letter], entry: Entry, stages: Stages = PINNED) -> None:
        self._talk, self._letters, self._entry, self._stages = talk, letters, entry, stages
        self._crossing = crossing([letter.tensor for letter in letters])
        talk._ask()
        self._errand = send_carrier(self._carry)

    def _carry(self, errand: Errand[None]) -> None:
        errand.waits_for = self._letters[0].peer
        self._talk._greeting.join()
        wholes = [self._stages.take(letter.tensor.nbytes) for letter in self._letters]
        staged = [self._on_stage(*pair) for pair in zip(self._letters, wholes, strict=True)]
        self._copy(staged, sent=True)
        lines = self._talk._transport._lines
        lines.wait(lines.post(staged), errand)
        self._copy(staged, sent=False)
        for whole in wholes:  # not after an error: who broke off may still write here
            self._stages.give_back(whole)
        self._entry.done_at = time.monotonic()
        self._talk._transport._record.note("done", what=self._entry.what)

    def _on_stage(self, letter: Letter, whole: Tensor) -> Letter:
        stage = whole[: letter.tensor.nbytes].view(letter.tensor.dtype)
        return letter._replace(tensor=stage)

    def _copy(self, staged: list[Letter], *, sent: bool) -> None:
        """On the transport's stream, after what computed it; over when this returns."""
        with self._crossing.posting():
            for letter, on_stage in zip(self._letters, staged, strict=True):
                pair = as_bytes(letter.tensor), as_bytes(on_stage.tensor)
                into, source = reversed(pair) if sent else pair
                if letter.sent == sent:
                    into.copy_(source, non_blocking=True)
            self._crossing.mark_done()
        self._crossing.watch()

    def wait(self) -> None:
        self._talk._until_all_agree(self._entry.what)
        self._talk._until(self._errand, self._entry.what)
        self._crossing.hand_over()
        self._letters = []  # whoever keeps this object does not keep the tensors
