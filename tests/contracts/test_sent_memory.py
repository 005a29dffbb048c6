"""One suite over every schedule: what is sent is left alone until it was waited for."""

from __future__ import annotations

import pytest
import torch

import longring as lr
from longring.schedules.select import SCHEDULES
from longring.testing import run_ranks

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


class Guarded:
    """A rank's transport that looks, when a post is waited for, whether what it sends is still what it was."""

    def __init__(self, transport, node_ranks):
        self.transport, self.rank, self.size = transport, transport.rank, transport.size
        self.node_ranks, self.spoilt, self.posts = node_ranks, [], 0
        self.members, self.decline = transport.members, transport.decline

    def converse(self, terms, *, timeout=None):
        return GuardedTalk(self, self.transport.converse(terms, timeout=timeout))


class GuardedTalk:
    def __init__(self, guarded, talk):
        self.guarded, self.talk = guarded, talk

    def __enter__(self):
        self.talk.__enter__()
        return self

    def __exit__(self, *error):
        return self.talk.__exit__(*error)

    def post(self, sends, receives, *, what):
        self.guarded.posts += 1
        sent = [(x, x.clone()) for _, x in sends]
        copies = [(peer, then) for (peer, _), (_, then) in zip(sends, sent, strict=True)]
        return Guard(self.guarded, self.talk.post(copies, receives, what=what), sent, what)


class Guard:
    def __init__(self, guarded, pending, sent, what):
        self.guarded, self.pending, self.sent, self.what = guarded, pending, sent, what

    def wait(self):
        if not all(torch.equal(now, then) for now, then in self.sent):
            self.guarded.spoilt.append(self.what)
        self.pending.wait()


@every_schedule
@pytest.mark.parametrize(
    "pattern", [lr.Dense(causal=False), lr.Dense(), lr.Dense(window=(7, 0))], ids=["full", "causal", "window"]
)
def test_memory_that_is_being_sent_is_not_used_again_before_it_has_left(schedule, pattern):
    """Nine ranks in three nodes: what a ring of rings sends to the next node is under way for a whole inner round."""

    def program(transport):
        group = Guarded(transport, 3)
        torch.manual_seed(transport.rank)
        x = torch.randn(2, 5, 6, 4).requires_grad_()
        for _ in range(2):
            options = {"pattern": pattern, "group": group, "layout": "contiguous", "schedule": schedule}
            lr.attention(x, x, x, **options).sum().backward()
        return group.posts, group.spoilt

    for posts, spoilt in run_ranks(9, program):
        assert posts
        assert spoilt == []
