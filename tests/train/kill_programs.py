"""Training runs that are killed, where a new process finds them by name; what they left is judged without longring."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from checkpoint_programs import ends_at
from training_curves import settings

from longring.train.run import train
from longring.train.stopping import Stopping
from worlds import Outcome, World

STARTING = -1  # before the run says where it goes on
LIMIT = 60.0  # seconds of one start, far more than it takes


class Kill(NamedTuple):
    """Who is killed and when: the first of `ranks` comes to its `moment` on the disk, and takes the others along; or
    from outside, `delay` seconds after this start has told of so many `steps`."""

    ranks: tuple[int, ...]
    moment: int | None = None
    steps: int = 0
    delay: float = 0.0


# ------------------------------------------------------------------------------------------------------- on a rank


def trained(group: Any, out: str, words: dict[str, Any], kill: Kill | None) -> tuple[int, int | None, list[str]]:
    """A run to its end, or to this rank's: (steps, where it went on, what it noted)."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if kill is not None and kill.moment is not None:
        pids: list[Any] = [None] * size
        dist.all_gather_object(pids, os.getpid(), group=group)
        if rank == kill.ranks[0]:
            ends_at(kill.moment, also=tuple(pids[other] for other in kill.ranks[1:]))
    report = train(settings(size, Path(out), **words), stopping=Stopping())
    return report.steps, report.resumed_from, report.notes


# ---------------------------------------------------------------------------------------------------- in the test


def start(
    size: int, out: Path, words: dict[str, Any], kill: Kill | None = None, limit: float = LIMIT, **options: Any
) -> list[Outcome]:
    """The run on so many ranks, until it is over or killed; options are those of `World`."""
    args, loads = (str(out), words, kill), ("longring.train.run",)
    world = World(size, "kill_programs:trained", args, store="nobody", ends="at once", loads=loads, **options)
    killer = None
    if kill is not None and kill.moment is None:
        killer = threading.Thread(target=_strike, args=(world.folder, out, kill, len(begun(out)), limit))
        killer.start()
    outcomes = world.run(limit=limit)
    if killer is not None:
        killer.join()
    return outcomes


def _strike(folder: Path, out: Path, kill: Kill, before: int, limit: float) -> None:
    """As the system does it: in the midst of whatever these ranks are at."""
    end = time.monotonic() + limit
    pids = [folder / f"{rank}.pid" for rank in kill.ranks]
    with suppress(OSError):  # the world is over, which the test will notice
        while not (all(pid.exists() for pid in pids) and _told(out, before) >= kill.steps):
            if time.monotonic() > end or not folder.exists():
                return
            time.sleep(0.002)
        time.sleep(kill.delay)
        for pid in pids:
            if not pid.with_suffix(".status").exists():
                os.kill(int(pid.read_text()), signal.SIGKILL)


def _told(out: Path, before: int) -> int:
    """How many steps this start has told of, where `before` starts came before it."""
    text = _metrics(out)
    return text.rpartition('{"run"')[2].count('{"step"') if text.count('{"run"') > before else STARTING


def _metrics(out: Path) -> str:
    with suppress(FileNotFoundError):
        return (out / "metrics.jsonl").read_text()
    return ""


def begun(out: Path) -> list[int]:
    """Where each start went on, those alone that came so far; 0 is the beginning."""
    told = [json.loads(line) for line in _metrics(out).splitlines() if line.startswith('{"run"')]
    return [line["run"]["resumed_from"] or 0 for line in told]


def last_step(out: Path) -> int:
    """The last step that was told of whole; 0 if none was."""
    lines = _metrics(out).split("\n")[:-1]  # what has no end of line is half of one
    return max((json.loads(line)["step"] for line in lines if line.startswith('{"step"')), default=0)


def newest_whole(out: Path) -> int:
    """The step of the newest checkpoint whose every byte is as its manifest says; 0 if there is none."""
    places = [*out.glob("step-????????"), *out.glob("step-????????.replaced-*")]
    return max((int(place.name[5:13]) for place in places if _is_whole(place)), default=0)


def _is_whole(place: Path) -> bool:
    """As docs/checkpoints.md says it: `sha256sum -c manifest.sha256`, and then the files that the manifest lists."""
    try:
        text = (place / "manifest.json").read_bytes()
        if (place / "manifest.sha256").read_text().split()[0] != hashlib.sha256(text).hexdigest():
            return False
        files = json.loads(text)["files"].items()
        return all(hashlib.sha256((place / name).read_bytes()).hexdigest() == facts["sha256"] for name, facts in files)
    except FileNotFoundError:
        return False


def damaged(place: Path, chance: random.Random) -> str:
    """Cut a file of a checkpoint short, change a byte of it, or take it away; its name."""
    file = chance.choice(sorted(path for path in place.iterdir() if path.name != "manifest.sha256"))
    content = bytearray(file.read_bytes())
    how = chance.choice(["cut", "changed", "gone"])
    if how == "gone":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[: chance.randrange(len(content))])
    else:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
    return file.name
