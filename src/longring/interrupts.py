"""Ctrl-C, raised only where it can be dealt with: not between the start of something and the note that it was started.

Python raises KeyboardInterrupt between any two instructions of the main thread, also within `except` and `finally`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 130  # the exit code


def end_at_once(number: int, frame: FrameType | None) -> None:
    """A handler for what has nothing to clean up yet, nor loaded what would say so."""
    os.write(2, b"stopped\n")
    os._exit(STOPPED)


@contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Call what this yields where Ctrl-C may be raised; where it came last, it is raised behind this block.

    Only the main thread hears signals. What ignores Ctrl-C, or has a handler that Python does not know, keeps it.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    came: list[int] = []

    def hear() -> None:
        while came:
            before(came.pop(0), sys._getframe())

    def hold_back(number: int, frame: FrameType | None) -> None:
        came.append(number)

    signal.signal(signal.SIGINT, hold_back)
    try:
        yield hear
    finally:
        signal.signal(signal.SIGINT, before)
        hear()
