"""Time and memory on the device: competitors in turns, by CUDA events, in seconds, with medians and spread."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..records import Spread

CACHE_BYTES = 1 << 28  # written before each call: more than any second-level cache holds
HEAD_START = 0.0015  # seconds: the device sleeps at least so long before each call, while the host prepares it
LONGEST_START = 0.02
CYCLES = 2e9  # of the device in a second, about
FAR_BEHIND = 1.6  # times the fastest of the first round: such a one is not run again
LONG_ENOUGH = 0.3  # seconds of a call's runs together: short ones are repeated more often
MOST_ROUNDS = 16  # that are run without looking at what they say
LAST_ROUND = 48
PATIENCE = 15.0  # seconds of all rounds: none is begun beyond, once there were as many as asked for
SURE = 0.003  # of a ratio: rounds go on until its median is known so well,
PLAINLY = 0.1  # or to this part of its distance from 1: how far somebody is ahead need not be known to a hair
WALLS, CALLS_IN_A_ROW = 5, 8  # how often the wall clock is asked, after how many calls
LED_IN = 0.04  # seconds that a call runs unmeasured before it is measured, if it is shorter than LONG_ENOUGH

Call = Callable[[], Any]


def _nothing() -> None:
    return None


class Turn(NamedTuple):
    """What is timed, and what is not: done before it each time, and after."""

    call: Call
    before: Call = _nothing
    after: Call = _nothing


def timed(
    turns: dict[str, Turn], device: torch.device, *, repeats: int, keep: tuple[str, ...] = (), is_warm: bool = False
) -> dict[str, list[float]]:
    """Seconds of each round, by name. Every call is warmed up once, unless it is warm; then all take turns.

    Clocks and heat drift, by one or two hundredths of a call's time within a second: who compares two calls compares
    them round by round. And a call may be slower right after one that took more power; ratios of one kernel to itself
    were off by up to 4 %, and that is the likely cause. So rounds begin with another call and go both ways, two by
    two, and each call that is not long runs for a while, unmeasured, before it is measured. Then the device is given
    something to do for as long as the host needs for the call, so that what it costs the host is hidden, as it is in a
    model: it is the device's time that is measured. A call that was far behind in the first round is not repeated,
    unless it is in `keep`; the others take turns until their ratios are known well.
    """
    hosts: dict[str, float] = {}
    if not is_warm:
        _round(list(turns.items()), device, hosts)
    rounds: list[dict[str, float]] = []
    while len(rounds) < _enough(repeats, rounds) or _goes_on(repeats, rounds):
        number = len(rounds)
        chosen = [name for name in turns if not rounds or name in keep or _is_close(name, rounds[0])]
        first = number // 2 % len(chosen)
        order = chosen[first:] + chosen[:first]
        order = order[::-1] if number % 2 else order
        rounds.append(_round([(name, turns[name]) for name in order], device, hosts, lead_in=_lead_in(rounds)))
    return {name: [round_[name] for round_ in rounds if name in round_] for name in turns}


def _enough(repeats: int, rounds: list[dict[str, float]]) -> int:
    """As many rounds as asked for, or more where the fastest call is short; as many one way as the other."""
    if repeats < 3 or not rounds:
        return repeats
    enough = max(repeats, min(MOST_ROUNDS, int(LONG_ENOUGH / max(min(rounds[0].values()), 1e-9))))
    return enough + enough % 2


def _goes_on(repeats: int, rounds: list[dict[str, float]]) -> bool:
    """Whether the ratio of some call to the fastest is not known well enough, of calls that can be repeated often."""
    if repeats < 3 or min(rounds[0].values()) >= LONG_ENOUGH:
        return False
    if len(rounds) % 2:
        return True
    if len(rounds) >= LAST_ROUND or len(rounds) * _seconds(rounds) > PATIENCE:
        return False
    fastest = min(rounds[-1], key=lambda name: statistics.median(round_[name] for round_ in rounds))
    return any(
        _is_in_doubt([round_[name] for round_ in rounds], [round_[fastest] for round_ in rounds])
        for name in rounds[-1]
        if name != fastest
    )


def _is_in_doubt(mine: list[float], its: list[float]) -> bool:
    """By the standard error of the median ratio, of rounds taken in twos."""
    ratios = both_ways(mine, its)
    if len(ratios) < 2:
        return True
    ratio = statistics.median(ratios)
    error = 1.25 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return error > max(SURE * ratio, PLAINLY * abs(ratio - 1))


def both_ways(mine: Sequence[float], its: Sequence[float]) -> list[float]:
    """Ratios of what two rounds, one each way, say together."""
    shared = min(len(mine), len(its))
    if shared < 2:
        return [mine[0] / its[0]]
    return [sum(mine[i : i + 2]) / sum(its[i : i + 2]) for i in range(0, shared - 1, 2)]


def _lead_in(rounds: list[dict[str, float]]) -> dict[str, int]:
    """How often each runs before it is measured: where all are over so soon that the one before is still felt."""
    if not rounds or min(rounds[0].values()) >= LONG_ENOUGH:
        return {}
    return {name: math.ceil(LED_IN / max(seconds, LED_IN / 50)) for name, seconds in rounds[0].items()}


def _seconds(rounds: list[dict[str, float]]) -> float:
    """That a round takes, by the last one: what is measured, and what leads in."""
    lead_in = _lead_in(rounds)
    return sum(seconds * (1 + lead_in[name]) for name, seconds in rounds[-1].items())


def _is_close(name: str, first: dict[str, float]) -> bool:
    return first[name] <= FAR_BEHIND * min(first.values())


def _round(
    turns: list[tuple[str, Turn]],
    device: torch.device,
    hosts: dict[str, float],
    *,
    lead_in: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, float]:
    """`hosts`: the least that each has cost the host so far, in seconds; kept up to date."""
    return _round_on_gpu(turns, device, hosts, lead_in) if device.type == "cuda" else _round_on_host(turns)


def _round_on_gpu(
    turns: list[tuple[str, Turn]], device: torch.device, hosts: dict[str, float], lead_in: Mapping[str, int]
) -> dict[str, float]:
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device)
    events = {}
    for name, turn in turns:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(lead_in.get(name, 0)):
            turn.before()
            turn.call()
            turn.after()
        turn.before()
        cache.zero_()
        torch.cuda._sleep(head_start(hosts.get(name)))
        start.record()
        began = time.perf_counter()
        turn.call()
        hosts[name] = min(time.perf_counter() - began, hosts.get(name, math.inf))
        end.record()
        turn.after()
        events[name] = start, end
    torch.cuda.synchronize(device)
    return {name: 1e-3 * start.elapsed_time(end) for name, (start, end) in events.items()}


def head_start(host: float | None) -> int:
    """Cycles that the device sleeps before a call that costs the host so many seconds, or nobody knows how many."""
    return int(CYCLES * min(LONGEST_START, max(HEAD_START, 1.5 * (host or 0))))


def _round_on_host(turns: list[tuple[str, Turn]]) -> dict[str, float]:
    times = {}
    for name, turn in turns:
        turn.before()
        start = time.perf_counter()
        turn.call()
        times[name] = time.perf_counter() - start
        turn.after()
    return times


def once(call: Call, device: torch.device) -> tuple[Any, Spread]:
    """What a call gives that takes too long to be repeated, and its time."""
    results: list[Any] = []
    times = _round([("once", Turn(lambda: results.append(call())))], device, {})
    return results[0], Spread.of(list(times.values()))


def by_the_wall(turn: Turn, device: torch.device) -> float:
    """Seconds of a call among others like it, from the first launch to the last result: what the host takes counts."""
    turn.before()
    times = []
    for _ in range(WALLS):
        _wait(device)
        start = time.perf_counter()
        for _ in range(CALLS_IN_A_ROW):
            turn.call()
        _wait(device)
        times.append((time.perf_counter() - start) / CALLS_IN_A_ROW)
    turn.after()
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_beyond(call: Call, device: torch.device) -> int | None:
    """Bytes that the call had allocated at most, beyond what was there before; None where nobody counts."""
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def release(device: torch.device) -> None:
    """Give back what the allocator keeps, before something large."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
