"""Triton 3.6's interpreter mended: numpy 2.4 stops its loops, and it multiplies bfloat16 as if integers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_prepare, _dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot


@contextmanager
def mended_interpreter() -> Iterator[None]:
    with (
        patch.object(interpreter, "_patch_lang_tensor", _prepared),
        patch.object(interpreter.InterpreterBuilder, "create_dot", _multiplied),
    ):
        yield


def _prepared(tensor, scope):
    _prepare(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _multiplied(self, a, b, *rest):
    return _dot(self, _widened(a), _widened(b), *rest)


def _widened(x):
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
