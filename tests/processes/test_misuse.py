"""What people do to groups: refuse on one rank, make them anew, destroy them, mix them up, compile around them."""

import time

import pytest
import torch
import torch.distributed as dist

import longring as lr
from longring.transport.board import Board, Verdict

pytestmark = pytest.mark.processes


def call(n, group=None, **options):
    s = lr.Sharding(n, group or dist.group.WORLD)
    x = torch.ones(1, s.local_length, 2, 8)
    return lr.attention(x, x, x, sharding=s, timeout=20, **options)


def raised(function, *args, **options):
    try:
        function(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def refused_by_one():
    began = time.monotonic()
    found = raised(call, 24, scale="much" if dist.get_rank() == 1 else 0.5)
    return *found, time.monotonic() - began


def test_what_one_rank_refuses_the_others_hear_of_at_once():
    found = lr.launch(refused_by_one, ranks=3, timeout=60)
    assert found[1][0] == "ArgumentError"
    for kind, text, seconds in (found[0], found[2]):
        assert kind == "Disagreement"
        assert "an argument was refused (rank 1: scale must be a finite number" in text
        assert seconds < 10


def refused_by_all():
    for _ in range(3):
        assert raised(call, 24, scale="much")[0] == "ArgumentError"
    return call(24).sum().item()


def test_what_all_refuse_breaks_nothing():
    assert lr.launch(refused_by_all, ranks=3, timeout=60) == [8 * 2 * 8] * 3


def another_life():
    """A second group of one name on one store, as when a world is made anew."""
    first = Board(dist.group.WORLD)
    first.pronounce(Verdict("failed", 0, "long ago"))
    again = Board(dist.group.WORLD)
    return first.verdict(), again.verdict(), again.notes([0])[0].beats


def test_a_group_made_anew_knows_nothing_of_the_old_ones_verdict():
    assert lr.launch(another_life, ranks=1, timeout=60) == [(("failed", 0, "long ago"), None, 0)]


def destroyed():
    group = dist.new_group([0, 1])
    call(24, group)
    dist.destroy_process_group(group)
    return raised(call, 24, group)


def test_a_destroyed_group_is_named_as_such():
    for kind, text in lr.launch(destroyed, ranks=2, timeout=60):
        assert issubclass(getattr(lr, kind), lr.LongringError)
        assert "destroyed" in text


def keys_over_other_ranks():
    rows = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    rank = dist.get_rank()
    queries = lr.Sharding(8, rows[rank % 2])
    keys = lr.Sharding(8, columns[rank in (1, 2)])
    x = torch.zeros(1, 4, 1, 4)
    return raised(lr.attention, x, x, x, sharding=queries, kv_sharding=keys, timeout=20)


def test_keys_dealt_over_other_ranks_are_refused():
    for kind, text in lr.launch(keys_over_other_ranks, ranks=4, timeout=60):
        assert kind == "LayoutError"
        assert "kv_sharding is over ranks" in text


def unshard_along(dims):
    s = lr.Sharding(8, dist.group.WORLD)
    return raised(s.unshard, torch.zeros(4, 4), dim=dims[dist.get_rank()], timeout=20)


def test_the_dimension_of_tokens_is_agreed_on():
    for kind, text in lr.launch(unshard_along, (0, 1), ranks=2, timeout=60):
        assert kind == "Disagreement"
        assert "dim is 1 on rank 1, and 0 on rank 0" in text
    assert lr.launch(unshard_along, (1, -1), ranks=2, timeout=60) == [None, None]


def compiled():
    s = lr.Sharding(16, dist.group.WORLD)
    torch.manual_seed(0)
    x = torch.randn(1, 16, 2, 8, requires_grad=True)

    def model(x):
        mine = s.shard(2 * x)
        return s.unshard(lr.attention(mine, mine, mine, sharding=s, timeout=20)).sum()

    want = torch.autograd.grad(model(x), x)[0]
    return torch.equal(torch.autograd.grad(torch.compile(model, backend="eager")(x), x)[0], want)


def test_the_compiler_leaves_attention_alone():
    assert lr.launch(compiled, ranks=2, timeout=100) == [True, True]
