"""A run from its first step, or from its newest checkpoint, to its last: what every rank does."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch.distributed as dist

from .. import __version__
from ..errors import ArgumentError, CheckpointError
from ..schedules.labels import watching
from . import checkpoints
from .about import About
from .checkpoints import Found
from .config import OF_THE_ORDER, OF_THE_WEIGHTS, Config, differences, spelt
from .job import Job, Taken
from .metrics import CONFIG, Metrics
from .metrics import check as check_metrics
from .metrics import steps as steps_of
from .small_files import put
from .stopping import Stopping
from .tasks import Task, task_of
from .weights import load_weights, newest
from .world import World


class Listener(Protocol):
    """Who hears of a run while it goes on, on the first rank alone."""

    def note(self, text: str) -> None: ...

    def begin(self, *, step: int, steps: int) -> None: ...

    def step(self, record: dict[str, Any]) -> None: ...

    def end(self) -> None: ...


@dataclass
class Report:
    """What a run did; the same on all ranks."""

    steps: int = 0  # of the whole run, earlier ones too
    resumed_from: int | None = None
    is_stopped: bool = False  # before the last step, since somebody asked
    first_loss: float | None = None  # of this part of the run
    last_loss: float | None = None
    batch: int = 0  # sequences of a step
    parameters: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    attention_share: float = 0.0  # of the time of steps, of a rank on average
    communication_share: float = 0.0
    checkpoint: str | None = None
    corpus: str = ""
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def train(config: Config, *, stopping: Stopping, listener: Listener | None = None, keeps_batch: bool = False) -> Report:
    """On every rank of an initialised process group; `config` is settled for it. The listener is the first rank's.

    keeps_batch:  a run that goes on takes its checkpoint's batch, and not the config's, which nobody named.
    """
    world = World.joined(config)
    run = Run(config, world, task_of(config), listener if world.is_first else None)
    return run.to_the_end(stopping, keeps_batch=keeps_batch)


class Run:
    def __init__(self, config: Config, world: World, task: Task, listener: Listener | None) -> None:
        self.config, self.world, self.task, self.listener = config, world, task, listener
        self.folder = Path(config.out)
        self.job = Job(config, world, task.sequences, vocabulary=task.vocabulary)
        self.report = Report(corpus=task.description)
        self.seconds = dict.fromkeys(("all", "attention", "communication"), 0.0)  # of all steps
        self.report.parameters = sum(parameter.numel() for parameter in self.job.model.parameters())

    def to_the_end(self, stopping: Stopping, *, keeps_batch: bool) -> Report:
        try:
            with self.world.telling_of_lost_peers("resuming"):
                self._resume(keeps_batch)
            self.report.batch = cast(int, self.config.batch)
            began = time.perf_counter()
            self._go_on(stopping)
        finally:
            checkpoints.release(self.folder)
        self.report.seconds = time.perf_counter() - began
        return self._concluded()

    def _go_on(self, stopping: Stopping) -> None:
        metrics = self._metrics() if self.world.is_first else None
        try:
            with watching(self.job.meter.watch):
                self._loop(stopping, metrics)
        finally:
            if metrics is not None:
                metrics.close()
            if self.listener is not None:
                self.listener.end()

    # ---------------------------------------------------------------------------------------------------- steps

    def _loop(self, stopping: Stopping, metrics: Metrics | None) -> None:
        config, report = self.config, self.report
        if self.listener is not None:
            self.listener.begin(step=report.steps, steps=config.steps)
        while report.steps < config.steps and not report.is_stopped:
            number = report.steps + 1
            began = time.perf_counter()
            with self.world.telling_of_lost_peers(f"step {number}"):
                taken = self.job.step(number, is_asked_to_stop=stopping.is_asked)
            report.steps = number
            record = self._count(taken, time.perf_counter() - began)
            if metrics is not None:
                metrics.step(record)
            if self.listener is not None:
                self.listener.step(record)
            report.is_stopped = taken.is_last and number < config.steps
            if report.is_stopped or number % config.save_every == 0 or number == config.steps:
                with self.world.telling_of_lost_peers(f"saving step {number}"):
                    self._save()

    def _count(self, taken: Taken, seconds: float) -> dict[str, Any]:
        """What is told of this step; and the sums over steps."""
        report = self.report
        tokens = cast(int, self.config.batch) * cast(int, self.config.context)
        report.tokens += tokens
        report.first_loss = taken.loss if report.first_loss is None else report.first_loss
        report.last_loss = taken.loss
        self.seconds["all"] += seconds
        self.seconds["attention"] += taken.attention_seconds
        self.seconds["communication"] += taken.communication_seconds
        return {
            "step": report.steps,
            "loss": taken.loss,
            "tokens": tokens,
            "predicted": taken.predicted,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "learning_rate": taken.learning_rate,
            "gradient_norm": taken.gradient_norm,
            "attention_seconds": taken.attention_seconds,
            "communication_seconds": taken.communication_seconds,
            "sequences": self.job.taken,
        }

    def _concluded(self) -> Report:
        report, stepping = self.report, self.seconds["all"] or 1.0
        report.tokens_per_second = report.tokens / report.seconds
        report.attention_share = self.seconds["attention"] / stepping
        report.communication_share = self.seconds["communication"] / stepping
        return report

    # --------------------------------------------------------------------------------------- what is on the disk

    def _metrics(self) -> Metrics:
        config, report = self.config.as_json(), self.report
        try:
            put(self.folder / CONFIG, json.dumps(config, indent=2) + "\n")
        except OSError as failure:
            raise ArgumentError(f"{self.folder / CONFIG} cannot be written: {failure.strerror or failure}") from failure
        about = {"config": config, "version": __version__, "resumed_from": report.resumed_from}
        return Metrics(self.folder, step=report.steps, about=about | {"corpus": report.corpus})

    def _resume(self, keeps_batch: bool) -> None:
        self._make_folder()
        checkpoints.reserve(self.folder, group=dist.group.WORLD, timeout=self.config.timeout)
        found = checkpoints.find(self.folder, group=dist.group.WORLD, timeout=self.config.timeout)
        for name, why in found.skipped:
            self._note(f"skipped {name}: {why}")
        if not found:
            self._check_beginning(found)
            self._begin()
            return
        about = About.of(found)
        self._check(about)
        if keeps_batch:
            self._keep_batch(cast(int, about.config.batch))
        state, own = self.job.state(), self.job.own_state()
        together: dict[str, Any] = {"group": dist.group.WORLD, "timeout": self.config.timeout}
        checkpoints.load(found, state, per_rank=own, **together)
        checkpoints.together(f"loading {found.path}", lambda: self.job.check(state, own), **together)
        self.job.restore(state, own, taken=about.sequences)
        self.job.loaded_from = str(found.path)
        self.report.steps = self.report.resumed_from = found.step
        self.report.checkpoint = str(found.path)
        self._note(
            f"resumed from step {found.step:,} in {self.folder}, which {_several(found.ranks, 'rank')} had saved"
        )

    def _check_beginning(self, found: Found) -> None:
        """A run whose checkpoints are all damaged, or gone, does not begin again by itself; one without any does."""
        damaged = [skip for skip in found.skipped if skip.was_complete]
        flag = spelt("restart_if_damaged")
        if damaged and not self.config.restart_if_damaged:
            raise CheckpointError(
                f"--out {self.folder} has {_several(len(damaged), 'checkpoint')}, and none is whole: "
                f"{'; '.join(f'{name}: {why}' for name, why in damaged[:3])}{'; ...' * (len(damaged) > 3)}. They are "
                f"kept as they are. Put a copy in their place, take another --out, or say {flag} to begin at step 1"
            )
        if damaged:
            self._note(f"no checkpoint in {self.folder} is whole: the run begins again at step 1, as {flag} says")
            return
        checkpoints.together(
            f"looking for an earlier run in {self.folder}",
            lambda: self._check_metrics(found),
            group=dist.group.WORLD,
            timeout=self.config.timeout,
        )

    def _check_metrics(self, found: Found) -> None:
        """They tell of steps that had been saved, where the checkpoints of an earlier run were moved away."""
        last = max((told["step"] for told in steps_of(self.folder) if type(told["step"]) is int), default=0)
        every, steps = _times(self.folder / CONFIG) or (self.config.save_every, self.config.steps)
        first = min(every, steps)
        # a run that was killed while it saved for the first time has come to that step, and may have left nothing
        is_saved = last > first or (last == first == steps and not found.skipped)
        flag = spelt("restart_if_damaged")
        if is_saved and not self.config.restart_if_damaged:
            raise CheckpointError(
                f"--out {self.folder} has no checkpoint, but metrics of {last:,} steps, and the first was due after "
                f"{first:,}: checkpoints were renamed, moved or deleted. Put them back, take another --out, or say "
                f"{flag} to begin at step 1, which forgets these metrics"
            )
        if is_saved:
            self._note(f"no checkpoint is left in {self.folder}: the run begins again at step 1, as {flag} says")
        elif found.skipped:
            self._note(f"no checkpoint was ever completed in {self.folder}: the run begins at step 1")
        elif last:
            self._note(
                f"{self.folder} has metrics of {_several(last, 'step')}, but no checkpoint: the run begins at step 1"
            )

    def _begin(self) -> None:
        """With fresh weights, or with another run's."""
        if self.config.weights is None:
            return
        group, timeout = dist.group.WORLD, self.config.timeout
        found = newest(Path(self.config.weights), group=group, timeout=timeout, of="--weights")
        load_weights(found, self.job.model, group=group, timeout=timeout)
        self.job.loaded_from = str(found.path)
        self._note(f"begins with the weights of step {found.step:,} in {found.folder}")

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise ArgumentError(f"--out {self.folder} cannot be made: {failure.strerror or failure}") from failure
        check_metrics(self.folder)

    def _check(self, about: About) -> None:
        """Refuse to go on with other weights or another order of the data, rather than with a part of them."""
        wrong = differences(self.config, about.config, (*OF_THE_WEIGHTS, *OF_THE_ORDER))
        if (self.config.dtype == "fp64") != (about.config.dtype == "fp64"):  # fp32 and bf16 keep the same weights
            wrong += differences(self.config, about.config, ("dtype",))
        if about.fingerprint != self.task.fingerprint:
            wrong.append(_other_data(about.corpus, self.task.name))
        if wrong:
            raise ArgumentError(
                f"--out {self.folder} holds another run: {'; '.join(wrong)}. Say the same, or another --out"
            )

    def _keep_batch(self, batch: int) -> None:
        """A batch that nobody named follows the number of rings; but a run that goes on follows its losses."""
        config = self.config
        if batch == config.batch:
            return
        if batch % (config.data_ranks * config.micro_batch):
            raise ArgumentError(
                f"--batch was {batch} in {self.folder}, which is no multiple of data ranks times --micro-batch, now "
                f"{config.data_ranks} x {config.micro_batch}. Take other ranks, or say --batch {config.batch} for "
                "another batch from here on"
            )
        self.config = self.job.config = replace(config, batch=batch)
        self._note(
            f"a step stays at {_several(batch, 'sequence')}, as saved; by itself it would be {config.batch} on "
            f"{_several(config.data_ranks, 'ring')} (--batch {config.batch})"
        )

    def _save(self) -> None:
        task = self.task
        about = About(self.job.taken, self.config, task.name, task.fingerprint, task.vocabulary)
        saved = checkpoints.save(
            self.folder,
            self.report.steps,
            self.job.state(),
            per_rank=self.job.own_state(),
            about=about.as_json(),
            keep=self.config.keep,
            group=dist.group.WORLD,
            timeout=self.config.timeout,
        )
        self.report.checkpoint = str(saved)

    def _note(self, text: str) -> None:
        self.report.notes.append(text)
        if self.listener is not None:
            self.listener.note(text)


def _times(path: Path) -> tuple[int, int] | None:
    """How often the run before this one saved, and how many steps it was to have, if its file says so."""
    try:
        with path.open("rb") as file:
            told = json.loads(file.read(1 << 20))
    except (OSError, ValueError, RecursionError):
        return None
    every, steps = (told.get(name) if isinstance(told, dict) else None for name in ("save_every", "steps"))
    return (every, steps) if type(every) is int and type(steps) is int and min(every, steps) > 0 else None


def _other_data(was: str, name: str) -> str:
    if was != name:
        return f"the data was {was} and is {name}, or has changed since"
    return f"the data is called {name} as before, but its files have changed since, or are others"


def _several(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' if count != 1 else ''}"
