"""The index that torch.distributed.checkpoint keeps of a checkpoint, read without trusting who wrote it.

It is a pickle, and torch reads it with pickle.load, which runs whatever the file asks for. Here it is read as data, by
`unpickling`; every number is checked against the manifest; and only then torch's own objects are made, by this module.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from . import unpickling
from .manifest import INDEX, Damaged, Manifest, shown
from .unpickling import Call, Name, Pairs, Stranger, Unreadable

LARGEST = 2**63 - 1  # of sizes, offsets and whole numbers
DIMENSIONS = 64  # of a tensor, at most, as in torch
MOST_TANGLED = 64  # parts of a tensor that no cut along a dimension takes apart
LONGEST_PATH = 100  # names from the top of a state to a value in it
MOST_FIELDS = 20  # of one of torch's dataclasses, which have at most six


def _of(known: Any) -> Name:
    return Name(known.__module__, known.__name__)


_INDEX, _TENSOR, _BYTES, _CHUNK, _KEY, _PROPERTIES, _FORMAT, _META = map(
    _of,
    (
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.MetadataIndex,
        metadata.TensorProperties,
        metadata._MEM_FORMAT_ENCODING,
        metadata.StorageMeta,
    ),
)
_PLACE, _SIZE, _LAYOUT = _of(filesystem._StorageInfo), Name("torch", "Size"), Name("torch.serialization", "_get_layout")
_STRIDED = ("torch.strided",)
_DTYPES = {Name("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_NAMES = (_INDEX, _TENSOR, _BYTES, _CHUNK, _KEY, _PROPERTIES, _FORMAT, _META, _PLACE, _SIZE, _LAYOUT, *_DTYPES)


def read(content: bytes, manifest: Manifest) -> Metadata:
    """The index, if it speaks of this checkpoint's files and of nothing else."""
    others = manifest.bytes - manifest.files[INDEX].bytes
    if len(content) > (1 << 20) + others // 2:  # a place takes some 200 bytes here, and 1,400 and more in its file
        raise Damaged(f"{INDEX} has {len(content)} bytes, for files of {others} bytes")
    try:
        told = unpickling.load(content, _NAMES)
    except Stranger as name:
        raise Damaged(f"{INDEX} asks for {name}, which no index needs: it could run code, and is not read") from None
    except Unreadable as why:
        raise Damaged(f"{INDEX} is not an index of torch.distributed.checkpoint: {why}") from None
    try:
        return _made(told, manifest)
    except _Wrong as why:
        raise Damaged(f"{INDEX} cannot be right: {why}") from None


class _Wrong(Exception):
    """What is wrong with an index."""


def _made(told: Any, manifest: Manifest) -> Metadata:
    whole = _fields(told, _INDEX)
    described, paths, places = (
        _pairs(whole.get(part)) for part in ("state_dict_metadata", "planner_data", "storage_data")
    )
    if len(places) != sum(_parts(about) for _, about in described):  # before any of them is looked at
        raise _Wrong(f"it has {len(places)} places, and not as many parts")
    made = Metadata(
        state_dict_metadata={_text(key): _described(about) for key, about in described},
        planner_data={_text(key): _path(path) for key, path in paths},
        storage_data={_key(key): _place(place, manifest) for key, place in places},
    )
    if (
        not len(described) == len(paths) == len(made.planner_data)
        or made.planner_data.keys() != made.state_dict_metadata.keys()
    ):
        raise _Wrong("keys and paths differ")
    if len(made.storage_data) != len(places):
        raise _Wrong("two places are of one part")
    for key, about in made.state_dict_metadata.items():
        _check(key, about, made.storage_data)
    return made


def _check(key: str, about: TensorStorageMetadata | BytesStorageMetadata, places: Container[MetadataIndex]) -> None:
    """That all of it is there."""
    if isinstance(about, BytesStorageMetadata):
        if MetadataIndex(key) not in places:
            raise _Wrong(f"{shown(key)} is nowhere")
        return
    for chunk in about.chunks:
        if not _is_inside(chunk, about.size):
            raise _Wrong(f"{shown(key)} of size {list(about.size)} has a part {chunk}")
        if MetadataIndex(key, chunk.offsets) not in places:
            raise _Wrong(f"a part of {shown(key)} is nowhere")
    held, whole = sum(math.prod(chunk.sizes) for chunk in about.chunks), math.prod(about.size)
    if held != whole or not about.chunks:
        raise _Wrong(f"the parts of {shown(key)} have {held} of {whole} elements")
    if len({chunk.offsets for chunk in about.chunks}) != len(about.chunks) or _overlap(about.chunks):
        raise _Wrong(f"parts of {shown(key)} overlap, so that others are missing")


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether two have an element in common: along one dimension after the other, those that may are put together."""
    groups = [[chunk for chunk in chunks if 0 not in chunk.sizes]]
    for axis in range(len(chunks[0].sizes)):
        groups = [group for together in groups for group in _touching(together, axis) if len(group) > 1]
    return any(map(_pairs_overlap, groups))


def _touching(chunks: list[ChunkStorageMetadata], axis: int) -> list[list[ChunkStorageMetadata]]:
    """Groups of chunks whose ranges along this dimension have no gap between them; those of different groups do."""
    groups: list[list[ChunkStorageMetadata]] = []
    end = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[axis]):
        if not groups or chunk.offsets[axis] >= end:
            groups.append([])
        groups[-1].append(chunk)
        end = max(end, chunk.offsets[axis] + chunk.sizes[axis])
    return groups


def _pairs_overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Of those that no dimension takes apart, which no way of dealing a tensor out leaves many of."""
    if len(chunks) > MOST_TANGLED:
        return True
    return any(
        all(
            at < other_at + other_long and other_at < at + long
            for at, long, other_at, other_long in zip(
                chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True
            )
        )
        for number, chunk in enumerate(chunks)
        for other in chunks[:number]
    )


def _is_inside(chunk: ChunkStorageMetadata, size: torch.Size) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(size):
        return False
    return all(at + long <= end for at, long, end in zip(chunk.offsets, chunk.sizes, size, strict=True))


# ------------------------------------------------------------------------------------------------ torch's objects


def _described(told: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _is_new(told, _BYTES):
        return BytesStorageMetadata()
    state = _fields(told, _TENSOR)
    chunks = [_chunk(chunk) for chunk in state["chunks"]]
    return TensorStorageMetadata(_properties(state.get("properties")), _size(state.get("size")), chunks)


def _parts(told: Any) -> int:
    """How many places a tensor, or a value, needs."""
    if _is_new(told, _BYTES):
        return 1
    chunks = _fields(told, _TENSOR).get("chunks")
    if type(chunks) is not list:
        raise _Wrong("a tensor has no list of parts")
    return len(chunks)


def _properties(told: Any) -> TensorProperties:
    """A tensor's dtype. Of the rest, which torch calls deprecated, all tensors that are saved have the same."""
    state = told.state if _is_new(told, _PROPERTIES) else None
    if type(state) is not tuple or len(state) != 5:
        raise _Wrong("a tensor has no properties")
    dtype, layout = state[:2]
    if type(dtype) is not Name or dtype not in _DTYPES:
        raise _Wrong("a tensor has no dtype")
    if type(layout) is not Call or layout.name is not _LAYOUT or layout.args != _STRIDED:
        raise _Wrong("a tensor is not strided")
    return TensorProperties(dtype=_DTYPES[dtype])


def _chunk(told: Any) -> ChunkStorageMetadata:
    state = _fields(told, _CHUNK)
    return ChunkStorageMetadata(_size(state.get("offsets")), _size(state.get("sizes")))


def _key(told: Any) -> MetadataIndex:
    state = _fields(told, _KEY)
    offset, hint = state.get("offset"), state.get("index")
    if hint is not None and not _is_whole(hint):
        raise _Wrong(f"a part has the number {shown(hint)}")
    return MetadataIndex(_text(state.get("fqn")), None if offset is None else _size(offset), hint)


def _place(told: Any, manifest: Manifest) -> filesystem._StorageInfo:
    state = _fields(told, _PLACE)
    path, offset, length = state.get("relative_path"), state.get("offset"), state.get("length")
    if type(path) is not str or path not in manifest.files:
        raise _Wrong(f"it points to {shown(path)}, outside the manifest")
    if state.get("transform_descriptors") is not None:
        raise _Wrong("it asks for a transformation")
    if not _is_whole(offset) or not _is_whole(length) or offset + length > manifest.files[path].bytes:
        raise _Wrong(f"a place in {path} is {shown(offset)} and {shown(length)} of {manifest.files[path].bytes} bytes")
    return filesystem._StorageInfo(path, offset, length)


def _path(told: Any) -> tuple[str | int, ...]:
    if type(told) is not tuple or not 0 < len(told) <= LONGEST_PATH:
        raise _Wrong("a value has no path")
    if not all(type(part) is str or _is_whole(part) for part in told):
        raise _Wrong(f"a value has the path {shown(told)}")
    return told


def _size(told: Any) -> torch.Size:
    """Its product is bounded too, and without the dimensions that are empty, which would leave the others free."""
    numbers = told.args[0] if type(told) is Call and told.name is _SIZE and len(told.args) == 1 else None
    if type(numbers) is not tuple or len(numbers) > DIMENSIONS or not all(map(_is_whole, numbers)):
        raise _Wrong(f"a tensor has the size {shown(numbers)}")
    if math.prod(number or 1 for number in numbers) > LARGEST:
        raise _Wrong(f"a tensor has the size {shown(numbers)}, more than there can be")
    return torch.Size(numbers)


# ------------------------------------------------------------------------------------------------ parts of a pickle


def _is_new(told: Any, name: Name) -> bool:
    return type(told) is Call and told.name is name and not told.args


def _fields(told: Any, name: Name) -> dict[Any, Any]:
    """The state of an object of that class."""
    if not _is_new(told, name):
        raise _Wrong(f"it has {_kind(told)} where {name.name} belongs")
    state = told.state
    if type(state) is not Pairs or len(state) > 2 * MOST_FIELDS or not all(type(key) is str for key in state[::2]):
        raise _Wrong(f"{name.name} lacks its fields")
    return dict(zip(state[::2], state[1::2], strict=True))


def _pairs(told: Any) -> list[tuple[Any, Any]]:
    if type(told) is not Pairs:
        raise _Wrong("a part is missing")
    return list(zip(told[::2], told[1::2], strict=True))


def _text(told: Any) -> str:
    if type(told) is not str:
        raise _Wrong(f"a key is of type {_kind(told)}")
    return told


def _kind(told: Any) -> str:
    return str(told.name) if type(told) is Call else type(told).__name__


def _is_whole(number: Any) -> TypeGuard[int]:
    return type(number) is int and 0 <= number <= LARGEST
