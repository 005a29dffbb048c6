"""One suite over every schedule: what is under way while a rank computes, and how long it is waited for."""

from __future__ import annotations

import pytest
import torch

import longring as lr
from longring.call import make_journey
from longring.geometry.layouts import deal
from longring.geometry.patterns import Dense, Problem
from longring.geometry.task import Task
from longring.kernels.contract import Upstream
from longring.kernels.select import KERNELS
from longring.schedules.select import SCHEDULES
from longring.testing import run_ranks

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


class Watched:
    """A rank's transport that remembers every timeout, and counts what is under way."""

    def __init__(self, transport):
        self.transport, self.rank, self.size = transport, transport.rank, transport.size
        self.node_ranks, self.members, self.decline = transport.node_ranks, transport.members, transport.decline
        self.timeouts, self.under_way = [], 0

    def converse(self, terms, *, timeout=None):
        return WatchedTalk(self, self.transport.converse(terms, timeout=timeout), timeout)


class WatchedTalk:
    def __init__(self, watched, talk, timeout):
        self.watched, self.talk, self.timeout = watched, talk, timeout

    def __enter__(self):
        self.talk.__enter__()
        return self

    def __exit__(self, *error):
        return self.talk.__exit__(*error)

    def post(self, sends, receives, *, what):
        self.watched.timeouts.append(self.timeout)
        self.watched.under_way += 1
        return Arrival(self.watched, self.talk.post(sends, receives, what=what))


class Arrival:
    def __init__(self, watched, pending):
        self.watched, self.pending = watched, pending

    def wait(self):
        self.pending.wait()
        self.watched.under_way -= 1


class Attentive:
    """A kernel that notes how many posts are under way whenever it is called."""

    def __init__(self, watched):
        self.watched, self.during_forward, self.during_backward = watched, [], []

    def forward(self, *args, **options):
        self.during_forward.append(self.watched.under_way)
        return KERNELS["reference"].forward(*args, **options)

    def backward(self, *args, **options):
        self.during_backward.append(self.watched.under_way)
        return KERNELS["reference"].backward(*args, **options)


@pytest.mark.parametrize("schedule", ["ring", "exchange"])
def test_a_rank_computes_while_messages_are_under_way(schedule):
    """In a forward all steps but the last, in a backward all; and in the end nothing is left under way.

    A backward computes a rank's own block in two parts, one of them while the last gradients come home.
    """
    dealt = deal("contiguous", 12, 4)
    task = Task(Dense(causal=False), Problem(1, 12, 12, 1, 0), dealt, dealt)

    def program(transport):
        watched = Watched(transport)
        kernel = Attentive(watched)
        journey = make_journey(task, watched, kernel, schedule, 0.5, None)
        q, k, v, dout = (torch.randn(1, 3, 1, 4, dtype=torch.float64) for _ in range(4))
        total = SCHEDULES[schedule].forward(journey, q, k, v)
        SCHEDULES[schedule].backward(journey, Upstream(dout, None, *total), q, k, v)
        return kernel.during_forward, kernel.during_backward, watched.under_way

    for forward, backward, left in run_ranks(4, program):
        assert (len(forward), len(backward)) == (4, 5)
        assert all(forward[:-1])
        assert all(backward)
        assert left == 0


@every_schedule
def test_every_message_is_waited_for_as_long_as_was_asked(schedule):
    def program(transport):
        group = Watched(transport)
        x = torch.randn(1, 4, 2, 4).requires_grad_()
        out = lr.attention(x, x, x, group=group, layout="zigzag", schedule=schedule, timeout=7.0)
        forward = len(group.timeouts)
        out.sum().backward()
        return forward, group.timeouts

    for forward, timeouts in run_ranks(3, program):
        assert 0 < forward < len(timeouts)
        assert set(timeouts) == {7.0}
