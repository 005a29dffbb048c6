"""A rank among made-up peers: its plan is kept to, message by message, and what is early or wrong is refused."""

import pytest
import torch

import longring as lr
from longring.errors import ScheduleRefusal, TransportError
from longring.geometry.layouts import deal
from longring.geometry.patterns import Problem
from longring.geometry.plans import plan
from longring.geometry.task import Task
from longring.transport.contract import Transport
from longring.transport.replay import Replay

D = 4
FORWARD = {"call": "attention, forward"}


class Noting:
    """Peers that bring ones, and note what was taken."""

    def __init__(self):
        self.taken, self.brought = [], []

    def bring(self, parcel, buffers):
        self.brought.append(parcel)
        for buffer in buffers:
            buffer.fill_(1)

    def take(self, parcel, tensors):
        self.taken.append((parcel, [x.clone() for x in tensors]))


def task(ranks=4, n=16, pattern=None):
    layout = deal("contiguous", n, ranks)
    return Task(pattern or lr.Dense(causal=False), Problem(1, n, n, 1, 0), layout, layout)


def messages(post):
    sends = [(p.receiver, torch.zeros(p.vectors * D)) for _, p in post.sends for _ in "kv"]
    return sends, [(p.sender, torch.zeros(p.vectors * D)) for _, p in post.receives for _ in "kv"]


def test_it_is_a_transport():
    door = Replay(task(), "ring", 1, None, node_ranks=2)
    assert isinstance(door, Transport)
    assert (door.rank, door.size, door.node_ranks, door.members) == (1, 4, 2, (0, 1, 2, 3))
    assert repr(door) == "Replay(rank 1 of 4)"
    door.decline(ValueError("nobody waits"))


@pytest.mark.parametrize("schedule", ["ring", "bidirectional", "double_ring", "exchange", "gather"])
def test_messages_of_the_plan_are_brought_taken_and_counted(schedule):
    peers, seen = Noting(), []
    door = Replay(task(), schedule, 2, peers, node_ranks=2, watch=lambda phase, posts: seen.append((phase, posts)))
    for phase in ("forward", "backward"):
        posts = list(getattr(plan(schedule, task(), 2, 2), phase)())
        with door.converse({"call": f"attention, {phase}"}) as talk:
            for post in posts:
                talk.post(*messages(post), what="a step").wait()
        numbers = sum(2 * p.vectors * D for post in posts for _, p in post.sends)
        assert door.bytes_sent[phase] == 4 * numbers > 0
        assert [at for said, at in seen if said == phase] == list(range(1, len(posts) + 1))
        expected = [p for post in posts for _, p in post.receives]
        assert peers.brought[-len(expected) :] == expected


def test_nothing_is_there_before_it_was_waited_for():
    peers = Noting()
    with Replay(task(2), "ring", 0, peers).converse(FORWARD) as talk:
        sends, receives = messages(next(iter(plan("ring", task(2), 0).forward())))
        pending = talk.post(sends, receives, what="a step")
        assert not any(buffer.any() for _, buffer in receives)
        assert not peers.taken
        sends[0][1].fill_(7)  # too early: whoever looks at what was sent sees it
        pending.wait()
        assert all((buffer == 1).all() for _, buffer in receives)
        assert (peers.taken[0][1][0] == 7).all()


def test_without_peers_nothing_happens():
    door = Replay(task(), "ring", 0, None)
    with door.converse(FORWARD) as talk:
        buffer = torch.zeros(3)
        talk.post([], [(1, buffer)], what="whatever").wait()
    assert not buffer.any()
    assert door.bytes_sent == {"forward": 0}


def test_a_post_of_nothing_is_in_no_plan():
    with Replay(task(1), "gather", 0, Noting()).converse(FORWARD) as talk:
        talk.post([], [], what="rows of nobody").wait()


def test_more_than_the_plan_has_is_refused():
    talk = Replay(task(1), "ring", 0, Noting()).converse(FORWARD)
    with pytest.raises(TransportError, match="rank 0 posted more than its plan has"):
        talk.post([], [(0, torch.zeros(D))], what="a step too many")


def test_less_than_the_plan_has_is_refused():
    talk = Replay(task(), "ring", 0, Noting()).converse(FORWARD)
    with pytest.raises(TransportError, match="ended its forward after 0 posts"), talk:
        pass


def test_a_message_that_nobody_waited_for_is_refused():
    (only,) = plan("ring", task(2), 0).forward()
    talk = Replay(task(2), "ring", 0, Noting()).converse(FORWARD)
    with pytest.raises(TransportError, match="after 1 posts, 0 of them waited for"), talk:
        talk.post(*messages(only), what="a step")


def test_an_error_is_not_covered_by_another():
    with pytest.raises(ZeroDivisionError), Replay(task(), "ring", 0, Noting()).converse(FORWARD):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda sends, receives: (sends[:1], receives), "sends 1 messages, by its plan 2"),
        (lambda sends, receives: (sends, [(2, x) for _, x in receives]), "rank 2 at the other end"),
        (lambda sends, receives: ([(r, x[:-1]) for r, x in sends], receives), "its plan has 4 vectors"),
        (lambda sends, receives: (sends, [receives[0], (receives[1][0], torch.zeros(4))]), "16 and 4 numbers"),
    ],
)
def test_what_is_not_as_planned_is_refused(spoil, said):
    sends, receives = messages(next(iter(plan("ring", task(), 0).forward())))
    talk = Replay(task(), "ring", 0, Noting()).converse(FORWARD)
    with pytest.raises(TransportError, match=said):
        talk.post(*spoil(sends, receives), what="step 1").wait()


@pytest.mark.parametrize("schedule", ["ulysses", "hybrid", "no such"])
def test_schedules_that_wait_for_results_are_refused(schedule):
    with pytest.raises(ScheduleRefusal, match="ring, bidirectional, double_ring, exchange, gather"):
        Replay(task(), schedule, 0, None)
