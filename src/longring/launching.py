"""Local ranks: one function in several processes of this machine, and what each of them returned.

The caller's process hosts the store at which the ranks meet, on loopback and a port the system chooses, so that
no rank's death takes the store with it and no two launches meet by mistake. A rank finds the environment that
torchrun would give it. It comes from a fork server that has torch loaded: a start takes tenths of a second.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import pickle
import re
import signal
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed.rendezvous import rendezvous

from .errors import ArgumentError, PeerLost, RankFailed, TransportError
from .hearing import deafened
from .interrupts import held_back

T = TypeVar("T")

GRACE = 5.0  # seconds that ranks have to raise by themselves, once one of them failed
WHERE = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
JOINING = 1800.0  # seconds that ranks have to come: as long as torch waits
HELLO = 0.02  # seconds between looks at who came
FAREWELL = 1.0  # seconds between asking a process to end and ending it
LOOPBACK = "127.0.0.1"
PRELOADED = ["torch", "torch.distributed", "longring.functional", "longring.hearing"]


def launch(
    program: Callable[..., T], *args: Any, ranks: int = 4, timeout: float | None = None, backend: str = "auto"
) -> list[T]:
    """Run `program(*args)` on local ranks, and return what each returned, in order of rank.

    Inside, the group of all ranks is `torch.distributed.group.WORLD`. The program is a function at the top level of a
    module or script; it, its arguments and its results are pickled. A script calls `launch` under
    `if __name__ == "__main__":`, since every rank imports the script.

    When a rank raises or dies, the others have a few seconds to notice, are then ended, and RankFailed tells of
    the rank that was first. `timeout` bounds the whole run, in seconds. No rank outlives this process.

    `backend="auto"` is NCCL where every rank has a GPU of its own, which is made its current device, and Gloo
    elsewhere. The cores are shared out: OMP_NUM_THREADS is cores / ranks, unless you set it.

    Under torchrun, or in a world that is already initialised, nothing is started: this process is one of the ranks. It
    joins that world, runs the program itself and returns `[its own result]`; how many ranks there are, and how long
    they may run, is then up to whoever started them.
    """
    _check(program, ranks, timeout, backend)
    if dist.is_initialized():
        return [program(*args)]
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return [_joined(program, args, backend)]
    chosen = _backend(backend, ranks)  # before anything starts, so that a refusal is raised here
    work = _pickled(program, args)
    return [pickle.loads(result) for result in _results(work, ranks, timeout, chosen)]


def _check(program: Any, ranks: Any, timeout: Any, backend: Any) -> None:
    if not callable(program):
        raise ArgumentError(f"program must be a function, got {program!r}")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ArgumentError(f"ranks must be a whole number of at least 1, got {ranks!r}")
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < math.inf):
        raise ArgumentError(f"timeout must be a positive number of seconds, or None for no limit; got {timeout!r}")
    if not isinstance(backend, str):
        raise ArgumentError(f'backend must be "auto" or the name of a backend of torch.distributed, got {backend!r}')


def _pickled(program: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    name = getattr(program, "__qualname__", repr(program))
    try:
        pickle.dumps(program)
    except Exception as error:
        raise ArgumentError(
            f"program {name} cannot be sent to another process ({error}); "
            "make it a function at the top level of a module or script, and give it what it needs as arguments"
        ) from None
    try:
        return pickle.dumps((program, args))
    except Exception as error:
        raise ArgumentError(f"the arguments of {name} cannot be sent to another process: {error}") from None


# A world that somebody else began


def _joined(program: Callable[..., T], args: tuple[Any, ...], backend: str) -> T:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    _join(_backend(backend, local_ranks))
    result = program(*args)
    dist.destroy_process_group()  # only after success: after an error it could wait for a peer that is gone
    return result


def _join(backend: str) -> None:
    """Become the rank that the environment says."""
    device = None
    if "nccl" in backend:  # where ranks may share GPUs there can be fewer of these
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store, rank, ranks = _met()
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, device_id=device)
    except MemoryError as error:  # as Gloo answers an address of a peer that is none
        raise TransportError(
            f"rank {rank} of {ranks} could not make its process group ({error}): memory ran out, or another program "
            "writes to the store at which the ranks meet. It has no password; let nobody else reach its port "
            "(docs/networks.md)"
        ) from error
    _wait_for_all(store, rank, ranks)


_known: dict[tuple[int | str | None, ...], tuple[dist.Store, int, int]] = {}


def _met() -> tuple[dist.Store, int, int]:
    """A part of the store that all ranks know, this one's number, and how many there are.

    The store is kept while this process lasts: a world that was left may be joined again, and where nobody else is the
    host of the store, it ends when rank 0 lets go of it. With another process as rank 0 it is another store.
    """
    where = os.getpid(), *(os.environ.get(name) for name in WHERE)
    if where in _known:
        store, rank, ranks = _known[where]
        with suppress(dist.DistNetworkError):
            return _fresh(store, rank, ranks), rank, ranks
    store, rank, ranks = _known[where] = next(rendezvous("env://"))
    return _fresh(store, rank, ranks), rank, ranks


def _wait_for_all(store: dist.Store, rank: int, ranks: int) -> None:
    """Gloo may call a rank connected while another still shakes hands, which fails if the first is done and gone.

    Rank 0, which may be the host of the store, leaves when nobody needs it any more.
    """
    others = range(1, ranks)
    if rank > 0:
        store.set(f"longring/joined/{rank}", "yes")
        store.wait(["longring/all joined"])
        store.set(f"longring/left/{rank}", "yes")
    elif ranks > 1:
        store.wait([f"longring/joined/{other}" for other in others])
        store.set("longring/all joined", "yes")
        store.wait([f"longring/left/{other}" for other in others])


def _fresh(store: dist.Store, rank: int, ranks: int) -> dist.Store:
    """A part of the store that nobody has written to.

    A world that is left and joined again has the same store, and so have ranks that torchrun starts anew (torch 2.13),
    with the addresses of those that are gone. How often that was may differ from machine to machine, so rank 0 makes
    up a name. Another rank says hello by a number that nobody knew before, which is how it knows that the answer is for
    it, and rank 0, by the name, that it was heard.
    """
    if rank > 0:
        hello = uuid.uuid4().hex
        store.set(f"longring/hello/{rank}", hello)
        name = _name(store, f"longring/answer/{hello}")
        store.set(f"longring/heard/{name}/{rank}", "yes")
        return dist.PrefixStore(f"longring/{name}", store)
    name, waiting, until = uuid.uuid4().hex, set(range(1, ranks)), time.monotonic() + JOINING
    while waiting:
        for other in sorted(waiting):
            if store.check([f"longring/hello/{other}"]):
                store.set(f"longring/answer/{_name(store, f'longring/hello/{other}')}", name)
        waiting = {other for other in waiting if not store.check([f"longring/heard/{name}/{other}"])}
        if waiting and time.monotonic() > until:
            raise PeerLost(f"{_spoken(sorted(waiting))} did not join this world of {ranks} in time", rank=min(waiting))
        time.sleep(HELLO if waiting else 0)
    return dist.PrefixStore(f"longring/{name}", store)


def _name(store: dist.Store, key: str) -> str:
    """What a rank made up, 32 hexadecimal digits. Nothing protects the store: another program may write to it."""
    found = store.get(key)
    if not re.fullmatch(rb"[0-9a-f]{32}", found):
        raise TransportError(
            f"the store at which the ranks meet has {found[:40]!r} under {key}, which no rank wrote: another program "
            "writes to it. It has no password; let nobody else reach its port (docs/networks.md)"
        )
    return found.decode()


def ranks_on_gpus(local_ranks: int) -> int:
    """How many of this machine's ranks can have a GPU: one for each; all of them where NCCL is told to share.

    NCCL can from 2.30 on, as an experiment, with NCCL_MULTI_RANK_GPU_ENABLE=1.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not devices or devices >= local_ranks or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return devices
    return local_ranks if dist.is_nccl_available() and nccl_version() >= (2, 30) else devices


def nccl_version() -> tuple[int, ...]:
    """The NCCL that runs, such as (2, 30, 7). torch.cuda.nccl.version() is the one torch was built with."""
    number = ctypes.c_int()
    with suppress(OSError, AttributeError):  # not loaded, or linked into torch
        if ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number)) == 0:
            return number.value // 10000, number.value // 100 % 100, number.value % 100
    return nccl.version()[:3]


def _backend(asked: str, local_ranks: int) -> str:
    devices = ranks_on_gpus(local_ranks)
    if asked == "auto":
        return "cpu:gloo,cuda:nccl" if devices >= local_ranks and dist.is_nccl_available() else "gloo"
    if "nccl" in asked and devices < local_ranks:
        raise ArgumentError(
            f"backend {asked!r} needs a GPU for each of this machine's {local_ranks} ranks, and there are {devices}"
        )
    return asked


# A world of our own, seen from the caller


class _Failure(NamedTuple):
    rank: int
    what: str  # completes "rank 2 ..."
    error_type: str | None = None
    error_text: str | None = None
    traceback_text: str | None = None
    signal: str | None = None
    is_consequence: bool = False  # of another rank's failure


class _Result(NamedTuple):
    pickled: bytes


@dataclass
class _Rank:
    """A started process, and the wire on which it says once how it went."""

    number: int
    process: Any
    wire: Connection
    said: _Result | _Failure | None = None

    def listen(self) -> None:
        """Take what it said, or the way it died. Its word comes first: a process ends after it spoke."""
        exit_code = self.process.exitcode
        if self.said is None and self.wire.poll():
            self.said = self._heard()
        if exit_code is not None and (self.said is None or (exit_code and isinstance(self.said, _Result))):
            self.said = _death(self.number, exit_code, gave_a_result=self.said is not None)

    def _heard(self) -> _Result | _Failure | None:
        try:
            return pickle.loads(self.wire.recv_bytes())
        except (EOFError, OSError):  # it died, perhaps in the middle of its word: its exit code will tell
            self.process.join()
            return None

    @property
    def is_over(self) -> bool:
        return self.said is not None and self.process.exitcode is not None


def _death(rank: int, exit_code: int, gave_a_result: bool) -> _Failure:
    after = "after it had given its result" if gave_a_result else "before it gave a result"
    if exit_code >= 0:
        hint = (
            "" if gave_a_result else '; if it never began, does the script call launch under if __name__ == "__main__"?'
        )
        return _Failure(rank, f"ended with exit code {exit_code} {after}{hint}")
    name = _signal_name(-exit_code)
    return _Failure(rank, f"was killed by {name} {after}", signal=name)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _results(work: bytes, ranks: int, timeout: float | None, backend: str) -> list[bytes]:
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    with _store_port() as port, _started(work, ranks, port, backend) as started:
        failures = _followed(started, deadline)
        if failures:
            raise _as_error(_first_cause(failures), ranks)
        unfinished = [rank.number for rank in started if not rank.is_over]
        if unfinished:
            raise RankFailed(
                f"{_spoken(unfinished)} of {ranks} had not ended after {timeout:g} s, the timeout", rank=unfinished[0]
            )
        return [rank.said.pickled for rank in started if isinstance(rank.said, _Result)]


@contextmanager
def _store_port() -> Iterator[int]:
    """The port of a store in this process, which only this machine can reach."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    yield port
    del store


@contextmanager
def _started(work: bytes, ranks: int, port: int, backend: str) -> Iterator[list[_Rank]]:
    """The ranks, none of which is left when this block is."""
    started: list[_Rank] = []
    hears = _hears()
    try:
        for rank in range(ranks):
            with held_back():  # a rank of whose work half was written would say so in a traceback
                started.append(_start(work, rank, _environment(rank, ranks, port), backend, hears))
        yield started
    finally:
        _end(started)


def _start(work: bytes, rank: int, environment: Mapping[str, str], backend: str, hears: bool) -> _Rank:
    context = _context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_live, args=(work, rank, environment, backend, theirs, hears), name=_Deaf(f"longring rank {rank}")
    )
    try:
        process.start()
    finally:
        theirs.close()  # or its end would never be seen
    return _Rank(rank, process, ours)


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    start_fork_server()
    return multiprocessing.get_context("forkserver")


def start_fork_server(*, ignoring: tuple[signal.Signals, ...] = ()) -> None:
    """Unless it runs, or there is none on this system. Ctrl-C does not end it while it loads, nor ever what it ignores.

    Here a signal that comes meanwhile is heard afterwards: blocked it waits, while to be ignored would lose it.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    resource_tracker.ensure_running()  # the server would start it, which unblocks signals
    is_main = threading.current_thread() is threading.main_thread()  # where alone handlers may be set
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ignoring})
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignoring if is_main}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The caller's environment as it is now (the fork server has that of its first call), and what torchrun adds."""
    added = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is there already: rank 0 is not to host it
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    wanted = {"OMP_NUM_THREADS": max(1, _cores() // ranks), **_loopback_for_gloo()}
    unasked = {name: value for name, value in wanted.items() if name not in os.environ}
    return {**os.environ, **{name: str(value) for name, value in (added | unasked).items()}}


def _loopback_for_gloo() -> dict[str, str]:
    """Gloo would listen where the host's name points to, which is often nowhere."""
    names = {name for _, name in socket.if_nameindex()}
    found = sorted(names & {"lo", "lo0"})
    return {"GLOO_SOCKET_IFNAME": found[0]} if found else {}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _followed(started: list[_Rank], deadline: float) -> list[_Failure]:
    """The failures, in the order in which they came, once all ranks ended, the deadline or the grace has passed."""
    failures: list[_Failure] = []
    while time.monotonic() < deadline:
        for rank in started:
            rank.listen()
            if isinstance(rank.said, _Failure) and rank.said not in failures:
                failures.append(rank.said)
                deadline = min(deadline, time.monotonic() + GRACE)
        waiting = [rank for rank in started if not rank.is_over]
        if not waiting:
            break
        _wait_for_any(waiting, deadline)
    return failures


def _wait_for_any(waiting: list[_Rank], deadline: float) -> None:
    left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
    wires = [rank.wire for rank in waiting if rank.said is None]
    wait([*wires, *(rank.process.sentinel for rank in waiting)], left)


def _first_cause(failures: list[_Failure]) -> _Failure:
    """The first that does not come of another one; of equals, min takes the first."""
    return min(failures, key=lambda failure: failure.is_consequence)


def _as_error(failure: _Failure, ranks: int) -> RankFailed:
    error = RankFailed(
        f"rank {failure.rank} of {ranks} {failure.what}",
        rank=failure.rank,
        error_type=failure.error_type,
        error_text=failure.error_text,
        traceback_text=failure.traceback_text,
        signal=failure.signal,
    )
    if failure.traceback_text:
        error.add_note(f"on rank {failure.rank}:\n{failure.traceback_text}")
    return error


def _spoken(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _end(started: list[_Rank]) -> None:
    """Ask, then insist: a stopped process hears only the latter."""
    for rank in started:
        if rank.process.is_alive():  # asked here, since the number of a process that is gone may be another's
            rank.process.terminate()
    until = time.monotonic() + FAREWELL
    for rank in started:
        rank.process.join(max(0.0, until - time.monotonic()))
    for rank in started:
        if rank.process.is_alive():
            rank.process.kill()
        rank.process.join()
        rank.process.close()
        rank.wire.close()


# A world of our own, seen from a rank


class _Deaf(str):
    """A process's name, which is the first thing it reads: with that it is deaf to Ctrl-C, before it imports anything.

    Around its program a rank has nothing to say to Ctrl-C: the caller hears it as well, and ends the rank. Left to
    itself, Python would print the beginning of a traceback, and as much of the rest as there was time for.
    """

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return deafened, (str(self),)


def _hears() -> bool:
    """Whether a program hears Ctrl-C before it asks to: not where the caller hears nothing, or has plans of its own."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _live(work: bytes, rank: int, environment: Mapping[str, str], backend: str, wire: Connection, hears: bool) -> None:
    _leave_with_the_caller()
    os.environ.clear()
    os.environ.update(environment)
    _set_threads()
    outcome = pickle.dumps(_outcome(work, rank, backend, hears))
    with suppress(BrokenPipeError):  # the caller did not wait
        wire.send_bytes(outcome)


def _leave_with_the_caller() -> None:
    """The fork server is this process's parent, and stays as long as we do: only the caller's pipe tells of its end."""
    caller = multiprocessing.parent_process()
    assert caller is not None

    def watch() -> None:
        caller.join()
        os._exit(1)

    threading.Thread(target=watch, name="longring watches the caller", daemon=True).start()


def _set_threads() -> None:
    """torch read the variable when the fork server loaded it, so it must be told."""
    first = os.environ["OMP_NUM_THREADS"].split(",")[0]
    if first.isdecimal() and int(first) > 0:
        torch.set_num_threads(int(first))


def _outcome(work: bytes, rank: int, backend: str, hears: bool) -> _Result | _Failure:
    try:
        program, args = _unpickled(work)
        _join(backend)
        if hears:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        result = pickle.dumps(program(*args))
        dist.destroy_process_group()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return _Result(result)
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        kind, text = type(error).__name__, str(error)
        shown = "".join(traceback.format_exception(error))
        return _Failure(rank, f"raised {kind}: {text}", kind, text, shown, is_consequence=_comes_of_another(error))


def _comes_of_another(error: BaseException | None) -> bool:
    """Whether it began with a peer that was gone. Gloo has no error of its own, only its source's path in the text."""
    while error is not None:
        if isinstance(error, (PeerLost, dist.DistError)) or "/gloo/" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _unpickled(work: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    try:
        return pickle.loads(work)
    except AttributeError as error:
        raise ArgumentError(
            f"a new process does not find the program or its arguments ({error}); define them in a module or in a "
            "script file, not in a notebook, at a prompt, or under if __name__ == '__main__'"
        ) from error
