"""The command `longring`, and `python -m longring`."""

import signal

from .interrupts import end_at_once


def main() -> None:
    """Run it; Ctrl-C is answered while it is still loaded, too."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    from .cli import main as command

    command()


if __name__ == "__main__":
    main()
