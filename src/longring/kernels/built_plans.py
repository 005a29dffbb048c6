"""Plans that an operation builds for each new size, and when to build one: never for data that comes but once.

cuDNN takes 30 to 70 ms for a plan, forward and backward each, and keeps it. In a process that computes the same sizes
again and again that is nothing; with packed documents or lengths that change at every step it is a hundred times the
attention itself. What comes next is not known, so building is paid for like anything one may rent or buy: by the time
that calls of this kind have lost without the plan, and out of a small allowance, which plans that are used earn back.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

SECONDS = 0.06  # to build one, on an H200 with cuDNN 9.19
ALLOWANCE = 32 * SECONDS  # what may be built in advance: a ring or LongNet of one kind, forward and backward

Built = tuple[Any, ...]
"""What a plan is built for: pass, dtype, whether there is a gradient of lse, heads to a kv head, size."""


class BuiltPlans:
    """The plans of this process, and what is left of the allowance."""

    def __init__(self) -> None:
        self._built: set[Built] = set()
        self._allowance = ALLOWANCE
        self._lock = threading.Lock()  # ranks may be threads

    def __contains__(self, one: Built) -> bool:
        return one in self._built

    def clear(self) -> None:
        with self._lock:
            self._built, self._allowance = set(), ALLOWANCE

    def bought(self, needed: Collection[Built], lost: float) -> float | None:
        """Count what is missing as built, given the seconds that calls have `lost` without: what it cost in advance.

        None where it is not worth it yet.
        """
        with self._lock:
            price = max(0.0, SECONDS * len(set(needed) - self._built) - lost)
            if price > self._allowance:
                return None
            self._allowance -= price
            self._built |= set(needed)
            return price

    def paid_back(self, seconds: float) -> None:
        """Plans that were built in advance have saved so much."""
        with self._lock:
            self._allowance = min(ALLOWANCE, self._allowance + seconds)
