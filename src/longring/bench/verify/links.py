"""Links between neighbours of the ring, and how much of its messages hides behind its computing: all measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import longring as lr

from ...transport.contract import Pending, Receives, Sends, Terms, Transport
from .ranks import FAILED, NOT_RUN, PASSED, Add, Ranks, Row

BIG = {"cpu": 4 << 20, "cuda": 64 << 20}  # bytes of a message whose rate is measured
SMALL, ROUND_TRIPS, REPEATS = 8, 20, 3
TOKENS_A_RANK = {"cpu": 512, "cuda": 8192}
HEADS = {"cpu": (4, 2, 64), "cuda": (16, 8, 128)}  # of queries, of keys, and their dimension
SLOW = 0.5  # of the median of links of its kind


def links(ranks: Ranks, add: Add) -> None:
    """A row for each; they pass if messages arrive, whatever the rate: what is slow is for the reader to judge."""
    for name, check, measure in (
        ("links between neighbours", "links", _links),
        ("overlap of a causal ring", "overlap", _overlap),
    ):
        if not ranks.wanted.includes(name):
            continue
        row = Row(check, name, NOT_RUN, "a single rank has no neighbour" if ranks.size == 1 else ranks.why_not() or "")
        if not row.detail:
            _measured(ranks, row, measure)
        add(row)


def _measured(ranks: Ranks, row: Row, measure: Callable[[Ranks], tuple[str, dict[str, Any]]]) -> None:
    found, problem = ("", {}), None
    try:
        found = measure(ranks)
    except Exception as error:  # of this rank's links: the others hear of it
        problem = f"rank {ranks.rank}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    problems = [text for text in ranks.all_say(problem) if text is not None]
    if problems:
        row.status, row.detail, ranks.reason = FAILED, "; ".join(problems[:3]), f"{row.name} failed"
    else:
        row.status, (row.detail, row.numbers) = PASSED, found


# ----------------------------------------------------------------------------------------------------------- links


def _links(ranks: Ranks) -> tuple[str, dict[str, Any]]:
    """Pairs of neighbours by turns, so that none waits for another; then all links at once, as in a ring."""
    mine: dict[str, dict[str, float]] = {}
    for pairs in _by_turns(ranks.size):
        dist.barrier(ranks.control)
        for pair in pairs:
            if ranks.rank in pair:
                found = _ping(ranks, pair[0] if ranks.rank == pair[1] else pair[1])
                if ranks.rank == pair[0]:
                    mine[f"{pair[0]}-{pair[1]}"] = found
    dist.barrier(ranks.control)
    seconds = max(ranks.all_say(_seconds(ranks, _around(ranks, BIG[ranks.device.type]))))
    all_links = {name: link for each in ranks.all_say(mine) for name, link in each.items()}
    rates = {name: link["bytes_per_second"] for name, link in all_links.items()}
    slowest, median = min(rates, key=lambda name: rates[name]), statistics.median(rates.values())
    at_once = BIG[ranks.device.type] / seconds
    latency = max(link["latency_seconds"] for link in all_links.values())
    detail = (
        f"{median / 1e9:.3g} GB/s each way (median of {len(rates)}), slowest {slowest} with "
        f"{rates[slowest] / 1e9:.3g}; all at once {at_once / 1e9:.3g}; a message takes {latency * 1e6:.0f} us at most"
    )
    few = [name for name, rate in rates.items() if rate < SLOW * median]
    return detail, {"links": all_links, "all_at_once_bytes_per_second": at_once, "slow": few}


def _by_turns(size: int) -> Iterator[list[tuple[int, int]]]:
    """The pairs of neighbours in the ring; in each turn no rank is in two."""
    pairs = [(rank, (rank + 1) % size) for rank in range(size if size > 2 else 1)]
    last = pairs[-1:] if size % 2 else []  # of an odd ring: it meets both the first pair and the one before
    rest = pairs[: len(pairs) - len(last)]
    yield from (turn for turn in (rest[::2], rest[1::2], last) if turn)


def _ping(ranks: Ranks, peer: int) -> dict[str, float]:
    """Half a round trip of a few bytes; bytes a second of a large message, while as large a one comes the other way."""
    nbytes = BIG[ranks.device.type]
    big = _seconds(ranks, _exchange(ranks, [peer], [peer], nbytes))
    there, back = _exchange(ranks, [peer], [], SMALL), _exchange(ranks, [], [peer], SMALL)
    first, second = (there, back) if ranks.rank < peer else (back, there)

    def there_and_back() -> None:
        for _ in range(ROUND_TRIPS):
            first()
            second()

    small = _seconds(ranks, there_and_back) / (2 * ROUND_TRIPS)
    return {"bytes_per_second": nbytes / big, "latency_seconds": small}


def _around(ranks: Ranks, nbytes: int) -> Callable[[], None]:
    return _exchange(ranks, [(ranks.rank + 1) % ranks.size], [(ranks.rank - 1) % ranks.size], nbytes)


def _exchange(ranks: Ranks, to: list[int], from_: list[int], nbytes: int) -> Callable[[], None]:
    """Sends and receives of so many bytes, until this rank has what it waits for. By torch alone, not by longring."""
    buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=ranks.device) for _ in (*to, *from_)]
    kinds = [(dist.isend, peer) for peer in to] + [(dist.irecv, peer) for peer in from_]
    operations = [dist.P2POp(kind, buffer, peer) for (kind, peer), buffer in zip(kinds, buffers, strict=True)]

    def exchange() -> None:
        for work in dist.batch_isend_irecv(operations):
            if ranks.device.type == "cuda":
                work.wait()  # makes the stream wait; with a bound the host would look once in a millisecond
            else:
                work.wait(timedelta(seconds=ranks.wanted.timeout))

    return exchange


def _seconds(ranks: Ranks, function: Callable[[], Any]) -> float:
    """The quickest of a few, after one that does not count."""
    function()
    return min(_timed(ranks, function) for _ in range(REPEATS))


def _timed(ranks: Ranks, function: Callable[[], Any]) -> float:
    ranks.finish()
    start = time.perf_counter()
    function()
    ranks.finish()
    return time.perf_counter() - start


# --------------------------------------------------------------------------------------------------------- overlap


class Silent:
    """A transport that carries nothing: with it a call takes the time of its computing. Results mean nothing."""

    def __init__(self, real: Transport) -> None:
        self.rank, self.size, self.node_ranks, self.members = real.rank, real.size, real.node_ranks, real.members

    def decline(self, error: Exception) -> None:
        return None

    def converse(self, terms: Terms, *, timeout: float | None = None) -> Silent:
        return self

    def post(self, sends: Sends, receives: Receives, *, what: str) -> Pending:
        for _, buffer in receives:
            buffer.zero_()  # or what memory held before might be nan, with which some processors are slow
        return self

    def wait(self) -> None:
        return None

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def _overlap(ranks: Ranks) -> tuple[str, dict[str, Any]]:
    """Both passes of a causal ring; its computing alone; messages of as many bytes in as many steps alone."""
    real = lr.Sharding(1, dist.group.WORLD).transport
    both = {"ring": real, "compute": Silent(real)}
    calls: dict[str, Callable[[], Any]] = {name: _call(ranks, transport) for name, transport in both.items()}
    before = getattr(real, "bytes_sent", 0)
    calls["ring"]()
    sent = max(ranks.all_say(getattr(real, "bytes_sent", 0) - before))  # of one size: torch aborts at any other
    steps = 3 * (ranks.size - 1)  # keys twice, and their gradients
    message = _around(ranks, sent // steps)
    calls["transfer"] = lambda: [message() for _ in range(steps)]
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS + 1):  # in turns, so that a slow moment falls on all alike
        for name, call in calls.items():
            dist.barrier(ranks.control)
            found[name].append(_timed(ranks, call))
    everywhere = ranks.all_say({name: min(times[1:]) for name, times in found.items()})
    slowest = {name: max(one[name] for one in everywhere) for name in calls}
    hidden = (slowest["compute"] + slowest["transfer"] - slowest["ring"]) / min(slowest["compute"], slowest["transfer"])
    detail = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in slowest.items())
    numbers = {"seconds": slowest, "hidden": hidden, "bytes_sent_by_a_rank": sent, "steps": steps}
    return f"{detail}; {min(1.0, max(0.0, hidden)):.0%} of the shorter is hidden behind the longer", numbers


def _call(ranks: Ranks, transport: Any) -> Callable[[], None]:
    heads, kv_heads, d = HEADS[ranks.device.type]
    s = lr.Sharding(TOKENS_A_RANK[ranks.device.type] * ranks.size, transport, "zigzag")
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    shapes = [(1, s.local_length, h, d) for h in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, device=ranks.device).to(dtype).requires_grad_() for shape in shapes)
    dout = torch.randn_like(q)

    def call() -> None:
        out = lr.attention(q, k, v, sharding=s, schedule="ring", timeout=ranks.wanted.timeout)
        torch.autograd.grad(out, (q, k, v), dout)

    return call
