"""What each process of a profile does: the call again and again, watched in different ways."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from ...call import Call, Options, prepare
from ...functional import attention
from ...geometry.patterns import Pattern
from ...plan.memory import Held, Phase, held
from ...plan.traffic import backward_bytes, forward_bytes
from ...schedules.buffers import release_buffers
from ...schedules.labels import watching
from ...sharding import Sharding
from ...transport.journal import Journal
from ..memory import Peak as Most
from ..memory import measured_peak
from .memory import GRADIENTS, OUT, SYMMETRIC, WORKSPACE, Account, Sample, highest
from .spans import Clock, DeviceClock, HostClock, Recorder, Span

PATIENCE = 120.0  # seconds after which a rank that does not answer is lost
ROUNDS = 10  # of letters between two clocks


class Asked(NamedTuple):
    """The call that is profiled, and how."""

    tokens: int
    ranks: int
    nodes: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    pattern: Pattern
    layout: str
    schedule: str
    kernel: str
    device: str  # "cpu" or "cuda"
    with_backward: bool
    repeat: int
    seed: int

    @property
    def phases(self) -> tuple[Phase, ...]:
        return ("forward", "backward") if self.with_backward else ("forward",)


class Run(NamedTuple):
    """One call as a rank saw it, in seconds of its clock."""

    phases: dict[str, tuple[float, float]]
    spans: list[Span]
    boundaries: list[float]  # of activities, the same in number and order in every run

    @property
    def seconds(self) -> float:
        return max(end for _, end in self.phases.values()) - min(start for start, _ in self.phases.values())


class Peak(NamedTuple):
    """The most bytes held in a phase, and of what."""

    bytes: int
    components: dict[str, int]


@dataclass(frozen=True)
class Seen:
    """What one rank has to tell."""

    rank: int
    schedule: str
    layout: str
    kernel: str
    device: str  # in words
    offset: float  # seconds to add to its clock to have rank 0's
    unsure: float
    runs: list[Run]
    memory_run: Run
    samples: list[Sample]  # at moments of the memory run
    peaks: dict[str, Peak]
    predicted: dict[str, Held]
    bytes_sent: dict[str, int]
    bytes_planned: dict[str, int]


def attend(asked: Asked) -> Seen:
    """Timed with buffers in place; then, from none on, once more to follow memory, and once a pass for its peak."""
    rank = _Rank(asked)
    offset, unsure = _clock_offset()
    rank.call()
    runs = [rank.timed() for _ in range(asked.repeat)]
    account = Account()
    memory_run = rank.timed(account)
    samples = account.samples(memory_run.phases)
    choice = rank.choice()
    symmetric = getattr(rank.sharding.transport, "symmetric_bytes", 0)
    return Seen(
        rank=rank.sharding.rank,
        schedule=choice.schedule.name,
        layout=rank.sharding.layout,
        kernel=choice.kernel.name,
        device=_device_in_words(asked.device),
        offset=offset,
        unsure=unsure,
        runs=runs,
        memory_run=memory_run,
        samples=samples,
        peaks=_peaks(samples, memory_run, rank.peaks(), symmetric),
        predicted=_predicted(asked, choice, symmetric),
        bytes_sent={phase: _sent(memory_run, phase) for phase in asked.phases},
        bytes_planned=_planned(asked, choice),
    )


def _unnamed(name: str, *tensors: Tensor) -> None:
    """Where nobody follows memory."""


class _Rank:
    """This rank's part of the call, over random numbers: only their size matters here."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._device = torch.device("cuda", torch.cuda.current_device()) if asked.device == "cuda" else "cpu"
        self.sharding = Sharding(asked.tokens, _group(asked), asked.layout, pattern=asked.pattern)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, the same in every run."""
        asked = self._asked
        random = torch.Generator(self._device).manual_seed(asked.seed + self.sharding.rank)
        q, k, v = (self._random(heads, random) for heads in (asked.heads, asked.kv_heads, asked.kv_heads))
        return q, k, v

    def _random(self, heads: int, random: torch.Generator) -> Tensor:
        shape = self._asked.batch, self.sharding.local_length, heads, self._asked.head_dim
        options: dict[str, Any] = {"dtype": self._asked.dtype, "device": self._device}
        return torch.randn(shape, generator=random, requires_grad=self._asked.with_backward, **options)

    def choice(self) -> Call:
        return prepare(*self.inputs(), self._asked.pattern, Options(**self._options()), dry=True)

    def _options(self) -> dict[str, Any]:
        asked = self._asked
        return {"sharding": self.sharding, "schedule": asked.schedule, "kernel": asked.kernel, "timeout": PATIENCE}

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, pattern=self._asked.pattern, return_lse=True, **self._options())

    def call(
        self,
        *,
        until: str | None = None,
        during: Callable[[str], Any] = nullcontext,
        named: Callable[..., None] = _unnamed,
    ) -> None:
        """Forward, and backward unless it ends before, each in a context; `named` hears of inputs and results."""
        inputs = self.inputs()
        for name, x in zip("qkv", inputs, strict=True):
            named(name, x)
        with during("forward"):
            out, lse = self.attend(*inputs)
            named(OUT, out)
            named("lse", lse)
        if (until or self._asked.phases[-1]) == "forward":
            return
        dout = torch.ones_like(out)
        named("dout", dout)
        with during("backward"):
            named(GRADIENTS, *torch.autograd.grad(out, inputs, dout))

    def timed(self, account: Account | None = None) -> Run:
        """One call with its spans; with an account from no buffers on, so that all that is held is seen."""
        if account is not None:
            release_buffers()
        dist.barrier()
        is_by_device = self._asked.device == "cuda" and account is None  # memory is taken when the host asks for it
        clock: Clock = DeviceClock() if is_by_device else HostClock()
        phases: dict[str, tuple[Any, Any]] = {}

        @contextmanager
        def during(phase: str) -> Iterator[None]:
            dist.barrier()  # what one rank waits for is then a part of the call, not of a late start
            start = clock.mark()
            yield
            phases[phase] = start, clock.mark()

        transport: Any = self.sharding.transport
        with transport.recording() as journal:
            recorder = Recorder(clock, journal)
            with ExitStack() as watched:
                watched.enter_context(watching(recorder))
                if account is not None:
                    watched.enter_context(account)
                    watched.enter_context(watching(account))
                self.call(during=during, named=_unnamed if account is None else account.own)
            if self._asked.device == "cuda":
                torch.cuda.synchronize()
            _until_done(journal)
        read = {phase: (clock.read(start), clock.read(end)) for phase, (start, end) in phases.items()}
        return Run(read, recorder.spans(), recorder.boundaries())

    def peaks(self) -> dict[str, int]:
        """The most bytes as the allocator saw them, what is inside kernels included: of a forward, and of both."""
        measured = _device_peak if self._asked.device == "cuda" else measured_peak
        found: dict[str, int] = {}
        for phase in self._asked.phases:
            release_buffers()
            dist.barrier()
            with measured() as peak:
                self.call(until=phase)
            found[phase] = peak.bytes
        return found


def _group(asked: Asked) -> Any:
    if asked.nodes == 1:
        return dist.group.WORLD
    return dist.init_device_mesh("cpu", (asked.nodes, asked.ranks // asked.nodes))


def _until_done(journal: Journal) -> None:
    """A carrier may be a moment behind the caller who has all it waited for."""
    until = time.monotonic() + 1.0
    while any(entry.done_at is None for entry in journal.entries) and time.monotonic() < until:
        time.sleep(0.0002)


@contextmanager
def _device_peak() -> Iterator[Most]:
    """Of torch's allocator on the GPU, beyond what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, peak = torch.cuda.memory_allocated(), Most()
    yield peak
    torch.cuda.synchronize()
    peak.bytes = torch.cuda.max_memory_allocated() - before


def _device_in_words(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"the CPU, {threads} thread{'s' if threads > 1 else ''} a rank"


# ------------------------------------------------------------------------------------------------------- clocks


def _clock_offset() -> tuple[float, float]:
    """(seconds to rank 0's clock, how unsure that is), by the quickest of several letters there and back.

    Ranks of one machine have one clock; then the letters find nothing beyond what they leave unsure.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    best = (0.0, 0.0)
    for other in range(1, size):
        if rank in (0, other):
            best = _compared(0 if rank else other, answers=rank == 0) or best
    offset, unsure = best
    return (offset, unsure) if abs(offset) > unsure else (0.0, unsure)


def _compared(peer: int, *, answers: bool) -> tuple[float, float] | None:
    theirs = torch.zeros(1, dtype=torch.float64)
    found = []
    for _ in range(ROUNDS):
        if answers:
            dist.recv(theirs, peer)
            dist.send(torch.tensor([time.monotonic()], dtype=torch.float64), peer)
            continue
        asked_at = time.monotonic()
        dist.send(theirs, peer)
        dist.recv(theirs, peer)
        now = time.monotonic()
        found.append(((now - asked_at) / 2, theirs.item() - (asked_at + now) / 2))
    if answers:
        return None
    unsure, offset = min(found)
    return offset, unsure


def on_another_run(moments: list[float], run: Run, other: Run) -> list[float]:
    """The same moments of another run of the same call: both pass through the same activities in the same order."""
    here, there = _milestones(run), _milestones(other)
    if len(here) != len(there):
        raise AssertionError(f"two runs of one call had {len(here)} and {len(there)} milestones")
    return [float(moment) for moment in numpy.interp(moments, here, there)]


def _milestones(run: Run) -> list[float]:
    phases = [moment for times in run.phases.values() for moment in times]
    return numpy.maximum.accumulate(sorted([*run.boundaries, *phases])).tolist()


# ------------------------------------------------------------------------------------------- measured and planned


def _peaks(samples: list[Sample], run: Run, by_allocator: dict[str, int], symmetric: int) -> dict[str, Peak]:
    """Components where the most was held; what only the allocator saw is inside kernels.

    What ranks of one GPU machine share for their messages is beside the allocator's count, and there all the time.
    """
    end_of_forward = run.phases["forward"][1]
    found = {}
    for phase, allocated in by_allocator.items():
        of_phase = [sample for sample in samples if (sample.at <= end_of_forward) == (phase == "forward")]
        components = dict(highest(of_phase).components)
        inside = allocated - sum(components.values())
        if inside > 0:
            components[WORKSPACE] = components.get(WORKSPACE, 0) + inside
        if symmetric:
            components[SYMMETRIC] = symmetric
        found[phase] = Peak(sum(components.values()), components)
    return found


def _predicted(asked: Asked, choice: Call, symmetric: int) -> dict[str, Held]:
    """Of the call; what its transport keeps for messages is known beforehand, too, and there all the time."""
    journey = choice.journey
    size = {"head_dim": asked.head_dim, "itemsize": asked.dtype.itemsize, "node_ranks": journey.transport.node_ranks}
    how = {"device": asked.device, "kernel": asked.kernel, "threads": torch.get_num_threads()}
    found = {
        phase: held(journey.task, journey.schedule, journey.transport.rank, **size, phase=phase, **how)
        for phase in asked.phases
    }
    if not symmetric:
        return found
    always = {SYMMETRIC: symmetric}
    return {
        phase: Held(
            of.peak_bytes + symmetric, of.components | always, {at: one | always for at, one in of.timeline.items()}
        )
        for phase, of in found.items()
    }


def _planned(asked: Asked, choice: Call) -> dict[str, int]:
    journey = choice.journey
    size = {"head_dim": asked.head_dim, "itemsize": asked.dtype.itemsize, "node_ranks": journey.transport.node_ranks}
    count = {"forward": forward_bytes, "backward": backward_bytes}
    return {
        phase: count[phase](journey.task, journey.schedule, journey.transport.rank, **size) for phase in asked.phases
    }


def _sent(run: Run, phase: str) -> int:
    return sum(span.bytes for span in run.spans if span.kind == "send" and span.phase == phase)
