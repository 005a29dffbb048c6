"""What a transport promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


class Pending(Protocol):
    """Messages under way. Until `wait` returns, what is sent must not change and what is received is not there."""

    def wait(self) -> None:
        """Return when everything was sent and received; raise PeerLost when the timeout has passed."""
        ...


@runtime_checkable
class Transport(Protocol):
    """One rank's door to the others. Messages from one rank to another arrive in the order they were posted."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def post(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        *,
        what: str,
        terms: Mapping[str, object] | None = None,
        timeout: float | None = None,
    ) -> Pending:
        """Start sending (to, tensor) and receiving (from, buffer) without waiting. Tensors are contiguous.

        `what` names the step and its phase for the error message of a peer that never answers. `terms` are the
        facts that both sides must share: where they differ, the receiver raises and names them.
        """
        ...
