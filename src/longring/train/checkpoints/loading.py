"""Loading into tensors that are there already, however many ranks wrote them, and without running anything."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from ...errors import ArgumentError
from . import index, manifest
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
    reader = FileSystemReader(path)
    reader.set_up_storage_reader(known, is_coordinator=False)
    try:
        reader.read_data(planner.create_local_plan(), planner).wait()
    except pickle.UnpicklingError as error:
        line = str(error).partition("\n")[0]
        raise Damaged(f"{path} holds what only running code could read, and is not read: {line}") from None
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
    """torch's planner, which would load a plain value by running whatever its pickle asks for."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
