"""Every error longring raises on purpose. The tree is the documentation:

LongringError
├── ArgumentError          (ValueError)  an argument has a value nothing can be computed from
│   ├── PatternError                     the pattern contradicts itself, or the sequence it is used on
│   ├── LayoutError                      the tokens cannot be dealt as asked, or were dealt otherwise
│   ├── KernelRefusal                    the kernel asked for by name cannot compute this exactly
│   ├── ScheduleRefusal                  the schedule asked for by name cannot run here
│   └── NotBuilt                         a known feature of attention that longring does not have yet
├── CheckpointError        (RuntimeError) a checkpoint could not be written, or cannot be trusted
├── DataChanged            (RuntimeError) a file of the data is not what it was when it was opened
├── NotFinite              (ArithmeticError) a tile gave nan or inf; looked for with LONGRING_DEBUG=1 alone
└── TransportError         (RuntimeError) a tensor did not reach the rank it was sent to
    ├── PeerLost                         another rank failed, or stayed silent until the timeout
    ├── Disagreement                     the ranks did not make the same call
    └── RankFailed                       a rank that `launch` started raised, died or did not end in time

and two warnings, RowsLeftOut: the pattern is allowed, but some rows of it see no key at all; and HeadsForTokens: the
tensors are allowed, but look like [batch, heads, n, d].
"""

from collections.abc import Iterator
from contextlib import contextmanager


class LongringError(Exception):
    """Base of every deliberate error, so that callers can catch one name."""


class ArgumentError(LongringError, ValueError):
    """An argument has a value nothing can be computed from."""


class PatternError(ArgumentError):
    """The pattern contradicts itself, or the sequence it is used on."""


class LayoutError(ArgumentError):
    """The tokens cannot be dealt as asked, or were dealt otherwise than the sharding says."""


class KernelRefusal(ArgumentError):
    """The kernel asked for by name cannot compute this exactly."""


class ScheduleRefusal(ArgumentError):
    """The schedule asked for by name cannot run here."""


class NotBuilt(ArgumentError):
    """A known feature of attention that longring does not have yet: refused, never ignored."""


class CheckpointError(LongringError, RuntimeError):
    """A checkpoint could not be written, or cannot be trusted. Those that were there before are as they were."""


class DataChanged(LongringError, RuntimeError):
    """A file of the data is not what it was when it was opened: what was learned from is not there any more."""


class NotFinite(LongringError, ArithmeticError):
    """A tile gave nan or inf. Looked for with LONGRING_DEBUG=1 alone, since looking costs as much as computing."""


class TransportError(LongringError, RuntimeError):
    """A tensor did not reach the rank it was sent to."""


class PeerLost(TransportError):
    """Another rank failed, or stayed silent until the timeout.

    `rank` is the one suspected, None where nothing points to one; `phase_and_step` is what this rank waited in.
    """

    def __init__(self, message: str, *, rank: int | None = None, phase_and_step: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.phase_and_step = phase_and_step


class Disagreement(TransportError):
    """The ranks did not make the same call: the message, the same on all, says who differs and in what."""


class RankFailed(TransportError):
    """A rank that `launch` started raised, died or did not end in time.

    What is known of it: `rank`; `error_type`, `error_text`, `traceback_text` if it raised; `signal` if it was killed.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        error_type: str | None = None,
        error_text: str | None = None,
        traceback_text: str | None = None,
        signal: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.error_type = error_type
        self.error_text = error_text
        self.traceback_text = traceback_text
        self.signal = signal


class RowsLeftOut(UserWarning):
    """The pattern is allowed, but some rows of it see no key at all."""


class HeadsForTokens(UserWarning):
    """The tensors are allowed, but look as if heads and tokens had changed places: [batch, heads, n, d]."""


@contextmanager
def naming_rank(rank: int, ranks: int) -> Iterator[None]:
    """Begin what a rank's arguments are refused with by the rank, where there are several."""
    try:
        yield
    except ArgumentError as error:
        if ranks == 1 or str(error).startswith("rank "):
            raise
        raise type(error)(f"rank {rank}: {error}") from None
