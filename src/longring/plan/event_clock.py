"""Clock: when every rank is where, while all of them do the same things in the same order.

A message starts when its sender and its receiver have both posted it and its line is free; the receiver has it a
latency after its last byte has left. Lines serve what was posted earlier in the program first, and what is posted at
one point in the order in which it becomes ready. Who waits for a post waits for what it receives and for what it sends.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from .event_lists import Messages, Row, arithmetic
from .event_rows import AnyFreight, Move
from .links import NEVER, Lines, ticked


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

    ends: Row
    arriving: Row
    latency: float


@dataclass
class Clock:
    lines: Lines
    keeps_spans: bool = False
    at: Row = field(init=False)  # of every rank
    free: Row = field(init=False)  # when every line is
    carried: tuple[float, float] = (0.0, 0.0)  # seconds that lines inside and outside of nodes carried something
    computing: Row = field(init=False)
    moving: float = 0.0  # seconds of all messages, latency included
    spans: list[Span] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        ranks = self.lines.ranks
        self.rows = arithmetic(self.lines, keeps_spans=self.keeps_spans)
        self.at, self.computing = self.rows.full(0.0, ranks), self.rows.full(0.0, ranks)
        self.free = self.rows.full(0.0, self.lines.count)
        self._under_way: dict[Hashable, list[_Sent]] = {}
        self._latency = tuple(self.lines.latency(is_inside=is_inside) for is_inside in (True, False))
        self._crossings: dict[Move, range | list[int]] = {}

    # ---- what ranks do

    def work(self, row: Row, *, is_counted: bool = True) -> None:
        """Every rank computes so long; who counts it himself says so."""
        before, self.at = self.at, self.rows.added(self.at, row)
        if is_counted:
            self.count_work(row)
        if self.keeps_spans:
            self._keep("compute", before, self.at)

    def count_work(self, row: Row) -> None:
        self.computing = self.rows.added(self.computing, row)

    def wait(self, key: Hashable) -> None:
        """For what was posted under the key."""
        before = self.at
        for sent in self._under_way.pop(key, []):
            self.at = self.rows.waited(self.at, *sent)
        if self.keeps_spans:
            self._keep("wait", before, self.at)

    def send(self, key: Hashable, move: Move, freight: AnyFreight, frame: Move) -> None:
        """Each rank to its target, with what the frame brings to it; nothing where the freight has none."""
        if freight.is_nothing:
            return
        crossing = self._crossing(move)
        if crossing and not self.lines.are_own:
            everybody = self.rows.everybody
            self.scatter(key, Messages(everybody, move.back.moved(everybody), frame.moved(freight.nbytes)))
            return
        on_line = self._on_line(move, freight, frame, crossing)
        # where everybody has waited for whatever it sent, every line is free
        free = self._free_lines(crossing) if self._under_way else None
        ends = self.rows.begun(self.at, move.back.moved(self.at), on_line, free)
        self._take_lines(crossing, ends, freight.are_all_sent)
        self._under_way.setdefault(key, []).append(_Sent(ends, *self._arriving(move, crossing, ends)))
        self.count(move, freight, frame)
        if self.keeps_spans:
            nbytes = frame.moved(freight.nbytes)
            self.spans += [
                Span(rank, "send", self.step, e - x, e, int(nbytes[rank]))
                for rank, (e, x) in enumerate(zip(ends, on_line, strict=True))
                if x > NEVER
            ]

    def scatter(self, key: Hashable, messages: Messages) -> None:
        """Any messages of one point, on any lines."""
        if not self.rows.many(messages.nbytes):
            return
        self.count_messages(messages)
        ends = self.rows.queued(self.at, self.free, messages)
        done = self.rows.done(messages, ends)
        self._under_way.setdefault(key, []).append(_Sent(done, done, 0.0))
        if self.keeps_spans:
            for *message, end in zip(*messages, ends, strict=True):
                if end > NEVER:
                    start = end - self.lines.carrying(*message)
                    self.spans.append(Span(message[0], "send", self.step, start, end, int(message[2])))

    # ---- rows of lines

    def _crossing(self, move: Move) -> range | list[int]:
        if move not in self._crossings:
            self._crossings[move] = move.crossing(self.lines.node_ranks)
        return self._crossings[move]

    def _on_line(self, move: Move, freight: AnyFreight, frame: Move, crossing: range | list[int]) -> Row:
        """Seconds that each sender's message takes on its line."""
        if len(crossing) == self.lines.ranks:
            row = frame.moved(freight.outside)
        else:
            row = frame.moved(freight.inside)
            if crossing:
                row = row.copy()
                _put(row, crossing, _some(frame.moved(freight.outside), crossing))
        slow = [(s, r) for s, r in self.lines.slow.links if move.target(s) == r]
        if slow:
            row = row.copy()
            for sender, receiver in slow:
                if row[sender] > NEVER:
                    nbytes = int(freight.nbytes[frame.back.target(sender)])
                    row[sender] = self.lines.carrying(sender, receiver, nbytes)
        return row

    def _free_lines(self, crossing: range | list[int]) -> Row:
        ranks = self.lines.ranks
        if len(crossing) == ranks:
            return self.free[ranks:]
        row = self.free[:ranks].copy()
        if crossing:
            _put(row, crossing, _some(self.free, crossing, ranks))
        return row

    def _take_lines(self, crossing: range | list[int], ends: Row, are_all_sent: bool) -> None:
        if not are_all_sent:
            ends = self.rows.larger(ends, self._free_lines(crossing))
        ranks = self.lines.ranks
        if len(crossing) == ranks:
            self.free[ranks:] = ends
            return
        if crossing:
            _put(self.free, crossing, _some(ends, crossing), ranks)
            ends = ends.copy()
            _put(ends, crossing, _some(self.free, crossing))
        self.free[:ranks] = ends

    def _arriving(self, move: Move, crossing: range | list[int], ends: Row) -> tuple[Row, float]:
        """(when each receiver's message left its line, latency), those that come from far with what they need more."""
        near, far = self._latency
        if len(crossing) == self.lines.ranks:
            return move.moved(ends), far
        if crossing and near != far:
            ends = ends.copy()
            _put(ends, crossing, self.rows.added(_some(ends, crossing), self.rows.full(far - near, len(crossing))))
        return move.moved(ends), near

    def count(self, move: Move, freight: AnyFreight, frame: Move) -> None:
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
            near -= self.rows.total(_some(frame.moved(freight.inside), crossing))
            far = self.rows.total(_some(frame.moved(freight.outside), crossing))
        self._add_moved(near, far, messages, len(crossing) / self.lines.ranks)

    def _add_moved(self, near: float, far: float, messages: int, share_far: float) -> None:
        latency = (1 - share_far) * self._latency[0] + share_far * self._latency[1]
        self.carried = self.carried[0] + near, self.carried[1] + far
        self.moving += near + far + messages * latency

    def count_messages(self, messages: Messages) -> None:
        near, far, many_near, many_far = self.rows.carried(messages)
        many = many_near + many_far
        self._add_moved(near, far, many, many_far / many if many else 0.0)

    def lines_used(self) -> tuple[int, int]:
        """Lines (inside, outside) of nodes that ever carried something."""
        ranks = self.lines.ranks
        return self.rows.many(self.free[:ranks]), self.rows.many(self.free[ranks:])

    def _keep(self, kind: str, before: Row, behind: Row) -> None:
        for rank, (start, end) in enumerate(zip(before, behind, strict=True)):
            if end > start:
                self.spans.append(Span(rank, kind, self.step, start, end))


def _some(row: Row, at: range | list[int], offset: int = 0) -> Row:
    if isinstance(at, range):
        return row[at.start + offset : at.stop + offset : at.step]
    return [row[index + offset] for index in at]


def _put(row: Row, at: range | list[int], values: Row, offset: int = 0) -> None:
    if isinstance(at, range):
        row[at.start + offset : at.stop + offset : at.step] = values
    else:
        for index, value in zip(at, values, strict=True):
            row[index + offset] = value


def slowed(seconds: float, factor: float) -> float:
    return seconds if factor == 1.0 else ticked(factor * seconds)
