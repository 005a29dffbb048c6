"""Ctrl-C at any moment of a command: one word, exit code 130, and nothing that Python itself would print about it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..interrupts import STOPPED, end_at_once

_AGAIN = 0.02  # seconds until a signal that came at a bad moment is looked at again
_PATIENCE = 3.0  # seconds that an import may go on
_SAME_PRESS = 0.5  # seconds in which a terminal and a program that passes signals on may send two for one Ctrl-C
_FRAGILE = ("<frozen importlib", "weakref")  # files whose functions Python calls where it prints what they raise


class Interrupts:
    """KeyboardInterrupt for Ctrl-C, but not in an import or a finaliser; at a second Ctrl-C the process ends at once.

    What is raised in the callbacks of an import Python prints, and forgets; what is raised elsewhere in an import may
    leave a package half loaded, which then complains in words of its own. So it is raised once the import is over.
    """

    def __init__(self) -> None:
        self._base: FrameType | None = None
        self._came: float | None = None
        self._is_raised = self._is_said = False

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, end_at_once):
            self._base = sys._getframe(1)
            signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        """Who was stopped stays so: a second Ctrl-C comes while Python shuts down."""
        if self._base is not None and not self._is_raised:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._base = None

    def say(self) -> int:
        if not self._is_said:
            self._is_said = True
            print("stopped", file=sys.stderr)
        return STOPPED

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._came = now if self._came is None else self._came
        if self._is_raised:
            if now - self._came > _SAME_PRESS:
                self._end_at_once()
        elif not self._is_fragile(frame):
            self._is_raised = True
            raise KeyboardInterrupt
        elif now - self._came > _PATIENCE:
            self._end_at_once()
        elif hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)

    def _is_fragile(self, frame: FrameType | None) -> bool:
        while frame is not None and frame is not self._base:
            code = frame.f_code
            if code.co_name == "__del__" or any(name in code.co_filename for name in _FRAGILE):
                return True
            frame = frame.f_back
        return False

    def _end_at_once(self) -> None:
        if not self._is_said:
            os.write(2, b"stopped\n")
        os._exit(STOPPED)


@contextmanager
def heard_within(seconds: float) -> Iterator[None]:
    """For commands that have nothing to clean up: where Ctrl-C did not end them after so long, a thread does."""
    if threading.current_thread() is not threading.main_thread():  # signals are heard elsewhere
        yield
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    is_over = threading.Event()
    threading.Thread(target=_watch, args=(reading, is_over, seconds), daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        signal.set_wakeup_fd(before)
        writing.close()


def _watch(reading: socket.socket, is_over: threading.Event, seconds: float) -> None:
    with reading:
        while heard := reading.recv(1):
            if heard[0] == signal.SIGINT and not is_over.wait(seconds):
                sys.stderr.write("stopped\n")
                sys.stderr.flush()
                os._exit(STOPPED)
