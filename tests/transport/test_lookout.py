"""When a rank gives up, and whom it names: the real lookout of each rank, on a store in virtual time.

A wait ends within its timeout and half a second, on every rank, whatever it is that does not answer.
"""

import random
import threading
from types import SimpleNamespace

import pytest

from longring.errors import Disagreement, PeerLost
from longring.transport import lookout
from longring.transport.agreement import Differs, Signature
from longring.transport.board import _there
from virtual_time import Message, Store, StoreBoard, VirtualTime

PROMISED = 0.5
SILENT = SimpleNamespace(note=lambda *_, **__: None, written=lambda: "")  # no flight record


@pytest.fixture
def time(monkeypatch):
    before = threading.stack_size(1 << 18)  # thousands of threads
    virtual = VirtualTime()
    monkeypatch.setattr(lookout, "time", virtual)
    monkeypatch.setattr(lookout, "send_carrier", virtual.carrier)
    yield virtual
    threading.stack_size(before)


def waits(time, store, size, timeout, *, begins=lambda rank: 0.0, message=None, host=None, lost=()):
    """By rank: what it raised, if anything, and how many seconds after it began to wait."""
    found = {}

    def program(rank):
        board = StoreBoard(store, rank, size, host)
        vigil = lookout.Lookout(board, SILENT, lambda: None)
        errand = Message(time, (rank - 1) % size) if message is None else message(rank)
        began, signature = time.now, Signature(b"", {"length": str(rank % 2)})
        try:
            vigil.until(errand, what="step 1", conversation=1, signature=signature, timeout=timeout)
            found[rank] = None, time.now - began
        except (PeerLost, Disagreement) as error:
            found[rank] = error, time.now - began

    time.run([(begins(rank), lambda rank=rank: program(rank)) for rank in range(size) if rank not in lost])
    return found


def named(found, timeout):
    """Which ranks were named, if each rank raised in time."""
    for rank, (error, seconds) in found.items():
        assert isinstance(error, PeerLost), rank
        assert seconds < timeout + PROMISED, f"rank {rank} raised {seconds - timeout:.2f} s after its timeout"
    return {error.rank for error, _ in found.values()}


@pytest.mark.parametrize("skew", [0.0, 0.4], ids=["together", "one after the other"])
@pytest.mark.parametrize("timeout", [0.3, 1.0, 2.0, 8.0, 60.0])
@pytest.mark.parametrize("size", [2, 4, 8, 100])
def test_a_ring_names_the_silent_rank_in_time(time, size, timeout, skew):
    chance = random.Random(size)
    starts = [skew * timeout * chance.random() for _ in range(size)]
    found = waits(time, Store(time), size, timeout, begins=starts.__getitem__, lost=(1,))
    assert len(found) == size - 1
    assert named(found, timeout) == {1}


@pytest.mark.parametrize("timeout", [2.0, 60.0])
def test_thousands_of_ranks_name_the_silent_one_in_time(time, timeout):
    """All at the same moment, which is the most that a store can be asked at once."""
    assert named(waits(time, Store(time), 2048, timeout, lost=(700,)), timeout) == {700}


@pytest.mark.parametrize("timeout", [0.3, 1.0, 2.0, 8.0])
def test_a_stopped_host_of_the_store_is_named_in_time(time, timeout):
    store = Store(time)
    store.stopped_at = 0.0
    assert named(waits(time, store, 8, timeout, host=0, lost=(0,)), timeout) == {0}


def test_who_is_told_by_another_does_not_wait_for_its_own_timeout(time):
    found = waits(time, Store(time), 4, 20.0, begins=[0.0, 0.0, 0.0, 10.0].__getitem__, lost=(1,))
    assert named(found, 20.0) == {1}
    assert found[3][1] < 10.0 + 1.0 + PROMISED  # a sign of life later


@pytest.mark.parametrize("request_", [0.004, 0.02, 0.2], ids=lambda seconds: f"{seconds} s each")
def test_a_slow_store_makes_no_rank_late(time, request_):
    """The right name needs answers; the time does not."""
    named(waits(time, Store(time, request=request_), 8, 3.0, lost=(5,)), 3.0)


@pytest.mark.parametrize("timeout", [0.3, 2.0, 600.0])
def test_an_answer_within_the_timeout_is_taken(time, timeout):
    """Also at the last moment, when the others are watched already."""
    found = waits(time, Store(time), 2, timeout, message=lambda rank: Message(time, 1 - rank, 0.999 * timeout))
    assert [error for error, _ in found.values()] == [None, None]


@pytest.mark.parametrize("timeout", [0.3, 2.0, 600.0])
def test_nobody_gives_up_before_the_timeout(time, timeout):
    found = waits(time, Store(time), 3, timeout, lost=(2,))
    assert all(seconds >= timeout for _, seconds in found.values())


def test_a_circle_is_told(time):
    found = waits(time, Store(time), 3, 2.0)
    assert named(found, 2.0) == {None}
    assert all("ranks wait for each other (" in str(error) for error, _ in found.values())


def test_a_wait_that_has_not_begun_is_no_answer(time):
    found = waits(time, Store(time), 2, 2.0, message=lambda rank: Message(time, None))
    assert named(found, 2.0) == {None}


def test_the_host_of_the_store_raises_in_time_and_stays_for_ranks_that_compute(time):
    """Rank 3 never comes to hear of it."""
    found = waits(time, Store(time), 4, 2.0, host=0, lost=(2, 3))
    assert len(named(found, 2.0)) == 1
    assert time.now >= 2.0 + lookout._GRACE


@pytest.mark.parametrize("host", [0, None])
@pytest.mark.parametrize("lost", [(), (3,)], ids=["all are there", "a rank is lost"])
@pytest.mark.parametrize("timeout", [0.3, 60.0])
def test_ranks_that_disagree_say_so_within_two_seconds(time, timeout, lost, host):
    def message(rank):
        return Message(time, (rank - 1) % 4, 0.01, Differs())

    found = waits(time, Store(time), 4, timeout, message=message, lost=lost, host=host)
    assert len({str(error) for error, _ in found.values()}) == 1
    for error, seconds in found.values():
        assert isinstance(error, Disagreement)
        assert "length is 1 on rank" in str(error)
        assert seconds < 2.0


def test_ranks_that_disagree_over_a_silent_store_say_so_within_two_seconds(time):
    store = Store(time)
    store.stopped_at = 0.0
    found = waits(time, store, 4, 60.0, message=lambda rank: Message(time, 0, 0.01, Differs()), host=0, lost=(0,))
    assert all(isinstance(error, Disagreement) and seconds < 2.0 for error, seconds in found.values())


class CountingStore:
    def __init__(self, keys):
        self.keys, self.asked = set(keys), 0

    def check(self, keys):
        self.asked += 1
        return self.keys.issuperset(keys)


@pytest.mark.parametrize("missing", [[], [5], [0, 1, 2047], range(2048)])
def test_keys_that_are_not_there_are_found_in_few_questions(missing):
    keys = [str(number) for number in range(2048)]
    there = [key for key in keys if int(key) not in missing]
    store = CountingStore(there)
    assert _there(store, keys) == there
    assert store.asked <= 1 + 2 * 11 * len(missing)


@pytest.mark.parametrize("size", [4, 16, 17, 24])
@pytest.mark.parametrize("travel", [0.0002, 0.03], ids=["quick", "slow"])
def test_the_stores_host_stays_for_the_others_however_late_its_verdict_is(time, size, travel):
    """Rank 0 hosts it, and waits for a lost rank as rank 1 does; the others compute."""
    store = Store(time, travel=travel)
    time.run([(0.0, lambda rank=rank: raised(time, store, rank, size, host=0, close=0.1)) for rank in (0, 1)])
    assert time.now >= 2.0 + lookout._GRACE


@pytest.mark.parametrize("size", [17, 64])
def test_the_stores_host_stays_where_it_reads_no_notes(time, size):
    store = Store(time)
    store.numbers["readers/1"] = 16  # ranks that read them instead
    time.run([(0.0, lambda: raised(time, store, 0, size, host=0, close=0.01))])
    assert time.now >= 2.0 + lookout._GRACE


@pytest.mark.parametrize("victim", range(40, 44))
def test_who_read_in_an_earlier_step_makes_room_for_who_waits_now(time, victim):
    """A slow step, for which all wait, and then a lost rank: who waits for it begins later than who waits for those."""
    size, timeout, store, found = 100, 10.0, Store(time), {}

    def program(rank):
        vigil = lookout.Lookout(StoreBoard(store, rank, size, None), SILENT, lambda: None)
        options = {"what": "a step", "conversation": 1, "signature": Signature(b"", {}), "timeout": timeout}
        try:
            vigil.until(Message(time, (rank - 1) % size, 0.8 * timeout), **options)
            if rank - victim in (1, 2, 3):
                time.sleep(0.2 * (victim + 3 - rank))
                vigil.until(Message(time, rank - 1), **options)
        except PeerLost as error:
            found[rank] = error.rank

    time.run([(0.0, lambda rank=rank: program(rank)) for rank in range(size)])
    assert found == dict.fromkeys((victim + 1, victim + 2, victim + 3), victim)


def raised(time, store, rank, size, *, host, close):
    """Which rank this one names, that waits 2 s for the one before it."""
    vigil = lookout.Lookout(StoreBoard(store, rank, size, host), SILENT, lambda: time.sleep(close))
    options = {"what": "a step", "conversation": 1, "signature": Signature(b"", {}), "timeout": 2.0}
    with pytest.raises(PeerLost) as caught:
        vigil.until(Message(time, (rank - 1) % size), **options)
    return caught.value.rank
