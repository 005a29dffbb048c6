"""The transport of a process that works alone: it has nobody to write to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..errors import TransportError
from .contract import Pending


class Alone:
    rank = 0
    size = 1

    def post(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        *,
        what: str,
        terms: Mapping[str, object] | None = None,
        timeout: float | None = None,
    ) -> Pending:
        raise TransportError(f"a single rank has nobody to exchange messages with ({what})")
