"""Names for what a rank does, step by step, for whoever watches: torch.profiler, NVTX, `longring profile`.

Where nobody watches nothing is named: no text is made, and a step pays for a look at three flags.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.autograd.profiler as torch_profiler
from torch import Tensor

from ..transport.contract import Conversation, Pending, Receives, Sends

if TYPE_CHECKING:
    from .contract import Journey

# nsys tells its programs of itself; a range that nobody records is cheap, but its text is not
_is_for_nsys = torch.version.cuda is not None and any(
    os.environ.get(name, "") not in ("", "0") for name in ("LONGRING_NVTX", "NSYS_PROFILING_SESSION_ID")
)
_VERBS = {"compute": "", "post": "post ", "wait": "wait for ", "merge": "merge "}
_NOTHING = nullcontext()


class Doing(NamedTuple):
    """What a rank is at, made into text only where somebody reads it."""

    journey: Journey
    phase: str  # "forward" or "backward"
    what: str
    step: int | None = None
    owner: int | None = None  # of the rows this is about

    @property
    def words(self) -> str:
        return self.what if self.owner is None else f"{self.what} of {self.owner}"

    def __str__(self) -> str:
        """As an error says it."""
        step = [] if self.step is None else [f"step {self.step}"]
        return ", ".join([self.journey.name, self.phase, *step, self.words])


class Activity(NamedTuple):
    """A stretch of a rank's time: of computing, posting, waiting or merging."""

    kind: str  # "compute", "post", "wait" or "merge"
    doing: Doing
    sends: Sends = ()
    receives: Receives = ()
    reads: tuple[Tensor, ...] = ()  # what is computed with

    def __str__(self) -> str:
        """As a profiler shows it: longring ring forward step 3: keys of 5."""
        doing = self.doing
        step = "" if doing.step is None else f" step {doing.step}"
        return f"longring {doing.journey.schedule} {doing.phase}{step}: {_VERBS[self.kind]}{doing.words}"


Watcher = Callable[[Activity], AbstractContextManager[object]]
_watchers: tuple[Watcher, ...] = ()
_turn = threading.Lock()


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Every activity of this process meanwhile is done in a context that the watcher makes, whatever its thread."""
    global _watchers
    with _turn:
        _watchers = (*_watchers, watcher)
    try:
        yield
    finally:
        with _turn:
            _watchers = tuple(one for one in _watchers if one is not watcher)


def is_watched() -> bool:
    return bool(_watchers) or torch_profiler._is_profiler_enabled or _is_for_nsys


def during(kind: str, doing: Doing | None, *reads: Tensor) -> AbstractContextManager[object]:
    """A context for computing or merging, with a name where somebody watches and it has one."""
    return _named(Activity(kind, doing, reads=reads)) if doing is not None and is_watched() else _NOTHING


def _named(activity: Activity) -> AbstractContextManager[object]:
    ranges = ExitStack()
    if torch_profiler._is_profiler_enabled:
        ranges.enter_context(torch_profiler.record_function(str(activity)))
    if _is_for_nsys:
        torch.cuda.nvtx.range_push(str(activity))
        ranges.callback(torch.cuda.nvtx.range_pop)
    for watcher in _watchers:
        ranges.enter_context(watcher(activity))
    return ranges


# ------------------------------------------------------------------------------------------------ messages


def posted(talk: Conversation, sends: Sends, receives: Receives, *, what: str, doing: Doing | None) -> Pending:
    """As `talk.post`; posting has a name, and so has waiting for what was posted."""
    if doing is None or not is_watched():
        return talk.post(sends, receives, what=what)
    with _named(Activity("post", doing, sends, receives)):
        pending = talk.post(sends, receives, what=what)
    return _Watched(pending, Activity("wait", doing))


class _Watched:
    def __init__(self, pending: Pending, activity: Activity) -> None:
        self._pending, self._activity = pending, activity

    def wait(self) -> None:
        with _named(self._activity):
            self._pending.wait()


def heard(talk: Conversation, doing: Doing) -> Conversation:
    """The same conversation; to leave it, which waits for the others' word, has a name."""
    return _Heard(talk, Activity("wait", doing)) if is_watched() else talk


class _Heard:
    def __init__(self, talk: Conversation, activity: Activity) -> None:
        self._talk, self._activity = talk, activity

    def post(self, sends: Sends, receives: Receives, *, what: str) -> Pending:
        return self._talk.post(sends, receives, what=what)

    def __enter__(self) -> Conversation:
        return self._talk.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _named(self._activity):
            self._talk.__exit__(kind, error, trace)
