"""Tensors and plain values out of the archives that torch.save writes into a checkpoint's files.

torch.load with weights_only runs no code, but makes what a file asks for: a bytearray of any size from forty bytes, or
records that unpack to a thousand times of what they take. Here a record is as large as it is in the file, the pickle
in it is read as data, and a tensor has the size and dtype that the index says.
"""

from __future__ import annotations

import io
import os
import struct
import sys
import zipfile
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from . import unpickling, values
from .manifest import Damaged, shown
from .unpickling import Call, Name, Pairs, Reference, Stranger, Unreadable

PICKLE, ORDER, NUMBERS = "data.pkl", "byteorder", "data/"
RECORDS = 100  # of an archive: six or seven, as of now
_HEADER = 30  # bytes before the name of a record

_TYPED, _UNTYPED = Name("torch._utils", "_rebuild_tensor_v2"), Name("torch._utils", "_rebuild_tensor_v3")
_HOOKS, _BYTES = Name("collections", "OrderedDict"), Name("torch.storage", "UntypedStorage")
_STORAGES = {
    Name("torch", f"{kind}Storage"): dtype
    for kind, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexDouble": torch.complex128,
        "ComplexFloat": torch.complex64,
    }.items()
}
_DTYPES = {Name("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_NAMES = (_TYPED, _UNTYPED, _HOOKS, _BYTES, *_STORAGES, *_DTYPES)


def value(file: IO[bytes], offset: int, length: int) -> Any:
    """What stands there, of None, bool, int, float, str, bytes, and lists, tuples and dicts of them."""
    archive = _opened(file, offset, length)
    try:
        return values.plain(unpickling.load(archive.pickle, values.NAMES))
    except (Stranger, Unreadable) as why:
        raise _refusal(why) from None


def tensor(file: IO[bytes], offset: int, length: int, dtype: torch.dtype, size: torch.Size) -> Tensor:
    """The tensor that stands there, which is of that dtype and size."""
    archive = _opened(file, offset, length)
    try:
        told = unpickling.load(archive.pickle, _NAMES, has_references=True)
    except (Stranger, Unreadable) as why:
        raise _refusal(why) from None
    view = _view(told, dtype)
    if view.size != tuple(size):
        raise Damaged(f"a part of {list(size)} is one of {shown(view.size)} in its file")
    record = archive.records.get(NUMBERS + view.key)
    if record is None or record.bytes != view.count * dtype.itemsize:
        raise Damaged(f"a part of {list(size)} lacks its numbers")
    reach = sum((long - 1) * step for long, step in zip(view.size, view.stride, strict=True))
    if 0 not in view.size and view.first + reach >= view.count:
        raise Damaged(f"a part of {list(size)} reaches beyond its {view.count} numbers")
    numbers = torch.empty(0, dtype=dtype)
    if record.bytes:
        numbers = torch.frombuffer(archive.content(record), dtype=dtype)
    found = numbers.as_strided(view.size, view.stride, view.first if view.count else 0)
    found = found.conj() if view.is_conjugated else found
    return torch._neg_view(found) if view.is_negated else found


def _refusal(why: Exception) -> Damaged:
    if isinstance(why, Stranger):
        return Damaged(f"it holds what only running code could read, and is not read: {why}")
    return Damaged(f"it holds what is neither a tensor nor a plain value: {why}")


# -------------------------------------------------------------------------------------------------------- archives


class _Record(NamedTuple):
    at: int
    bytes: int


class _Slice(io.RawIOBase):
    """A part of a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        at += {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if at < 0:
            raise OSError(f"there is nothing {-at} bytes before the beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return count


class _Archive:
    """The records of a zip file, none of which is packed."""

    def __init__(self, part: _Slice) -> None:
        self._part = part
        with zipfile.ZipFile(part) as archive:  # type: ignore[arg-type]
            infos = archive.infolist()
        self.records = {info.filename.partition("/")[2]: self._record(info) for info in infos}
        if len(infos) > RECORDS or len(self.records) != len(infos):
            raise zipfile.BadZipFile("too many records")
        self.pickle = bytes(self.content(self.records[PICKLE]))
        order = bytes(self.content(self.records[ORDER])) if ORDER in self.records else b"little"
        if order != sys.byteorder.encode():
            raise Damaged(f"it was written on a machine whose bytes are in another order: {shown(order)}")

    def _record(self, info: zipfile.ZipInfo) -> _Record:
        """Where it is: zipfile tells where its header begins, of which this knows the length."""
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise zipfile.BadZipFile("a record is packed")
        self._part.seek(info.header_offset)
        header = self._part.read(_HEADER)
        assert header is not None
        signature, name, extra = struct.unpack("<4s22xHH", header)
        if signature != b"PK\3\4":
            raise zipfile.BadZipFile("a record is not there")
        return _Record(info.header_offset + _HEADER + name + extra, info.file_size)

    def content(self, record: _Record) -> bytearray:
        if record.at + record.bytes > self._part._length:
            raise zipfile.BadZipFile("a record is not there")
        content = bytearray(record.bytes)
        self._part.seek(record.at)
        view = memoryview(content)
        while view:
            count = self._part.readinto(view)
            if not count:
                raise zipfile.BadZipFile("a record is cut short")
            view = view[count:]
        return content


def _opened(file: IO[bytes], offset: int, length: int) -> _Archive:
    try:
        return _Archive(_Slice(file, offset, length))
    except Damaged:
        raise
    except OSError as error:
        raise Damaged(f"it cannot be read: {error.strerror or error}") from None
    except Exception:  # zipfile fails in many ways with bytes that anyone may have written
        raise Damaged("it is no archive as torch.save writes it") from None


# --------------------------------------------------------------------------------------------------------- tensors


class _View(NamedTuple):
    """A tensor as a pickle tells of it: where its `count` numbers are, and which of them it has."""

    key: str
    count: int
    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    is_conjugated: bool
    is_negated: bool


def _view(told: Any, dtype: torch.dtype) -> _View:
    """Of a call of one of torch's two functions that make a tensor, as Tensor.__reduce_ex__ writes it."""
    if type(told) is not Call or told.name not in (_TYPED, _UNTYPED) or told.state is not None:
        raise Damaged("it holds something else than a tensor")
    is_typed = told.name is _TYPED
    if len(told.args) not in ((6, 7) if is_typed else (7, 8)):
        raise Damaged("it holds something else than a tensor")
    storage, first, size, stride = told.args[:4]
    key, count, kind = _storage(storage)
    found = _STORAGES.get(kind) if is_typed else _DTYPES.get(_name(told.args[6])) if kind is _BYTES else None
    if found != dtype:
        raise Damaged(f"a tensor of {dtype} is one of {found or 'something else'} in its file")
    if not is_typed:
        count, left = divmod(count, dtype.itemsize)
        if left:
            raise Damaged("a tensor has a part of a number")
    are_numbers = all(map(_is_whole, (count, first))) and _are_whole(size) and _are_whole(stride)
    if not are_numbers or len(size) != len(stride):
        raise Damaged("a tensor has neither size nor strides")
    more = told.args[6 if is_typed else 7 :]
    return _View(key, count, first, size, stride, *_marks(more[0] if more else None))


def _storage(told: Any) -> tuple[str, int, Name]:
    id_ = told.id if type(told) is Reference else None
    if type(id_) is not tuple or len(id_) != 5 or id_[0] != "storage" or type(id_[1]) is not Name:
        raise Damaged("a tensor has no storage")
    kind, key, count = id_[1], id_[2], id_[4]
    if type(key) is not str or not _is_whole(count):
        raise Damaged("a tensor has no storage")
    return key, count, kind


def _marks(told: Any) -> tuple[bool, bool]:
    """Whether all its numbers are to be conjugated, and negated."""
    if told is None:
        return False, False
    if type(told) is not Pairs or len(told) > 4 or not all(key in ("conj", "neg") for key in told[::2]):
        raise Damaged("a tensor has more to it than its numbers")
    marks = dict(zip(told[::2], told[1::2], strict=True))
    return marks.get("conj") is True, marks.get("neg") is True


def _name(told: Any) -> Any:
    return told if type(told) is Name else None


def _are_whole(told: Any) -> bool:
    return type(told) is tuple and len(told) <= 64 and all(map(_is_whole, told))


def _is_whole(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**63
