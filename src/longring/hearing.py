"""Ctrl-C around the fork server. It loads this last, and then whatever it forks hears Ctrl-C as any process does.

The server itself starts deaf (`launching.start_fork_server`): a terminal sends Ctrl-C to it, too, and in the seconds in
which it loads torch it would end with a traceback.
"""

import signal
import threading

if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
