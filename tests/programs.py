"""What the ranks of test worlds do: functions of (group, ...), found by name in a process of their own.

`group` is a torch group, or one of the transports that are groups themselves.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from longring.errors import TransportError
from longring.transport.select import transport_for

TIMEOUT = 20.0  # of programs in which nothing goes wrong


def number(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


# --------------------------------------------------------------------------------------------- what is promised


def ring(group: Any, calls: int = 1, *, timeout: float = TIMEOUT, terms: dict | None = None) -> list:
    return around(transport_for(group), calls=calls, timeout=timeout, terms=terms)


def around(
    transport: Any,
    *,
    calls: int = 1,
    floats: int = 16,
    timeout: float = TIMEOUT,
    terms: dict | None = None,
    before_post: Callable[[int, int], None] = lambda call, step: None,
) -> list:
    """Every rank's number goes once around, in each of `calls` calls; returns the numbers met."""
    rank, size, met = transport.rank, transport.size, []
    for call in range(calls):
        block, arriving = torch.full((floats,), float(rank)), torch.empty(floats)
        with transport.converse(terms or {"floats": floats}, timeout=timeout) as talk:
            for step in range(1, size):
                before_post(call, step)
                what = f"call {call}, step {step}"
                pending = talk.post([((rank + 1) % size, block)], [((rank - 1) % size, arriving)], what=what)
                pending.wait()
                block, arriving = arriving, block
                met.append(block.unique().tolist())
    return met


def three_letters(group: Any) -> list | None:
    transport, met = transport_for(group), []
    for _ in range(3):
        with transport.converse({}, timeout=TIMEOUT) as talk:
            if transport.rank == 0:
                early = talk.post([(1, number(1)), (1, number(2))], [], what="early")
                late = talk.post([(1, number(3))], [], what="late")
                early.wait()
                late.wait()
                continue
            buffers = [number(0) for _ in range(3)]
            first = talk.post([], [(0, buffers[0])], what="first")
            rest = talk.post([], [(0, buffers[1]), (0, buffers[2])], what="rest")
            rest.wait()  # waiting in another order changes nothing: the order of posting decides
            first.wait()
            met.append([buffer.item() for buffer in buffers])
    return met or None


def all_to_all(group: Any) -> dict:
    """Each hears from every other, of as many numbers as its rank says, whoever wrote first."""
    transport = transport_for(group)
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    buffers = {rank: torch.zeros(1 + rank) for rank in others}
    for _ in range(2):
        with transport.converse({}, timeout=TIMEOUT) as talk:
            mine = [
                (rank, torch.full((1 + transport.rank,), 10.0 * transport.rank + rank)) for rank in reversed(others)
            ]
            talk.post(mine, list(buffers.items()), what="all to all").wait()
    return {rank: buffer.tolist() for rank, buffer in buffers.items()}


def many_at_once(group: Any, posts: int) -> list:
    transport = transport_for(group)
    above, below = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    met = []
    for _ in range(2):
        with transport.converse({}, timeout=TIMEOUT) as talk:
            buffers = [number(-1) for _ in range(posts)]
            pending = [
                talk.post([(above, number(10 * transport.rank + count))], [(below, buffer)], what=f"post {count}")
                for count, buffer in enumerate(buffers)
            ]
            for one in reversed(pending):
                one.wait()
        met = [buffer.item() for buffer in buffers]
    return met


def nothing_to_say(group: Any) -> int:
    transport = transport_for(group)
    above, below = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    for _ in range(2):
        with transport.converse({}, timeout=TIMEOUT) as talk:
            talk.post([], [], what="nothing").wait()
            talk.post([(above, torch.zeros(2, 0))], [(below, torch.zeros(2, 0))], what="no rows").wait()
    return transport.bytes_sent


def two_buffers(group: Any, steps: int) -> list:
    transport = transport_for(group)
    peer, met = 1 - transport.rank, []
    sent, received = torch.empty(5000), torch.empty(5000)
    with transport.converse({}, timeout=TIMEOUT) as talk:
        for step in range(steps):
            sent.fill_(step + 100 * transport.rank)
            talk.post([(peer, sent)], [(peer, received)], what=f"step {step}").wait()
            sent.fill_(-1)
            met += received.unique().tolist()
    return met


def every_dtype(group: Any) -> list:
    transport = transport_for(group)
    peer, met = 1 - transport.rank, []
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8)
    with transport.converse({}, timeout=TIMEOUT) as talk:
        for kind in kinds:
            sent, received = (torch.full((3, 5), transport.rank, dtype=kind) for _ in range(2))
            talk.post([(peer, sent)], [(peer, received)], what=str(kind)).wait()
            met.append(int(received.unique().item()))
    return met


def count_bytes(group: Any) -> int:
    """Rank 1 writes to rank 0, rank 2 to both."""
    transport, pairs = transport_for(group), [(1, 0), (2, 0), (2, 1)]
    kinds = [((3, 5), torch.bfloat16), ((2,), torch.float64)]
    with transport.converse({}, timeout=TIMEOUT) as talk:
        made = [(pair, torch.zeros(shape, dtype=dtype)) for pair in pairs for shape, dtype in kinds]
        sends = [(receiver, x) for (sender, receiver), x in made if sender == transport.rank]
        receives = [(sender, x) for (sender, receiver), x in made if receiver == transport.rank]
        talk.post(sends, receives, what="letters").wait()
    return transport.bytes_sent


def only_greet(group: Any, calls: int) -> int:
    transport = transport_for(group)
    for call in range(calls):
        with transport.converse({"call": call % 2}, timeout=TIMEOUT):
            pass
    return calls


def refusals(group: Any) -> list[str]:
    transport, said = transport_for(group), []
    crooked, straight = torch.zeros(4, 3).mT, torch.zeros(3)
    wrong = [([(1, crooked)], []), ([], [(1, crooked)]), ([(0, straight)], []), ([], [(2, straight)])]
    wrong.append(([(2, straight)], []))
    talk = transport.converse({}, timeout=TIMEOUT)
    for sends, receives in wrong if transport.rank == 0 else []:
        try:
            talk.post(sends, receives, what="a letter")
        except TransportError as error:
            said.append(str(error))
    with talk:
        return said


# ----------------------------------------------------------------------------------------------- what goes wrong


def ring_with_a_victim(group: Any, victim: int, post: int, how: str, timeout: float, calls: int) -> Any:
    """`victim` is killed or stopped, or fails, just before its post of that number."""
    transport = transport_for(group)
    posts = iter(range(1, 10_000))

    def strike(call: int, step: int) -> None:
        if transport.rank == victim and next(posts) == post:
            strike_oneself(how)

    return around(transport, calls=calls, floats=3000, timeout=timeout, before_post=strike)


def strike_oneself(how: str) -> None:
    if how == "raise":
        raise MemoryError("no room left")
    if how == "sleep":
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    time.sleep(60)  # a stop takes effect at the next chance
