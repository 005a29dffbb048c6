"""Arguments that are whole numbers, refused in the same words wherever they are not."""

from __future__ import annotations

from typing import Any

from ..errors import ArgumentError


def whole(value: Any, name: str, *, least: int, most: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        limit = "" if most is None else f" to {most}"
        raise ArgumentError(f"{name} must be a whole number from {least}{limit}, got {value!r}")
    if value >= 2**63:
        raise ArgumentError(f"{name} must be below 2**63, got {value}")
    return value
