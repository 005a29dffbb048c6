"""One rank's forward and backward, watched: results, time, memory and bytes, and what was predicted for them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...autograd import attended, differentiated
from ...call import Call, Choice, check_pattern, check_scale, choose_kernel, make_journey, pick_schedule
from ...errors import ArgumentError, LongringError
from ...geometry.layouts import deal
from ...geometry.parcels import Parcel
from ...geometry.patterns import Pattern, Problem
from ...geometry.task import Task
from ...kernels.contract import Upstream
from ...plan.choose import choose_layout
from ...plan.cost import estimates, typical
from ...plan.counts import computing
from ...plan.event_pace import Pace
from ...plan.hardware import Hardware, all_hardware
from ...plan.memory import held
from ...plan.traffic import BYTES
from ...plan.work import pairs
from ...schedules.buffers import release_buffers
from ...schedules.select import check_schedule
from ...transport.ledger import Ledger
from ...transport.replay import FOLLOWED, Replay, check_followed
from .checks import Check, Judge, Results
from .clock import Clock
from .exact import Terms
from .gradients import Gradients
from .numbers import Numbers
from .pairs import check_known
from .peers import MadeUp
from .places import positions_of
from .sampling import sampled_own, sampled_rows, sampled_sent

PRODUCTS = {"forward": 2, "backward": 5}  # matrix products for each pair: QK and PV; then QK again, dP, dQ, dK, dV
LONG = 10.0  # seconds of a pass that is too dear to be run once for nothing
LEAST_PACE = 1e13  # FLOP/s of a GPU whose rates are not known
WAYS = attrgetter("sends"), attrgetter("receives")
MOST_TOKENS = 1 << 43  # positions that the generator tells apart

Watch = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, of how much)."""


@dataclass(frozen=True)
class Setting:
    """Which rank of which ring, and of what."""

    tokens: int
    ranks: int
    rank: int
    pattern: Pattern
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    batch: int = 1
    node_ranks: int | None = None
    layout: str = "auto"
    schedule: str = "auto"
    kernel: str = "auto"
    seed: int = 0


class Made(NamedTuple):
    """What a setting comes to."""

    task: Task
    layout: Choice
    schedule: Choice
    kernel: Choice
    call: Call
    door: Replay
    numbers: Numbers
    gradients: Gradients
    terms: Terms


@dataclass
class Phase:
    """One pass. Seconds of every run without what it took to make the others up, which is `made_up`.

    `is_warm`: it was run once before, unmeasured, so that nothing is compiled any more.
    """

    name: str
    is_warm: bool = False
    runs: list[float] = field(default_factory=list)
    made_up: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    planned_sent: int = 0
    planned_received: int = 0
    flops: int = 0
    predicted_bytes: int | None = None
    predicted_components: dict[str, int] | None = None
    predicted_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """The median; where there are several runs without the very first, which also compiles and takes memory."""
        return statistics.median(self._counted(self.runs))

    def _counted(self, runs: list[float]) -> list[float]:
        return runs if self.is_warm else runs[1:] or runs

    @property
    def bytes_agree(self) -> bool:
        return (self.bytes_sent, self.bytes_received) == (self.planned_sent, self.planned_received)

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "runs": self.runs,
            "warmed_up": self.is_warm,
            "made_up_seconds": statistics.median(self._counted(self.made_up)),
            "flops": self.flops,
            "tflops": self.flops / self.seconds / 1e12 if self.seconds else None,
            "peak_bytes": self.peak_bytes,
            "predicted_bytes": self.predicted_bytes,
            "predicted_components": self.predicted_components,
            "predicted_seconds": self.predicted_seconds,
            "bytes_sent": self.bytes_sent,
            "planned_bytes_sent": self.planned_sent,
            "bytes_received": self.bytes_received,
            "planned_bytes_received": self.planned_received,
        }


@dataclass
class Replayed:
    """What was found out about one rank."""

    setting: Setting
    layout: Choice
    schedule: Choice
    kernel: Choice
    local_tokens: int
    workspace_bytes: int
    phases: dict[str, Phase]
    checks: list[Check]
    hardware: str | None  # of the prediction of time
    notes: list[str]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks) and all(phase.bytes_agree for phase in self.phases.values())

    @property
    def real(self) -> str:
        """What was run, in words."""
        setting, passes = self.setting, " and ".join(self.phases)
        device = "this GPU" if setting.device.type == "cuda" else "this machine's CPU"
        return (
            f"One rank's full share was computed here, on {device}: the {passes} of rank {setting.rank} of "
            f"{setting.ranks:,}, with its {self.local_tokens:,} of {setting.tokens:,} tokens, by the schedule, buffers "
            "and kernels that a ring runs. Nothing was multiplied up; its time, memory and bytes were measured."
        )

    @property
    def simulated(self) -> str:
        """What was not."""
        others = self.setting.ranks - 1
        if not others:
            return "Nothing: there is no other rank."
        who = "the other rank" if others == 1 else f"the other {others:,} ranks"
        said = (
            f"What {who} would have sent of keys and values was generated from (seed, position) when it was due, which "
            "is not part of the time; no link was used, and nothing waited for one."
        )
        if "backward" in self.phases:
            said += (
                " The gradients that they would have found were made up as well, from (seed, sender, position), about "
                "as large as the rank's own and for every second of its own rows; what the rank sent, and what it "
                "kept, must be these and its own contribution together."
            )
        return said

    def to_json(self) -> dict[str, Any]:
        setting = self.setting
        return {
            "rank": setting.rank,
            "ranks": setting.ranks,
            "tokens": setting.tokens,
            "local_tokens": self.local_tokens,
            "layout": self.layout.name,
            "schedule": self.schedule.name,
            "schedule_reason": self.schedule.reason,
            "kernel": self.kernel.name,
            "device": str(setting.device),
            "generator_bytes": self.workspace_bytes,
            "hardware": self.hardware,
            "phases": {name: phase.to_json() for name, phase in self.phases.items()},
            "checks": [check.to_json() for check in self.checks],
            "notes": self.notes,
            "ok": self.ok,
        }


def replay(
    setting: Setting,
    *,
    forward_only: bool = False,
    samples: int = 64,
    repeats: int = 1,
    watch: Watch = lambda what, done, of: None,
) -> Replayed:
    """Run one rank of the ring, and check `samples` rows of everything that it finds."""
    watch("planning", 0, 1)
    made = make(setting, watch)
    phases = [Phase("forward")] if forward_only else [Phase("forward"), Phase("backward")]
    for phase in phases:
        _count(made, phase)
    notes, hardware = [], _predict(made, setting, phases)
    leaving, arriving = ([], []) if forward_only else _gradients(made)
    keep = sampled_sent(made.task, setting.rank, leaving, samples, setting.seed)
    with torch.no_grad():
        found = _run(made, setting, phases, keep, repeats)
        release_buffers()
        judge = Judge(made.task, setting.rank, made.terms, made.gradients, arriving, watch)
        vectors = sampled_rows(made.task, made.task.queries.shards[setting.rank], samples, setting.seed + 1)
        if forward_only:
            checks = judge.forward(found, vectors)
        else:
            own = sampled_own(made.task, setting.rank, made.gradients, arriving, samples, setting.seed + 2)
            checks = judge.both(found, vectors, own)
    notes += [_first_run(phase) for phase in phases if _was_cold(setting.device, phase)]
    if not vectors:
        notes.append("this rank holds no token: there is nothing to check")
    return Replayed(
        setting,
        made.layout,
        made.schedule,
        made.kernel,
        made.task.queries.sizes[setting.rank],
        made.numbers.workspace_bytes,
        {phase.name: phase for phase in phases},
        checks,
        hardware and hardware.name,
        notes,
    )


# --------------------------------------------------------------------------------------------------- making


def make(setting: Setting, watch: Watch = lambda what, done, of: None) -> Made:
    """Refuse what cannot be replayed; choose what was left to `auto`."""
    if not 0 <= setting.rank < setting.ranks:
        raise ArgumentError(f"rank must be from 0 to {setting.ranks - 1} of {setting.ranks} ranks, got {setting.rank}")
    if setting.tokens > MOST_TOKENS:
        raise ArgumentError(f"tokens must be at most {MOST_TOKENS:,} to be generated, got {setting.tokens:,}")
    check_known(setting.pattern)
    problem = Problem(setting.batch, setting.tokens, setting.tokens, setting.kv_heads, 0)
    check_pattern(setting.pattern, problem)
    layout = Choice(setting.layout, "asked for by name")
    if setting.layout == "auto":
        layout = Choice(*choose_layout(setting.pattern, setting.tokens))
    dealt = deal(layout.name, setting.tokens, setting.ranks)
    task = Task(setting.pattern, problem, dealt, dealt, setting.heads)
    like = [
        torch.empty(setting.batch, 0, heads, setting.head_dim, dtype=setting.dtype, device=setting.device)
        for heads in (setting.heads, setting.kv_heads)
    ]
    schedule = _schedule(setting, task, like[0])
    kernel, kernel_choice = choose_kernel(setting.kernel, *like, deterministic=False)
    door = Replay(task, schedule.name, setting.rank, None, node_ranks=setting.node_ranks, watch=_steps_of(task, watch))
    scale = check_scale(None, like[0])
    journey = make_journey(task, door, kernel, schedule.name, scale, None)
    numbers = Numbers(setting.seed, setting.head_dim, setting.device)
    terms = Terms(numbers, setting.dtype, task.share, scale)
    gradients = Gradients(task, setting.rank, numbers)
    call = Call(journey, schedule, kernel_choice)
    return Made(task, layout, schedule, kernel_choice, call, door, numbers, gradients, terms)


def _schedule(setting: Setting, task: Task, like: Tensor) -> Choice:
    """What the engine would take, or of those that can be replayed the one that is estimated to be fastest."""
    check_schedule(setting.schedule)
    if setting.schedule != "auto":
        check_followed(setting.schedule)
    taken = pick_schedule(setting.schedule, task, like, setting.node_ranks or setting.ranks)
    if taken.name in FOLLOWED:
        return taken
    found = estimates(
        task,
        head_dim=setting.head_dim,
        itemsize=setting.dtype.itemsize,
        node_ranks=setting.node_ranks or setting.ranks,
        machine=typical(setting.device.type),
    )
    best = min((one for one in found if one.schedule in FOLLOWED), key=lambda one: one.seconds)
    return Choice(best.schedule, f"the fastest that can be replayed; among real ranks auto would take {taken.name}")


def _steps_of(task: Task, watch: Watch) -> Callable[[str, int], None]:
    return lambda phase, posts: watch(phase, posts, max(task.ranks - 1, posts))


def _count(made: Made, phase: Phase) -> None:
    """What the plan says of the phase."""
    task, rank, d = made.task, made.door.rank, made.numbers.d
    item = made.terms.dtype.itemsize
    for post in made.door.posts(phase.name):
        phase.planned_sent += _bytes(post.sends, d, item)
        phase.planned_received += _bytes(post.receives, d, item)
    phase.flops = PRODUCTS[phase.name] * 2 * d * pairs(task, rank) * task.share


def _gradients(made: Made) -> tuple[list[Parcel], list[Parcel]]:
    """(those that the rank sends, those that it is brought)."""
    posts = made.door.posts("backward")
    leaving, arriving = ([p for post in posts for _, p in way(post) if p.kind == "gradients"] for way in WAYS)
    return leaving, arriving


def _bytes(parcels: tuple[tuple[int, Any], ...], head_dim: int, itemsize: int) -> int:
    return sum(p.vectors * BYTES[p.kind](head_dim, itemsize, max(4, itemsize)) for _, p in parcels)


# ----------------------------------------------------------------------------------------------- predicting


def _predict(made: Made, setting: Setting, phases: list[Phase]) -> Hardware | None:
    """Memory always; time where the device is one of those whose rates are known."""
    machine, threads = _hardware(setting.device), torch.get_num_threads()
    size = {"head_dim": setting.head_dim, "itemsize": setting.dtype.itemsize, "node_ranks": made.door.node_ranks}
    for phase in phases:
        kind: Any = phase.name
        hold = held(
            made.task,
            made.schedule.name,
            setting.rank,
            **size,
            phase=kind,
            device=setting.device.type,
            kernel=setting.kernel,
            threads=threads,
        )
        phase.predicted_bytes, phase.predicted_components = hold.peak_bytes, dict(hold.components)
        if machine is not None:
            pace = Pace(machine, made.task, kind, setting.head_dim, setting.dtype.itemsize)
            phase.predicted_seconds = _computing(pace, made, setting.rank, threads)
    return machine


def _computing(pace: Pace, made: Made, rank: int, threads: int) -> float | None:
    """Of this rank, at the pace of the event simulation; None where no rate is known of numbers of this size."""
    try:
        seconds = computing(made.task, made.schedule.name, rank, node_ranks=made.door.node_ranks, pace=pace)
    except ArgumentError:
        return None
    return seconds / threads if pace.hardware.device == "cpu" else seconds  # whose rates are of one core


def _hardware(device: torch.device) -> Hardware | None:
    known = all_hardware()
    if device.type == "cpu":
        return known.get("cpu")
    said = torch.cuda.get_device_name(device).lower().replace(" ", "")
    return next((known[name] for name in known if name in said), None)


# ------------------------------------------------------------------------------------------------- running


def _run(made: Made, setting: Setting, phases: list[Phase], keep: list[int], repeats: int) -> Results:
    memory = _on_gpu(setting.device) if setting.device.type == "cuda" else _on_cpu()
    with memory as peak:
        q, k, v = (_own(made, setting, name) for name in "qkv")

        def forward() -> tuple[Tensor, Tensor]:
            return attended(made.call, q, k, v)

        out, lse = _measured(made, setting, phases[0], forward, repeats, (), peak)[0]
        if len(phases) == 1:
            return Results(out, lse)
        dout = _own(made, setting, "dout")

        def backward() -> tuple[Tensor, Tensor, Tensor]:
            return differentiated(made.call, Upstream(dout, None, out, lse), q, k, v)

        (dq, dk, dv), peers = _measured(made, setting, phases[1], backward, repeats, keep, peak)
    return Results(out, lse, dq, dk, dv, peers.kept)


def _measured(
    made: Made,
    setting: Setting,
    phase: Phase,
    run: Callable[[], Any],
    repeats: int,
    keep: Sequence[int],
    peak: Callable[[], int],
) -> tuple[Any, MadeUp]:
    phase.is_warm = _is_warmed_up(setting.device, phase)
    if phase.is_warm:
        made.door.peers = MadeUp(made.task, made.numbers, made.gradients, Clock(setting.device))
        run()
    peak()  # what was held to draw the rank's rows, or to compile, is not the pass's own
    found = _timed(made, setting, phase, run, repeats, keep)
    phase.peak_bytes = peak()
    return found


def _is_warmed_up(device: torch.device, phase: Phase) -> bool:
    """Where kernels are compiled at their first call: unless a run takes long, beside which compiling does not."""
    if device.type != "cuda":
        return False
    expected = phase.flops / LEAST_PACE if phase.predicted_seconds is None else phase.predicted_seconds
    return expected < LONG


def _was_cold(device: torch.device, phase: Phase) -> bool:
    return device.type == "cuda" and not phase.is_warm and len(phase.runs) == 1


def _first_run(phase: Phase) -> str:
    return (
        f"the only run of the {phase.name} was also the first one, and its time includes what is compiled and "
        "allocated then; --repeats 2 leaves that out"
    )


def _timed(
    made: Made, setting: Setting, phase: Phase, run: Callable[[], Any], repeats: int, keep: Sequence[int]
) -> tuple[Any, MadeUp]:
    result = peers = None
    for _ in range(repeats):
        result = None  # freed before it is made anew
        clock = Clock(setting.device)
        peers = made.door.peers = MadeUp(made.task, made.numbers, made.gradients, clock, keep)
        with clock.running():
            result = run()
        seconds, made_up = clock.seconds()
        phase.runs.append(seconds)
        phase.made_up.append(made_up)
    assert peers is not None
    phase.bytes_sent, phase.bytes_received = made.door.bytes_sent[phase.name], made.door.bytes_received[phase.name]
    return result, peers


def _own(made: Made, setting: Setting, tensor: str) -> Tensor:
    """This rank's rows of a tensor."""
    shard = made.task.queries.shards[setting.rank]
    rows, heads = made.task.queries.sizes[setting.rank], setting.kv_heads if tensor in "kv" else setting.heads
    x = torch.empty(setting.batch, rows, heads, setting.head_dim, dtype=setting.dtype, device=setting.device)
    for batch in range(setting.batch):
        at = 0
        for positions in positions_of(shard, range(rows)):
            made.numbers.fill(x[batch, at : at + len(positions)], tensor, batch, positions, range(heads))
            at += len(positions)
    return x


@contextmanager
def _on_cpu() -> Iterator[Callable[[], int]]:
    """A reading is the most bytes of all tensors at one time since the one before."""
    with Ledger() as ledger:

        def peak() -> int:
            found, ledger.peak_bytes = ledger.peak_bytes, ledger.live_bytes
            return found

        yield peak


@contextmanager
def _on_gpu(device: torch.device) -> Iterator[Callable[[], int]]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)  # the generator's

    def peak() -> int:
        torch.cuda.synchronize(device)
        found = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.reset_peak_memory_stats(device)
        return found

    try:
        yield peak
    except torch.cuda.OutOfMemoryError as error:
        raise LongringError(f"this GPU's memory does not hold the rank's share: {error}") from error
