"""The transport of a process that works alone: it has nobody to write to."""

from __future__ import annotations

from ..errors import TransportError
from .contract import Pending, Receives, Sends, Terms


class Alone:
    rank = 0
    size = 1
    node_ranks = 1
    members = (0,)

    def decline(self, error: Exception) -> None:
        return None

    def converse(self, terms: Terms, *, timeout: float | None = None) -> Alone:
        return self

    def post(self, sends: Sends, receives: Receives, *, what: str) -> Pending:
        raise TransportError(f"a single rank has nobody to exchange messages with ({what})")

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *error: object) -> None:
        return None
