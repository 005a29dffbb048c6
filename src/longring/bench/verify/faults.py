"""Faults, each in a world of processes made for it: as many as there are ranks, on the same machines and devices.

Every rank starts a process of its own for each fault, which none of those who started the ranks (torchrun, Slurm,
`longring.launch`) knows of: it may be killed or stopped, and the world that is verified stays whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import longring as lr

from .ranks import FAILED, NOT_RUN, PASSED, Add, Ranks, Row

STARTING = 150.0  # seconds that the processes have to load torch, meet and compute once
ENDING = 20.0  # seconds that a process has to end by itself after its last word
LOSSES = {"kill": "a rank is killed", "stop": "a rank is stopped", "leave": "a rank leaves"}
MISMATCHES = {name: f"another {name}" for name in ("dtype", "pattern", "length", "scale")}
SAID = {"dtype": "dtype is ", "pattern": "pattern is ", "length": "length is ", "scale": "scale is "}
TOKENS = 1021
PR_SET_PDEATHSIG = 1


def faults(ranks: Ranks, add: Add) -> None:
    """Mismatches share a world, a group for each; who is lost is lost in a world of its own."""
    for names in (list(MISMATCHES), *([name] for name in LOSSES)):
        wanted = [name for name in names if ranks.wanted.includes((MISMATCHES | LOSSES)[name])]
        rows = [Row("fault", (MISMATCHES | LOSSES)[name], NOT_RUN) for name in wanted]
        reason = _why_not(ranks)
        if rows and reason is None:
            reason = _played(ranks, dict(zip(wanted, rows, strict=True)))
        for row in rows:
            row.detail = row.detail if reason is None else reason
            add(row)


def _why_not(ranks: Ranks) -> str | None:
    if not ranks.wanted.faults:
        return "faults were not asked for; see --faults"
    return "a single rank has no other to lose" if ranks.size == 1 else ranks.why_not()


# ------------------------------------------------------------------------------------------------ beside each rank


def _played(ranks: Ranks, rows: dict[str, Row]) -> str | None:
    """Fill in the rows from a world of new processes; why there was none, if so."""
    victim = ranks.size - 1
    with contextlib.ExitStack() as held:
        port, problem = None, None
        if ranks.rank == 0:
            try:
                port = held.enter_context(_store_port())
            except (OSError, RuntimeError) as error:
                problem = f"no store for another world: {error}"
        port, problem = ranks.all_say((port, problem))[0]
        if port is None:
            return problem
        loses = ranks.rank == victim and not rows.keys() & MISMATCHES.keys()
        heard = _process(ranks, list(rows), port, held, is_awaited=not loses)
        every = ranks.all_say(heard)
    for name, row in rows.items():
        judge = _judge_mismatch if name in MISMATCHES else _judge_loss
        judge(ranks, name, row, every)
    return None


@contextlib.contextmanager
def _store_port() -> Any:
    """The port of a store in this process, at the address at which the world has met."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    yield port
    del store


def _process(ranks: Ranks, names: list[str], port: int, held: contextlib.ExitStack, *, is_awaited: bool) -> dict:
    """What this rank's process says of each fault, and how it ended. It is gone when `held` is left."""
    wanted = ranks.wanted
    job = {"names": names, "timeout": wanted.fault_timeout, "starting": STARTING, "device": ranks.device.type}
    environment = {**os.environ, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(job)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    held.callback(_end, process)
    if not is_awaited:
        return {}
    try:
        out, errors = process.communicate(timeout=STARTING + len(names) * (2 * wanted.fault_timeout + 10) + ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
    said = [json.loads(line) for line in out.splitlines() if line.startswith('{"fault"')]
    return {one["fault"]: one for one in said} | {"status": process.poll(), "tail": errors[-300:]}


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()  # one that is stopped, too
    process.communicate()


# ------------------------------------------------------------------------------------------------------- judgement


def _judge_mismatch(ranks: Ranks, name: str, row: Row, every: list[dict]) -> None:
    """All ranks raise Disagreement, within seconds, in one text that names what differs."""
    said = _said(row, name, dict(enumerate(every)))
    if said is None:
        return
    limit = ranks.wanted.disagreement
    texts = {one["text"] for one in said.values()}
    wrong = [_told(rank, one) for rank, one in said.items() if one["error"] != "Disagreement"]
    if not wrong and (len(texts) > 1 or SAID[name] not in next(iter(texts))):
        wrong = [f"{SAID[name]!r} is not in what ranks said: {' | '.join(sorted(texts))[:200]}"]
    _settle(row, said, wrong, limit, f"Disagreement that names it on {len(said)} of {ranks.size} ranks")


def _judge_loss(ranks: Ranks, name: str, row: Row, every: list[dict]) -> None:
    """All but the victim raise PeerLost, name it, and end by themselves."""
    victim = ranks.size - 1
    said = _said(row, name, {rank: heard for rank, heard in enumerate(every) if rank != victim})
    if said is None:
        return
    limit = ranks.wanted.fault_timeout + ranks.wanted.slack
    wrong = [
        _told(rank, one) for rank, one in said.items() if one["error"] != "PeerLost" or one["named"] not in (victim,)
    ]
    wrong += [
        f"rank {rank} did not end well ({heard['status']})"
        for rank, heard in enumerate(every)
        if rank != victim and heard["status"] != 0
    ]
    _settle(row, said, wrong, limit, f"PeerLost that names it on {len(said)} of {ranks.size - 1} other ranks")


def _said(row: Row, name: str, every: dict[int, dict]) -> dict[int, Any] | None:
    """By rank; None, and said in the row, where the fault did not come about or some rank did not come back."""
    silent = [rank for rank, heard in every.items() if name not in heard]
    if not silent:
        return {rank: heard[name] for rank, heard in every.items()}
    first = every[silent[0]]
    never_began = not any(one.get("began") for one in every.values())
    ended = "did not end" if first["status"] is None else f"ended with {first['status']}"
    row.status = NOT_RUN if never_began and len(silent) == len(every) else FAILED
    row.detail = f"{len(silent)} processes said nothing; rank {silent[0]}'s {ended}: {first['tail'].strip()[-150:]}"
    return None


def _told(rank: int, one: dict) -> str:
    return f"rank {rank}: {one['error'] or 'no error'} {one['text'][:120]}"


def _settle(row: Row, said: dict[int, Any], wrong: list[str], limit: float, right: str) -> None:
    seconds = {rank: one["seconds"] for rank, one in said.items()}
    latest = max(seconds, key=lambda rank: seconds[rank])
    row.numbers = {"seconds": [seconds[rank] for rank in sorted(seconds)], "limit": limit}
    if seconds[latest] > limit:
        wrong = [*wrong, f"rank {latest} raised after {seconds[latest]:.2f} s, and {limit:g} s are allowed"]
    row.status = FAILED if wrong else PASSED
    row.detail = "; ".join(wrong[:3]) or f"{right}, after {seconds[latest]:.2f} s at most ({limit:g} s are allowed)"


# ----------------------------------------------------------------------------------------------- in such a process


def main() -> None:
    job = json.loads(sys.argv[1])
    with contextlib.suppress(OSError, AttributeError):  # Linux: gone with the rank that started it, however that ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    lr.launch(_commit, job, backend="gloo" if job["device"] == "cpu" else "auto")


def _commit(job: dict[str, Any]) -> None:
    _say({"fault": "began"})
    for name in job["names"]:
        _say(_mismatch(job, name) if name in MISMATCHES else _loss(job, name))
    if job["names"][0] in LOSSES:
        sys.exit(0)  # without destroying the group, which might wait for who is lost


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _mismatch(job: dict[str, Any], name: str) -> dict[str, Any]:
    """A call on which all agree, then one in which the last rank differs."""
    group: Any = dist.new_group()
    _attention(job, group)(timeout=job["starting"])
    return _raised(job, name, _attention(job, group, odd=name if _is_last() else ""))


def _loss(job: dict[str, Any], name: str) -> dict[str, Any]:
    """A call with all ranks, then one of which the last rank makes the forward pass only."""
    call = _attention(job, dist.group.WORLD)
    call(timeout=job["starting"])
    return _raised(job, name, lambda: call(lambda: _strike(name) if _is_last() else None))


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def _strike(how: str) -> None:
    if how == "leave":
        sys.exit(0)
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def _raised(job: dict[str, Any], name: str, call: Callable[[], None]) -> dict[str, Any]:
    """What the call raised, and how long after all ranks began it."""
    control: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=job["starting"]))
    dist.barrier(control)
    began, error = time.perf_counter(), None
    try:
        call()
    except Exception as raised:  # whatever it is, it is told
        error = raised
    told = {"error": type(error).__name__ if error else None, "text": str(error or "").strip()[:2000]}
    return {"fault": name, "seconds": time.perf_counter() - began, "named": getattr(error, "rank", None)} | told


def _attention(job: dict[str, Any], group: Any, odd: str = "") -> Callable[..., None]:
    """Both passes of a causal ring; `odd` is what differs on this rank, `between` is called after the forward."""
    s = lr.Sharding(TOKENS + (odd == "length"), group, "zigzag")
    dtype = torch.bfloat16 if odd == "dtype" else torch.float32
    q, k, v = (torch.randn(1, s.local_length, 2, 64).to(job["device"], dtype).requires_grad_() for _ in range(3))
    pattern, scale = lr.Dense(causal=odd != "pattern"), 0.25 if odd == "scale" else 0.125

    def call(between: Callable[[], object] = lambda: None, timeout: float = job["timeout"]) -> None:
        options: dict[str, Any] = {"pattern": pattern, "sharding": s, "schedule": "ring", "timeout": timeout}
        out = lr.attention(q, k, v, scale=scale, **options)
        between()
        torch.autograd.grad(out.sum(), (q, k, v))

    return call


if __name__ == "__main__":
    main()
