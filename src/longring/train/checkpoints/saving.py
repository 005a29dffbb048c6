"""Saving: all ranks write beside, rank 0 puts the whole in place by one rename, and old checkpoints go."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ...errors import ArgumentError, CheckpointError
from . import manifest, values
from .claims import claim
from .durable import Facts, SyncedFiles, sync_folder
from .manifest import Damaged, Manifest
from .meeting import Meeting
from .names import DELETING, REPLACED, SAVING, complete, entries, marked

RANKS = "ranks"  # the key under which each rank's own values are


class _Order(NamedTuple):
    """What rank 0 asks of a rank."""

    draft: Path
    plan: SavePlan
    bytes: int  # of all ranks together


class _Part(NamedTuple):
    """What a rank has written."""

    results: list[WriteResult]
    files: dict[str, Facts]


def save(
    folder: Path,
    step: int,
    state: dict[str, Any],
    *,
    about: dict[str, Any],
    keep: int,
    group: Any = None,
    per_rank: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> Path:
    """Write `state` as the checkpoint of `step`, and return where it is once it will survive anything.

    Every rank of `group` calls it with the same arguments; without a group this process is alone. `state` is nested
    dicts and lists of tensors (DTensors: each rank writes its part) and plain values, the same on all ranks and written
    once. `per_rank` is for what each rank has for itself, such as the state of its random numbers. `about` is kept as
    JSON for whoever looks. The `keep` newest complete checkpoints up to this one stay.

    Where anything fails on any rank, CheckpointError is raised on all of them, and where a rank is lost, PeerLost on
    all others; what was saved before is then as it was. `timeout` bounds every wait for another rank, in seconds, and a
    second more for each 50 MB that the ranks write together; None is the group's own.
    """
    folder = Path(folder)
    meeting = Meeting(group, timeout=timeout)
    work = _Saving(folder, step, meeting, about, keep)
    try:
        order = meeting.hold(
            f"planning the checkpoint of step {step}",
            lambda: work.planned(state, per_rank),
            work.ordered,
            folder=str(folder),
            keep=keep,
        )
        return meeting.hold(
            f"saving the checkpoint of step {step}", lambda: work.written(order), work.committed, moved=order.bytes
        )
    except BaseException:
        work.undo()
        raise


class _Saving:
    """One save, as a rank goes through it; `ordered` and `committed` are rank 0's."""

    def __init__(self, folder: Path, step: int, meeting: Meeting, about: dict[str, Any], keep: int) -> None:
        self.folder, self.step, self.about, self.keep = folder, step, about, keep
        self.ranks, self.rank = meeting.ranks, meeting.rank
        self.planner = DefaultSavePlanner()
        self.writer: _Writer | None = None
        self.draft: Path | None = None  # known to rank 0, which made it

    def planned(self, state: dict[str, Any], per_rank: dict[str, Any] | None) -> SavePlan:
        self._check(state)
        own = {RANKS: {str(self.rank): per_rank}} if per_rank else {}
        self.planner.set_up_planner({**state, **own}, None, self.rank == 0)
        for key, value in self.planner.state_dict.items():
            values.check(key, value)
        return self.planner.create_local_plan()

    def _check(self, state: Any) -> None:
        for name, number, least in (("step", self.step, 0), ("keep", self.keep, 1)):
            if type(number) is not int or number < least:
                raise ArgumentError(f"{name} must be a whole number of at least {least}, got {number!r}")
            if number > manifest.LARGEST:
                raise ArgumentError(f"{name} must be below 2**63")
        if not isinstance(state, dict) or not state or not all(type(key) is str for key in state):
            raise ArgumentError("state must be a dict with keys of str, and not be empty")
        if RANKS in state:
            raise ArgumentError(f"{RANKS!r} is where per_rank is kept; call it something else in the state")
        manifest.check_about(self.about)

    def ordered(self, plans: list[SavePlan]) -> list[_Order]:
        _made(self.folder)
        if claim(self.folder):
            _sweep(self.folder)  # whoever wrote these held the lock that is ours now: it is gone
        self.draft = self.folder / marked(self.step, SAVING)
        self.draft.mkdir()
        plans, self.metadata = self.planner.create_global_plan(plans)
        plans = _Writer(self.draft).prepare_global_plan(plans)
        return [_Order(self.draft, plan, _size(plans)) for plan in plans]

    def written(self, order: _Order) -> _Part:
        if not order.draft.is_dir():
            raise CheckpointError(f"{order.draft}, which rank 0 made, is not here; all ranks must see the same folder")
        self.writer = _Writer(order.draft)
        writes = self.writer.write_data(self.planner.finish_plan(order.plan), self.planner)
        results = writes.value()
        sync_folder(order.draft)
        return _Part(results, self.writer.files.facts)

    def committed(self, parts: list[_Part]) -> list[Path]:
        assert self.writer is not None
        assert self.draft is not None
        self.writer.finish(self.metadata, [part.results for part in parts])
        files = {name: facts for part in parts for name, facts in part.files.items()} | self.writer.files.facts
        manifest.put(self.draft, Manifest(self.step, self.ranks, files, self.about))
        sync_folder(self.draft)
        place = _put_in_place(self.draft, self.folder, self.step)
        self.draft = None
        with suppress(OSError):  # it is saved: what could not be deleted today is deleted with the next
            _prune(self.folder, self.step, self.keep)
        return [place] * self.ranks

    def undo(self) -> None:
        """Leave nothing half-written, as far as one can: a rank that still writes loses its file, not its mind."""
        if self.draft is not None:
            shutil.rmtree(self.draft, ignore_errors=True)


class _Writer(FileSystemWriter):
    """torch's writer, with files that are synced and summed, and an index that does not tell where it was made."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=False)  # it would sync before it has flushed
        self.fs = self.files = SyncedFiles()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def _size(plans: list[SavePlan]) -> int:
    return sum(item.tensor_storage_size() or 0 for plan in plans for item in plan.items)


def _made(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"{folder} is a file; checkpoints need a folder")
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def _put_in_place(draft: Path, folder: Path, step: int) -> Path:
    place = folder / complete(step)
    if place.exists():  # of a run that came this far before; until the new one is there, it is found by its new name
        place.rename(folder / marked(step, REPLACED))
    os.rename(draft, place)
    sync_folder(folder)
    return place


def _sweep(folder: Path) -> None:
    """Make room: what killed writers left, and what was to be deleted when somebody was killed."""
    for entry in entries(folder):
        if entry.fate in (SAVING, DELETING):
            shutil.rmtree(entry.path, ignore_errors=True)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Delete what this checkpoint replaces, and what is older than the `keep` newest good ones.

    Of steps to come, left by a run that went further and was set back, nothing is known to be worse: they stay.
    """
    good = 0
    for entry in entries(folder):
        if entry.fate == REPLACED or (entry.fate is None and good >= keep):
            _delete(entry.path, entry.step)
        elif entry.fate is None and entry.step <= step:
            good += _looks_good(entry.path)


def _looks_good(path: Path) -> bool:
    """By names and sizes alone: reading all of them at every save would cost more than the save."""
    try:
        manifest.get(path)
    except Damaged:
        return False
    return True


def _delete(path: Path, step: int) -> None:
    doomed = path.with_name(marked(step, DELETING))
    try:
        path.rename(doomed)  # first, so that a half-deleted folder never has a good name
    except OSError:
        return  # the next save tries again
    shutil.rmtree(doomed, ignore_errors=True)


def own_key(rank: int, writers: int) -> str:
    """Whose own values a rank goes on with, where `writers` ranks wrote theirs."""
    return str(rank % writers)


def paths_of(planner_data: Mapping[str, tuple[Any, ...]], *top: str) -> set[str]:
    """The keys of an index that lie under a path."""
    return {key for key, path in planner_data.items() if path[: len(top)] == top}
