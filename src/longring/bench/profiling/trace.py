"""A profile as trace events, for chrome://tracing and ui.perfetto.dev.

Every rank is a process: what it does is one thread, and its messages are others, as many as were ever under way at
once. Arrows go from who sends to who receives, and memory by component is a counter.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .run import Profile, Rank
from .spans import Span

WORK, MESSAGES = 0, 1  # threads
COLOURS = {
    "compute": "thread_state_running",
    "merge": "rail_animation",
    "post": "thread_state_runnable",
    "wait": "terrible",
    "send": "rail_response",
}
Event = dict[str, Any]


def write_trace(profile: Profile, path: Path) -> None:
    events = list(trace_events(profile))
    said = {"schedule": profile.schedule, "layout": profile.layout, "kernel": profile.kernel, "device": profile.device}
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": said}))


def trace_events(profile: Profile) -> Iterator[Event]:
    """Times are microseconds."""
    placed = {rank.rank: _placed(rank) for rank in profile.ranks}
    for rank in profile.ranks:
        threads = {WORK: "work"} | {thread: _thread_name(thread) for _, thread in placed[rank.rank] if thread}
        yield from _names(rank.rank, threads)
        yield from _phases(rank)
        for span, thread in placed[rank.rank]:
            yield _slice(rank.rank, thread, span)
        for sample in rank.samples:
            yield {"ph": "C", "name": "memory", "pid": rank.rank, "ts": _us(sample.at), "args": sample.components}
    yield from _arrows(placed)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _thread_name(thread: int) -> str:
    return "messages" if thread == MESSAGES else f"messages {thread}"


def _names(rank: int, threads: dict[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for thread, name in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": thread}}


def _phases(rank: Rank) -> Iterator[Event]:
    for phase, (start, end) in rank.phases.items():
        yield _complete(rank.rank, WORK, phase, "phase", start, end, {})


def _slice(rank: int, thread: int, span: Span) -> Event:
    said = {"phase": span.phase, "step": span.step}
    if span.kind == "send":
        said |= {
            "bytes sent": span.bytes,
            "to": sorted({peer for peer, _ in span.sends}),
            "bytes received": sum(size for _, size in span.receives),
            "from": sorted({peer for peer, _ in span.receives}),
        }
    return _complete(rank, thread, title(span), span.kind, span.start, span.end, said)


def title(span: Span) -> str:
    step = "" if span.step is None else f"step {span.step}: "
    verb = {"wait": "wait for ", "merge": "merge ", "post": "post "}.get(span.kind, "")
    return f"{step}{verb}{span.what}"


def _complete(
    rank: int, thread: int, name: str, category: str, start: float, end: float, args: dict[str, Any]
) -> Event:
    colour = {"cname": COLOURS[category]} if category in COLOURS else {}
    ts = _us(start)
    place = {"pid": rank, "tid": thread, "ts": ts, "dur": round(max(0.0, _us(end) - ts), 3)}
    return {"ph": "X", "name": name, "cat": category, **place, "args": args, **colour}


def _placed(rank: Rank) -> list[tuple[Span, int]]:
    """Each span with its thread; messages that overlap are put beside each other."""
    free: list[float] = []  # when each thread of messages is next
    placed = []
    for span in sorted(rank.spans, key=lambda span: (span.start, -span.end)):
        if span.kind != "send":
            placed.append((span, WORK))
            continue
        lane = next((number for number, until in enumerate(free) if until <= span.start), len(free))
        free[lane : lane + 1] = [span.end]
        placed.append((span, MESSAGES + lane))
    return placed


def _arrows(placed: dict[int, list[tuple[Span, int]]]) -> Iterator[Event]:
    """Between two ranks the n-th message that one sends is the n-th that the other receives."""
    sent, received = (_messages(placed, direction) for direction in ("sends", "receives"))
    number = 0
    for (sender, receiver), posts in sent.items():
        pairs = dict.fromkeys(zip(posts, received.get((receiver, sender), []), strict=True))
        for (span, thread), (other, there) in pairs:  # a post of several tensors is one arrow
            number += 1
            flow = {"name": "message", "cat": "message", "id": number}
            yield {"ph": "s", **flow, "pid": sender, "tid": thread, "ts": _inside(span, span.start)}
            yield {"ph": "f", "bp": "e", **flow, "pid": receiver, "tid": there, "ts": _inside(other, other.end)}


def _messages(placed: dict[int, list[tuple[Span, int]]], direction: str) -> dict[tuple[int, int], list[Any]]:
    """(rank, peer) -> the post of every tensor, in the order of posting."""
    found: dict[tuple[int, int], list[tuple[Span, int]]] = defaultdict(list)
    for rank, spans in placed.items():
        for span, thread in spans:
            messages: Sequence[tuple[int, int]] = getattr(span, direction)
            for peer, size in messages:
                if size:  # nothing is sent for a tensor without numbers
                    found[rank, peer].append((span, thread))
    return found


def _inside(span: Span, moment: float) -> float:
    """A time that belongs to the slice, of which the end is not a part."""
    start, end = _us(span.start), _us(span.end)
    return round(min(max(_us(moment), start), max(start, end - 0.001)), 3)
