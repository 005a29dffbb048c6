"""Ctrl-C while one call of a kernel takes minutes: Python hears of it only when the call is over."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

STOPPED = 130


@contextmanager
def heard_within(seconds: float) -> Iterator[None]:
    """For commands that have nothing to clean up: where Ctrl-C did not end them after so long, a thread does."""
    if threading.current_thread() is not threading.main_thread():  # signals are heard elsewhere
        yield
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading, seconds), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writing.close()


def _watch(reading: socket.socket, seconds: float) -> None:
    with reading:
        while heard := reading.recv(1):
            if heard[0] == signal.SIGINT:
                time.sleep(seconds)
                sys.stderr.write("stopped\n")
                sys.stderr.flush()
                os._exit(STOPPED)
