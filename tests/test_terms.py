"""What ranks must share is compared, all of it, and timeouts are handed on."""

from __future__ import annotations

import pytest
import torch

import longring as lr
from longring.testing import run_ranks


class Noting:
    """A rank's transport that remembers with which terms and timeout it conversed."""

    def __init__(self, transport, node_ranks=None):
        self.transport, self.rank, self.size = transport, transport.rank, transport.size
        self.node_ranks = node_ranks or transport.node_ranks
        self.timeouts = []
        self.members, self.decline = transport.members, transport.decline

    def converse(self, terms, *, timeout=None):
        self.timeouts.append(timeout)
        return self.transport.converse(terms, timeout=timeout)


def test_other_ranks_are_waited_for_as_long_as_was_asked():
    """In `unshard`, and in the backward of `shard`."""

    def program(transport):
        group = Noting(transport)
        s = lr.Sharding(9, group)
        part = s.shard(torch.randn(1, 9, 2).requires_grad_(), timeout=7.0)
        s.unshard(part.detach(), timeout=8.0)
        assert group.timeouts == [8.0]
        part.sum().backward()
        return group.timeouts

    assert run_ranks(3, program) == [[8.0, 7.0]] * 3


DIFFERENT = {
    "dtype": lambda odd: (torch.zeros(1, 4, 2, dtype=torch.float64 if odd else torch.float32), "contiguous"),
    "shape of a token": lambda odd: (torch.zeros(1, 4, 1, 2) if odd else torch.zeros(1, 4, 2, 1), "contiguous"),
    "how tokens are dealt": lambda odd: (torch.zeros(1, 4, 2), "zigzag" if odd else "contiguous"),
}


@pytest.mark.parametrize("differs", DIFFERENT)
def test_ranks_that_unshard_differently_are_told(differs):
    def program(group):
        part, layout = DIFFERENT[differs](group.rank == 1)
        return lr.Sharding(12, group, layout).unshard(part)

    with pytest.raises(lr.TransportError, match=rf"disagree .*{differs}.*; all ranks must make the same call"):
        run_ranks(3, program)


@pytest.mark.parametrize(
    ("differs", "term"),
    [
        ("node_ranks", "ranks of a node"),
        ("keys", "how keys are dealt"),
        ("head_dim", "head dimension"),
        ("batch", "batch"),
        ("kv_heads", "kv heads"),
        ("heads", "heads"),
    ],
)
@pytest.mark.parametrize("schedule", ["ring", "hybrid"])
def test_every_fact_that_ranks_must_share_is_compared(schedule, differs, term):
    """Messages may well fit: they are of other rows, or of other heads."""

    def program(transport):
        def odd(name, ours, theirs):
            return theirs if transport.rank == 1 and name == differs else ours

        group = Noting(transport, odd("node_ranks", 2, 4))
        queries, keys = lr.Sharding(16, group), lr.Sharding(16, group, odd("keys", "zigzag", "striped"))
        batch, d = odd("batch", 2, 4), odd("head_dim", 8, 4)
        q = torch.zeros(batch, 4, odd("heads", 8, 4), d)
        k = torch.zeros(batch, 4, odd("kv_heads", 2, 4), d)
        options = {"sharding": queries, "kv_sharding": keys, "schedule": schedule, "scale": 0.5}
        return lr.attention(q, k, k, pattern=lr.Dense(causal=False), **options)

    with pytest.raises(lr.TransportError, match=rf"disagree .*{term}.*; all ranks must make the same call"):
        run_ranks(4, program)
