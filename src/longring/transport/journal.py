"""What was sent, when, and what happened last: timings on request, a flight record in debug mode."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Entry:
    """One post: what for, how much, and when, in seconds of the monotonic clock."""

    what: str
    bytes_sent: int
    bytes_received: int
    posted_at: float
    done_at: float | None = None  # None while it is under way

    @property
    def seconds(self) -> float | None:
        return None if self.done_at is None else self.done_at - self.posted_at


@dataclass
class Journal:
    """Every post of a while, in order."""

    entries: list[Entry] = field(default_factory=list)

    @property
    def bytes_sent(self) -> int:
        return sum(entry.bytes_sent for entry in self.entries)


class FlightRecord:
    """The last events of this rank, kept only with LONGRING_DEBUG=1."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._events: deque[dict[str, Any]] | None = deque(maxlen=200) if _is_debugging() else None

    def note(self, event: str, **facts: Any) -> None:
        if self._events is not None:
            self._events.append({"time": time.time(), "rank": self._rank, "event": event, **facts})

    def written(self) -> str:
        """Where the record was written to, as the end of an error's message; nothing if there is none."""
        if self._events is None:
            return ""
        try:
            handle, path = tempfile.mkstemp(prefix=f"longring-rank{self._rank}-", suffix=".jsonl", text=True)
            with os.fdopen(handle, "w") as file:
                file.writelines(json.dumps(event) + "\n" for event in list(self._events))
        except OSError as error:  # a full disk must not hide the error that is being reported
            return f"; the flight record could not be written: {error}"
        return f"; flight record: {path}"


def _is_debugging() -> bool:
    return os.environ.get("LONGRING_DEBUG", "") not in ("", "0")
