"""Being asked to stop: SIGTERM or SIGINT, to a rank itself or to the process that started it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ..launching import start_fork_server

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    """Whether this rank was asked to stop: by a signal, or by the file that `passed_on` leaves for all of them."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._heard = False

    @property
    def is_asked(self) -> bool:
        return self._heard or (self._file is not None and self._file.exists())

    def hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Meanwhile signals end nothing. Elsewhere than in the main thread Python hears none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.hear) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def passed_on(file: Path) -> Iterator[Path]:
    """In the process that starts ranks: the first signal asks them to stop, the second one does not wait for them."""
    start_fork_server(ignoring=(signal.SIGTERM,))  # or a signal to all would end it, and the word of how ranks ended

    def hear(number: int, frame: FrameType | None) -> None:
        if file.exists():
            raise KeyboardInterrupt
        file.touch()

    before: dict[int, Any] = {number: signal.signal(number, hear) for number in SIGNALS}
    try:
        yield file
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
