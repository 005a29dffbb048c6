"""Random configurations on a GPU, as many as fit a time limit, judged against float64 and added to a record.

python benchmarks/random_gpu.py --seed 7 --minutes 5 --jobs 6 --record docs/records/random_gpu.json
python benchmarks/random_gpu.py --seed 8 --minutes 4 --jobs 8 --sanitizer --record docs/records/random_gpu.json
python benchmarks/random_gpu.py --replay '{"seed": 7, ...}'      one configuration of a record's failures, here

Several processes share the GPU. One that crashes, hangs or loses its CUDA context is replaced, and its configuration
recorded. What is drawn depends on (seed, index) and on --at-most-n, --device and --sanitizer only. Runs of different
seeds add up in the record; a seed that it has is refused. --sanitizer runs the processes under compute-sanitizer's
memcheck at up to 8,192 tokens, without PyTorch's caching of memory, so that every tensor ends where an allocation does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from longring.sources import Sources, sources  # noqa: E402
from random_configurations import (  # noqa: E402
    CRASH,
    FAILURES,
    HANG,
    NO_MEMORY,
    RIGHT,
    Configuration,
    Limits,
    Outcome,
    draw,
    run,
)

ANSWER = "ANSWER "
GRACE = 30.0  # seconds past the end of a run in which what was begun may come to an end
STARTING = 180.0  # seconds that a process may take to load PyTorch and open the GPU
SANITIZER_FOUND = 9
MEMCHECK = (
    *("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", str(SANITIZER_FOUND)),
    *("--target-processes", "application-only", "--report-api-errors", "no"),
)
TOLD = 12  # failures that are printed


def main(arguments: Sequence[str] | None = None) -> int:
    told = parsed(arguments)
    if told.worker:
        work(told)
        return 0
    if told.replay:
        return replayed(Configuration.from_json(told.replay), told)
    check_is_new(told.record, told.seed)
    done = Run(told).go()
    if told.record:
        append(told.record, done)
    return report(done)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn; a record takes each once")
    parser.add_argument("--minutes", type=float, default=5.0, help="no configuration is begun after that")
    parser.add_argument("--jobs", type=int, default=4, help="processes that share the GPU")
    parser.add_argument("--most", type=int, default=1_000_000, help="configurations at most")
    parser.add_argument("--at-most-n", type=int, help="tokens at most (200,000 on a GPU, 300 on a CPU)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, help="seconds for one configuration (120; 240 with --sanitizer)")
    parser.add_argument("--record", type=Path, help="a JSON file to add this run to")
    parser.add_argument("--sources", help="a hash of the engine's sources, instead of that of these")
    parser.add_argument("--commit", help="for the record, where there is no git")
    parser.add_argument("--sanitizer", action="store_true", help="under compute-sanitizer's memcheck")
    parser.add_argument("--replay", metavar="JSON", help="run this configuration alone")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    told = parser.parse_args(arguments)
    if told.sanitizer and not told.worker and shutil.which(MEMCHECK[0]) is None:
        parser.error("--sanitizer needs compute-sanitizer (of the CUDA toolkit) on the PATH")
    if min(told.jobs, told.most) < 1:
        parser.error(f"--jobs and --most must be at least 1, got {told.jobs} and {told.most}")
    told.limit = told.limit or (240.0 if told.sanitizer else 120.0)
    return told


def limits_of(told: argparse.Namespace) -> Limits:
    limits = Limits.of(told.device, told.at_most_n)
    return limits.sanitized if told.sanitizer else limits


def replayed(configuration: Configuration, told: argparse.Namespace) -> int:
    found = run(configuration, told.device)
    print(f"{found.outcome} after {found.seconds:.1f} s, {found.judging:.1f} of them judging: {found.message}")
    for quantity, ratio in found.ratios.items():
        print(f"  {quantity}: {ratio:.3g} of what is allowed")
    return 0 if found.outcome == RIGHT else 1


# ------------------------------------------------------------------------------------------------------ a worker


def work(told: argparse.Namespace) -> None:
    """Read indices, answer with outcomes, until there are no more or this process is of no use."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // told.jobs))
    limits, judged_on = limits_of(told), "cpu" if told.sanitizer else None
    answer({"facts": facts(told.device)})
    for line in sys.stdin:
        watch = threading.Timer(told.limit * 0.9, say_where)  # before this process is ended for a call that hangs
        watch.start()
        configuration = draw(told.seed, int(line), limits)
        for patience in (2.0, 8.0, 0.0):  # the memory is shared: others may have had it
            found = run(configuration, told.device, judged_on=judged_on)
            if found.outcome != NO_MEMORY or not patience:
                break
            time.sleep(patience)
        watch.cancel()
        if told.device == "cuda" and not found.is_poisoned:
            keep_little()
        answer({name: value for name, value in asdict(found).items() if name != "configuration"})
        if found.is_poisoned:
            os._exit(0 if not told.sanitizer else 1)  # a dead CUDA context may raise, or wait, where Python ends


def say_where() -> None:
    """The stacks of threads that do something; faulthandler would walk them while they run, and may crash doing so."""
    for number, frame in sys._current_frames().items():
        stack = traceback.format_stack(frame)
        is_waiting = any("loopback.py" in line or "threading.py" in line for line in stack[-2:])
        if number != threading.get_ident() and not is_waiting:
            print(f"thread {number}\n{''.join(stack[-12:])}", file=sys.stderr, flush=True)


def keep_little() -> None:
    """What PyTorch keeps for later calls is not to be had by the other processes."""
    import torch

    if torch.cuda.memory_reserved() > 4 << 30:
        torch.cuda.empty_cache()


def answer(told: dict[str, Any]) -> None:
    print(ANSWER + json.dumps(told), flush=True)


def facts(device: str) -> dict[str, str]:
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "device": platform.processor() or "cpu"}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = "none"
    if device == "cuda":
        torch.ones(1, device="cuda")
        found |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda or "none"}
    return found


class Gone(Exception):
    """A worker ended, or did not answer in time."""


class Worker:
    """One process. Its errors go to a file of its own, of which the end is told where it dies."""

    def __init__(self, told: argparse.Namespace, folder: Path, number: int) -> None:
        self._err = folder / f"{number}.err"
        self.log = folder / f"{number}.memcheck"
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", *same(told)]
        if told.sanitizer:
            command = [*MEMCHECK, "--log-file", str(self.log), *command]
        with self._err.open("wb") as err:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=err, env=environment(told), start_new_session=True
            )
        self._rest = b""
        self.told = 0  # errors of compute-sanitizer
        self.facts: dict[str, str] = self._heard(STARTING * (3 if told.sanitizer else 1))["facts"]

    def ask(self, index: int, seconds: float) -> dict[str, Any]:
        try:
            self._pipes[0].write(f"{index}\n".encode())
            self._pipes[0].flush()
        except OSError:
            raise Gone(self._ended()) from None
        return self._heard(seconds)

    def _heard(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while True:
            line, found, self._rest = self._rest.partition(b"\n")
            if found:
                if line.startswith(ANSWER.encode()):
                    return json.loads(line[len(ANSWER) :])
                continue
            self._rest = line
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._pipes[1]], [], [], left)[0]:
                raise TimeoutError(f"no answer for {seconds:.0f} s\n{self.last_words()}")
            more = os.read(self._pipes[1].fileno(), 1 << 16)
            if not more:
                raise Gone(self._ended())
            self._rest += more

    def _ended(self) -> str:
        try:
            code = self._process.wait(30)
        except subprocess.TimeoutExpired:
            return f"ended its output, but not itself\n{self.last_words()}"
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return f"{how}\n{self.last_words()}"

    def last_words(self, most: int = 3000) -> str:
        return self._err.read_text(errors="replace")[-most:]

    def end(self, patience: float = 30.0) -> None:
        """No more is asked."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._pipes[0].close()
            self._process.wait(patience)
        self.kill()

    def kill(self) -> None:
        """It and what it started: under compute-sanitizer the process that computes is another one."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # of what it did not read
                pipe.close()

    @property
    def _pipes(self) -> tuple[Any, Any]:
        return self._process.stdin, self._process.stdout

    def sanitizer_errors(self) -> list[str]:
        """What it reported, and at the end one for all that are not known by their first word."""
        log = self._log
        found = [block.strip() for block in re.split(r"(?========== (?:Invalid|Misaligned|Out[- ]of))", log)[1:]]
        summed = sum(map(int, re.findall(r"ERROR SUMMARY: (\d+) error", log)))
        return found if summed <= len(found) else [*found, *[log[-1500:]] * (summed - len(found))]

    @property
    def has_summary(self) -> bool:
        return "ERROR SUMMARY" in self._log

    @property
    def _log(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def same(told: argparse.Namespace) -> list[str]:
    """The options on which what is drawn depends, and how it is run."""
    asked = ["--seed", str(told.seed), "--device", told.device, "--jobs", str(told.jobs), "--limit", str(told.limit)]
    if told.at_most_n is not None:
        asked += ["--at-most-n", str(told.at_most_n)]
    return [*asked, "--sanitizer"] if told.sanitizer else asked


def environment(told: argparse.Namespace) -> dict[str, str]:
    found = dict(os.environ)
    found.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "longring_triton"))  # one for all workers
    found.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // told.jobs))
    if told.sanitizer:
        found["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        found.pop("PYTORCH_CUDA_ALLOC_CONF")
    return found


# --------------------------------------------------------------------------------------------------------- a run


@dataclass
class Done:
    """What a run found: what the record keeps of it."""

    seed: int
    indices: int
    started: str
    minutes: float
    commit: str
    sources: Sources | str
    facts: dict[str, str]
    limits: dict[str, Any]
    jobs: int
    sanitizer: dict[str, Any] | None
    outcomes: Counter[str] = field(default_factory=Counter)
    counts: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    dilated_over_ranks_from_32768_tokens: int = 0
    worst: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=dict)
    slowest: list[dict[str, Any]] = field(default_factory=list)
    unfinished: int = 0
    seconds: float = 0.0  # of all configurations together, and of them judging
    judging: float = 0.0

    def add(self, found: Outcome) -> None:
        it = found.configuration
        self.outcomes[found.outcome] += 1
        self.seconds, self.judging = self.seconds + found.seconds, self.judging + found.judging
        for fact, value in it.facts.items():
            of_value = self.counts.setdefault(fact, {}).setdefault(value, {})
            of_value[found.outcome] = of_value.get(found.outcome, 0) + 1
        self.dilated_over_ranks_from_32768_tokens += it.is_far and found.outcome == RIGHT
        if found.outcome in FAILURES:
            self.failures.append(
                {"outcome": found.outcome, "message": found.message, "configuration": json.loads(it.to_json())}
            )
        elif found.outcome != RIGHT:
            reason = found.message.partition(";")[0][:160]
            self.refusals[reason] = self.refusals.get(reason, 0) + 1
        for quantity, ratio in found.ratios.items() if found.outcome == RIGHT else ():
            known = self.worst.setdefault(it.dtype, {}).setdefault(quantity, {"ratio": -1.0})
            if ratio > known["ratio"]:
                known |= {"ratio": round(ratio, 4), "index": it.index}
        self.slowest.append({"seconds": round(found.seconds, 2), "judging": round(found.judging, 2), "index": it.index})
        self.slowest = sorted(self.slowest, key=lambda each: -each["seconds"])[:5]

    def record(self) -> dict[str, Any]:
        found = asdict(self)
        counts = {fact: dict(sorted(values.items())) for fact, values in self.counts.items()}
        return found | {"outcomes": dict(sorted(self.outcomes.items())), "counts": counts}

    @property
    def is_clean(self) -> bool:
        watched = self.sanitizer or {"errors": 0, "processes": 0, "summaries": 0}
        return not self.failures and not watched["errors"] and watched["summaries"] == watched["processes"]


class Run:
    """Workers, each driven by a thread, until the time is up."""

    def __init__(self, told: argparse.Namespace) -> None:
        self._told, self._limits = told, limits_of(told)
        self._lock, self._next, self._number = threading.Lock(), 0, 0
        self._start = time.monotonic()
        self._until = self._start + 60 * told.minutes
        self._folder = Path(tempfile.mkdtemp(prefix="random_gpu_"))
        self._fatal: list[str] = []
        watched = {"tool": "memcheck", "errors": 0, "configurations": 0, "processes": 0, "summaries": 0, "reports": []}
        started = datetime.now(UTC).isoformat(timespec="seconds")
        name = told.commit or commit()
        self.done = Done(
            told.seed,
            0,
            started,
            0.0,
            name,
            told.sources or sources(),
            {},
            asdict(self._limits),
            told.jobs,
            watched if told.sanitizer else None,
        )

    def go(self) -> Done:
        threads = [threading.Thread(target=self._drive, daemon=True) for _ in range(self._told.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._fatal:
            raise SystemExit(f"no worker could be started: {self._fatal[0]}")
        self.done.indices = self._next
        self.done.minutes = round((time.monotonic() - self._start) / 60, 2)
        return self.done

    def _drive(self) -> None:
        worker: Worker | None = None
        while (index := self._take()) is not None:
            try:
                worker = worker or self._started()
            except (Gone, TimeoutError) as error:
                with self._lock:
                    self._fatal.append(str(error))
                    self.done.unfinished += 1
                return
            configuration = draw(self._told.seed, index, self._limits)
            patience = min(self._told.limit, self._until + GRACE - time.monotonic())
            try:
                found = Outcome(configuration, **worker.ask(index, patience))
            except TimeoutError as error:
                if patience < self._told.limit:  # the run is over: whether it hangs is not known
                    worker.kill()
                    with self._lock:
                        self.done.unfinished += 1
                    return
                found = Outcome(configuration, HANG, str(error), seconds=self._told.limit)
            except Gone as error:
                found = Outcome(configuration, CRASH, str(error))
            if found.is_poisoned:
                self._end(worker)
            elif found.outcome in (HANG, CRASH):
                worker.kill()
            self._watch(worker, configuration)
            if found.is_poisoned or found.outcome in (HANG, CRASH):
                worker = None
            self._add(found)
        if worker is not None:
            self._end(worker)

    def _take(self) -> int | None:
        with self._lock:
            if self._fatal or time.monotonic() > self._until or self._next >= self._told.most:
                return None
            self._next += 1
            return self._next - 1

    def _started(self) -> Worker:
        with self._lock:
            self._number += 1
            number = self._number
        worker = Worker(self._told, self._folder, number)
        with self._lock:
            self.done.facts = worker.facts
        return worker

    def _watch(self, worker: Worker, configuration: Configuration | None = None) -> None:
        """What compute-sanitizer has written since it was looked at: errors of this configuration."""
        if (watched := self.done.sanitizer) is None:
            return
        errors = worker.sanitizer_errors()
        with self._lock:
            watched["configurations"] += configuration is not None
            watched["errors"] += len(errors) - worker.told
            for error in errors[worker.told :]:
                asked = None if configuration is None else json.loads(configuration.to_json())
                watched["reports"].append({"error": error[:1500], "configuration": asked})
            del watched["reports"][TOLD:]
        worker.told = len(errors)

    def _end(self, worker: Worker) -> None:
        worker.end()
        if (watched := self.done.sanitizer) is not None:  # one that was not watched found nothing, which says nothing
            with self._lock:
                watched["processes"] += 1
                watched["summaries"] += worker.has_summary
            self._watch(worker)

    def _add(self, found: Outcome) -> None:
        with self._lock:
            self.done.add(found)
            count = sum(self.done.outcomes.values())
            if found.outcome in FAILURES and len(self.done.failures) <= TOLD:
                print(f"{found.outcome}: {found.message[:600]}\n  {found.configuration.to_json()}", flush=True)
            if count % 100 == 0:
                print(f"{count} after {time.monotonic() - self._start:.0f} s: {dict(self.done.outcomes)}", flush=True)


def commit() -> str:
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    if shutil.which("git") is None:
        return "unknown"
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


# ----------------------------------------------------------------------------------------------------- the record


def runs_of(record: Path) -> list[dict[str, Any]]:
    return json.loads(record.read_text())["runs"] if record.exists() else []


def check_is_new(record: Path | None, seed: int) -> None:
    """Before anything runs: the same seed twice would count the same configurations twice."""
    seeds = sorted(each["seed"] for each in runs_of(record)) if record else []
    if seed in seeds:
        raise SystemExit(f"{record} has a run of seed {seed} already (its seeds: {seeds}); give another --seed")


def append(record: Path, done: Done) -> None:
    check_is_new(record, done.seed)
    told = {"command": "python benchmarks/random_gpu.py", "runs": [*runs_of(record), finite(done.record())]}
    record.parent.mkdir(parents=True, exist_ok=True)
    beside = record.with_name(f"{record.name}.{os.getpid()}")
    beside.write_text(json.dumps(told, indent=1) + "\n")
    beside.replace(record)


def finite(x: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(x, dict):
        return {key: finite(value) for key, value in x.items()}
    if isinstance(x, list):
        return [finite(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def report(done: Done) -> int:
    total = sum(done.outcomes.values())
    print(f"\nseed {done.seed}, {total} configurations in {done.minutes} minutes on {done.facts.get('device')}")
    print(", ".join(f"{count} {outcome}" for outcome, count in done.outcomes.most_common()))
    if done.unfinished:
        print(f"{done.unfinished} more were begun and not over in time")
    print(f"dilated over ranks with 32,768 tokens and more, right: {done.dilated_over_ranks_from_32768_tokens}")
    for dtype, quantities in sorted(done.worst.items()):
        told = ", ".join(f"{name} {known['ratio']:.2g}" for name, known in quantities.items())
        print(f"worst error over what is allowed, {dtype}: {told}")
    print(f"{done.seconds:.0f} s of processes' time, {done.judging:.0f} of them judging")
    print("slowest: " + ", ".join(f"{each['seconds']} s (index {each['index']})" for each in done.slowest))
    for reason, count in sorted(done.refusals.items(), key=lambda each: -each[1])[:8]:
        print(f"refused {count} times: {reason}")
    if watched := done.sanitizer:
        whole = f"{watched['summaries']} of {watched['processes']} processes watched to their end"
        print(f"compute-sanitizer: {watched['errors']} errors in {watched['configurations']} configurations, {whole}")
        for each in watched["reports"]:
            print(f"{each['error']}\n  {json.dumps(each['configuration'])}")
    if done.failures:
        kinds = ", ".join(sorted({each["outcome"] for each in done.failures}))
        print(f"{len(done.failures)} failures ({kinds}); replay one with --replay 'JSON' of its configuration")
    return 0 if done.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
