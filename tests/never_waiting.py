"""For tests on a GPU: whatever makes the host wait for it is an error meanwhile."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def never_waiting() -> Iterator[None]:
    """The mode is the process's, and torch warns of it each time: it goes back whatever happens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
