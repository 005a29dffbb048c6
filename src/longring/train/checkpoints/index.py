"""The index that torch.distributed.checkpoint keeps of a checkpoint, read without trusting who wrote it.

It is a pickle, and torch reads it with pickle.load, which runs whatever the file asks for. Here a name in it stands for
one of the index's own classes or is refused, and every number is checked against the manifest before it is used.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from .manifest import INDEX, Damaged, Manifest

_CLASSES = {
    filesystem._StorageInfo,
    metadata._MEM_FORMAT_ENCODING,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
}
_NAMED: dict[tuple[str, str], Any] = {
    **{(known.__module__, known.__name__): known for known in _CLASSES},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # a look into a table of layouts
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _NAMED[module_name, global_name]
        except KeyError:
            raise _Stranger(f"{module_name}.{global_name}") from None

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _Stranger("something outside the file")


class _Stranger(Exception):
    """A name that has no place in an index."""


def read(content: bytes, manifest: Manifest) -> Metadata:
    """The index, if it speaks of this checkpoint's files and of nothing else."""
    try:
        index = _Unpickler(io.BytesIO(content)).load()
        _check(index, manifest)
    except Damaged:
        raise
    except _Stranger as name:
        raise Damaged(f"{INDEX} asks for {name}, which no index needs: it could run code, and is not read") from None
    except Exception as error:  # bytes that anyone may have written fail in any way
        raise Damaged(f"{INDEX} is not an index of torch.distributed.checkpoint ({error!r})") from None
    return index


def _check(index: Any, manifest: Manifest) -> None:
    _insist(type(index) is Metadata, f"it holds a {type(index).__name__}")
    described: Any = index.state_dict_metadata
    places: Any = index.storage_data
    _insist(type(described) is dict and type(places) is dict and type(index.planner_data) is dict, "a part is missing")
    _insist(set(index.planner_data) == set(described), "keys and paths differ")
    for place in places.values():
        _check_place(place, manifest)
    key: Any  # until it was checked
    for key, about in described.items():
        _check_path(key, index.planner_data[key])
        if type(about) is BytesStorageMetadata:
            _insist(MetadataIndex(key) in places, f"{key} is nowhere")
        else:
            _check_tensor(key, about, places)


def _check_place(place: Any, manifest: Manifest) -> None:
    _insist(type(place) is filesystem._StorageInfo, f"a place is a {type(place).__name__}")
    _insist(place.relative_path in manifest.files, f"it points to {place.relative_path!r}, outside the manifest")
    _insist(place.transform_descriptors is None, "it asks for a transformation")
    _insist(_are_whole((place.offset, place.length)), f"{place} lies nowhere")
    size = manifest.files[place.relative_path].bytes
    _insist(place.offset + place.length <= size, f"{place} ends after {size} bytes")


def _check_path(key: Any, path: Any) -> None:
    _insist(type(key) is str and type(path) is tuple and len(path) > 0, f"{key!r} has no path")
    _insist(all(type(part) in (str, int) for part in path), f"{key!r} has the path {path!r}")


def _check_tensor(key: str, about: Any, places: dict[Any, Any]) -> None:
    _insist(type(about) is TensorStorageMetadata, f"{key} is a {type(about).__name__}")
    _insist(type(about.size) is torch.Size and _are_whole(about.size), f"{key} has size {about.size!r}")
    _insist(type(about.properties.dtype) is torch.dtype, f"{key} has no dtype")
    for chunk in about.chunks:
        _insist(type(chunk) is ChunkStorageMetadata and _is_inside(chunk, about.size), f"{key} has a part {chunk!r}")
        _insist(MetadataIndex(key, chunk.offsets) in places, f"a part of {key} is nowhere")
    offsets = {tuple(chunk.offsets) for chunk in about.chunks}
    held = sum(math.prod(chunk.sizes) for chunk in about.chunks)
    is_whole = held == math.prod(about.size) and len(offsets) == len(about.chunks) > 0
    _insist(is_whole, f"the parts of {key} have {held} of {math.prod(about.size)} elements")


def _is_inside(chunk: ChunkStorageMetadata, size: torch.Size) -> bool:
    are_sizes = all(type(part) is torch.Size and _are_whole(part) for part in (chunk.offsets, chunk.sizes))
    if not are_sizes or not len(chunk.offsets) == len(chunk.sizes) == len(size):
        return False
    return all(at + long <= end for at, long, end in zip(chunk.offsets, chunk.sizes, size, strict=True))


def _are_whole(numbers: Any) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


def _insist(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Damaged(f"{INDEX} cannot be right: {otherwise}")
