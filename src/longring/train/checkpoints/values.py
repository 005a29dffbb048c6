"""What a state may consist of: dicts and lists of strided tensors and of values that are read back without any code."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ArgumentError

_PLAIN = (type(None), bool, int, float, str, bytes)


def check(key: str, value: Any) -> None:
    """Refuse before it is written what could not be read."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise ArgumentError(f"{key} is a tensor of layout {value.layout}; a checkpoint holds strided ones")
        return
    odd = _odd_one(value)
    if odd is not None:
        raise ArgumentError(
            f"{key} has a {type(odd).__module__}.{type(odd).__qualname__}, which cannot be read back without running "
            "code; a checkpoint holds tensors, None, bool, int, float, str, bytes, and lists, tuples and dicts of them"
        )


def _odd_one(value: Any) -> Any:
    """Types are compared exactly: numpy's float64 is a float too, but is pickled as a call of numpy's."""
    if type(value) in (list, tuple):
        inner = value
    elif type(value) is dict:
        inner = [*value.keys(), *value.values()]
    else:
        return None if type(value) in _PLAIN else value
    return next((odd for odd in map(_odd_one, inner) if odd is not None), None)
