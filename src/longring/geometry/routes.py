"""Routes: through which ranks an owner's rows travel, step by step.

At every step each rank has one guest, and each owner one host. At step 0 everybody is at home. Gradients
follow the rows along a *chain* of steps and are sent home from where the chain, or the need for them, ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Arcs = tuple[range, ...]


class Route(Protocol):
    """Integers only. A step is at least 1 where rows travel."""

    @property
    def steps(self) -> int: ...

    def host(self, owner: int, step: int) -> int:
        """Where the owner's rows are."""
        ...

    def guest(self, rank: int, step: int) -> int:
        """Whose rows are here."""
        ...

    def origin(self, step: int) -> int:
        """From where they come: who sends them is who is or was their host at that step."""
        ...

    def leaving(self, step: int) -> tuple[int, ...]:
        """For which later steps rows are sent during this one."""
        ...

    def served(self, step: int) -> range:
        """The steps whose hosts get their rows through the host of this one, itself included."""
        ...

    def chain(self, step: int) -> range:
        """The steps along which gradients pass, this one among them."""
        ...

    def hosts(self, owner: int, steps: range) -> Arcs:
        """The ranks that are host at one of these steps, as ranges."""
        ...


@dataclass(frozen=True)
class Ring:
    """From neighbour to neighbour, all the way round."""

    size: int
    direction: int  # +1: from rank r to r + 1; -1: to r - 1

    @property
    def steps(self) -> int:
        return self.size

    def host(self, owner: int, step: int) -> int:
        return (owner + self.direction * step) % self.size

    def guest(self, rank: int, step: int) -> int:
        return (rank - self.direction * step) % self.size

    def origin(self, step: int) -> int:
        return step - 1

    def leaving(self, step: int) -> tuple[int, ...]:
        return (step + 1,) if step + 1 < self.size else ()

    def served(self, step: int) -> range:
        return range(step, self.size)

    def chain(self, step: int) -> range:
        return range(1, self.size)

    def hosts(self, owner: int, steps: range) -> Arcs:
        if not steps:
            return ()
        ends = self.host(owner, steps[0]), self.host(owner, steps[-1])
        first, last = ends[:: self.direction]
        return _arc(first, last, range(self.size))


@dataclass(frozen=True)
class Star:
    """Straight from the owner to each rank in turn."""

    size: int

    @property
    def steps(self) -> int:
        return self.size

    def host(self, owner: int, step: int) -> int:
        return (owner + step) % self.size

    def guest(self, rank: int, step: int) -> int:
        return (rank - step) % self.size

    def origin(self, step: int) -> int:
        return 0

    def leaving(self, step: int) -> tuple[int, ...]:
        return (step + 1,) if step + 1 < self.size else ()

    def served(self, step: int) -> range:
        return range(step, step + 1)

    chain = served

    def hosts(self, owner: int, steps: range) -> Arcs:
        ranks = (self.host(owner, step) for step in steps)
        return tuple(range(rank, rank + 1) for rank in ranks)


@dataclass(frozen=True)
class DoubleRing:
    """Rings inside every node, and a ring between nodes whose hops have a whole inner round to arrive.

    Ranks of a node are consecutive. In round u the rows of an owner are in the u-th node from its own, having
    come to the rank of the owner's place there; inside they go round, in the same direction.
    """

    size: int
    inner: int
    direction: int = +1

    @property
    def nodes(self) -> int:
        return self.size // self.inner

    @property
    def steps(self) -> int:
        return self.size

    def host(self, owner: int, step: int) -> int:
        (node, place), (round_, hop) = divmod(owner, self.inner), divmod(step, self.inner)
        return self._member(node + self.direction * round_, place + self.direction * hop)

    def guest(self, rank: int, step: int) -> int:
        (node, place), (round_, hop) = divmod(rank, self.inner), divmod(step, self.inner)
        return self._member(node - self.direction * round_, place - self.direction * hop)

    def _member(self, node: int, place: int) -> int:
        return node % self.nodes * self.inner + place % self.inner

    def origin(self, step: int) -> int:
        return step - 1 if step % self.inner else step - self.inner

    def leaving(self, step: int) -> tuple[int, ...]:
        inside = (step + 1,) if (step + 1) % self.inner else ()
        outside = (step + self.inner,) if step % self.inner == 0 and step + self.inner < self.size else ()
        return inside + outside

    def served(self, step: int) -> range:
        return range(step, self._end_of_round(step) if step % self.inner else self.size)

    def chain(self, step: int) -> range:
        return range(max(1, step - step % self.inner), self._end_of_round(step))

    def _end_of_round(self, step: int) -> int:
        return step - step % self.inner + self.inner

    def hosts(self, owner: int, steps: range) -> Arcs:
        """Of one round, or of several from the beginning of one."""
        if not steps:
            return ()
        if steps[0] // self.inner == steps[-1] // self.inner:
            ends = self.host(owner, steps[0]), self.host(owner, steps[-1])
            first, last = ends[:: self.direction]
            return _arc(first, last, self._node_of(first))
        return tuple(self._node_of(self.host(owner, step)) for step in range(steps[0], steps.stop, self.inner))

    def _node_of(self, rank: int) -> range:
        first = rank - rank % self.inner
        return range(first, first + self.inner)


def _arc(first: int, last: int, circle: range) -> Arcs:
    """From first round to last, both included."""
    if first <= last:
        return (range(first, last + 1),)
    return range(first, circle.stop), range(circle.start, last + 1)
