"""Signals around the fork server. It loads this last, and then whatever it forks hears Ctrl-C as any process does.

The server itself starts with signals blocked (`launching.start_fork_server`): a terminal sends Ctrl-C to it, too, and
in the seconds in which it loads torch it would end with a traceback.
"""

import signal
import threading

HELD = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}


def hear() -> None:
    """What came while signals were blocked is forgotten: it was for the process that started this one."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for number in blocked.intersection(HELD):
        after = signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
        signal.signal(number, after)


def deafened(name: str) -> str:
    """A process that reads this as its name is deaf to Ctrl-C from then on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return name


if hasattr(signal, "pthread_sigmask") and threading.current_thread() is threading.main_thread():
    hear()
