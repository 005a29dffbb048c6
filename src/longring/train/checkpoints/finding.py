"""Finding the newest checkpoint that can be trusted, and saying why newer ones cannot."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ArgumentError, CheckpointError
from . import manifest
from .manifest import Damaged, Manifest
from .meeting import Meeting
from .names import DELETING, REPLACED, SAVING, Entry, entries

LOOKS = 10  # at a folder whose checkpoints go away while they are read
_WHY = {
    SAVING: "it was not finished: its writer was ended, or is at it now",
    DELETING: "it was being deleted",
}


class Skipped(NamedTuple):
    name: str
    why: str

    @property
    def was_complete(self) -> bool:
        """Whether it was a checkpoint once: not what a writer left that was killed while it saved."""
        return f".{SAVING}-" not in self.name


@dataclass(frozen=True)
class Found:
    """The newest complete checkpoint of a folder, if there is one, and what was passed over for it."""

    folder: Path
    path: Path | None = None
    manifest: Manifest | None = None
    skipped: tuple[Skipped, ...] = field(default=())

    def __bool__(self) -> bool:
        return self.path is not None

    @property
    def step(self) -> int:
        return self._trusted.step

    @property
    def ranks(self) -> int:
        """How many wrote it."""
        return self._trusted.ranks

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return self._trusted.bytes

    @property
    def about(self) -> dict[str, Any]:
        return self._trusted.about

    @property
    def _trusted(self) -> Manifest:
        if self.manifest is None:
            raise ArgumentError(f"there is no complete checkpoint in {self.folder}")
        return self.manifest

    def describe(self) -> str:
        """For the user: a line for what was found, and one for each that was skipped."""
        if self.manifest is None:
            first = f"no complete checkpoint in {self.folder}"
        else:
            ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
            first = f"step {self.step} is the newest complete checkpoint in {self.folder}, written by {ranks}"
        return "\n".join([first, *(f"skipped {name}: {why}" for name, why in self.skipped)])


def find(folder: Path, *, group: Any = None, timeout: float | None = None) -> Found:
    """The newest checkpoint in `folder` whose every file is there with its size and checksum.

    With a `group` all its ranks call it, share the reading, and get the same answer. No folder is no checkpoint.
    `timeout` is that of `save`.
    """
    folder = Path(folder)
    meeting = Meeting(group, timeout=timeout)
    for _ in range(LOOKS):
        found = _found(folder, meeting)
        if found is not None:
            return found
    raise CheckpointError(f"the checkpoints of {folder} are deleted faster than they can be read; keep more of them")


def _found(folder: Path, meeting: Meeting) -> Found | None:
    """None where one went away while it was read: the run that made it lives, and has a newer one by now.

    Manifests are read one at a time: those of a folder together may be of any size.
    """
    candidates: list[Entry] = meeting.hold(
        f"looking for checkpoints in {folder}", lambda: None, lambda _: [_look(folder)] * meeting.ranks
    )
    skipped: list[Skipped] = []
    for candidate in candidates:
        trusted = _of_rank_0(candidate, meeting)
        damage = trusted if isinstance(trusted, str) else _damage(candidate.path, trusted, meeting)
        if damage is None:
            return None
        if not damage:
            assert isinstance(trusted, Manifest)
            return Found(folder, candidate.path, trusted, tuple(skipped))
        skipped.append(Skipped(candidate.path.name, damage))
    return Found(folder, skipped=tuple(skipped))


def _look(folder: Path) -> list[Entry]:
    """Newest first."""
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is a file; checkpoints are in a folder")
    return entries(folder)


def _of_rank_0(entry: Entry, meeting: Meeting) -> Manifest | str | None:
    """The manifest of a checkpoint, or why it cannot be trusted; None if it went away."""
    if entry.fate not in (None, REPLACED):
        return _WHY[entry.fate]
    return meeting.hold(
        f"reading the manifest of {entry.path}", lambda: None, lambda _: [_trusted(entry)] * meeting.ranks
    )


def _trusted(entry: Entry) -> Manifest | str | None:
    try:
        trusted = manifest.get(entry.path)
        if trusted.step != entry.step:
            raise Damaged(f"its manifest is that of step {trusted.step}: it was renamed")
    except Damaged as why:
        return str(why) if entry.path.exists() else None
    return trusted


def _damage(path: Path, trusted: Manifest | None, meeting: Meeting) -> str | None:
    """What is wrong with it, in all ranks' eyes, of whom each reads a share of the files; None if it went away."""
    if trusted is None:
        return None
    return meeting.hold(
        f"reading {path}",
        lambda: _damage_of(path, trusted, sorted(trusted.files)[meeting.rank :: meeting.ranks]),
        lambda reports: ["; ".join(filter(None, reports)) if path.exists() else None] * meeting.ranks,
        moved=trusted.bytes,
    )


def _damage_of(path: Path, trusted: Manifest, names: list[str]) -> str:
    try:
        manifest.check_sums(path, trusted, names)
    except Damaged as why:
        return str(why)
    return ""
