"""Refusals that modules and models share: sizes, switches and positive numbers."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ArgumentError


def check_size(name: str, size: Any) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ArgumentError(f"{name} must be a whole number of at least 1, got {size!r}")


def check_bools(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ArgumentError(f"{name} must be True or False, got {value!r}")


def check_positive(name: str, value: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ArgumentError(f"{name} must be a positive number, got {value!r}")
