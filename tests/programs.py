"""What the ranks of test worlds do: functions of (group, ...), found by name in a process of their own.

`group` is a torch group, or one of the transports that are groups themselves.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from longring.errors import TransportError
from longring.transport.select import transport_for

TIMEOUT: float | None = 20.0  # of programs in which nothing goes wrong
DEVICE = "cpu"  # where messages are


def number(value: float) -> torch.Tensor:
    return torch.tensor([float(value)], device=DEVICE)


# --------------------------------------------------------------------------------------------- what is promised


def ring(group: Any, calls: int = 1, *, timeout: float | None = TIMEOUT, terms: dict | None = None) -> list:
    return around(transport_for(group), calls=calls, timeout=timeout, terms=terms)


def around(
    transport: Any,
    *,
    calls: int = 1,
    floats: int = 16,
    timeout: float | None = TIMEOUT,
    terms: dict | None = None,
    before_post: Callable[[int, int], None] = lambda call, step: None,
) -> list:
    """Every rank's number goes once around, in each of `calls` calls; returns the numbers met."""
    rank, size, met = transport.rank, transport.size, []
    for call in range(calls):
        block, arriving = (torch.full((floats,), float(rank), device=DEVICE) for _ in range(2))
        with transport.converse(terms or {"floats": floats}, timeout=timeout) as talk:
            for step in range(1, size):
                before_post(call, step)
                what = f"call {call}, step {step}"
                pending = talk.post([((rank + 1) % size, block)], [((rank - 1) % size, arriving)], what=what)
                pending.wait()
                block, arriving = arriving, block
                met.append(block.unique().tolist())
    return met


def three_letters(group: Any) -> list | None:
    transport, met = transport_for(group), []
    for _ in range(3):
        with transport.converse({}, timeout=TIMEOUT) as talk:
            if transport.rank == 0:
                early = talk.post([(1, number(1)), (1, number(2))], [], what="early")
                late = talk.post([(1, number(3))], [], what="late")
                early.wait()
                late.wait()
                continue
            buffers = [number(0) for _ in range(3)]
            first = talk.post([], [(0, buffers[0])], what="first")
            rest = talk.post([], [(0, buffers[1]), (0, buffers[2])], what="rest")
            rest.wait()  # waiting in another order changes nothing: the order of posting decides
            first.wait()
            met.append([buffer.item() for buffer in buffers])
    return met or None


def all_to_all(group: Any) -> dict:
    """Each hears from every other, of as many numbers as its rank says, whoever wrote first."""
    transport = transport_for(group)
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    buffers = {rank: torch.zeros(1 + rank, device=DEVICE) for rank in others}
    for _ in range(2):
        with transport.converse({}, timeout=TIMEOUT) as talk:
            whats = [(rank, 10.0 * transport.rank + rank) for rank in reversed(others)]
            mine = [(rank, torch.full((1 + transport.rank,), what, device=DEVICE)) for rank, what in whats]
            talk.post(mine, list(buffers.items()), what="all to all").wait()
    return {rank: buffer.tolist() for rank, buffer in buffers.items()}


def many_at_once(group: Any, posts: int) -> list:
    transport = transport_for(group)
    above, below = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    met = []
    for _ in range(2):
        with transport.converse({}, timeout=TIMEOUT) as talk:
            buffers = [number(-1) for _ in range(posts)]
            pending = [
                talk.post([(above, number(10 * transport.rank + count))], [(below, buffer)], what=f"post {count}")
                for count, buffer in enumerate(buffers)
            ]
            for one in reversed(pending):
                one.wait()
        met = [buffer.item() for buffer in buffers]
    return met


def nothing_to_say(group: Any) -> int:
    transport = transport_for(group)
    above, below = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    for _ in range(2):
        with transport.converse({}, timeout=TIMEOUT) as talk:
            talk.post([], [], what="nothing").wait()
            nothing = [torch.zeros(2, 0, device=DEVICE) for _ in range(2)]
            talk.post([(above, nothing[0])], [(below, nothing[1])], what="no rows").wait()
    return transport.bytes_sent


def two_buffers(group: Any, steps: int) -> list:
    transport = transport_for(group)
    peer, met = 1 - transport.rank, []
    sent, received = (torch.empty(5000, device=DEVICE) for _ in range(2))
    with transport.converse({}, timeout=TIMEOUT) as talk:
        for step in range(steps):
            sent.fill_(step + 100 * transport.rank)
            talk.post([(peer, sent)], [(peer, received)], what=f"step {step}").wait()
            sent.fill_(-1)
            met += received.unique().tolist()
    return met


def every_dtype(group: Any) -> list:
    transport = transport_for(group)
    peer, met = 1 - transport.rank, []
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8)
    with transport.converse({}, timeout=TIMEOUT) as talk:
        for kind in kinds:
            sent, received = (torch.full((3, 5), transport.rank, dtype=kind, device=DEVICE) for _ in range(2))
            talk.post([(peer, sent)], [(peer, received)], what=str(kind)).wait()
            met.append(int(received.unique().item()))
    return met


def count_bytes(group: Any) -> int:
    """Rank 1 writes to rank 0, rank 2 to both."""
    transport, pairs = transport_for(group), [(1, 0), (2, 0), (2, 1)]
    kinds = [((3, 5), torch.bfloat16), ((2,), torch.float64)]
    with transport.converse({}, timeout=TIMEOUT) as talk:
        made = [(pair, torch.zeros(shape, dtype=dtype)) for pair in pairs for shape, dtype in kinds]
        sends = [(receiver, x) for (sender, receiver), x in made if sender == transport.rank]
        receives = [(sender, x) for (sender, receiver), x in made if receiver == transport.rank]
        talk.post(sends, receives, what="letters").wait()
    return transport.bytes_sent


def only_greet(group: Any, calls: int) -> int:
    transport = transport_for(group)
    for call in range(calls):
        with transport.converse({"call": call % 2}, timeout=TIMEOUT):
            pass
    return calls


def refusals(group: Any) -> list[str]:
    transport, said = transport_for(group), []
    crooked, straight = torch.zeros(4, 3).mT, torch.zeros(3)
    wrong = [([(1, crooked)], []), ([], [(1, crooked)]), ([(0, straight)], []), ([], [(2, straight)])]
    wrong.append(([(2, straight)], []))
    talk = transport.converse({}, timeout=TIMEOUT)
    for sends, receives in wrong if transport.rank == 0 else []:
        try:
            talk.post(sends, receives, what="a letter")
        except TransportError as error:
            said.append(str(error))
    with talk:
        return said


# ----------------------------------------------------------------------------------------------- what goes wrong


@contextmanager
def measuring_hold_ups() -> Iterator[None]:
    """How late a busy machine makes this rank: told by what is raised, as the lateness of many short sleeps."""
    nap, late, is_over = 0.02, [0.0], threading.Event()

    def doze() -> None:
        while not is_over.is_set():
            began = time.monotonic()
            time.sleep(nap)
            late.append(max(0.0, time.monotonic() - began - nap - 0.001))

    threading.Thread(target=doze, daemon=True).start()
    try:
        yield
    except Exception as error:
        error.held_up = sum(late)  # type: ignore[attr-defined]
        raise
    finally:
        is_over.set()


@measuring_hold_ups()
def ring_with_a_victim(group: Any, victim: int, post: int, how: str, timeout: float | None, calls: int) -> Any:
    """`victim` is killed or stopped, or fails, just before its post of that number."""
    transport = transport_for(group)
    posts = iter(range(1, 10_000))

    def strike(call: int, step: int) -> None:
        if transport.rank == victim and next(posts) == post:
            strike_oneself(how)

    return around(transport, calls=calls, floats=3000, timeout=timeout, before_post=strike)


def victim_of_a_group_with_a_timeout(group: Any, victim: int, post: int, how: str, timeout: float, calls: int) -> Any:
    """As above, and no call says how long it may take."""
    import torch.distributed as dist

    own = dist.new_group(timeout=timedelta(seconds=timeout))
    return ring_with_a_victim(own, victim, post, how, None, calls)


@measuring_hold_ups()
def lost_before_the_first_call(group: Any, victim: int, post: int, how: str, timeout: float, calls: int) -> Any:
    transport = transport_for(group)
    if transport.rank == victim:
        time.sleep(0.5)  # the others have greeted it
        strike_oneself(how)
    return around(transport, calls=calls, timeout=timeout)


@measuring_hold_ups()
def lost_before_the_group_is_used(group: Any, victim: int, post: int, how: str, timeout: float, calls: int) -> Any:
    """The others make their transports when the victim is struck already."""
    import torch.distributed as dist

    dist.barrier(group)
    if dist.get_rank() == victim:
        strike_oneself(how)
    return around(transport_for(group), calls=calls, timeout=timeout)


def carriers_left(group: Any, *args: Any) -> list[str]:
    """Where carriers still are some seconds after the loss, on a machine that may be busy."""
    from longring.transport import carriers

    try:
        ring_with_a_victim(group, *args)
    except TransportError:
        end = time.monotonic() + 5.0
        while (left := [e for e in carriers._under_way if not e.is_over()]) and time.monotonic() < end:
            time.sleep(0.1)
        return [*(str((e.waits_for, e._work)) for e in left), *whereabouts()]
    raise AssertionError("nobody noticed")


def whereabouts() -> list[str]:
    """The stack of every carrier that is not at rest."""
    frames = sys._current_frames()
    threads = [thread for thread in threading.enumerate() if thread.name == "longring carrier"]
    stacks = ["".join(traceback.format_stack(frames[thread.ident])) for thread in threads if thread.ident in frames]
    return [stack for stack in stacks if not stack.rstrip().endswith("self.inbox.get()")]


def then_destroy_the_group(group: Any, *args: Any) -> Any:
    """As tidy programs end, also after an error."""
    import torch.distributed as dist

    try:
        return ring_with_a_victim(group, *args)
    finally:
        dist.destroy_process_group()


def strike_oneself(how: str) -> None:
    if how == "raise":
        raise MemoryError("no room left")
    if how == "sleep":
        time.sleep(60)
    print(f"struck at {time.monotonic()}", flush=True)  # noqa: T201
    if how == "leave":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    time.sleep(60)  # a stop takes effect at the next chance


def disagree(group: Any, good: int, odd: list[int], field: str, ours: Any, theirs: Any, timeout: float) -> Any:
    """After `good` calls that agree, the odd ranks make another one than the others: other terms, other sizes."""
    transport = transport_for(group)
    around(transport, calls=good, floats=13, terms={field: ours, "shape": (1, 2)}, timeout=timeout)
    is_odd = transport.rank in odd
    terms = {field: theirs if is_odd else ours, "shape": (1, 2)}
    return around(transport, floats=9 if is_odd else 13, terms=terms, timeout=timeout)


def posts_when_ranks_disagree(group: Any, good: int) -> int:
    """How many messages but greetings a rank posts in a call that the ranks disagree on."""
    transport = transport_for(group)
    around(transport, calls=good, terms={"length": 13}, timeout=TIMEOUT)
    posted = _posted(transport)
    try:
        around(transport, terms={"length": 13 + transport.rank}, timeout=TIMEOUT)
    except TransportError:
        return len(posted)
    raise AssertionError("nobody noticed")


def _posted(transport: Any) -> list:
    """All messages but greetings that the transport posts from now on."""
    from longring.transport import agreement

    honest, posted = transport._lines.post, []

    def post(letters: Any) -> Any:
        posted.extend(letter for letter in letters if letter.tag != agreement._TAG)
        return honest(letters)

    transport._lines.post = post
    return posted


def tags(group: Any, calls: int) -> tuple[int, int]:
    """How many messages a rank sends and receives in calls that are all the same, and how many tags these have."""
    transport = transport_for(group)
    posted = _posted(transport)
    around(transport, calls=calls, timeout=TIMEOUT)
    return len(posted), len({(letter.sent, letter.peer, letter.tag) for letter in posted})


def disagree_on_an_old_call(group: Any, odd: int, timeout: float) -> Any:
    """The odd rank makes a call that all know, the others one that nobody has made before."""
    transport = transport_for(group)
    around(transport, calls=3, floats=13, terms={"length": 13}, timeout=timeout)
    length = 13 if transport.rank == odd else 14
    return around(transport, floats=length, terms={"length": length}, timeout=timeout)


def one_counts_a_call_less(group: Any, odd: int, timeout: float) -> Any:
    transport = transport_for(group)
    around(transport, calls=2, timeout=timeout)
    transport._conversations -= transport.rank == odd
    return around(transport, timeout=timeout)


def another_machine(group: Any, odd: int, timeout: float) -> Any:
    import torch.distributed as dist

    os.environ["LOCAL_WORLD_SIZE"] = "2" if dist.get_rank() == odd else "4"
    return around(transport_for(group), timeout=timeout)


def another_version(group: Any, odd: int, timeout: float) -> Any:
    import longring

    transport = transport_for(group)
    around(transport, calls=2, timeout=timeout)
    if transport.rank == odd:
        longring.__version__ = "0.0.9"
    return around(transport, timeout=timeout)


def broken_group_stays_broken(group: Any) -> list[str]:
    transport, said = transport_for(group), []
    for length in (13 + transport.rank, 13, 13):
        try:
            around(transport, terms={"length": length}, timeout=5.0)
        except TransportError as error:
            said.append(str(error))
    return said


def one_makes_a_call_more(group: Any, busy: int, timeout: float) -> Any:
    transport = transport_for(group)
    around(transport, timeout=timeout)
    if transport.rank == busy:
        time.sleep(60)
    return around(transport, timeout=timeout)


def late_but_there(group: Any, late: int, seconds: float, timeout: float = 10.0) -> Any:
    transport = transport_for(group)
    for _ in range(2):
        if transport.rank == late:
            time.sleep(seconds)
        met = around(transport, timeout=timeout)
    return met


def crossed_circle(group: Any, timeout: float) -> Any:
    """Everyone waits for a message from above, and nobody sends."""
    transport = transport_for(group)
    with transport.converse({}, timeout=timeout) as talk:
        talk.post([], [((transport.rank + 1) % transport.size, number(0))], what="a circle").wait()


# --------------------------------------------------------------------------------------------- groups of all kinds


def sub_groups(group: Any) -> list:
    """Two rings side by side in a world of four, and the odd ranks' group is not for the even ones."""
    import torch.distributed as dist

    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    mine, other = pairs[rank % 2], pairs[1 - rank % 2]
    assert transport_for(mine) is transport_for(mine)
    try:
        transport_for(other)
    except ValueError as error:
        refused = str(error)
    return [transport_for(mine).rank, around(transport_for(mine), calls=2, timeout=TIMEOUT), refused]


def meshes(group: Any) -> dict:
    from torch.distributed.device_mesh import init_device_mesh

    kind = torch.device(DEVICE).type
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("data", "context"))
    row, whole = transport_for(mesh["context"]), transport_for(mesh)
    part = init_device_mesh(kind, (2, 1, 2), mesh_dim_names=("data", "one", "context"))["one", "context"]
    some = transport_for(part)
    assert some is transport_for(part)
    assert whole is transport_for(mesh)
    assert row is transport_for(mesh.get_group("context"))
    return {
        "row": (row.rank, row.size, row.node_ranks, around(row, timeout=TIMEOUT)),
        "whole": (whole.rank, whole.size, whole.node_ranks, around(whole, timeout=TIMEOUT)),
        "part": (some.rank, some.size, some.node_ranks, around(some, timeout=TIMEOUT)),
    }


def node_ranks(group: Any) -> int:
    return transport_for(group).node_ranks


def refused_meshes(group: Any) -> list[str]:
    import torch.distributed as dist

    shapes = [torch.tensor([[3, 2], [1, 0]]), torch.arange(4).view(2, 2, 1)]
    if dist.get_rank() > 1:
        shapes.append(torch.tensor([[0, 1]]))
    said = []
    for shape in shapes:
        try:
            transport_for(dist.DeviceMesh("cpu", shape, _init_backend=False))
        except ValueError as error:
            said.append(str(error))
    return said


def group_is_let_go(group: Any) -> bool:
    """The cache of transports keeps no group alive."""
    import gc
    import weakref

    import torch.distributed as dist

    made = dist.new_group([0, 1])
    around(transport_for(made), timeout=TIMEOUT)
    gone = weakref.ref(made)
    dist.destroy_process_group(made)
    del made
    gc.collect()
    return gone() is None


def groups_in_turn(group: Any, lives: int) -> list:
    """A world that ends and begins again over the same store, with an error in each life."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_process_group_store(group)
    rank, size, said = dist.get_rank(), dist.get_world_size(), []
    for life in range(lives):
        transport = transport_for(dist.group.WORLD)
        around(transport, timeout=TIMEOUT)
        try:
            around(transport, terms={"length": 13 + rank * life}, timeout=5.0)
        except TransportError as error:
            said.append(str(error))
        del transport
        dist.destroy_process_group()
        inner = dist.PrefixStore(f"again {life}", store)
        dist.init_process_group("gloo", store=inner, rank=rank, world_size=size)
    return said


# ------------------------------------------------------------------------------------------------- what is written


def journal(group: Any) -> list:
    transport = transport_for(group)
    around(transport, floats=10, timeout=TIMEOUT)
    with transport.recording() as record:
        around(transport, floats=10, timeout=TIMEOUT)
    around(transport, floats=10, timeout=TIMEOUT)
    assert all(0 < entry.seconds < TIMEOUT for entry in record.entries)
    entries = [(entry.what, entry.bytes_sent, entry.bytes_received) for entry in record.entries]
    return [entries, record.bytes_sent, transport.bytes_sent]


def keys_in_the_store(group: Any, calls: int) -> tuple[int, int] | None:
    import torch.distributed as dist

    transport, store = transport_for(group), dist.distributed_c10d._get_process_group_store(group)
    around(transport, calls=2, timeout=TIMEOUT)
    before = store.num_keys() if transport.rank == 0 else 0
    for call in range(calls):
        around(transport, terms={"call": call}, timeout=TIMEOUT)
    return (before, store.num_keys()) if transport.rank == 0 else None


def own_timeout(group: Any) -> float:
    return transport_for(group).converse({})._timeout


def watch_messages_fail(group: Any, timeout: float) -> Any:
    """Rank 1 stays away; rank 0 waits in its second step."""
    transport = transport_for(group)
    around(transport, floats=10, timeout=timeout)
    if transport.rank == 1:
        time.sleep(timeout + 8)
        return None
    return around(transport, floats=10, timeout=timeout)


class OnAnotherDevice:
    """Stands in for a CUDA stream: says in what order it is asked."""

    is_by_stream = True

    def __init__(self) -> None:
        self.order = ORDER

    @contextmanager
    def posting(self) -> Iterator[None]:
        self.order.append("by stream")
        yield

    def mark_done(self) -> None:
        self.order.append("posted")
        print("posted")  # noqa: T201

    def watch(self) -> None:
        return None

    def hand_over(self) -> None:
        self.order.append("done")


ORDER: list[str] = []


class HeldUp(OnAnotherDevice):
    """A device whose messages never end by themselves: aborting the group ends them."""

    aborted = threading.Event()

    def watch(self) -> None:
        self.aborted.wait(60)


def lost_behind_a_cuda_call(group: Any, victim: int, how: str, timeout: float) -> Any:
    """The victim is struck before it posts; the others' threads are then in a call that waits for their device."""
    from longring.transport import process_group

    process_group.crossing = lambda tensors: HeldUp()
    transport = transport_for(group)
    transport._lookout._close = lambda: (transport._close(), HeldUp.aborted.set())
    block, arriving = torch.zeros(30), torch.zeros(30)
    with transport.converse({"call": "a ring"}, timeout=timeout) as talk:
        talk._until_all_agree("greeting")
        if transport.rank == victim:
            strike_oneself(how)
        to, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
        pending = talk.post([(to, block)], [(source, arriving)], what="call 0, step 1")
        HeldUp.aborted.wait(60)
        pending.wait()
    return "nobody noticed"


def _without_tags(group: Any) -> Any:
    from longring.transport import process_group

    process_group.crossing = lambda tensors: OnAnotherDevice()
    transport = transport_for(group)
    transport._control = None
    return transport


def through_a_companion(group: Any, calls: int) -> tuple[list, list]:
    return around(_without_tags(group), calls=calls, timeout=TIMEOUT), ORDER


def companion_with_a_victim(group: Any, *args: Any) -> Any:
    _without_tags(group)
    return ring_with_a_victim(group, *args)


def posts_in_order(group: Any) -> tuple[int, float]:
    """How many were posted before what comes before them was, and what arrived in the end."""
    import threading

    transport, before, buffer = _without_tags(group), threading.Event(), number(-1)
    transport._last_posted = before
    with transport.converse({}, timeout=TIMEOUT) as talk:
        pending = talk.post([(1 - transport.rank, number(7))], [(1 - transport.rank, buffer)], what="second")
        talk._greeting.join()
        time.sleep(0.3)
        early = len(ORDER)
        before.set()
        pending.wait()
    return early, buffer.item()


def disagree_through_a_companion(group: Any, odd: int) -> Any:
    transport = _without_tags(group)
    length = 14 if transport.rank == odd else 13
    return around(transport, floats=length, terms={"length": length}, timeout=TIMEOUT)


# -------------------------------------------------------------------------------------------------- real attention


def attend(group: Any, *, timeout: float | None = TIMEOUT, **changes: Any) -> torch.Tensor:
    """Forward and backward of one small call; `changes` say in what it differs from the usual one."""
    import longring as lr

    usual = {
        "length": 13,
        "layout": "contiguous",
        "schedule": "ring",
        "dtype": torch.float32,
        "heads": 4,
        "kv_heads": 2,
        "deterministic": False,
        "scale": None,
    }
    facts = usual | {"pattern": lr.Dense(causal=True)} | changes
    length, heads, kv_heads = facts["length"], facts["heads"], facts["kv_heads"]
    sharding = lr.Sharding(length, group=group, layout=facts["layout"])
    seed = torch.Generator().manual_seed(length)
    shapes = [(1, length, count, 8) for count in (heads, kv_heads, kv_heads)]
    whole = [torch.randn(shape, generator=seed).to(facts["dtype"]) for shape in shapes]
    q, k, v = (sharding.shard(x).detach().to(DEVICE).requires_grad_() for x in whole)
    options = {name: facts[name] for name in ("pattern", "schedule", "deterministic", "scale")} | {"timeout": timeout}
    out = lr.attention(q, k, v, sharding=sharding, **options)
    out.sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))
    return out.detach()


@measuring_hold_ups()
def attention_with_a_victim(
    group: Any, victim: int, post: int, how: str, timeout: float, calls: int, schedule: str, moment: str
) -> str:
    """`victim` is struck at its post of that number, before it or with the message under way."""
    from longring.transport.process_group import Talk

    transport, posts, honest = transport_for(group), iter(range(1, 10_000)), Talk.post

    def strike(self: Talk, *args: Any, **words: Any) -> Any:
        is_now = next(posts) == post
        if is_now and moment == "before":
            strike_oneself(how)
        pending = honest(self, *args, **words)
        if is_now:
            strike_oneself(how)
        return pending

    if transport.rank == victim:
        Talk.post = strike
    for _ in range(calls):
        attend(group, timeout=timeout, length=301, layout="zigzag", schedule=schedule)
    return "all went well"


def attention_that_differs(group: Any, good: int, odd: int, kind: str) -> Any:
    """`good` usual calls, then one in which the odd rank differs."""
    import longring as lr

    transport = transport_for(group)
    segments = [lr.Dilated([4, size], [1, 2], causal=True) for size in (8, 12)]
    documents = [lr.Dense(causal=True, documents=[0, cut, 13]) for cut in (5, 6)]
    changes: dict[str, tuple[dict, dict]] = {
        "length": ({}, {"length": 14}),
        "dtype": ({}, {"dtype": torch.float64}),
        "heads": ({}, {"heads": 6}),
        "kv heads": ({}, {"kv_heads": 4}),
        "causal": ({}, {"pattern": lr.Dense(causal=False)}),
        "segments": ({"pattern": segments[0]}, {"pattern": segments[1]}),
        "documents": ({"pattern": documents[0]}, {"pattern": documents[1]}),
        "schedule": ({}, {"schedule": "gather"}),
        "deterministic": ({}, {"deterministic": True}),
        "scale": ({"scale": 0.25}, {"scale": 0.5}),
        "version": ({}, {}),
        "operation": ({}, {}),
    }
    usual, other = changes[kind]
    for _ in range(good):
        attend(group, **usual)
    is_odd = transport.rank == odd
    if is_odd and kind == "version":
        lr.__version__ = "0.0.9"
    with timing_what_is_raised():
        if is_odd and kind == "operation":
            sharding = lr.Sharding(13, group=group, layout="contiguous")
            return sharding.unshard(torch.zeros(1, sharding.local_length, 2, device=DEVICE)).tolist()
        return attend(group, **(other if is_odd else usual)).tolist()


@contextmanager
def timing_what_is_raised() -> Iterator[None]:
    began = time.monotonic()
    try:
        with measuring_hold_ups():
            yield
    except Exception as error:
        error.seconds = time.monotonic() - began  # type: ignore[attr-defined]
        raise


def other_tensors_are_refused(group: Any) -> tuple[list[str], bool]:
    """By all ranks, one kind after the other, and then a call is made."""
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    import longring as lr

    sharding, x, said = lr.Sharding(16, group), torch.ones(1, 8, 2, 4), []
    mesh = init_device_mesh("cpu", (transport_for(group).size,))
    for other in (DTensor.from_local(x, mesh, [Replicate()]), torch.nested.nested_tensor([x[0], x[0]])):
        try:
            lr.attention(other, other, other, sharding=sharding, timeout=TIMEOUT)
        except lr.ArgumentError as error:
            said.append(str(error))
    return said, lr.attention(x, x, x, sharding=sharding, timeout=TIMEOUT).equal(x)


# ------------------------------------------------------------------------------------------ through shared memory


def on_belts(group: Any, program: str, outbox: int, *args: Any) -> Any:
    """Another of these programs, with every message going through lanes of `outbox` bytes."""
    from belts import region_of

    transport_for(group)._symmetric = region_of(group, outbox)
    return globals()[program](group, *args)


def sizes(group: Any, numbers: list[int]) -> int:
    """Messages of so many bytes, all posted before any is waited for, up and down; how many arrived wrong."""
    transport, wrong = transport_for(group), 0
    rank, size = transport.rank, transport.size
    above, below = (rank + 1) % size, (rank - 1) % size
    for _ in range(2):
        with transport.converse({"sizes": numbers}, timeout=TIMEOUT) as talk:
            under_way = []
            for number in numbers:
                mine = [_stamped(number, rank, to) for to in (above, below)]
                room = [torch.zeros(number, dtype=torch.uint8, device=DEVICE) for _ in mine]
                sends = list(zip((above, below), mine, strict=True))
                under_way.append((talk.post(sends, list(zip((below, above), room, strict=True)), what="sizes"), room))
            for pending, room in reversed(under_way):
                pending.wait()
                for source, buffer in zip((below, above), room, strict=True):
                    wrong += not buffer.equal(_stamped(buffer.numel(), source, rank))
    return wrong


def _stamped(number: int, sender: int, receiver: int) -> torch.Tensor:
    """Bytes that tell who sent them to whom, and where they belong."""
    return ((torch.arange(number, device=DEVICE) * 31 + 7 * sender + 101 * receiver) % 251).to(torch.uint8)


def everybody_to_everybody(group: Any, numbers: int) -> int:
    """All name the next above first, to send to and to receive from, in one post as schedules make it.

    Were one lane queued whole before the next, ranks would wait in a circle where lanes share a queue.
    """
    transport, wrong = transport_for(group), 0
    rank, size = transport.rank, transport.size
    others = [(rank + hop) % size for hop in range(1, size)]
    room = {peer: torch.zeros(numbers, dtype=torch.uint8, device=DEVICE) for peer in others}
    with transport.converse({}, timeout=TIMEOUT) as talk:
        sends = [(peer, _stamped(numbers, rank, peer)) for peer in others]
        talk.post(sends, list(room.items()), what="everything").wait()
        for peer, buffer in room.items():
            wrong += not buffer.equal(_stamped(numbers, peer, rank))
    return wrong


def lost_on_the_way(group: Any, victim: int, how: str, *, is_loaded: bool = True) -> tuple[bool, str, int | None]:
    """The victim agrees to the call and is struck before it posts: only the vigil can tell.

    `is_loaded`: the kernels that look at what arrives are on the device before.
    """
    transport = transport_for(group)
    rank, size = transport.rank, transport.size
    transport._patience = 3.0
    terms = {"call": "a ring"}
    block, arriving = (torch.full((3000,), float(rank), device=DEVICE) for _ in range(2))
    if is_loaded:
        assert not arriving.isnan().all()
    for call in range(2):
        with transport.converse(terms) as talk:
            talk._until_all_agree("greeting")
            if rank == victim and call == 1:
                strike_oneself(how)
            talk.post([((rank + 1) % size, block)], [((rank - 1) % size, arriving)], what=f"call {call}").wait()
    is_nan = bool(arriving.isnan().all())  # on a device this waits, until the belts are let go
    is_from_victim = (rank - 1) % size == victim
    try:
        with transport.converse(terms, timeout=5.0):
            pass
    except TransportError as error:
        return is_nan == is_from_victim, str(error), getattr(error, "rank", None)
    return False, "nobody noticed", None


def lost_behind_a_call_without_a_timeout(group: Any, victim: int, how: str, timeout: float) -> tuple[str, float]:
    """The vigil watches the transfer of one call, for as long as the group would wait, and the next has a timeout."""
    transport = transport_for(group)
    rank, size = transport.rank, transport.size
    block, arriving = (torch.zeros(3000, device=DEVICE) for _ in range(2))
    with transport.converse({}, timeout=TIMEOUT):
        pass
    with transport.converse({}) as talk:
        talk._until_all_agree("greeting")
        if rank == victim:
            strike_oneself(how)
        pending = talk.post([((rank + 1) % size, block)], [((rank - 1) % size, arriving)], what="unwatched")
    time.sleep(2.0)  # the vigil has begun
    began = time.monotonic()
    try:
        with transport.converse({}, timeout=timeout):
            pass
    except TransportError as error:
        del pending
        return type(error).__name__, time.monotonic() - began
    raise AssertionError("nobody noticed")


def lost_before_a_new_kernel(group: Any, victim: int, how: str) -> tuple[bool, str, int | None]:
    return lost_on_the_way(group, victim, how, is_loaded=False)


def lost_where_the_driver_hangs(group: Any, victim: int, how: str) -> tuple[bool, str, int | None]:
    """Nothing more can be launched, as on a device that a thread loads a kernel on."""
    from belts import ThreadBelt

    class Stuck(ThreadBelt):
        def fill(self, into: torch.Tensor, byte: int) -> None:
            time.sleep(60)

    transport_for(group)._symmetric.shore.rescuers = lambda: [Stuck()]
    return lost_on_the_way(group, victim, how)


def judged(group: Any, schedules: list[str], dtype: torch.dtype) -> list[str]:
    """Attention of every kind on this world, against the definition: those that broke their budget."""
    import longring as lr
    from longring.testing import Result, judge

    length, broken = 211, []
    patterns = {
        "contiguous": [lr.Dense(causal=False), lr.Dense(window=(30, 0)), lr.Dilated([32, 64, 256], [1, 2, 4])],
        "zigzag": [lr.Dense(causal=True)],
    }
    draw = torch.Generator().manual_seed(3)
    whole = [torch.randn((1, length, 8, 16), generator=draw).to(dtype) for _ in range(4)]
    for schedule, layout in [(schedule, layout) for schedule in schedules for layout in patterns]:
        s = lr.Sharding(length, group=group, layout=layout)
        for pattern in patterns[layout]:
            q, k, v, dout = (s.shard(x).detach().to(DEVICE) for x in whole)
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            options = {"pattern": pattern, "sharding": s, "schedule": schedule, "timeout": TIMEOUT}
            out, lse = lr.attention(q, k, v, return_lse=True, **options)
            parts = [out, lse.transpose(1, 2).contiguous(), *torch.autograd.grad(out, (q, k, v), dout)]
            got = [s.unshard(x.detach()).cpu() for x in parts]
            if s.rank == 0:
                found = judge(Result(got[0], got[1].transpose(1, 2), *got[2:]), *whole[:3], pattern, whole[3])
                broken += [f"{schedule}, {pattern}: {one}" for one in found if not one.ok]
    return broken


def memory_that_cannot_be_shared(group: Any, odd: int) -> tuple[list[str], str | None]:
    """One rank has an obstacle: what it says on two calls on CUDA tensors, and why there is no memory."""
    from longring.transport import driver

    transport, said = transport_for(group), []
    torch.cuda.current_device = lambda: 0
    driver.obstacle = lambda: "no GPU here" if transport.rank == odd else None
    for _ in range(2):
        try:
            with transport.converse({"device": "cuda"}, timeout=TIMEOUT):
                pass
            said.append("fine")
        except TransportError as error:
            said.append(str(error))
    return said, getattr(transport._symmetric, "reason", None)


def staged(group: Any, program: str, *args: Any) -> Any:
    """Another of these programs, with every message going through memory of its own, as from a GPU over Gloo."""
    from longring.transport import process_group
    from longring.transport.staging import Staged

    honest = process_group.InFlight
    process_group.InFlight = lambda talk, letters, entry: (Staged if letters else honest)(talk, letters, entry)
    return globals()[program](group, *args)


# ------------------------------------------------------------------------------------------------------- on one GPU


def on_a_gpu(group: Any, program: str, is_watched: bool, *args: Any) -> Any:
    """Another of these programs with its messages on the one GPU that all ranks share."""
    global DEVICE, TIMEOUT
    torch.cuda.set_device(0)
    DEVICE = "cuda:0"
    transport = transport_for(group)
    with transport.converse({"device": "cuda"}, timeout=TIMEOUT):
        pass
    expected = os.environ.get("LONGRING_TRANSPORT") != "staged"
    assert (transport.symmetric_bytes > 0) == expected, f"{transport._symmetric}"
    TIMEOUT = TIMEOUT if is_watched else None
    return globals()[program](group, *args)


def on_nccl(group: Any, program: str, *args: Any) -> Any:
    """Another of these programs with its messages over NCCL."""
    global DEVICE
    DEVICE = "cuda:0"
    return globals()[program](group, *args)


def nccl_alone(group: Any) -> tuple[float, list, str]:
    import torch.distributed as dist

    torch.cuda.set_device(0)
    transport = transport_for(dist.new_group([0], backend="nccl"))
    met = around(transport, calls=2, timeout=TIMEOUT)
    transport._close()
    return transport._patience, met, transport._companion.name()
