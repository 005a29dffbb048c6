"""A shelf: what was made once for a kind of call, the latest used kept, as much of it as memory allows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shelf(Generic[T]):
    """By weight, not by number: of documents that are new at every step a thousand kinds would be gigabytes."""

    def __init__(self, most: int, weigh: Callable[[T], int]) -> None:
        self._most, self._weigh, self._weight = most, weigh, 0
        self._found: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.RLock()  # ranks may be threads; to make one thing may take another

    def find(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
            made = self._found[key] = make()
            self._weight += self._weigh(made)
            self._make_room()
            return made

    def clear(self) -> None:
        with self._lock:
            self._found.clear()
            self._weight = 0

    def _make_room(self) -> None:
        while self._weight > self._most and len(self._found) > 1:
            _, dropped = self._found.popitem(last=False)
            self._weight -= self._weigh(dropped)
