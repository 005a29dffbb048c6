"""Tensors of other kinds, readers of programs, and tensors in another order of dimensions: refused or warned of."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Replicate
from torch.fx.experimental.proxy_tensor import make_fx
from torch.masked import masked_tensor
from torch.utils.flop_counter import FlopCounterMode

import longring as lr
from longring import call
from longring.testing import run_ranks
from worlds import results

Q = torch.randn(1, 8, 2, 4)
CALLS = {
    "attention": lr.attention,
    "ring_attention": lr.ring_attention,
    "dilated_attention": lambda *qkv: lr.dilated_attention(*qkv, segment_lengths=[4], dilation_rates=[1]),
    "in branches": lambda *qkv: lr.dilated_attention(
        *qkv, segment_lengths=[4], dilation_rates=[1], mixing_gradient=False
    ),
    "simulate": lambda *qkv: lr.simulate(*qkv, ranks=2),
    "explain": lr.explain,
    "module": lambda *qkv: lr.nn.RingAttention()(*qkv),
}
every_call = pytest.mark.parametrize("function", CALLS.values(), ids=list(CALLS))


def distributed(x):
    """One of a mesh that nothing is sent over."""
    mesh = dist.DeviceMesh("cpu", torch.tensor([0]), _init_backend=False, _rank=0)
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def nested(**options):
    return torch.nested.nested_tensor([torch.randn(3, 2, 4), torch.randn(5, 2, 4)], **options)


KINDS = {
    "DTensor": (
        lambda: distributed(Q),
        r"is a DTensor: pass this rank's tensor, x.to_local\(\), with a longring.Shard",
    ),
    "NestedTensor": (nested, "is a NestedTensor: pack the sequences into one tensor, with documents="),
    "jagged": (lambda: nested(layout=torch.jagged), "is a NestedTensor: pack the sequences into one tensor"),
    "FakeTensor": (lambda: FakeTensorMode().from_tensor(Q), "is a FakeTensor: it holds no numbers"),
    "MaskedTensor": (lambda: masked_tensor(Q, Q > 0), "is a MaskedTensor: pass its data"),
    "meta": (lambda: Q.to("meta"), "must be dense tensors with numbers in them; q is on device meta"),
    "sparse": (Q.to_sparse, "must be dense tensors with numbers in them; q is torch.sparse_coo"),
}


def refused(error, match, function, *args):
    with pytest.raises(error, match=match) as raised:
        function(*args)
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch")  # prototypes of torch say so
@every_call
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_tensors(function, kind):
    make, match = KINDS[kind]
    other = make()
    refused(lr.ArgumentError, match, function, other, other, other)
    if kind not in ("meta", "sparse"):
        refused(lr.ArgumentError, f"v {match}", function, Q, Q, other)


@pytest.mark.parametrize("kind", ["DTensor", "NestedTensor", "jagged", "MaskedTensor"])
@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch")
def test_other_kinds_are_not_sharded_either(kind):
    make, match = KINDS[kind]
    s = lr.Sharding(8)
    for function in (s.shard, s.unshard):
        refused(lr.ArgumentError, f"x {match}", function, make())
    assert s.shard(Q.to("meta")).shape == Q.shape  # shapes without numbers can be dealt


@every_call
def test_under_a_fake_mode(function):
    with FakeTensorMode():
        refused(lr.ArgumentError, "under a FakeTensorMode has no numbers", function, Q, Q, Q)


@every_call
@pytest.mark.parametrize("which", range(3))
@pytest.mark.filterwarnings("ignore:.*jit.script.*:DeprecationWarning")  # of torch, as it makes a dual
def test_a_tangent(function, which):
    with forward_ad.dual_level():
        given = [Q, Q, Q]
        given[which] = forward_ad.make_dual(Q, Q)
        refused(lr.NotBuilt, f"{'qkv'[which]} has a tangent .*: forward-mode derivatives", function, *given)
        function(Q, Q, Q)  # a level without tangents of these


@every_call
@pytest.mark.filterwarnings("ignore:.*jit.trace.*:DeprecationWarning")
def test_readers_of_programs(function):
    refused(
        lr.NotBuilt, "torch.jit.trace of attention is not built; use", torch.jit.trace, lambda x: function(x, x, x), Q
    )
    refused(lr.NotBuilt, "make_fx of attention is not built; use", make_fx(lambda x: function(x, x, x)), Q)
    if function is not lr.explain:  # which gives no tensor
        gradient = torch.func.grad(lambda x: function(x, x, x).sum())
        refused(lr.NotBuilt, "transforms of torch.func", gradient, Q)


@every_call
def test_what_only_watches_or_is_a_tensor_in_all_but_name_is_welcome(function):
    class Named(torch.Tensor):
        pass

    with FlopCounterMode(display=False):
        function(Q, Q, Q)
    function(torch.nn.Parameter(Q), Q.as_subclass(Named), Q)


def test_on_one_rank_of_several():
    """The others hear of it, and the next call is made as if nothing had been."""

    def program(group):
        s = lr.Sharding(16, group)
        x = distributed(Q) if group.rank == 1 else Q
        with pytest.raises(lr.ArgumentError if group.rank == 1 else lr.TransportError):
            lr.attention(x, x, x, sharding=s)

    run_ranks(2, program)


@pytest.mark.processes
def test_connections_outlive_a_refusal():
    loads = ("torch.distributed.tensor",)
    for rank, (said, is_whole) in enumerate(results(2, "programs:other_tensors_are_refused", loads=loads)):
        assert said[0].startswith(f"rank {rank}: q is a DTensor")
        assert said[1].startswith(f"rank {rank}: q is a NestedTensor")
        assert is_whole


# ---------------------------------------------------------------------------------------------------- modules


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float16, torch.complex64], ids=str)
def test_inputs_of_another_dtype_than_the_weights(dtype):
    x = torch.ones(1, 8, 8)
    for module in (
        lr.nn.MultiheadAttention(8, 2),
        lr.nn.MultiheadAttention(8, 2, kdim=8, vdim=8),
        lr.nn.MultiheadDilatedAttention(8, 2, segment_lengths=[4], dilation_rates=[1]),
    ):
        refused(lr.ArgumentError, f"query is {dtype}, but the weights are torch.float32", module, x.to(dtype))
        refused(lr.ArgumentError, f"key is {dtype}, but the weights are torch.float32", module, x, x.to(dtype))
    refused(
        lr.ArgumentError, "query is on meta, but the weights are on cpu", lr.nn.MultiheadAttention(8, 2), x.to("meta")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_takes_every_dtype_that_it_casts(dtype):
    module, x = lr.nn.MultiheadAttention(8, 2), torch.ones(1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x.to(dtype))[0].dtype == torch.bfloat16
        refused(lr.ArgumentError, "query is torch.float64", module, x.double())
        refused(lr.ArgumentError, "query is torch.int64", module, x.long())


# ---------------------------------------------------------------------------------- [batch, heads, tokens, d]


@pytest.fixture
def not_warned_yet():
    """One process is warned once, and other tests may have been."""
    before = call._suspected[:]
    call._suspected.clear()
    yield
    call._suspected[:] = before


def shaped(n_q, heads, n_k=None, kv_heads=None):
    return [torch.randn(1, n, h, 4) for n, h in ((n_q, heads), *[(n_k or n_q, kv_heads or heads)] * 2)]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((8, 128), r"q is \[1, 8, 128, 4\] and k \[1, 8, 128, 4\]: 8 keys with 128 heads each look like"),
        ((32, 512), "32 keys with 512 heads"),
        ((4, 64), "4 keys with 64 heads"),
        ((32, 256, 8, 256), "8 keys with 256 heads"),  # grouped heads
        ((1, 300), "1 keys with 300 heads"),  # one head
    ],
)
@pytest.mark.parametrize("function", [lr.attention, lr.ring_attention, CALLS["simulate"], lr.explain])
def test_heads_in_the_place_of_tokens(function, shape, said, not_warned_yet):
    qkv = shaped(*shape)
    with pytest.warns(lr.HeadsForTokens, match=said) as seen:
        function(*qkv)
    assert "tensors are [batch, n, heads, d] here" in str(seen[0].message)
    assert seen[0].filename == __file__
    function(*qkv)  # once: a second warning would be an error here


@pytest.mark.parametrize(
    "shape",
    [
        (1, 128, 300, 128),  # decoding, one query
        (1, 128, 300, 8),
        (5, 64, 70, 64),  # a few queries after a prefix
        (1, 32),  # the first token
        (3, 32),  # a short prompt
        (3, 128, 3, 8),
        (3, 96, 3, 48),
        (300, 128, 7, 128),  # few keys, as in cross-attention
        (64, 64),
    ],
)
def test_shapes_of_decoding_and_of_short_prompts_are_not_suspected(shape, not_warned_yet):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lr.attention(*shaped(*shape), pattern=lr.Dense(causal=False))
        lr.explain(*shaped(*shape))


def test_a_rank_with_few_tokens_of_many_is_not_suspected(not_warned_yet):
    q = torch.randn(1, 80, 64, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lr.simulate(q, q, q, ranks=20)
        run_ranks(
            20, lambda group: lr.attention(*[lr.Sharding(80, group).shard(q)] * 3, sharding=lr.Sharding(80, group))
        )


def test_errors_say_the_order_where_it_may_be_their_cause():
    one = torch.randn(1, 32, 1, 4), *[torch.randn(1, 32, 300, 4)] * 2  # a query of decoding, elsewhere
    refused(lr.ArgumentError, r"got 1 and 300; tensors are \[batch, n, heads, d\] here: from", lr.attention, *one)
    q = torch.randn(1, 2, 300, 4)
    with pytest.raises(lr.LayoutError, match=r"q holds 2 tokens, .* 300 of 300 .*; tensors are \[batch, n, heads, d\]"):
        lr.attention(q, q, q, sharding=lr.Sharding(300))
