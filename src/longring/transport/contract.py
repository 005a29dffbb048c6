"""What a transport promises."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..errors import ArgumentError

Terms = Mapping[str, object]
Sends = Sequence[tuple[int, Tensor]]  # (to, tensor)
Receives = Sequence[tuple[int, Tensor]]  # (from, buffer)


class Pending(Protocol):
    """Messages under way. Until `wait` returns, what is sent must not change and what is received is not there."""

    def wait(self) -> None:
        """Return when everything was sent and received; raise PeerLost when the timeout has passed."""
        ...


class Conversation(AbstractContextManager["Conversation", None], Protocol):
    """The messages of one call. Leaving it without an error, every message was waited for.

    Leaving it with one, the others learn of it as soon as they wait for this rank.
    """

    def post(self, sends: Sends, receives: Receives, *, what: str) -> Pending:
        """Start sending and receiving without waiting. Tensors are contiguous.

        `what` names the phase and the step, for the error message of a peer that never answers.
        """
        ...


@runtime_checkable
class Transport(Protocol):
    """One rank's door to the others. Messages from one rank to another arrive in the order they were posted."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def node_ranks(self) -> int:
        """How many consecutive ranks are close to each other, as on one machine; a divisor of `size`."""
        ...

    @property
    def members(self) -> tuple[int, ...]:
        """Who the ranks are in the world that they are part of."""
        ...

    def decline(self, error: Exception) -> None:
        """Take part in a call that this rank refuses to make, so that the others do not wait for it.

        Returns within about a second. Where all ranks refuse, nothing happened.
        """
        ...

    def converse(self, terms: Terms, *, timeout: float | None = None) -> Conversation:
        """Begin one call, which every rank makes in the same order and on the same terms.

        `terms` are the global facts that all ranks must share. Where they differ nothing is computed from
        what arrives: Disagreement, naming who differs and in what. `timeout` bounds every wait, in seconds.
        """
        ...


def check_timeout(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout < math.inf:
        raise ArgumentError(f"timeout must be a positive number of seconds, or None; got {timeout!r}")
    return timeout
