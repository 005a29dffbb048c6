"""Links: which line a message between two ranks crosses, and how long it is on it.

A rank has a line of its own to the ranks of its node. Out of the node go `links_out` lines, of which each rank uses
one: its own where there are as many as ranks, else one that it shares with its neighbours. Lines are full duplex and
what arrives never queues: a line belongs to those who send on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import ArgumentError
from .hardware import Hardware

TICK = 2.0**-36
"""Durations are whole ticks of 15 picoseconds: then sums are exact for 36 hours, in whatever order they are taken."""

NEVER = float("-inf")
"""When a message arrives that nobody sends."""


def ticked(seconds: float) -> float:
    return round(seconds / TICK) * TICK


@dataclass(frozen=True)
class Slow:
    """Stragglers: by what factor some ranks compute, and some links carry, slower than the others."""

    ranks: Mapping[int, float] = field(default_factory=dict, hash=False)
    links: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)  # by (sender, receiver)

    def check(self, ranks: int) -> None:
        named = {*self.ranks, *(rank for link in self.links for rank in link)}
        if unknown := sorted(rank for rank in named if not 0 <= rank < ranks):
            raise ArgumentError(f"slow must name ranks from 0 to {ranks - 1}, got rank {unknown[0]}")
        for factor in (*self.ranks.values(), *self.links.values()):
            if not 0 < factor < float("inf"):
                raise ArgumentError(f"slow must give factors above 0 (2.0 is half as fast), got {factor!r}")


@dataclass(frozen=True)
class Lines:
    """The lines between so many ranks, of which `node_ranks` consecutive ones share a node."""

    hardware: Hardware
    ranks: int
    node_ranks: int
    slow: Slow = Slow()

    def is_inside(self, sender: int, receiver: int) -> bool:
        return sender // self.node_ranks == receiver // self.node_ranks

    @property
    def are_own(self) -> bool:
        """Whether no two ranks share a line out of their node."""
        return self.node_ranks == self.ranks or self.hardware.links_out >= self.node_ranks

    @property
    def count(self) -> int:
        return 2 * self.ranks

    def line(self, sender: int, receiver: int) -> int:
        """Its number: that of the sender inside its node; outside, behind those, that of who uses it first."""
        return sender if self.is_inside(sender, receiver) else self.line_out(sender)

    def line_out(self, rank: int) -> int:
        """The number of the one that the rank uses out of its node."""
        if self.are_own:
            return self.ranks + rank
        node, place = divmod(rank, self.node_ranks)
        links = self.hardware.links_out
        number = place * links // self.node_ranks
        return self.ranks + node * self.node_ranks + -(-number * self.node_ranks // links)

    def carrying(self, sender: int, receiver: int, nbytes: int) -> float:
        """Seconds that a message is on its line."""
        factor = self.slow.links.get((sender, receiver), 1.0)
        return self.on_line(nbytes, is_inside=self.is_inside(sender, receiver), factor=factor)

    def on_line(self, nbytes: int, *, is_inside: bool, factor: float = 1.0) -> float:
        link = self.hardware.inside if is_inside else self.hardware.outside
        return ticked(factor * nbytes / link.bytes_per_second)

    def latency(self, *, is_inside: bool) -> float:
        """Seconds from when the last byte has left until it is there; the line is free meanwhile."""
        return ticked((self.hardware.inside if is_inside else self.hardware.outside).latency_seconds)
