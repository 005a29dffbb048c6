"""Worlds of real processes for tests: ranks that are forked off a process with torch loaded, in a tenth of a second.

Each rank ends as an interpreter does (not by os._exit, as multiprocessing's children do), so that what goes wrong
at the very end of a process shows in its exit status. Run as a script, this file is that process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass
class Outcome:
    """How one rank ended: what it returned or raised, its exit status (negative: a signal), and what it printed."""

    value: Any = None
    error: str | None = None  # the type's name
    text: str = ""
    rank_named: int | None = None
    seconds: float | None = None  # that the call took which raised, where the program tells
    held_up: float = 0.0  # seconds by which sleeps of this rank ended late, where the program measures it
    phase_and_step: str | None = None
    at: float = 0.0  # time.monotonic(), which all processes of a machine share
    status: int | None = None  # None: it hung, and was killed
    printed: str = ""


@dataclass
class World:
    """`program`, as "module:function", called with (group, *args) in `size` ranks."""

    size: int
    program: str
    args: tuple[Any, ...] = ()
    store: str = "rank 0"  # who hosts the store: "rank 0", or "nobody" (a file)
    environment: dict[str, str] = field(default_factory=dict)
    absent: tuple[int, ...] = ()  # ranks that need not end by themselves
    ends: str = "as usual"  # or "at once", where how a rank ends is not the question
    loads: tuple[str, ...] = ()  # modules that take long to load: once for all ranks, in the process that makes them
    backend: str = "gloo"  # with "nccl" in it all ranks are on the first GPU
    preload: str = ""  # a library that comes before those of ranks, as the dynamic linker has them: see shared_gpu.py
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="longring-world-")))

    def run(self, limit: float = 30.0) -> list[Outcome]:
        """Every rank's outcome. Ranks that are left after `limit` seconds, or stopped, are killed."""
        for rank in range(self.size):
            job = {"folder": str(self.folder), "rank": rank, "size": self.size, "program": self.program}
            (self.folder / f"{rank}.args").write_bytes(pickle.dumps(self.args))
            job |= {"store": self.store, "environment": self.environment, "ends": self.ends, "loads": self.loads}
            _order(job | {"backend": self.backend}, self.preload)
        end = time.monotonic() + limit
        awaited = [rank for rank in range(self.size) if rank not in self.absent]
        while time.monotonic() < end and not all(self._is_over(rank) for rank in awaited):
            time.sleep(0.01)
        for rank in range(self.size):
            self._kill(rank)
        outcomes = [self._outcome(rank) for rank in range(self.size)]
        shutil.rmtree(self.folder, ignore_errors=True)  # a killed rank may still be ending in it
        return outcomes

    def _is_over(self, rank: int) -> bool:
        return (self.folder / f"{rank}.status").exists() or self._is_stopped(rank)

    def _is_stopped(self, rank: int) -> bool:
        """A stopped rank stays until the others are over."""
        try:
            pid = (self.folder / f"{rank}.pid").read_text()
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def _kill(self, rank: int) -> None:
        path = self.folder / f"{rank}.pid"
        if path.exists() and not (self.folder / f"{rank}.status").exists():
            os.kill(int(path.read_text()), signal.SIGKILL)

    def _outcome(self, rank: int) -> Outcome:
        path, status, log = (self.folder / f"{rank}.{kind}" for kind in ("outcome", "status", "log"))
        outcome = pickle.loads(path.read_bytes()) if path.exists() else Outcome()
        outcome.status = int(status.read_text()) if status.exists() else None
        outcome.printed = log.read_text() if log.exists() else ""
        return outcome


def results(size: int, program: str, *args: Any, limit: float = 30.0, **options: Any) -> list[Any]:
    """What every rank returned; any rank that failed fails the test, with all that is known."""
    outcomes = World(size, program, args, ends="at once", **options).run(limit)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error}: {outcome.text}\n{outcome.printed}"
        assert outcome.status == 0, f"rank {rank} ended with {outcome.status}\n{outcome.printed}"
    return [outcome.value for outcome in outcomes]


_makers: dict[str, subprocess.Popen[str]] = {}  # by what is loaded before all else


def _order(job: dict[str, Any], preload: str) -> None:
    maker = _makers.get(preload)
    if maker is None or maker.poll() is not None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"LD_PRELOAD": preload} if preload else {})
        maker = _makers[preload] = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
    assert maker.stdin is not None
    maker.stdin.write(json.dumps(job) + "\n")
    maker.stdin.flush()


# ------------------------------------------------------------------------------- in the process that makes ranks


def main() -> int:

    import longring.functional  # noqa: F401  # loaded once for all ranks

    sys.path[:0] = [str(HERE), *(str(path) for path in HERE.iterdir() if path.is_dir())]
    gc.freeze()  # or every rank looks through all of torch's objects when it ends
    children: dict[int, Path] = {}
    rest = b""
    while True:
        _reap(children)
        if not select.select([0], [], [], 0.01)[0]:
            continue
        read = os.read(0, 1 << 16)
        if not read:  # the tests are over
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            return 0
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            job = json.loads(line)
            for module in job["loads"]:
                importlib.import_module(module)
            place = Path(job["folder"]) / str(job["rank"])
            pid = os.fork()
            if pid == 0:
                return _live(job, place)
            place.with_suffix(".pid").write_text(str(pid))
            children[pid] = place


def _reap(children: dict[int, Path]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        written = children.pop(pid).with_suffix(".new")
        with suppress(OSError):  # nobody waits for it any more
            written.write_text(str(os.waitstatus_to_exitcode(status)))
            written.rename(written.with_suffix(".status"))


def _live(job: dict[str, Any], place: Path) -> int:
    log = os.open(place.with_suffix(".log"), os.O_CREAT | os.O_WRONLY)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(job["environment"])
    args = pickle.loads(place.with_suffix(".args").read_bytes())
    module, _, name = job["program"].partition(":")
    try:
        group = _join(job, place.parent)
        outcome = Outcome(getattr(importlib.import_module(module), name)(group, *args))
    except BaseException as error:
        traceback.print_exc()
        named, phase = getattr(error, "rank", None), getattr(error, "phase_and_step", None)
        outcome = Outcome(None, type(error).__name__, str(error), named, getattr(error, "seconds", None))
        outcome.phase_and_step, outcome.held_up = phase, getattr(error, "held_up", 0.0)
    outcome.at = time.monotonic()
    place.with_suffix(".outcome").write_bytes(pickle.dumps(outcome))  # "can still save state"
    if job["ends"] == "at once":
        os._exit(0)
    return 0


def _join(job: dict[str, Any], folder: Path) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = job["rank"], job["size"]
    store = dist.FileStore(str(folder / "store"), size) if job["store"] == "nobody" else _tcp_store(rank, folder)
    timeout, device = timedelta(seconds=60), None
    if "nccl" in job["backend"]:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    dist.init_process_group(job["backend"], store=store, rank=rank, world_size=size, timeout=timeout, device_id=device)
    return dist.group.WORLD


def _tcp_store(rank: int, folder: Path) -> Any:
    import torch.distributed as dist

    path = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(path)
        return store
    while not path.exists():
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int(path.read_text()), is_master=False)


if __name__ == "__main__":
    sys.modules["worlds"] = sys.modules["__main__"]  # one Outcome, whoever imports it
    Outcome.__module__ = "worlds"
    sys.exit(main())
