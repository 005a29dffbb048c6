"""Training for a long time, with ranks that stall and runs that are killed and started anew: what grows, what is left?

python benchmarks/train_soak.py --minutes 2              # a look
python benchmarks/train_soak.py --minutes 30 --write     # docs/records/train_soak.json

It runs `longring train` again and again into one folder. Meanwhile ranks are stopped for up to two seconds now and then
(SIGSTOP, SIGCONT), and every few minutes the run ends in one of four ways: one rank is killed, all ranks are, the
command with everything it started is, or it is asked to stop. The next start goes on, on one to three ranks. Of every
process the resident memory (its own, without pages of mapped files), the open handles and the threads are read from
/proc once a second.

Memory: a line is fitted to the resident memory of each rank in each of its lives, all of one slope, each with a height
of its own; what came before a life's first step, and the first fifth and 200 seconds of the rest, is left out. The
standard error takes each life of a rank for one observation, since what is read every second is not independent.
Handles and threads: the least number in the last quarter of a life beside that in the first quarter. Exit code 1 if
these grew, if a process or a file was left behind, or if a step is missing; and, where the soak took ten minutes or
more, if memory grew by more than a hundredth an hour, two standard errors taken off. Documents end in the same places
of every sequence: where they end in ever new ones, plans are kept until caches are full, in a few thousand steps and
some 20 MiB. Linux only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

import longring as lr

RECORD = Path(__file__).parent.parent / "docs" / "records" / "train_soak.json"
MODEL = ("--context", "1024", "--dim", "64", "--layers", "2", "--heads", "2", "--device", "cpu", "--timeout", "60")
LENGTH = ("--steps", "1000000", "--save-every", "20", "--keep", "3")
RANKS = (1, 2, 2, 3)  # to draw from
FILES, DOCUMENT = 100, 512  # of data, and tokens of each
LIVES = (420.0, 600.0)  # seconds between restarts
WARM_UP = 200.0  # seconds of a life in which memory is not judged: it rises by some MiB in its first 1,500 steps
STALLS = (2.0, 8.0)  # seconds between stalls
LONGEST_STALL = 2.0
POOLED = 2  # threads that may be started late, when two messages are under way at once for the first time
GONE_WITHIN = 15.0  # seconds in which what was started ends by itself
MIB = 1 << 20
EXIT_CODES = {"one rank killed": 1, "all ranks killed": 1, "everything killed": -9, "asked to stop": 0}
ENDS = tuple(EXIT_CODES)


# ------------------------------------------------------------------------------------------- processes, from /proc


class Sample(NamedTuple):
    seconds: float
    rss: int  # bytes, without pages of files, which the system may take back
    handles: int  # without files of the data, of which the last 64 that were read stay mapped
    threads: int


class Process(NamedTuple):
    """One process for ever: a number may be given anew, but not with the same beginning."""

    pid: int
    began: str


def session(leader: int) -> dict[Process, str]:
    """The processes of a session that live, with their parents' numbers and names: {process: "parent name"}."""
    found = {}
    for place in Path("/proc").iterdir():
        with suppress(OSError):
            if not place.name.isdecimal():
                continue
            name, _, rest = (place / "stat").read_text().partition("(")[2].rpartition(")")
            state, parent, _, of, *more = rest.split()
            if int(of) == leader and state not in "ZX":
                found[Process(int(place.name), more[15])] = f"{parent} {name}"
    return found


def sample(process: Process, seconds: float, data: Path) -> Sample | None:
    place = Path(f"/proc/{process.pid}")
    with suppress(OSError, ValueError):
        told = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
        handles = sum(not target.startswith(str(data)) for target in targets(place / "fd"))
        return Sample(seconds, int(told["RssAnon"].split()[0]) * 1024, handles, int(told["Threads"]))
    return None


def targets(handles: Path) -> Iterator[str]:
    """What each handle stands for; some are closed while we look."""
    for name in os.listdir(handles):
        with suppress(FileNotFoundError):
            yield os.readlink(handles / name)


# --------------------------------------------------------------------------------------------------- one life of it


@dataclass
class Life:
    """From one start to its end."""

    ranks: int
    end: str
    seconds: float = 0.0
    exit_code: int | None = None
    stalls: int = 0
    said: str = ""
    most_processes: int = 0
    left_processes: list[str] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # by "rank 0", ..., and "command"


class Soak:
    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.out, self.temporary, self.chance = folder / "run", folder / "tmp", chance
        self.temporary.mkdir()
        self.data = corpus(folder / "data")
        self.began = time.monotonic()

    def live(self, seconds: float, end: str) -> Life:
        """Start, sample, stall, and end it in this way."""
        life = Life(self.chance.choice(RANKS), end)
        command = [sys.executable, "-m", "longring", "train", "--ranks", str(life.ranks), "--out", str(self.out)]
        command += ["--data", str(self.data)]
        environment = {**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        began = time.monotonic()
        running = subprocess.Popen([*command, *MODEL, *LENGTH], env=environment, start_new_session=True, **pipes)
        try:
            self._watch(life, running, began + seconds)
            self._end(life, running, end)
        finally:
            with suppress(ProcessLookupError):
                if running.poll() is None:
                    os.killpg(running.pid, signal.SIGKILL)
            life.said = running.communicate(timeout=60)[1].strip()
        life.exit_code, life.seconds = running.returncode, time.monotonic() - began
        life.left_processes = _left(running.pid)
        return life

    def _watch(self, life: Life, running: Any, until: float) -> None:
        """Once a second, until it is time; between, a rank stalls now and then."""
        stall, since = time.monotonic() + self.chance.uniform(*STALLS), time.time()
        while time.monotonic() < until and running.poll() is None:
            processes = session(running.pid)
            for name, process in named(processes, running.pid).items() if self._is_training(since) else ():
                if (found := sample(process, time.monotonic() - self.began, self.data)) is not None:
                    life.samples.setdefault(name, []).append(found)
            life.most_processes = max(life.most_processes, len(processes))
            if time.monotonic() > stall:
                self._stall(life, running.pid)
                stall = time.monotonic() + self.chance.uniform(*STALLS)
            time.sleep(1.0)

    def _is_training(self, since: float) -> bool:
        """Whether a step was told of since then: before, a process loads and resumes."""
        path = self.out / "metrics.jsonl"
        if not path.exists() or path.stat().st_mtime < since:
            return False
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            return file.read().rstrip(b"\n").rpartition(b"\n")[2].startswith(b'{"step"')

    def _stall(self, life: Life, leader: int) -> None:
        ranks = ranks_of(session(leader), leader)
        if not ranks:
            return
        pid = self.chance.choice(ranks).pid
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                time.sleep(self.chance.uniform(0, LONGEST_STALL))
            finally:
                os.kill(pid, signal.SIGCONT)
            life.stalls += 1

    def _end(self, life: Life, running: Any, end: str) -> None:
        if running.poll() is not None:
            life.end = "ended by itself"
            return
        ranks = ranks_of(session(running.pid), running.pid)
        with suppress(ProcessLookupError):
            if end == "asked to stop" or not ranks:
                life.end = "asked to stop"
                running.send_signal(signal.SIGTERM)
            elif end == "everything killed":
                os.killpg(running.pid, signal.SIGKILL)
            else:
                for rank in ranks if end == "all ranks killed" else [self.chance.choice(ranks)]:
                    os.kill(rank.pid, signal.SIGKILL)
        running.wait(timeout=60)


def ranks_of(processes: dict[Process, str], leader: int) -> list[Process]:
    """Children of the fork server, which is a child of the command; in the order in which they began."""
    servers = {process.pid for process, about in processes.items() if int(about.split()[0]) == leader}
    ranks = [process for process, about in processes.items() if int(about.split()[0]) in servers]
    return sorted(ranks, key=lambda process: (int(process.began), process.pid))


def named(processes: dict[Process, str], leader: int) -> dict[str, Process]:
    found = {f"rank {number}": process for number, process in enumerate(ranks_of(processes, leader))}
    for process in processes:
        if process.pid == leader:
            found["command"] = process
    return found


def _left(leader: int) -> list[str]:
    """What of a session is still there, once it had time to end; and is ended now."""
    end = time.monotonic() + GONE_WITHIN
    while (left := session(leader)) and time.monotonic() < end:
        time.sleep(0.1)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return list(left.values())


def corpus(folder: Path) -> Path:
    """Documents of which two make a sequence: plans repeat, so that what grows is not what keeps them."""
    folder.mkdir()
    text = Path(os.__file__).read_bytes()
    for number in range(FILES):
        start = number * DOCUMENT % (len(text) - DOCUMENT)
        (folder / f"{number:03}.txt").write_bytes(text[start : start + DOCUMENT - 1])  # and the end of it is a token
    return folder


# --------------------------------------------------------------------------------------------------------- judging


class Slope(NamedTuple):
    mib_per_hour: float
    standard_error: float
    lives: int


def slope(lives: list[list[Sample]]) -> Slope | None:
    """One slope for all lives, each with a height of its own; None where there are fewer than two to tell it by."""
    sums = []
    for life in lives:
        samples = [one for one in settled(life) if one.seconds >= life[0].seconds + WARM_UP]
        if len(samples) < 5:
            continue
        x, y = [one.seconds / 3600 for one in samples], [one.rss / MIB for one in samples]
        middle, height = sum(x) / len(x), sum(y) / len(y)
        sums.append(
            (sum((a - middle) * (b - height) for a, b in zip(x, y, strict=True)), sum((a - middle) ** 2 for a in x))
        )
    if len(sums) < 2:
        return None
    spread = sum(sxx for _, sxx in sums)
    found = sum(sxy for sxy, _ in sums) / spread
    few = len(sums) / (len(sums) - 1)
    error = math.sqrt(few * sum((sxy - found * sxx) ** 2 for sxy, sxx in sums)) / spread
    return Slope(found, error, len(sums))


def rounded(found: Slope | None) -> dict[str, float] | None:
    return found and {name: round(value, 2) for name, value in found._asdict().items()}


def settled(samples: list[Sample]) -> list[Sample]:
    """Without the first fifth, in which a process fills its caches."""
    return samples[-(-len(samples) // 5) :]


def growth(samples: list[Sample], name: str) -> int:
    """How many more at the end of a life than at its beginning; while a checkpoint is written there are a few more."""
    numbers = [getattr(one, name) for one in settled(samples)]
    quarter = len(numbers) // 4
    return min(numbers[-quarter:]) - min(numbers[:quarter]) if quarter >= 2 else 0


def lost_steps(out: Path) -> tuple[int, int]:
    """(the last step, how many of all were missing or told twice), as the metrics have it."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().split("\n")[:-1]]
    steps = [line["step"] for line in lines if "step" in line]
    finite = all(math.isfinite(line["loss"]) for line in lines if "step" in line)
    wrong = sum(a != b for a, b in zip(steps, range(1, len(steps) + 1), strict=True))
    return (steps[-1] if steps else 0), wrong + (not finite)


def judged(lives: list[Life], out: Path, temporary: Path, minutes: float) -> dict[str, Any]:
    ranks = [samples for life in lives for name, samples in life.samples.items() if name != "command"]
    commands = [life.samples.get("command", []) for life in lives]
    rss = [one.rss for samples in ranks for one in settled(samples)]
    found = {"ranks": slope(ranks), "command": slope(commands)}
    steps, wrong = lost_steps(out)
    told: dict[str, Any] = {
        "lives": len(lives),
        "ends": {end: sum(life.end == end for life in lives) for end in sorted({life.end for life in lives})},
        "exit codes": {
            end: sorted({life.exit_code for life in lives if life.end == end}) for end in {life.end for life in lives}
        },
        "stalls": sum(life.stalls for life in lives),
        "steps": steps,
        "steps missing": wrong,
        "rss of a rank, MiB": [round(min(rss) / MIB, 1), round(max(rss) / MIB, 1)] if rss else [],
        "rss slope, MiB/hour": {name: rounded(one) for name, one in found.items()},
        "handles grown by": max((growth(samples, "handles") for samples in [*ranks, *commands]), default=0),
        "threads grown by": max((growth(samples, "threads") for samples in [*ranks, *commands]), default=0),
        "most handles": max((one.handles for samples in ranks for one in samples), default=0),
        "most threads": max((one.threads for samples in ranks for one in samples), default=0),
        "most processes at once": max(life.most_processes for life in lives),
        "processes left behind": [about for life in lives for about in life.left_processes],
        "files left behind": left_files(out),
        "temporary folders left by commands that were killed": left_folders(temporary),
    }
    told["failures"] = failures(told, lives, found["ranks"], sum(rss) / MIB / max(1, len(rss)), minutes)
    return told


def left_files(out: Path) -> list[str]:
    """What a run that was asked to stop must not leave in its folder."""
    usual = {"lock", "metrics.jsonl", "config.json", "loss.png", "tensorboard"}
    return sorted(
        path.name
        for path in out.iterdir()
        if path.name not in usual and not (path.name.startswith("step-") and "." not in path.name)
    )


def left_folders(temporary: Path) -> list[str]:
    """What a command that is itself killed cannot remove: its own, and Python's; torch's cache stays there for good."""
    return sorted(path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_"))


def failures(told: dict[str, Any], lives: list[Life], grown: Slope | None, rss: float, minutes: float) -> list[str]:
    """What would be a bug, in words."""
    found = []
    for name, allowed in (("steps missing", 0), ("handles grown by", 0), ("threads grown by", POOLED)):
        if told[name] > allowed:
            found.append(f"{name}: {told[name]}")
    for name in ("processes left behind", "files left behind"):
        if told[name]:
            found.append(f"{name}: {told[name]}")
    name = "temporary folders left by commands that were killed"
    if told[name] and not told["ends"].get("everything killed"):
        found.append(f"{name}: {told[name]}")
    for life in lives:
        if life.exit_code != EXIT_CODES.get(life.end):
            found.append(f"{life.end}, exit code {life.exit_code}: {life.said[-300:]}")
    if minutes >= 10 and grown is not None and grown.mib_per_hour - 2 * grown.standard_error > rss / 100:
        found.append(f"memory grows by {grown.mib_per_hour:.1f} MiB/hour, of {rss:.0f} MiB")
    return found


# -------------------------------------------------------------------------------------------------------- the run


def soak(minutes: float, seed: int, folder: Path) -> tuple[list[Life], dict[str, Any]]:
    chance = random.Random(seed)
    work = Soak(folder, chance)
    until = time.monotonic() + 60 * minutes
    lives: list[Life] = []
    ends = [*reversed(ENDS)]
    while time.monotonic() < until:
        left = until - time.monotonic()
        length = chance.uniform(*LIVES) if minutes >= 10 else 20 * minutes  # three in a short one
        is_last = left < 1.5 * length
        if not ends:
            ends = chance.sample(ENDS, len(ENDS))
        life = work.live(left if is_last else length, "asked to stop" if is_last else ends.pop())
        lives.append(life)
        at, ranks = time.monotonic() - work.began, f"{life.ranks} rank{'s' * (life.ranks > 1)}"
        print(
            f"{at:6.0f} s: {ranks}, {life.seconds:.0f} s, {life.stalls} stalls; {life.end}, exit code {life.exit_code}"
        )
    return lives, judged(lives, work.out, work.temporary, minutes)


def series(lives: list[Life]) -> list[dict[str, Any]]:
    """By life and process: seconds, MiB, handles and threads, every tenth sample."""
    return [
        {
            "life": number,
            "process": name,
            "seconds, MiB, handles, threads": [
                [round(one.seconds), round(one.rss / MIB, 1), one.handles, one.threads] for one in samples[::10]
            ],
        }
        for number, life in enumerate(lives)
        for name, samples in life.samples.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write docs/records/train_soak.json")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="longring-soak-") as folder:
        lives, found = soak(asked.minutes, asked.seed, Path(folder))
    print(json.dumps(found, indent=1))
    if asked.write:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        about = {
            "what": "longring train on 1 to 3 processes of one machine over Gloo, stalled, killed and started anew; "
            "measured, nothing simulated",
            "line": f"python benchmarks/train_soak.py --minutes {asked.minutes:g} --seed {asked.seed}",
            "run": ["longring", "train", *MODEL, *LENGTH],
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "longring": lr.__version__},
            "machine": {"system": platform.platform(), "cores": len(os.sched_getaffinity(0))},
            "commit": commit.stdout.strip() or "unknown",
        }
        RECORD.write_text(json.dumps({**about, "found": found, "series": series(lives)}, indent=1) + "\n")
    sys.exit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
