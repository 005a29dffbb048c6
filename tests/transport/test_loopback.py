"""Ranks as threads: what a transport promises, and how it speaks up when a rank breaks its side."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from longring.errors import ArgumentError, LongringError, PeerLost, TransportError
from longring.transport.alone import Alone
from longring.transport.contract import Transport
from longring.transport.ledger import Ledger
from longring.transport.loopback import Loopback, run_ranks


def numbers(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def talk(transport, timeout=None, terms=None):
    return transport.converse(terms or {}, timeout=timeout)


def swap(transport, value, *, what="a swap", timeout=None):
    """Send one number to the other of two ranks, and return the number it sent."""
    peer, buffer = 1 - transport.rank, numbers(0)
    talk(transport, timeout).post([(peer, numbers(value))], [(peer, buffer)], what=what).wait()
    return buffer.item()


# ---------------------------------------------------------------------------------------- what arrives, and when


def test_two_ranks_swap_numbers():
    assert run_ranks(2, lambda transport: swap(transport, 10 + transport.rank)) == [11, 10]


def test_results_come_in_order_of_rank():
    assert run_ranks(5, lambda transport: (transport.rank, transport.size)) == [(rank, 5) for rank in range(5)]


def test_a_loopback_is_a_transport():
    assert run_ranks(2, lambda transport: isinstance(transport, Transport)) == [True, True]
    assert isinstance(Alone(), Transport)


def test_letters_of_one_channel_arrive_in_the_order_they_were_posted():
    def program(transport):
        if transport.rank == 0:
            early = talk(transport).post([(1, numbers(1)), (1, numbers(2))], [], what="early")
            late = talk(transport).post([(1, numbers(3))], [], what="late")
            early.wait()
            late.wait()
            return None
        buffers = [numbers(0) for _ in range(3)]
        first = talk(transport).post([], [(0, buffers[0])], what="first")
        rest = talk(transport).post([], [(0, buffers[1]), (0, buffers[2])], what="rest")
        rest.wait()  # waiting in another order changes nothing: the order of posting decides
        first.wait()
        return [buffer.item() for buffer in buffers]

    assert run_ranks(2, program)[1] == [1, 2, 3]


def test_channels_are_apart():
    """Each rank hears from every other, whoever wrote first."""

    def program(transport):
        others = [rank for rank in range(transport.size) if rank != transport.rank]
        buffers = {rank: numbers(0) for rank in others}
        sends = [(rank, numbers(10 * transport.rank + rank)) for rank in reversed(others)]
        talk(transport).post(sends, list(buffers.items()), what="all to all").wait()
        return {rank: buffer.item() for rank, buffer in buffers.items()}

    heard = run_ranks(4, program)
    assert heard == [{a: 10 * a + b for a in range(4) if a != b} for b in range(4)]


def test_a_letter_is_read_when_its_receiver_waits_so_overwriting_early_is_caught():
    def arrives(patient):
        overwritten = threading.Event()

        def program(transport):
            if transport.rank == 1:
                buffer = numbers(0)
                if not patient:
                    assert overwritten.wait(60)
                talk(transport).post([], [(0, buffer)], what="a letter").wait()
                return buffer.item()
            sent = numbers(1)
            pending = talk(transport).post([(1, sent)], [], what="a letter")
            if patient:
                pending.wait()
            sent.fill_(-1)
            overwritten.set()
            pending.wait()
            return None

        return run_ranks(2, program)[1]

    assert arrives(patient=True) == 1
    assert arrives(patient=False) == -1


def test_a_buffer_is_untouched_until_its_receiver_waits():
    def program(transport):
        buffer = numbers(0)
        pending = talk(transport).post(
            [(1 - transport.rank, numbers(7))], [(1 - transport.rank, buffer)], what="a letter"
        )
        before = buffer.item()
        pending.wait()
        return before, buffer.item()

    assert run_ranks(2, program) == [(0, 7)] * 2


def test_bytes_are_counted_where_they_are_sent():
    def program(transport):
        if transport.rank == 0:
            sends = [(1, torch.zeros(3, 5, dtype=torch.bfloat16)), (1, torch.zeros(2, dtype=torch.float64))]
            talk(transport).post(sends, [], what="two letters").wait()
        else:
            receives = [(0, torch.zeros(3, 5, dtype=torch.bfloat16)), (0, torch.zeros(2, dtype=torch.float64))]
            talk(transport).post([], receives, what="two letters").wait()
        return transport.bytes_sent

    assert run_ranks(2, program) == [3 * 5 * 2 + 2 * 8, 0]


def test_empty_letters_and_empty_posts_are_fine():
    def program(transport):
        talk(transport).post([], [], what="nothing").wait()
        peer = 1 - transport.rank
        talk(transport).post([(peer, torch.zeros(2, 0))], [(peer, torch.zeros(2, 0))], what="no rows").wait()
        return transport.bytes_sent

    assert run_ranks(2, program) == [0, 0]


def test_a_world_of_one_runs_and_has_nobody_to_write_to():
    assert run_ranks(1, lambda transport: transport.size) == [1]
    with pytest.raises(TransportError, match="rank 0 of 1 cannot exchange a message with rank 0"):
        run_ranks(1, lambda transport: talk(transport).post([(0, numbers(1))], [], what="a letter"))
    with pytest.raises(TransportError, match=r"nobody to exchange messages with \(a letter\)"):
        talk(Alone()).post([], [], what="a letter")


def test_a_world_has_at_least_one_rank():
    for size in (0, True, "3", 2.0, None):
        with pytest.raises(ArgumentError, match="size must be a whole number of ranks"):
            run_ranks(size, lambda transport: None)  # type: ignore[arg-type]


def test_grad_mode_is_the_callers():
    with torch.no_grad():
        assert run_ranks(2, lambda _: torch.is_grad_enabled()) == [False, False]
    assert run_ranks(2, lambda _: torch.is_grad_enabled()) == [True, True]


# --------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_letter_to_oneself_or_to_nobody_is_refused(peer):
    with pytest.raises(TransportError, match=f"rank 0 of 2 cannot exchange a message with rank {peer}"):
        run_ranks(2, lambda t: talk(t).post([(peer, numbers(1))], [], what="a letter") if t.rank == 0 else None)


def test_tensors_must_be_contiguous_on_both_sides():
    crooked = torch.zeros(4, 3).mT
    for sends, receives in (([(1, crooked)], []), ([], [(1, crooked)])):
        with pytest.raises(TransportError, match="rank 0 can only send and receive contiguous"):
            run_ranks(2, lambda t, s=sends, r=receives: talk(t).post(s, r, what="a letter") if t.rank == 0 else None)


@pytest.mark.parametrize(
    ("sent", "expected", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), [r"\[3, 2\] of float32", r"\[2, 3\] of float32"]),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float16), [r"\[2\] of float16", r"\[2\] of float32"]),
    ],
    ids=["shape", "dtype"],
)
def test_a_letter_of_another_shape_or_dtype_is_refused_naming_both(sent, expected, words):
    def program(transport):
        sends, receives = ([(1, sent)], []) if transport.rank == 0 else ([], [(0, expected)])
        talk(transport).post(sends, receives, what="step 3").wait()

    match = rf"rank 1 expected {words[0]} from rank 0 \(step 3\), which sent {words[1]}"
    with pytest.raises(TransportError, match=match):
        run_ranks(2, program)


# ------------------------------------------------------------------------------------------- what goes wrong


def test_the_first_error_reaches_the_caller_with_its_rank_and_stops_all_others():
    stopped = []

    def program(transport):
        if transport.rank == 1:
            raise ZeroDivisionError("one over nothing")
        try:
            talk(transport).post([], [(1, numbers(0))], what="step 4").wait()
        except PeerLost as error:
            stopped.append((transport.rank, str(error)))
            raise

    with pytest.raises(ZeroDivisionError, match="one over nothing") as raised:
        run_ranks(3, program)
    assert raised.value.__notes__ == ["raised on rank 1 of 3"]
    assert sorted(rank for rank, _ in stopped) == [0, 2]
    assert all(
        message == f"rank {rank} waited for rank 1 (step 4), but rank 1 failed: one over nothing"
        for rank, message in stopped
    )


def test_a_failure_stops_ranks_that_wait_for_somebody_else():
    def program(transport):
        if transport.rank == 2:
            raise ZeroDivisionError("one over nothing")
        swap(transport, 1)
        talk(transport).post([], [(1 - transport.rank, numbers(0))], what="too much").wait()

    with pytest.raises(ZeroDivisionError):
        run_ranks(3, program)


def test_ranks_that_make_different_calls_are_told_so_instead_of_hanging():
    def program(transport):
        for _ in range(1 + transport.rank):
            swap(transport, 1, what="one call more")

    match = r"rank 1 waits for rank 0 \(one call more\), and no rank is left that could go on"
    with pytest.raises(PeerLost, match=match):
        run_ranks(2, program)


def test_ranks_that_all_wait_for_each_other_are_told_so():
    def program(transport):
        talk(transport).post([], [((transport.rank + 1) % transport.size, numbers(0))], what="a circle").wait()

    with pytest.raises(PeerLost, match=r"\(a circle\), and no rank is left that could go on"):
        run_ranks(3, program)


def test_a_letter_that_nobody_opens_is_noticed():
    def program(transport):
        if transport.rank == 0:
            talk(transport).post([(1, numbers(1))], [], what="unread").wait()

    with pytest.raises(PeerLost, match=r"rank 0 waits for rank 1 \(unread\), and no rank is left"):
        run_ranks(2, program)


def test_a_silent_peer_is_lost_when_the_timeout_has_passed():
    def program(transport):
        if transport.rank == 0:
            swap(transport, 1)
            talk(transport, 0.01).post([], [(1, numbers(0))], what="step 5").wait()
        else:
            swap(transport, 1)
            time.sleep(0.1)  # holds its turn, as a rank that computes does

    with pytest.raises(PeerLost, match=r"rank 0 waited 0.01 s for rank 1 \(step 5\): no answer"):
        run_ranks(2, program)


def test_an_answer_within_the_timeout_is_fine():
    assert run_ranks(2, lambda transport: swap(transport, transport.rank, timeout=60)) == [1, 0]


def test_errors_of_a_world_are_longrings_own():
    assert issubclass(PeerLost, TransportError)
    assert issubclass(TransportError, LongringError)


def test_a_new_world_knows_nothing_of_a_failed_one():
    with pytest.raises(ZeroDivisionError):
        run_ranks(2, lambda transport: 1 // transport.rank)
    assert run_ranks(2, lambda transport: swap(transport, 1)) == [1, 1]


def test_ranks_take_turns():
    """Where asked to, never two at once: each has all the cores."""
    busy, most = 0, 0

    def program(transport):
        nonlocal busy, most
        for _ in range(3):
            busy += 1
            most = max(most, busy)
            time.sleep(0.001)
            busy -= 1
            swap(transport, 1)

    run_ranks(2, program, take_turns=True)
    assert most == 1


def test_a_rank_that_is_busy_elsewhere_does_not_stop_the_clock_of_another():
    def program(transport):
        if transport.rank:
            time.sleep(1.5)
        else:
            swap(transport, 1, timeout=0.1)

    with pytest.raises(PeerLost, match=r"waited 0\.1 s for rank 1"):
        run_ranks(2, program)


def test_ranks_may_wait_for_each_other_by_other_means():
    barrier = threading.Barrier(2)

    def program(transport):
        barrier.wait(10)
        swap(transport, 1)

    run_ranks(2, program)


def test_a_rank_is_refused_in_another_thread_than_its_own():
    """Autograd runs every rank's backward on a GPU in one thread of its own, where they would wait for each other."""

    def program(transport):
        errors = []

        def elsewhere():
            try:
                swap(transport, 1)
            except TransportError as error:
                errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        raise errors[0]

    with pytest.raises(TransportError, match=r"use longring\.simulate"):
        run_ranks(2, program)


def test_terms_that_differ_are_named_with_both_values():
    def program(transport):
        peer = 1 - transport.rank
        sends, receives = [(peer, torch.zeros(1))], [(peer, torch.zeros(1))]
        terms = {"scale": float(transport.rank), "d": 4}
        talk(transport, terms=terms).post(sends, receives, what="a letter").wait()

    with pytest.raises(
        TransportError, match=r"disagree \(a letter\): scale: \d\.0 here, \d\.0 there; all ranks"
    ) as caught:
        run_ranks(2, program)
    assert "d:" not in str(caught.value)


# ------------------------------------------------------------------------------------------------- the ledger


def test_the_ledger_counts_new_storages_and_releases_them():
    with Ledger() as ledger:
        x = torch.zeros(100)  # 400 bytes
        y = x + 1
        assert (ledger.live_bytes, ledger.peak_bytes) == (800, 800)
        del x
        assert (ledger.live_bytes, ledger.peak_bytes) == (400, 800)
    del y
    assert (ledger.live_bytes, ledger.peak_bytes) == (0, 800)


def test_the_ledger_remembers_the_highest_peak():
    with Ledger() as ledger:
        x = torch.zeros(100)
        del x
        y = torch.zeros(10)
        assert (ledger.live_bytes, ledger.peak_bytes) == (40, 400)
        del y


def test_the_ledger_counts_views_and_in_place_results_once():
    with Ledger() as ledger:
        x = torch.zeros(10, 10)
        x.add_(1)
        views = x[2:], x.mT, x.view(100), x.unsqueeze(0), x.split(5), x.detach(), x.expand(3, 10, 10)
        assert ledger.live_bytes == 400
        del x
        assert ledger.live_bytes == 400, "a view keeps the storage"
        del views
        assert ledger.live_bytes == 0


def test_the_ledger_counts_a_reshaped_copy_and_a_product_once():
    """Inside, they are a new storage and a view of it that does not say so."""
    with Ledger() as ledger:
        x = torch.zeros(10, 20)
        copy = x.mT.reshape(200)
        assert ledger.live_bytes == 800 + 800
        product = torch.zeros(2, 3, 10) @ x  # its first argument is gone again
        assert ledger.live_bytes == 800 + 800 + 2 * 3 * 20 * 4
        del copy, product


def test_the_ledger_does_not_count_what_was_there_before():
    x = torch.zeros(100)
    with Ledger() as ledger:
        x.mul_(2)
        assert x[:50].shape == (50,)
        assert ledger.peak_bytes == 0


def test_the_ledger_counts_results_of_operations_that_have_several():
    with Ledger() as ledger:
        found = torch.zeros(4, 25).max(dim=1)
        assert ledger.live_bytes == 4 * 4 + 4 * 8
        assert ledger.peak_bytes == 400 + 48
        del found


def test_each_rank_has_its_own_ledger():
    ledgers = [Ledger() for _ in range(3)]

    def program(transport: Loopback) -> None:
        torch.zeros(100 * (transport.rank + 1))

    run_ranks(3, program, context=lambda transport: ledgers[transport.rank])
    assert [ledger.peak_bytes for ledger in ledgers] == [400, 800, 1200]


# ------------------------------------------------------------------------------------------------- Ctrl-C


def rank_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]


def interrupted_at(lines, program):
    """Run two ranks with Ctrl-C at these lines of the main thread, as it executes them; how many of them it reached."""
    counted, lost = 0, []

    def trace(frame, event, argument):
        nonlocal counted
        if event == "line":
            counted += 1
            if counted in lines:
                signal.raise_signal(signal.SIGINT)
        return trace

    before, traced = signal.signal(signal.SIGINT, signal.default_int_handler), sys.gettrace()
    told, sys.unraisablehook = sys.unraisablehook, lost.append  # in callbacks Python tells of it, and goes on
    try:
        sys.settrace(trace)
        run_ranks(2, program)
    except KeyboardInterrupt:
        pass
    else:
        sys.settrace(traced)
        assert lost or not any(line <= counted for line in lines), f"Ctrl-C was lost at one of {lines}"
    finally:
        sys.settrace(traced)
        sys.unraisablehook = told
        signal.signal(signal.SIGINT, before)
    swallowed = [getattr(one.object, "__code__", None) for one in lost]  # in what Python calls back, of anybody's
    assert not any("longring" in code.co_filename for code in swallowed if code is not None), lost
    return sum(line <= counted for line in lines)


@pytest.mark.parametrize("more", [(), (1,), (40,)], ids=["once", "twice in a row", "and again while ranks end"])
def test_ctrl_c_at_any_line_leaves_no_rank_behind(more):
    """A rank would wait for ever for one that was not started, and keep the process from ending."""
    line, program = 1, lambda transport: swap(transport, 1)
    while interrupted_at([line, *(line + later for later in more)], program):
        end = time.monotonic() + 30
        while rank_threads() and time.monotonic() < end:
            time.sleep(0.001)
        assert rank_threads() == [], f"interrupted at line {line}"
        line += 1
    assert line > 50


INTERRUPTED = """
import os, random, signal, sys, threading, time
import torch, longring as lr
from longring.testing import run_ranks

signal.signal(signal.SIGINT, signal.default_int_handler)
chance, met, whole = random.Random(5), 0, 0
q, k, v = (torch.randn(1, 64, 2, 8, requires_grad=True) for _ in range(3))

def call(number):
    if number % 2:
        lr.simulate(q, k, v, ranks=6).out.sum().backward()
    else:
        run_ranks(6, lambda transport: lr.Sharding(length=60, group=transport).shard(torch.zeros(1, 60, 1)))

def press(after, again):
    time.sleep(after)
    for _ in range(1 + again):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.002)

call(0), call(1)  # what is loaded on the way is loaded
for number in range(int(sys.argv[1])):
    began = time.monotonic()
    call(number)
    took = time.monotonic() - began
    presses = threading.Thread(target=press, args=(chance.random() * took, number % 3 == 0))
    presses.start()
    while True:  # also where the second comes while the first is dealt with
        try:
            if presses.is_alive():
                call(number)
                whole += 1
            presses.join()
            time.sleep(0.01)  # Python may raise the last a few instructions later
            break
        except KeyboardInterrupt:
            met += 1
end = time.monotonic() + 20
while (left := [t for t in threading.enumerate() if t.name.startswith("rank ")]) and time.monotonic() < end:
    time.sleep(0.01)
print(met, whole, len(left), flush=True)
"""


def test_ctrl_c_at_random_moments_leaves_no_thread_and_the_process_ends():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "40"], capture_output=True, text=True, timeout=110, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    met, _, left = map(int, done.stdout.split())
    assert (left, met >= 40) == (0, True)


def test_ctrl_c_does_not_wait_for_ranks_that_compute():
    """Those end when they next wait, or are done."""
    computing, may_end = threading.Event(), threading.Event()

    def program(transport):
        if transport.rank == 0:
            computing.set()
            may_end.wait(60)
        swap(transport, 1)
        raise AssertionError("no rank goes on")

    def press():
        computing.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=press).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(2, program)
        assert rank_threads() == ["rank 0"]
    finally:
        signal.signal(signal.SIGINT, before)
        may_end.set()
    end = time.monotonic() + 30
    while rank_threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert rank_threads() == []


def test_a_rank_that_cannot_be_started_ends_the_others(monkeypatch):
    honest = threading.Thread.start

    def start(thread):
        if thread.name == "rank 2":
            raise RuntimeError("can't start new thread")
        honest(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run_ranks(3, lambda transport: talk(transport).post([], [(2, numbers(0))], what="a letter").wait())
    assert rank_threads() == []
