"""Ranks that torchrun starts anew find its old store, and in it a place where nobody was before them."""

import threading

import pytest
import torch.distributed as dist

from longring import PeerLost, TransportError, launching


def joined(store, ranks, late=()):
    """What each of these ranks sees: the value that every other wrote under its own number."""
    seen, gates = [None] * ranks, {rank: threading.Event() for rank in range(ranks)}

    def join(rank):
        gates[rank].wait(10)
        place = launching._fresh(store, rank, ranks)
        assert not place.check(["used"]) or rank > 0
        place.set(f"address {rank}", f"of {rank}")
        seen[rank] = [place.get(f"address {other}").decode() for other in range(ranks)]
        place.add("used", 1)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for rank in sorted(range(ranks), key=lambda rank: rank in late):
        gates[rank].set()
    for thread in threads:
        thread.join(20)
    return seen


@pytest.mark.parametrize("late", [(), (0,), (1, 2)])
def test_each_start_has_a_place_of_its_own_in_one_store(late):
    store = dist.HashStore()
    for _ in range(3):
        assert joined(store, 3, late) == [["of 0", "of 1", "of 2"]] * 3


def test_a_hello_of_somebody_who_is_gone_is_no_hello(monkeypatch):
    """Rank 1 of a start before had come no further: rank 0 answers it in vain, and then the one that lives."""
    store = dist.HashStore()
    store.set("longring/hello/1", "d" * 32)
    assert joined(store, 2, late=(1,)) == [["of 0", "of 1"]] * 2
    monkeypatch.setattr(launching, "JOINING", 0.2)
    store.set("longring/hello/1", "a" * 32)
    with pytest.raises(PeerLost, match="rank 1 did not join this world of 2 in time") as lost:
        launching._fresh(store, 0, 2)
    assert lost.value.rank == 1


@pytest.mark.parametrize("foreign", [b"\xff\xfe", b"", b"yes", b"x" * (1 << 20), ("A" * 32).encode()])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_no_rank_wrote_into_the_store_is_one_clear_error(rank, foreign):
    """Nothing protects a store: any program that reaches its port may write to it."""
    store = dist.HashStore()

    class Overwritten:
        """What every key has that a rank reads in the moment after another program wrote it."""

        def get(self, key):
            return foreign

        def __getattr__(self, name):
            return getattr(store, name)

    store.set("longring/hello/1", "of another program")
    with pytest.raises(TransportError, match=r"has b'.*' under longring/\w+/\w+, which no rank wrote: another") as told:
        launching._fresh(Overwritten(), rank, 2)
    assert "docs/networks.md" in str(told.value)
    assert len(str(told.value)) < 400


def test_addresses_that_are_none_are_one_clear_error(monkeypatch):
    """What Gloo did with one that another program had overwritten; sometimes it ends the process by SIGSEGV instead."""

    def init_process_group(*args, **kwargs):
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(launching, "_met", lambda: (dist.HashStore(), 1, 2))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    with pytest.raises(
        TransportError, match=r"rank 1 of 2 could not make its process group \(std::bad_alloc\): memory"
    ):
        launching._join("gloo")
