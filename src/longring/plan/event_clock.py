"""Clock: when every rank is where, while all of them do the same things in the same order.

A message starts when its sender and its receiver have both posted it and its line is free; the receiver has it a
latency after its last byte has left. Lines serve what was posted earlier in the program first, and what is posted at
one point in the order in which it becomes ready. Who waits for a post waits for what it receives and for what it sends.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import add, sub
from typing import NamedTuple

from .event_rows import Freight, Move
from .links import NEVER, Lines, ticked

Message = tuple[int, int, int]  # sender, receiver, bytes


class Span(NamedTuple):
    """What a rank or its line did, in seconds since the beginning."""

    rank: int
    kind: str  # "compute", "wait" or "send"
    step: int
    start: float
    end: float
    nbytes: int = 0


class _Sent(NamedTuple):
    """When messages left their lines, by sender; when the same ones did, by receiver; and how much later they came."""

    ends: list[float]
    arriving: list[float]
    latency: float

    def waited_for(self, at: list[float]) -> list[float]:
        if self.ends is self.arriving:  # both are in there
            return [d if d > a else a for a, d in zip(at, self.ends, strict=True)]
        more = self.latency
        return [
            (z if z > a else a) if (z := r + more) > e else (e if e > a else a)
            for a, e, r in zip(at, self.ends, self.arriving, strict=True)
        ]


@dataclass
class Clock:
    lines: Lines
    keeps_spans: bool = False
    at: list[float] = field(init=False)  # of every rank
    free: list[float] = field(init=False)  # when every line is
    carried: tuple[float, float] = (0.0, 0.0)  # seconds that lines inside and outside of nodes carried something
    computing: list[float] = field(init=False)
    moving: float = 0.0  # seconds of all messages, latency included
    spans: list[Span] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        ranks = self.lines.ranks
        self.at, self.computing = [0.0] * ranks, [0.0] * ranks
        self.free = [0.0] * self.lines.count
        self._under_way: dict[Hashable, list[_Sent]] = {}
        self._latency = tuple(self.lines.latency(is_inside=is_inside) for is_inside in (True, False))
        self._crossings: dict[Move, range | list[int]] = {}

    # ---- what ranks do

    def work(self, row: Sequence[float], *, is_counted: bool = True) -> None:
        """Every rank computes so long; who counts it himself says so."""
        before, self.at = self.at, list(map(add, self.at, row))
        if is_counted:
            self.count_work(row)
        if self.keeps_spans:
            self._keep("compute", before, self.at)

    def count_work(self, row: Sequence[float]) -> None:
        self.computing = list(map(add, self.computing, row))

    def wait(self, key: Hashable) -> None:
        """For what was posted under the key."""
        before = self.at
        for sent in self._under_way.pop(key, []):
            self.at = sent.waited_for(self.at)
        if self.keeps_spans:
            self._keep("wait", before, self.at)

    def still_to_wait(self, key: Hashable) -> float:
        """How long the longest wait for the key would be, were it now."""
        return max(
            (max(map(sub, sent.waited_for(self.at), self.at)) for sent in self._under_way.get(key, [])), default=0.0
        )

    def lines_taken(self) -> float:
        """How long the busiest line of a rank is still taken."""
        ranks, at = self.lines.ranks, self.at
        near, far = (max(map(sub, some, at)) for some in (self.free[:ranks], self.free[ranks:]))
        return max(0.0, near, far)

    def forget(self, key: Hashable) -> None:
        """What nobody will wait for, since it is there before anybody could."""
        self._under_way.pop(key, None)

    def apart(self, move: Move | None) -> float:
        """How far from each other those are who send and receive; without a move, any two."""
        if move is None:
            return max(self.at) - min(self.at)
        return max(map(abs, map(sub, self.at, move.moved(self.at))))

    def send(self, key: Hashable, move: Move, freight: Freight, frame: Move) -> None:
        """Each rank to its target, with what the frame brings to it; nothing where the freight has none."""
        if freight.is_nothing:
            return
        crossing = self._crossing(move)
        if crossing and not self.lines.are_own:
            nbytes = frame.moved(freight.bytes.values)
            self.scatter(key, [(s, move.target(s), int(nbytes[s])) for s in range(self.lines.ranks)])
            return
        on_line = self._on_line(move, freight, frame, crossing)
        at, there = self.at, move.back.moved(self.at)
        if self._under_way:
            free = self._free_lines(crossing)
            ends = [
                ((a if a > f else f) if a > b else (b if b > f else f)) + x
                for a, b, f, x in zip(at, there, free, on_line, strict=True)
            ]
        else:  # everybody has waited for whatever it sent, so that every line is free
            ends = [(a if a > b else b) + x for a, b, x in zip(at, there, on_line, strict=True)]
        self._take_lines(crossing, ends, freight.are_all_sent)
        self._under_way.setdefault(key, []).append(_Sent(ends, *self._arriving(move, crossing, ends)))
        self.count(move, freight, frame)
        if self.keeps_spans:
            nbytes = frame.moved(freight.bytes.values)
            self.spans += [
                Span(rank, "send", self.step, e - x, e, int(nbytes[rank]))
                for rank, (e, x) in enumerate(zip(ends, on_line, strict=True))
                if x > NEVER
            ]

    def scatter(self, key: Hashable, messages: Sequence[Message]) -> None:
        """Any messages of one point, on any lines."""
        queues: dict[int, list[tuple[float, int, int, int]]] = {}
        for sender, receiver, nbytes in messages:
            if nbytes:
                ready = max(self.at[sender], self.at[receiver])
                queues.setdefault(self.lines.line(sender, receiver), []).append((ready, sender, receiver, nbytes))
        if not queues:
            return
        self.count_messages(messages)
        done = [NEVER] * self.lines.ranks
        self._under_way.setdefault(key, []).append(_Sent(done, done, 0.0))
        for line, queue in queues.items():
            for ready, sender, receiver, nbytes in sorted(queue):
                seconds = self.lines.carrying(sender, receiver, nbytes)
                latency = self._latency[not self.lines.is_inside(sender, receiver)]
                end = max(ready, self.free[line]) + seconds
                self.free[line] = end
                done[sender] = max(done[sender], end)
                done[receiver] = max(done[receiver], end + latency)
                if self.keeps_spans:
                    self.spans.append(Span(sender, "send", self.step, end - seconds, end, nbytes))

    # ---- rows of lines

    def _crossing(self, move: Move) -> range | list[int]:
        if move not in self._crossings:
            self._crossings[move] = move.crossing(self.lines.node_ranks)
        return self._crossings[move]

    def _on_line(self, move: Move, freight: Freight, frame: Move, crossing: range | list[int]) -> list[float]:
        """Seconds that each sender's message takes on its line."""
        if len(crossing) == self.lines.ranks:
            row = frame.moved(freight.outside)
        else:
            row = frame.moved(freight.inside)
            if crossing:
                row = row[:]
                _put(row, crossing, _some(frame.moved(freight.outside), crossing))
        slow = [(s, r) for s, r in self.lines.slow.links if move.target(s) == r]
        if slow:
            row = row[:]
            for sender, receiver in slow:
                if row[sender] > NEVER:
                    nbytes = int(freight.bytes.values[frame.back.target(sender)])
                    row[sender] = self.lines.carrying(sender, receiver, nbytes)
        return row

    def _free_lines(self, crossing: range | list[int]) -> list[float]:
        ranks = self.lines.ranks
        if len(crossing) == ranks:
            return self.free[ranks:]
        row = self.free[:ranks]
        if crossing:
            _put(row, crossing, _some(self.free, crossing, ranks))
        return row

    def _take_lines(self, crossing: range | list[int], ends: list[float], are_all_sent: bool) -> None:
        if not are_all_sent:
            ends = [e if e > f else f for e, f in zip(ends, self._free_lines(crossing), strict=True)]
        ranks = self.lines.ranks
        if len(crossing) == ranks:
            self.free[ranks:] = ends
            return
        if crossing:
            _put(self.free, crossing, _some(ends, crossing), ranks)
            ends = ends[:]
            _put(ends, crossing, _some(self.free, crossing))
        self.free[:ranks] = ends

    def _arriving(self, move: Move, crossing: range | list[int], ends: list[float]) -> tuple[list[float], float]:
        """(when each receiver's message left its line, latency), those that come from far with what they need more."""
        near, far = self._latency
        if len(crossing) == self.lines.ranks:
            return move.moved(ends), far
        if crossing and near != far:
            ends = ends[:]
            _put(ends, crossing, [end + (far - near) for end in _some(ends, crossing)])
        return move.moved(ends), near

    def count(self, move: Move, freight: Freight, frame: Move) -> None:
        """The seconds of what everybody sends, on lines of both kinds."""
        if freight.is_nothing:
            return
        crossing = self._crossing(move)
        near, far, messages = freight.seconds
        if not crossing:
            far = 0.0
        elif len(crossing) == self.lines.ranks:
            near = 0.0
        else:
            near -= _sum_of(_some(frame.moved(freight.inside), crossing))
            far = _sum_of(_some(frame.moved(freight.outside), crossing))
        self._add_moved(near, far, messages, len(crossing) / self.lines.ranks)

    def _add_moved(self, near: float, far: float, messages: int, share_far: float) -> None:
        latency = (1 - share_far) * self._latency[0] + share_far * self._latency[1]
        self.carried = self.carried[0] + near, self.carried[1] + far
        self.moving += near + far + messages * latency

    def count_messages(self, messages: Sequence[Message]) -> None:
        for sender, receiver, nbytes in messages:
            if nbytes:
                seconds, is_inside = (
                    self.lines.carrying(sender, receiver, nbytes),
                    self.lines.is_inside(sender, receiver),
                )
                self._add_moved(seconds if is_inside else 0.0, 0.0 if is_inside else seconds, 1, float(not is_inside))

    def lines_used(self) -> tuple[int, int]:
        """Lines (inside, outside) of nodes that ever carried something."""
        ranks = self.lines.ranks
        return sum(x > 0 for x in self.free[:ranks]), sum(x > 0 for x in self.free[ranks:])

    def _keep(self, kind: str, before: list[float], behind: list[float]) -> None:
        for rank, (start, end) in enumerate(zip(before, behind, strict=True)):
            if end > start:
                self.spans.append(Span(rank, kind, self.step, start, end))


def _some(row: list[float], at: range | list[int], offset: int = 0) -> list[float]:
    if isinstance(at, range):
        return row[at.start + offset : at.stop + offset : at.step]
    return [row[index + offset] for index in at]


def _put(row: list[float], at: range | list[int], values: list[float], offset: int = 0) -> None:
    if isinstance(at, range):
        row[at.start + offset : at.stop + offset : at.step] = values
    else:
        for index, value in zip(at, values, strict=True):
            row[index + offset] = value


def _sum_of(values: list[float]) -> float:
    whole = sum(values)
    return whole if whole > NEVER else sum(x for x in values if x > NEVER)


def slowed(seconds: float, factor: float) -> float:
    return seconds if factor == 1.0 else ticked(factor * seconds)
