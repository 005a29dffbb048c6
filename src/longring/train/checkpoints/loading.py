"""Loading into tensors that are there already, however many ranks wrote them, and without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ...errors import ArgumentError
from . import archives, index, manifest
from .finding import Found
from .manifest import INDEX, Damaged, Manifest
from .meeting import Meeting
from .saving import RANKS, own_key, paths_of


def load(
    found: Found,
    state: dict[str, Any],
    *,
    group: Any = None,
    per_rank: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Fill `state` (and `per_rank`) in place from a checkpoint that `find` found, and return what was said `about` it.

    `state` has the shape of what was saved: tensors of the same sizes and dtypes, dealt over ranks in any way, and any
    values where there were values. Whole parts of the top level may be left out (a model without its optimiser);
    within one, nothing may be missing or left over. A rank goes on with its own `per_rank`, or, where more ranks load
    than wrote, with that of rank `rank % writers`. `timeout` is that of `save`.
    """
    if found.path is None or found.manifest is None:
        raise ArgumentError(f"there is nothing to load: {found.describe()}")
    path, trusted = found.path, found.manifest
    meeting = Meeting(group, timeout=timeout)
    meeting.hold(
        f"loading {path}",
        lambda: _load(path, trusted, state, per_rank, meeting.rank),
        lambda reports: reports,
        moved=trusted.bytes,
    )
    return trusted.about


def _load(path: Path, trusted: Manifest, state: dict[str, Any], per_rank: dict[str, Any] | None, rank: int) -> None:
    known = index.read(manifest.checked_content(path, trusted, INDEX), trusted)
    own = own_key(rank, trusted.ranks)
    whole = {**state, **({RANKS: {own: per_rank}} if per_rank else {})}
    planner = _Planner()
    planner.set_up_planner(whole, known)
    for top in state:
        _check(top, planner, known)
    if per_rank:
        _check(RANKS, planner, known, own)
    _read(path, planner, known)
    state.update((key, whole[key]) for key in state)
    if per_rank:
        per_rank.update(whole[RANKS][own])


def _check(top: str, planner: _Planner, known: Metadata, *below: str) -> None:
    saved, wanted = paths_of(known.planner_data, top, *below), paths_of(planner.mappings, top, *below)
    if saved != wanted:
        lacking, over = sorted(wanted - saved), sorted(saved - wanted)
        raise ArgumentError(
            f"{top!r} is not what was saved: {_listed(lacking)} in the state alone, {_listed(over)} in the checkpoint "
            "alone; build the model and the optimiser as the run that wrote it did"
        )
    for key in wanted:
        _check_kind(key, planner.state_dict[key], known.state_dict_metadata[key])


def _listed(keys: list[str]) -> str:
    shown = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
    return f"{len(keys)} key{'s' * (len(keys) != 1)}" + (f" ({shown})" if keys else "")


def _check_kind(key: str, here: Any, saved: Any) -> None:
    """torch would convert dtypes in silence, and put a value in the place of a tensor."""
    is_tensor = isinstance(saved, TensorStorageMetadata)
    if isinstance(here, torch.Tensor) != is_tensor:
        raise ArgumentError(f"{key} is {'a tensor' if is_tensor else 'a value'} in the checkpoint, but not here")
    if not is_tensor:
        return
    if (saved.size, saved.properties.dtype) != (here.size(), here.dtype):
        was, now = (saved.size, saved.properties.dtype), (here.size(), here.dtype)
        raise ArgumentError(f"{key} was saved as {_tensor(*was)} and is {_tensor(*now)} here")


def _tensor(size: torch.Size, dtype: torch.dtype) -> str:
    return f"{dtype} of size {list(size)}"


class _Planner(DefaultLoadPlanner):
    """torch's planner, without its habit of looking for keys of older versions of itself."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata)


def _read(path: Path, planner: _Planner, known: Metadata) -> None:
    """What torch's own reader does, by way of torch.load."""
    by_file: dict[str, list[tuple[ReadItem, _StorageInfo]]] = {}
    for item in planner.create_local_plan().items:
        place = known.storage_data[item.storage_index]
        by_file.setdefault(place.relative_path, []).append((item, place))
    for name, items in by_file.items():
        with (path / name).open("rb") as file:
            for item, place in items:
                _fill(planner, known, item, file, place)


def _fill(planner: _Planner, known: Metadata, item: ReadItem, file: IO[bytes], place: _StorageInfo) -> None:
    key, at = item.dest_index.fqn, (file, place.offset, place.length)
    try:
        if item.type == LoadItemType.BYTE_IO:
            set_element(planner.original_state_dict, planner.mappings[key], archives.value(*at))
            return
        about = known.state_dict_metadata[key]
        assert isinstance(about, TensorStorageMetadata)
        assert item.storage_index.index is not None
        sizes = about.chunks[item.storage_index.index].sizes
        found = archives.tensor(*at, about.properties.dtype, sizes)
    except Damaged as why:
        raise Damaged(f"{place.relative_path} cannot be right about {key}: {why}") from None
    part = narrow_tensor_by_index(found, item.storage_offsets, item.lengths)
    planner.resolve_tensor(item).detach().copy_(part)
