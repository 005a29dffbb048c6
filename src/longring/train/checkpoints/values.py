"""What a state may consist of: dicts and lists of strided tensors and of values that are read back without any code."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ArgumentError
from .unpickling import Call, Name, Pairs, Unreadable

DEEPEST = 100  # lists, tuples and dicts of a value within each other
MOST_AGAIN = 1_000_000  # parts of lists that stand in a value more than once, and take no bytes for it
MOST_KEYS = 10_000  # of a dict, where they are not all text
LARGEST_KEY = 2**60  # of whole numbers that hash to themselves
MOST_OTHER_KEYS = 100  # of a dict, that are neither text nor such numbers
_PLAIN = (type(None), bool, int, float, str, bytes)
_ENCODED = Name("_codecs", "encode")  # how bytes are written in the protocol of torch.save
_EMPTY = Name("__builtin__", "bytes")
NAMES = (_ENCODED, _EMPTY)


def check(key: str, value: Any) -> None:
    """Refuse before it is written what could not be read."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise ArgumentError(f"{key} is a tensor of layout {value.layout}; a checkpoint holds strided ones")
        return
    try:
        _Walk().plain(value)
    except Unreadable as why:
        raise ArgumentError(
            f"{key} has {why}, which cannot be read back without running code; a checkpoint holds tensors, None, bool, "
            f"int, float, str, bytes, and lists, tuples and dicts of them, at most {DEEPEST} within each other"
        ) from None


def plain(told: Any) -> Any:
    """The value that `unpickling.load` tells of."""
    return _Walk().plain(told)


class _Walk:
    """Through a value, as it is or as a pickle tells of it, to a copy of it."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.left, self.depth = MOST_AGAIN, 0

    def plain(self, told: Any) -> Any:
        """Types are compared exactly: numpy's float64 is a float too, but is pickled as a call of numpy's."""
        kind = type(told)
        if kind in _PLAIN:
            return told
        if kind is Call:
            return _bytes(told)
        if kind not in (list, tuple, dict, Pairs):
            raise Unreadable(f"a {kind.__module__}.{kind.__qualname__}")
        inner = [part for pair in told.items() for part in pair] if kind is dict else told
        if id(told) in self.seen:
            self.left -= len(inner) + 1
        self.seen.add(id(told))
        self.depth += 1
        if self.left < 0:
            raise Unreadable(f"more than {MOST_AGAIN} parts of the same lists again and again")
        if self.depth > DEEPEST:
            raise Unreadable(f"more than {DEEPEST} lists in lists")
        made = [self.plain(part) for part in inner]
        self.depth -= 1
        if kind in (list, tuple):
            return kind(made)
        return _dict(made)


def _bytes(told: Call) -> bytes:
    if told.name is _EMPTY and told.args == ():
        return b""
    is_text = told.name is _ENCODED and len(told.args) == 2 and all(type(part) is str for part in told.args)
    if not is_text or told.args[1] != "latin1":
        raise Unreadable(f"a call of {told.name}")
    try:
        return told.args[0].encode("latin1")
    except UnicodeEncodeError:
        raise Unreadable("bytes that are none") from None


def _dict(made: list[Any]) -> dict[Any, Any]:
    """Text and bytes hash by a secret; of other keys one could write many that all meet: each would look at all."""
    keys = made[::2]
    if len(keys) > MOST_KEYS and not all(type(key) is str for key in keys):
        raise Unreadable(f"a dict of more than {MOST_KEYS} keys that are no text")
    if sum(not _is_spread(key) for key in keys) > MOST_OTHER_KEYS:
        raise Unreadable(f"a dict of more than {MOST_OTHER_KEYS} keys that are neither text nor numbers below 2**60")
    try:
        return dict(zip(keys, made[1::2], strict=True))
    except TypeError:
        raise Unreadable("a dict whose keys are lists") from None


def _is_spread(key: Any) -> bool:
    return type(key) in (str, bytes) or (type(key) is int and abs(key) < LARGEST_KEY)
