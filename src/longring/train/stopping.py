"""Being asked to stop: SIGTERM, SIGINT or a closed terminal, of a rank itself or of the process that started it.

A shell and the system may both tell of a closed terminal: it asks to stop, however often.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ..launching import start_fork_server

SIGNALS = (signal.SIGTERM, signal.SIGINT)
HANGUPS = tuple(number for number in signal.Signals if number.name == "SIGHUP")  # not every system has it


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
        before = {number: signal.signal(number, self.hear) for number in _heard()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def passed_on(file: Path) -> Iterator[Path]:
    """In the process that starts ranks: the first signal asks them to stop, the second one does not wait for them."""
    heard = _heard()  # those to all would end the fork server, and the word of how ranks ended; ranks inherit that
    start_fork_server(ignoring=tuple(number for number in heard if number != signal.SIGINT))

    def hear(number: int, frame: FrameType | None) -> None:
        if number in HANGUPS:
            fall_silent()
        elif file.exists():
            raise KeyboardInterrupt
        file.touch()

    before: dict[int, Any] = {number: signal.signal(number, hear) for number in heard}
    try:
        yield file
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fall_silent() -> None:
    """Whatever is printed from now on goes nowhere, unless it goes to a file: nobody is left to read it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.dup2(nowhere, number)
    os.close(nowhere)


def _heard() -> tuple[signal.Signals, ...]:
    """Where nohup says that a closed terminal is to be ignored, it is."""
    return *SIGNALS, *(number for number in HANGUPS if signal.getsignal(number) is not signal.SIG_IGN)
