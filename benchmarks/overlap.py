"""How much of the transfers hides behind the computing, over links of a set speed: checked before timed, in one run.

python benchmarks/overlap.py > docs/records/overlap.json      # Linux, as root; elsewhere it says why not
python benchmarks/overlap.py --only "ring, 4 ranks"           # one of the scenarios

Every rank is a machine of its own (namespaces.py). Three things are timed in turns, each after a barrier: the tiles
alone, with a transport that carries nothing; the messages alone, recorded and sent again without a tile; and the
call as it is. The slowest rank counts. What would be perfect is the longer of the first two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import namespaces
import torch
import torch.distributed as dist
from torch import Tensor

import longring as lr
from longring.testing import relative_error
from longring.transport.contract import Conversation, Pending, Receives, Sends, Terms, Transport
from longring.transport.select import transport_for

D, REPEATS, TIMEOUT = 64, 5, 60.0
PASSES = ("forward", "backward")
WAYS = ("compute", "transfer", "together")


def longnet(tokens: int) -> lr.Dilated:
    """A branch that stays on a rank, and two that do not."""
    return lr.Dilated([tokens // 8, tokens // 2, tokens], [1, 2, 4])


class Scenario(NamedTuple):
    name: str
    ranks: int
    rate: str
    tokens: int
    heads: int
    pattern: lr.Dense | lr.Dilated
    layout: str
    schedule: str


# At four ranks on two cores the transfers must be several times the computing, at two the computing the longer one:
# four busy ranks that share two cores have nothing to hide a transfer behind. Moving bytes through the kernel takes
# time of the same two cores, which a longer sequence makes small beside the computing: hence two lengths.
SCENARIOS = (
    Scenario("ring, 4 ranks, slow links", 4, "80mbit", 4096, 4, lr.Dense(), "zigzag", "ring"),
    Scenario("ring, 2 ranks, fast links", 2, "400mbit", 16384, 4, lr.Dense(), "zigzag", "ring"),
    Scenario("ring, 2 ranks, fast links, long", 2, "400mbit", 32768, 4, lr.Dense(), "zigzag", "ring"),
    Scenario("dilated, 4 ranks, slow links", 4, "50mbit", 8192, 4, longnet(8192), "contiguous", "exchange"),
    Scenario("dilated, 2 ranks, fast links", 2, "150mbit", 16384, 4, longnet(16384), "contiguous", "exchange"),
)


# Transports that leave something out


class _Nothing:
    def wait(self) -> None:
        return None


class Mute:
    """Carries nothing: what is timed is the computing. Buffers hold ordinary numbers; others take other times."""

    def __init__(self, real: Transport) -> None:
        self.rank, self.size, self.node_ranks = real.rank, real.size, real.node_ranks
        self.members, self.decline = real.members, real.decline
        self._filled: set[int] = set()

    def converse(self, terms: Terms, *, timeout: float | None = None) -> Mute:
        return self

    def post(self, sends: Sends, receives: Receives, *, what: str) -> Pending:
        for _, buffer in receives:
            if buffer.data_ptr() not in self._filled:  # only in the first rounds, which do not count
                self._filled.add(buffer.data_ptr())
                buffer.normal_(std=0.1)
        return _Nothing()

    def __enter__(self) -> Mute:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class Event(NamedTuple):
    """A post, with buffers like those of the call, or the wait for the post of that number."""

    number: int
    sends: Sends = ()
    receives: Receives = ()
    is_wait: bool = False


class Recorder:
    """Carries everything, and remembers what was posted and waited for, in order, by conversation."""

    def __init__(self, real: Transport) -> None:
        self.rank, self.size, self.node_ranks = real.rank, real.size, real.node_ranks
        self.members, self.decline = real.members, real.decline
        self._real = real
        self.heard: list[tuple[Terms, list[Event]]] = []

    def converse(self, terms: Terms, *, timeout: float | None = None) -> _Overheard:
        events: list[Event] = []
        self.heard.append((terms, events))
        return _Overheard(self._real.converse(terms, timeout=timeout), events)

    def taken(self) -> list[tuple[Terms, list[Event]]]:
        heard, self.heard = self.heard, []
        return heard


class _Overheard:
    def __init__(self, talk: Conversation, events: list[Event]) -> None:
        self._talk, self._events = talk, events

    def post(self, sends: Sends, receives: Receives, *, what: str) -> Pending:
        number = sum(not event.is_wait for event in self._events)
        self._events.append(Event(number, _alike(sends), _alike(receives)))
        return _OverheardPending(self._talk.post(sends, receives, what=what), number, self._events)

    def __enter__(self) -> _Overheard:
        self._talk.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._talk.__exit__(*error)


class _OverheardPending:
    def __init__(self, pending: Pending, number: int, events: list[Event]) -> None:
        self._pending, self._number, self._events = pending, number, events

    def wait(self) -> None:
        self._events.append(Event(self._number, is_wait=True))
        self._pending.wait()


def _alike(messages: Iterable[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    return [(peer, torch.zeros_like(tensor)) for peer, tensor in messages]


def replay(real: Transport, heard: list[tuple[Terms, list[Event]]]) -> None:
    """The same messages in the same order, waited for in the same places, and nothing computed."""
    for terms, events in heard:
        pending: dict[int, Pending] = {}
        with real.converse(terms, timeout=TIMEOUT) as talk:
            for event in events:
                if event.is_wait:
                    pending[event.number].wait()
                else:
                    pending[event.number] = talk.post(event.sends, event.receives, what=f"message {event.number}")


# One rank


class Call:
    """The call of a scenario on this rank, over any transport."""

    def __init__(self, scenario: Scenario) -> None:
        random = torch.Generator().manual_seed(0)
        self.whole = [torch.randn(1, scenario.tokens, scenario.heads, D, generator=random) for _ in range(4)]
        self.scenario = scenario

    def sharding(self, transport: Transport) -> lr.Sharding:
        return lr.Sharding(length=self.scenario.tokens, group=transport, layout=self.scenario.layout)

    def run(self, transport: Transport) -> tuple[dict[str, float], list[Tensor], list[Any]]:
        """(seconds of each pass, out and gradients, what a recorder heard in each pass)."""
        sharding = self.sharding(transport)
        *qkv, dout = (sharding.shard(x) for x in self.whole)
        qkv = [x.requires_grad_() for x in qkv]
        options = {"pattern": self.scenario.pattern, "schedule": self.scenario.schedule, "timeout": TIMEOUT}
        taken = getattr(transport, "taken", list)
        out, forward = timed(lambda: lr.attention(*qkv, sharding=sharding, **options))
        heard = [taken()]
        gradients, backward = timed(lambda: torch.autograd.grad(out, qkv, dout))
        heard.append(taken())
        return {"forward": forward, "backward": backward}, [out.detach(), *gradients], heard

    def check(self, transport: Transport, found: list[Tensor]) -> float:
        """The largest error against one process."""
        whole = [self.sharding(transport).unshard(x) for x in found]
        leaves = [x.clone().requires_grad_() for x in self.whole[:3]]
        out = lr.attention(*leaves, pattern=self.scenario.pattern)
        expected = [out.detach(), *torch.autograd.grad(out, leaves, self.whole[3])]
        return max(relative_error(a, b) for a, b in zip(whole, expected, strict=True))


def timed(function: Any) -> tuple[Any, float]:
    dist.barrier()
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def one_rank(scenario: Scenario) -> dict[str, Any]:
    dist.init_process_group("gloo")
    real = transport_for(dist.group.WORLD)
    call, recorder, mute = Call(scenario), Recorder(real), Mute(real)
    _, found, heard = call.run(recorder)
    error = call.check(real, found)
    if not error < 1e-5:
        raise SystemExit(f"wrong by {error:.1e}: nothing is timed")
    rounds = [one_round(call, real, mute, heard) for _ in range(REPEATS + 1)][1:]  # the first is warm-up
    dist.barrier()
    sent = [sum(tensor.nbytes for _, events in one for event in events for _, tensor in event.sends) for one in heard]
    return {"error": error, "rounds": rounds, "bytes_sent": dict(zip(PASSES, sent, strict=True))}


def one_round(call: Call, real: Transport, mute: Mute, heard: list[Any]) -> dict[str, dict[str, float]]:
    """In turns, so that a slow moment of the machine falls on all alike."""
    return {
        "together": call.run(real)[0],
        "compute": call.run(mute)[0],
        "transfer": {
            phase: timed(lambda one=one: replay(real, one))[1] for phase, one in zip(PASSES, heard, strict=True)
        },
    }


# All ranks


def all_ranks(number: int) -> dict[str, Any]:
    scenario = SCENARIOS[number]
    with namespaces.machines(scenario.ranks, scenario.rate) as made:
        running = [start(machine, number, made[0].address, scenario.ranks) for machine in made]
        said = [process.communicate(timeout=600)[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"{scenario.name}: a rank failed")
    return summary(scenario, [json.loads(text) for text in said])


def start(machine: namespaces.Machine, number: int, first: str, ranks: int) -> subprocess.Popen[str]:
    world = {"RANK": str(machine.number), "WORLD_SIZE": str(ranks), "MASTER_ADDR": first, "MASTER_PORT": "29500"}
    command = [sys.executable, __file__, "--rank-of", str(number)]
    return machine.start(
        command, {**world, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}, stdout=subprocess.PIPE
    )


def summary(scenario: Scenario, reports: list[dict[str, Any]]) -> dict[str, Any]:
    passes = {phase: summary_of_pass(phase, [report["rounds"] for report in reports]) for phase in PASSES}
    return {
        "what": scenario.name,
        "ranks": scenario.ranks,
        "rate": scenario.rate,
        "shape": f"batch 1, {scenario.tokens} tokens, {scenario.heads} heads, d = {D}, float32",
        "pattern": repr(scenario.pattern),
        "layout": scenario.layout,
        "schedule": scenario.schedule,
        "error against one process": max(report["error"] for report in reports),
        "bytes sent by each rank": [report["bytes_sent"] for report in reports],
        **passes,
    }


def summary_of_pass(phase: str, rounds_of_ranks: list[list[dict[str, dict[str, float]]]]) -> dict[str, Any]:
    slowest = {
        way: [max(round_[way][phase] for round_ in rounds) for rounds in zip(*rounds_of_ranks, strict=True)]
        for way in WAYS
    }
    median = {way: statistics.median(seconds) for way, seconds in slowest.items()}
    perfect = max(median["compute"], median["transfer"])
    quickest = {way: min(seconds) for way, seconds in slowest.items()}
    return {
        "seconds": {way: {"median": median[way], "min": min(s), "max": max(s)} for way, s in slowest.items()},
        "transfer / compute": median["transfer"] / median["compute"],
        "in series / perfect": (median["compute"] + median["transfer"]) / perfect,
        "together / perfect": median["together"] / perfect,
        "together / perfect, quickest rounds": quickest["together"] / max(quickest["compute"], quickest["transfer"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of is not None:
        json.dump(one_rank(SCENARIOS[asked.rank_of]), sys.stdout)
        return
    reason = namespaces.why_not()
    if reason is not None:
        sys.exit(f"skipped: {reason}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    busy = os.getloadavg()[0]
    record = {
        "commit": commit.stdout.strip(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "longring": lr.__version__},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}; a rank has 1 thread; medians of {REPEATS}",
        "load of the machine before": round(busy, 2),
        "runs": [all_ranks(number) for number, one in enumerate(SCENARIOS) if asked.only in one.name],
    }
    json.dump(record, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
