"""The cache: keys and values where they belong, memory that grows as it says, tokens dealt evenly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import longring as lr
from longring.nn import Cache, DecoderLayer, Multihead, Rotary
from longring.nn.attention import Attention
from longring.nn.cache import LEAST_ROOM, sizes_in_the_end
from longring.testing import run_ranks

BATCH, KV_HEADS, D = 2, 3, 4


def rows(tokens, first=0):
    """Keys that say whose they are."""
    at = torch.arange(first, first + tokens, dtype=torch.float32)
    return at.view(1, -1, 1, 1).expand(BATCH, -1, KV_HEADS, D).clone()


def test_what_was_taken_is_there_in_order():
    cache = Cache()
    layer = cache.layer(0)
    cache.admit(5, None)
    layer.take(rows(5), -rows(5))
    for token in range(5, 70):
        cache.admit(1, "replicated")
        layer.take(rows(1, token), -rows(1, token))
        assert torch.equal(layer.keys, rows(token + 1))
        assert torch.equal(layer.values, -rows(token + 1))
    assert cache.length == layer.sharding.length == 70


def test_memory_grows_by_doubling_and_is_stated():
    cache, made = Cache(), []
    layer = cache.layer(0)
    cache.admit(1, None)
    layer.take(rows(1), rows(1))
    for token in range(1, 1000):
        cache.admit(1, "replicated")
        layer.take(rows(1, token), rows(1, token))
        made.append(cache.nbytes)
    each = 2 * BATCH * KV_HEADS * D * 4
    assert made[0] == LEAST_ROOM * each
    assert made[-1] == 1024 * each
    assert len(set(made)) == 7  # 16, 32, ..., 1024: so many copies, of at most as much as is held in the end
    assert all(room <= 2 * max(LEAST_ROOM, held) * each for held, room in enumerate(made, 2))


def test_with_a_capacity_nothing_moves():
    cache = Cache(capacity=100)
    layer = cache.layer(0)
    cache.admit(10, None)
    layer.take(rows(10), rows(10))
    place = layer.keys.data_ptr()
    for token in range(10, 100):
        cache.admit(1, "replicated")
        layer.take(rows(1, token), rows(1, token))
    assert layer.keys.data_ptr() == place
    assert cache.nbytes == 2 * BATCH * KV_HEADS * D * 4 * 100


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(0, 60))
def test_further_tokens_go_to_who_holds_fewest(sizes, tokens):
    sizes[0] += not any(sizes)
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    shards = [[range(start, start + size)] for start, size in zip(starts, sizes, strict=True)]

    def program(group):
        cache = Cache()
        cache.admit(sizes[group.rank], lr.Sharding.from_ranges(shards, group=group))
        for _ in range(tokens):
            before = list(cache.sharding.dealt.sizes)
            cache.admit(1, "replicated")
            assert before[cache.holder] == min(before)
        return cache.sharding

    found = run_ranks(len(sizes), program)
    assert len({s.dealt for s in found}) == 1
    got = found[0].dealt.sizes
    assert list(got) == sizes_in_the_end(sizes, tokens)
    assert sum(got) == sum(sizes) + tokens
    level = max((size for size, before in zip(got, sizes, strict=True) if size > before), default=0)
    assert all(size >= level - 1 for size in got)  # nobody is left behind


def test_each_rank_keeps_its_own():
    def program(group):
        s = lr.Sharding(10, group, "zigzag")
        cache = Cache()
        layer = cache.layer(0)
        cache.admit(s.local_length, s)
        layer.take(s.shard(rows(10)), s.shard(rows(10)))
        for token in range(10, 40):
            cache.admit(1, "replicated")
            layer.take(rows(1, token), rows(1, token))
        kept = layer.keys[0, :, 0, 0].tolist()
        assert kept == cache.sharding.positions.tolist()
        return kept

    kept = run_ranks(3, program)
    assert sorted(position for mine in kept for position in mine) == list(range(40))
    assert max(map(len, kept)) - min(map(len, kept)) <= 1


def test_what_does_not_go_with_it_is_refused():
    cache = Cache()
    cache.admit(3, None)
    cache.layer(0).take(rows(3), rows(3))
    cache.admit(1, "replicated")
    for wrong in (rows(1)[:1], rows(1)[:, :, :1], rows(1)[..., :2], rows(1).double()):
        with pytest.raises(lr.ArgumentError, match="do not go with them"):
            cache.layer(0).take(wrong, wrong)
    with pytest.raises(lr.ArgumentError, match="capacity must be a whole number"):
        Cache(capacity=0)
    with pytest.raises(lr.ArgumentError, match=r"must be a longring\.Sharding, got 'zigzag'"):
        Cache().admit(3, "zigzag")


def test_a_layer_and_a_module_alone():
    """Without a model around them: positions are then their own."""
    torch.manual_seed(0)
    layer = DecoderLayer(16, 4, positions=Rotary(4)).double()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    with torch.no_grad():
        want = layer(x)
        for module, whole in ((layer, want), (layer.attention, layer.attention(x)[0])):
            cache, found = Cache(), []
            for tokens, sharding in ((x[:, :5], None), (x[:, 5:6], "replicated"), (x[:, 6:], "replicated")):
                cache.admit(tokens.shape[1], sharding)
                out = module(tokens, sharding=sharding, cache=cache.layer(0))
                found.append(out[0] if isinstance(out, tuple) else out)
            torch.testing.assert_close(torch.cat(found, 1), whole, atol=1e-12, rtol=1e-12)


def test_a_module_with_replicated_queries_over_keys_of_others():
    torch.manual_seed(0)
    module = Multihead(16, 4, attention=Attention(lr.Dense(causal=False)), positions=Rotary(4)).double()
    query, key = torch.randn(1, 2, 16, dtype=torch.float64), torch.randn(1, 11, 16, dtype=torch.float64)
    want = module(query, key)[0]

    def program(group):
        s = lr.Sharding(11, group, "zigzag")
        with torch.no_grad():
            return module(query, s.shard(key), sharding="replicated", kv_sharding=s)[0]

    for found in run_ranks(3, program):
        torch.testing.assert_close(found, want, atol=1e-12, rtol=1e-12)


def test_modules_refuse_what_makes_no_sense():
    module = Multihead(16, 4, attention=Attention())
    x, cache = torch.randn(1, 3, 16), Cache()
    cache.admit(3, None)
    with torch.no_grad():
        for words, said in (
            ({"query_offset": 2}, "query_offset=2 with a cache"),
            ({"documents": [0, 3]}, "with a cache is not built"),
        ):
            with pytest.raises(lr.NotBuilt, match=said):
                module(x, cache=cache.layer(0), **words)
        with pytest.raises(lr.ArgumentError, match="but a key was given"):
            module(x, x, cache=cache.layer(0))
        with pytest.raises(lr.ArgumentError, match="needs kv_sharding"):
            module(x, sharding="replicated")
        crossing = DecoderLayer(16, 4, cross_attention=True)
        with pytest.raises(lr.NotBuilt, match="cross_attention"):
            crossing(x, x, cache=cache.layer(1))
