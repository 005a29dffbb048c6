"""One rank of a world that is not there: it follows its plan post by post, and somebody stands in for the others.

The engine cannot tell: the same schedule, buffers and kernels run as among real ranks. Every message is held against
the plan. It is opened when the rank waits for it, as late as the contract allows, so that rows used before they are
there, or overwritten before they are gone, are caught by whoever looks at the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from ..errors import ScheduleRefusal, TransportError
from ..geometry.itinerary import Post
from ..geometry.parcels import Parcel
from ..geometry.plans import PLANS, plan
from ..geometry.task import Task
from .contract import Receives, Sends, Terms
from .loopback import check_node_ranks

FOLLOWED = ("ring", "bidirectional", "double_ring", "exchange", "gather")
"""Schedules of which only keys, values and their gradients arrive: what others computed cannot be made up."""


class Peers(Protocol):
    """Who stands in for all other ranks."""

    def bring(self, parcel: Parcel, buffers: tuple[Tensor, Tensor]) -> None:
        """Fill the buffers, flat, with the parcel's keys and values, or with gradients that others found."""
        ...

    def take(self, parcel: Parcel, tensors: tuple[Tensor, Tensor]) -> None:
        """Look at what the rank sent."""
        ...


class Replay:
    """The door of one rank to peers that are made up.

    `bytes_sent` and `bytes_received` are by phase, of the latest call in it. `watch` is told how many posts are done.
    Without peers nothing is brought, looked at or held against the plan: buffers hold what came last, for timing.
    """

    def __init__(
        self,
        task: Task,
        schedule: str,
        rank: int,
        peers: Peers | None,
        *,
        node_ranks: int | None = None,
        watch: Callable[[str, int], None] = lambda phase, posts: None,
    ) -> None:
        check_followed(schedule)
        self.rank, self.size = rank, task.ranks
        self.node_ranks = check_node_ranks(node_ranks, task.ranks)
        self.members = tuple(range(task.ranks))
        self.peers = peers
        self.bytes_sent: dict[str, int] = {}
        self.bytes_received: dict[str, int] = {}
        self._task, self._schedule, self._watch = task, schedule, watch
        self._known: dict[str, tuple[Post[Any], ...]] = {}

    def __repr__(self) -> str:
        return f"Replay(rank {self.rank} of {self.size})"

    def decline(self, error: Exception) -> None:
        """Nobody waits."""

    def posts(self, phase: str) -> tuple[Post[Any], ...]:
        """All that the plan posts in a phase. Asked for beforehand, it takes no time of the call's own."""
        if phase not in self._known:
            made = plan(self._schedule, self._task, self.rank, self.node_ranks)
            self._known[phase] = tuple({"forward": made.forward, "backward": made.backward}[phase]())
        return self._known[phase]

    def converse(self, terms: Terms, *, timeout: float | None = None) -> _Talk:
        phase = str(terms["call"]).removeprefix("attention, ")
        self.bytes_sent[phase] = self.bytes_received[phase] = 0
        return _Talk(self, phase, iter(self.posts(phase) if self.peers is not None else ()))


def check_followed(schedule: str) -> None:
    if schedule in FOLLOWED:
        return
    if schedule in PLANS:
        raise ScheduleRefusal(
            f"schedule {schedule!r} cannot be replayed: its ranks wait for what others computed, which nothing but "
            f"computing it could bring; {', '.join(FOLLOWED)} can"
        )
    raise ScheduleRefusal(f"schedule must be one of {', '.join(FOLLOWED)} to be replayed, got {schedule!r}")


class _Talk:
    """One pass along the plan."""

    def __init__(self, door: Replay, phase: str, posts: Iterator[Post[Any]]) -> None:
        self._door, self._phase, self._posts = door, phase, posts
        self._posted = self._waited = 0

    def post(self, sends: Sends, receives: Receives, *, what: str) -> _InFlight:
        door, post = self._door, None
        if door.peers is not None and (sends or receives):  # a rank may also post nothing, which no plan names
            post = next(self._posts, None)
            if post is None:
                raise TransportError(f"rank {door.rank} posted more than its plan has ({what})")
            door.bytes_sent[self._phase] += sum(x.nbytes for _, x in sends)
            door.bytes_received[self._phase] += sum(x.nbytes for _, x in receives)
        self._posted += 1
        return _InFlight(self, post, sends, receives, what)

    def _done(self) -> None:
        self._waited += 1
        self._door._watch(self._phase, self._waited)

    def __enter__(self) -> _Talk:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None or self._door.peers is None:
            return
        if self._waited < self._posted or next(self._posts, None) is not None:
            raise TransportError(
                f"rank {self._door.rank} ended its {self._phase} after {self._posted} posts, {self._waited} of them "
                "waited for, and its plan has more"
            )


class _InFlight:
    def __init__(self, talk: _Talk, post: Post[Parcel] | None, sends: Sends, receives: Receives, what: str) -> None:
        self._talk, self._post, self._what = talk, post, what
        self._sends, self._receives = sends, receives

    def wait(self) -> None:
        peers = self._talk._door.peers
        if self._post is not None and peers is not None:
            sent = self._paired("sends", [(p, p.receiver) for _, p in self._post.sends], self._sends)
            for parcel, tensors in sent:
                peers.take(parcel, tensors)
            expected = self._paired("expects", [(p, p.sender) for _, p in self._post.receives], self._receives)
            for parcel, buffers in expected:
                peers.bring(parcel, buffers)
            self._post = None
        self._talk._done()

    def _paired(
        self, does: str, planned: list[tuple[Parcel, int]], messages: Sends | Receives
    ) -> list[tuple[Parcel, tuple[Tensor, Tensor]]]:
        """Each parcel with its two tensors, which have its size and its other end."""
        found = []
        if len(messages) != 2 * len(planned):
            raise TransportError(
                f"{self._talk._door} {does} {len(messages)} messages, by its plan {2 * len(planned)} ({self._what})"
            )
        for number, (parcel, peer) in enumerate(planned):
            (to, first), (to_as_well, second) = messages[2 * number : 2 * number + 2]
            width, rest = divmod(first.numel(), parcel.vectors)
            if (to, to_as_well) != (peer, peer) or rest or not width or first.numel() != second.numel():
                raise TransportError(
                    f"{self._talk._door} {does} {first.numel()} and {second.numel()} numbers, rank {to} at the other "
                    f"end; its plan has {parcel.vectors} vectors, and rank {peer} ({self._what})"
                )
            found.append((parcel, (first.view(-1), second.view(-1))))
        return found
