"""What the caller got wrong raises at once, as one of longring's own errors, naming argument, value and remedy."""

import numpy as np
import pytest
import torch

import longring as lr
from longring import call
from longring.errors import (
    ArgumentError,
    KernelRefusal,
    LayoutError,
    NotBuilt,
    PatternError,
    ScheduleRefusal,
    TransportError,
)
from longring.simulation import Simulation
from longring.transport.loopback import run_ranks


def tokens(n=8, heads=2, d=4, batch=1, **options):
    return torch.zeros(batch, n, heads, d, **options)


def refused(error, match, call, *args, **kwargs):
    assert issubclass(error, (lr.LongringError, TypeError))
    with pytest.raises(error, match=match):
        call(*args, **kwargs)


Q = tokens()


def on_two_ranks(program):
    return run_ranks(2, program)


# ------------------------------------------------------------------------------------------------- tensors

BAD_TENSORS = {
    "k and v of different lengths": ((Q, tokens(8), tokens(7)), r"k and v must have one shape, got \[1, 8, 2, 4\] and"),
    "k and v of different d": ((Q, Q, tokens(d=5)), r"k and v must have one shape"),
    "another batch": ((Q, tokens(batch=2), tokens(batch=2)), "q and k must have one batch size, got 1 and 2"),
    "another d": ((Q, tokens(d=8), tokens(d=8)), "q and k must have one head dimension d, got 4 and 8"),
    "heads no multiple": ((tokens(heads=3), Q, Q), "heads must be a multiple of kv_heads, got 3 and 2"),
    "fewer heads than kv_heads": ((tokens(heads=1), Q, Q), "heads must be a multiple of kv_heads, got 1 and 2"),
    "dtypes": ((Q, Q.half(), Q.half()), "one dtype, but q is torch.float32 and k torch.float16"),
    "dtype of v": ((Q, Q, Q.double()), "one dtype, but q is torch.float32 and v torch.float64"),
    "devices": ((Q, tokens(device="meta"), Q), "one device, but q is on cpu and k on meta"),
    "integers": ((Q.long(), Q.long(), Q.long()), "q must be float16, bfloat16, float32 or float64, got torch.int64"),
    "not a tensor": ((Q, [[1.0]], Q), "k must be a tensor, got list"),
    "nothing": ((Q, Q, None), "v must be a tensor, got NoneType"),
    "three dimensions": ((Q[0], Q, Q), r"q must be \[batch, n, heads, d\], got shape \[8, 2, 4\]"),
    "no queries": ((tokens(0), Q, Q), "q "),
    "no keys": ((Q, tokens(0), tokens(0)), "k "),
    "no batch": ((tokens(batch=0),) * 3, r"q needs a batch, heads and d of at least 1, got shape \[0, 8, 2, 4\]"),
    "no heads": ((Q, tokens(heads=0), tokens(heads=0)), "k needs a batch, heads and d of at least 1"),
    "no d": ((tokens(d=0),) * 3, "q needs a batch, heads and d of at least 1"),
}
FUNCTIONS = {
    "attention": lr.attention,
    "ring_attention": lr.ring_attention,
    "dilated_attention": lambda *qkv: lr.dilated_attention(*qkv, segment_lengths=[4], dilation_rates=[1]),
    "simulate": lambda *qkv: lr.simulate(*qkv, ranks=2),
    "explain": lr.explain,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))
@pytest.mark.parametrize(("qkv", "match"), BAD_TENSORS.values(), ids=list(BAD_TENSORS))
def test_tensors(function, qkv, match):
    refused(ArgumentError, match, function, *qkv)


# ------------------------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"causal": 1}, "causal must be True or False, got 1"),
        ({"window": 3}, r"window must be \(left, right\), got 3"),
        ({"window": (1, 2, 3)}, r"window must be \(left, right\), got \(1, 2, 3\)"),
        ({"window": (-2, 0)}, "window's left must be at least 0, or -1 or None for no limit; got -2"),
        ({"window": (0, -7)}, "window's right must be at least 0"),
        ({"window": (1.5, 0)}, "window's left must be at least 0.*got 1.5"),
        ({"documents": []}, r"documents must be boundaries \[0, ..., n\], got an empty list"),
        ({"documents": [0, 5, 5, 8]}, "documents must rise from boundary to boundary, but 5 follows 5"),
        ({"documents": [0, 5, 3, 8]}, "documents must rise from boundary to boundary, but 3 follows 5"),
        ({"documents": [1, 8]}, r"documents must begin with 0 .* got \[1, 8\]"),
        ({"documents": [0]}, "documents must begin with 0 and end with the length"),
        ({"documents": [0, 2.5, 8]}, "documents must be whole numbers"),
        ({"documents": torch.tensor([0.0, 8.0])}, "documents must be whole numbers"),
        ({"documents": [0, [0, 8]]}, "documents must be whole numbers"),
        ({"documents": "0, 8"}, "documents must be a list of whole numbers, got '0, 8'"),
        ({"documents": 8}, "documents must be a list of whole numbers, got 8"),
        ({"lengths": [-1]}, r"lengths must be one whole number of at least 0 per batch row, got \[-1\]"),
        ({"lengths": [2.0]}, "lengths must be one whole number"),
        ({"lengths": []}, "lengths must be one whole number"),
        ({"lengths": 3}, "lengths must be a list of whole numbers, got 3"),
    ],
)
def test_dense(options, match):
    refused(PatternError, match, lr.Dense, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dilation_rates": [1, 2]}, r"segment_lengths and dilation_rates must pair up, got 1 and 2"),
        ({"segment_lengths": [0]}, r"segment_lengths must be a list of whole numbers of at least 1, got \[0\]"),
        ({"segment_lengths": [-4]}, r"segment_lengths .* got \[-4\]"),
        ({"segment_lengths": []}, r"segment_lengths .* got \[\]"),
        ({"segment_lengths": 4}, "segment_lengths must be a list of whole numbers, got 4"),
        ({"dilation_rates": [0]}, r"dilation_rates must be a list of whole numbers of at least 1, got \[0\]"),
        ({"dilation_rates": [1.0]}, r"dilation_rates .* got \[1.0\]"),
        ({"phase": "random"}, "phase must be 'mod' or 'block', got 'random'"),
        ({"causal": None}, "causal must be True or False, got None"),
        ({"documents": [0, 4, 2]}, "documents must rise"),
    ],
)
def test_dilated(options, match):
    good = {"segment_lengths": [4], "dilation_rates": [1]}
    refused(PatternError, match, lr.Dilated, **{**good, **options})
    refused(PatternError, match, lr.dilated_attention, Q, Q, Q, **{**good, **options})


@pytest.mark.parametrize(
    ("pattern", "match"),
    [
        (lr.Dense(documents=[0, 4]), "documents must end at the 8 keys of the sequence, but end at 4"),
        (lr.Dense(documents=[[0, 8]] * 3), "documents must be one list or one for each of 1 rows, got 3"),
        (lr.Dense(lengths=[1, 2]), r"lengths must hold one number for each of 1 rows, got \(1, 2\)"),
        (lr.Dense(lengths=[9]), r"lengths must not exceed the 8 keys, got \(9,\)"),
        (lr.Dilated([4], [1], documents=[0, 9]), "documents must end at the 8 keys"),
        (lr.Dilated([4], [1], documents=[[0, 8]] * 3), "documents must be one list or one for each of 1 rows, got 3"),
        ("causal", r"pattern must be longring.Dense\(...\) or longring.Dilated\(...\), got 'causal'"),
        (None, "pattern must be longring.Dense"),
    ],
)
def test_patterns_on_a_sequence(pattern, match):
    refused(PatternError, match, lr.attention, Q, Q, Q, pattern=pattern)
    refused(PatternError, match, lr.simulate, Q, Q, Q, ranks=2, pattern=pattern)


@pytest.mark.parametrize(
    "documents",
    [torch.tensor([0, 3, 8]), torch.tensor([[0, 3, 8]]), np.array([0, 3, 8]), [torch.tensor([0, 3, 8])], (0, 3, 8)],
    ids=["tensor", "2-D tensor", "array", "list of tensors", "tuple"],
)
def test_documents_may_be_tensors_and_arrays(documents):
    q = torch.randn(1, 8, 2, 4)
    expected = lr.attention(q, q, q, pattern=lr.Dense(documents=[0, 3, 8]))
    assert torch.equal(lr.attention(q, q, q, pattern=lr.Dense(documents=documents)), expected)
    assert torch.equal(lr.ring_attention(q, q, q, documents=documents), expected)
    assert lr.Sharding(8, layout="dealt", documents=documents).documents == ((0, 3, 8),)


# -------------------------------------------------------------------------------------------------- options

ONE_RANK = lr.Sharding(8)


@pytest.mark.parametrize(
    ("error", "options", "match"),
    [
        (ScheduleRefusal, {"schedule": "bus"}, "schedule must be one of auto, ring, .*; got 'bus'"),
        (ScheduleRefusal, {"schedule": None}, "schedule must be one of .* got None"),
        (KernelRefusal, {"kernel": "magic"}, "kernel must be one of auto, .*; got 'magic'"),
        (ArgumentError, {"scale": float("nan")}, "scale must be a finite number, got nan"),
        (ArgumentError, {"scale": float("inf")}, "scale must be a finite number, got inf"),
        (ArgumentError, {"scale": "1"}, "scale must be a finite number, got '1'"),
        (ArgumentError, {"scale": True}, "scale must be a finite number, got True"),
        (ArgumentError, {"timeout": True}, "timeout must be a positive number of seconds"),
        (ArgumentError, {"timeout": 0}, "timeout must be a positive number of seconds, or None; got 0"),
        (ArgumentError, {"timeout": -1.0}, "timeout must be a positive number of seconds"),
        (ArgumentError, {"timeout": "1 s"}, "timeout must be a positive number of seconds"),
        (ArgumentError, {"query_offset": 1.5}, "query_offset must be a whole number, got 1.5"),
        (ArgumentError, {"query_offset": True}, "query_offset must be a whole number, got True"),
        (ArgumentError, {"deterministic": 1}, "deterministic must be True or False, got 1"),
        (ArgumentError, {"sharding": "zigzag"}, "sharding must be a longring.Sharding, got 'zigzag'"),
        (ArgumentError, {"kv_sharding": ONE_RANK}, "kv_sharding was given without sharding"),
        (ArgumentError, {"layout": "zigzag"}, "layout='zigzag' needs group"),
        (ArgumentError, {"sharding": ONE_RANK, "layout": "zigzag"}, "sharding already says group and layout"),
        (ArgumentError, {"group": "nccl"}, "group must be a longring transport, .* got 'nccl'"),
        (ArgumentError, {"group": object(), "layout": "zigzag"}, "group must be a longring transport"),
    ],
)
def test_options(error, options, match):
    refused(error, match, lr.attention, Q, Q, Q, **options)
    refused(error, match, lr.explain, Q, Q, Q, **options)


@pytest.mark.parametrize("timeout", [float("nan"), float("inf")])
def test_a_timeout_that_is_no_number_of_seconds(timeout):
    refused(ArgumentError, "timeout must be", lr.attention, Q, Q, Q, timeout=timeout)


def test_a_kv_sharding_that_is_none():
    refused(ArgumentError, "kv_sharding must be", lr.attention, Q, Q, Q, sharding=ONE_RANK, kv_sharding="zigzag")


def run_of(function, *qkv, **options):
    """Called; what comes out, as a list of tensors or numbers."""
    found = function(*qkv, **options)
    return [found.out] if isinstance(found, Simulation) else [found]


DILATED = {"segment_lengths": [4], "dilation_rates": [1]}
CALLS = {
    **FUNCTIONS,
    "dilated_attention": lambda *qkv, **more: lr.dilated_attention(*qkv, **DILATED, **more),
    "simulate": lambda *qkv, **more: lr.simulate(*qkv, ranks=2, **more),
    "Attention": lr.nn.Attention(),
    "RingAttention": lr.nn.RingAttention(),
    "DilatedAttention": lr.nn.DilatedAttention(**DILATED),
}
every_call = pytest.mark.parametrize("function", CALLS.values(), ids=list(CALLS))


@every_call
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dropout", 0.1),
        ("dropout_p", 1),
        ("dropout", torch.tensor(0.0)),
        ("bias", 0),
        ("attn_bias", 1),
        ("attn_mask", False),
        ("mask", 0),
        ("alibi_slopes", [1.0]),
        ("softcap", 30.0),
        ("logit_cap", 30.0),
        ("sinks", 0),
    ],
)
def test_known_features_that_are_not_built_are_refused_by_name(function, name, value):
    refused(NotBuilt, f"{name}=.* not built yet, and is never silently ignored", function, Q, Q, Q, **{name: value})


@every_call
def test_what_does_nothing_elsewhere_does_nothing_here(function):
    nothing = {"dropout_p": 0.0, "dropout": 0, "softcap": 0.0}
    nothing |= dict.fromkeys(("attn_mask", "attention_mask", "key_padding_mask", "mask", "bias", "attn_bias", "sinks"))
    nothing |= dict.fromkeys(("alibi_slopes", "dropout", "logit_cap"))
    q, k, v = torch.randn(3, 1, 8, 2, 4).unbind()
    for without in ({name: value} for name, value in nothing.items()):
        for got, want in zip(run_of(function, q, k, v, **without), run_of(function, q, k, v), strict=True):
            assert torch.equal(got, want) if isinstance(got, torch.Tensor) else got == want
    run_of(function, q, k, v, **nothing)


@every_call
@pytest.mark.parametrize("mask", [torch.ones(90, 90), np.ones((90, 90), dtype=np.float32)], ids=["tensor", "array"])
def test_a_mask_is_described_and_not_printed(function, mask):
    with pytest.raises(NotBuilt) as error:
        function(Q, Q, Q, attn_mask=mask)
    assert "float32 [90, 90]: a mask given as a tensor is not built yet" in str(error.value)
    assert "\n" not in str(error.value)
    assert "said by pattern=longring.Dense(...)" in str(error.value)


def test_tensors_and_arrays_in_the_place_of_options_are_described_too():
    """One line, and none of Python's own errors of what is no truth value."""
    big, names = torch.ones(90, 90), np.array(["ring", "auto"])
    refused(PatternError, r"pattern must be .*, got torch.float32 \[90, 90\]$", lr.attention, Q, Q, Q, pattern=big)
    refused(
        ArgumentError, r"scale must be a finite number, got torch.float32 \[90, 90\]$", lr.attention, Q, Q, Q, scale=big
    )
    got = r"got an array of <U4 \[2\]$"
    for name in ("attention", "explain", "simulate"):
        refused(ScheduleRefusal, f"schedule must be one of .*; {got}", CALLS[name], Q, Q, Q, schedule=names)
        refused(KernelRefusal, f"kernel must be one of .*; {got}", CALLS[name], Q, Q, Q, kernel=names)
    refused(
        ArgumentError, "ring_attention is the ring; for schedule=an array", lr.ring_attention, Q, Q, Q, schedule=names
    )
    refused(LayoutError, f"layout must be one of .*; {got}", lr.simulate, Q, Q, Q, ranks=2, layout=names)
    refused(LayoutError, f"layout must be one of .*; {got}", lr.Sharding, 8, layout=names)


def test_an_array_of_schedules_over_ranks(monkeypatch):
    monkeypatch.setattr(call, "world_size", lambda: 2)
    refused(ScheduleRefusal, "schedule must be one of", lr.attention, Q, Q, Q, schedule=np.array(["ring", "auto"]))


def test_the_ring_may_be_called_by_its_name():
    q = torch.randn(1, 8, 2, 4)
    assert torch.equal(lr.ring_attention(q, q, q, schedule="ring"), lr.ring_attention(q, q, q))
    refused(
        ArgumentError, "is the ring; for schedule='gather' use attention", lr.ring_attention, q, q, q, schedule="gather"
    )


@every_call
def test_a_word_nobody_knows_is_a_type_error(function):
    match = r"^\w+\(\) got an unexpected keyword argument 'casual'$"
    refused(TypeError, match, function, Q, Q, Q, casual=True)


TO_PATTERNS = "; {}= is for pattern=longring.Dense(...), for longring.ring_attention and for modules"
TO_MAKING = "; {}= is said when the module is made"


@pytest.mark.parametrize(
    ("function", "name", "said"),
    [
        ("attention", "causal", TO_PATTERNS.format("causal")),
        ("attention", "is_causal", TO_PATTERNS.format("causal")),
        ("simulate", "is_causal", TO_PATTERNS.format("causal")),
        ("explain", "window_size", TO_PATTERNS.format("window")),
        ("ring_attention", "is_causal", "; it is causal= here"),
        ("ring_attention", "window_size", "; it is window= here"),
        ("ring_attention", "cu_seqlens", "; it is documents= here"),
        ("ring_attention", "pattern", "; pattern= is for longring.attention"),
        ("dilated_attention", "is_causal", "; it is causal= here"),
        ("dilated_attention", "window_size", TO_PATTERNS.format("window")),
        ("attention", "softmax_scale", "; it is scale= here"),
        ("dilated_attention", "softmax_scale", "; it is scale= here"),
        ("attention", "enable_gqa", "; query heads may be any multiple of kv heads without it"),
        ("RingAttention", "is_causal", "; it is causal= here"),
        ("RingAttention", "window_size", TO_MAKING.format("window")),
        ("DilatedAttention", "schedule", TO_MAKING.format("schedule")),
        ("Attention", "pattern", TO_MAKING.format("pattern")),
    ],
)
def test_words_of_others_are_told_where_they_belong(function, name, said):
    with pytest.raises(TypeError) as error:
        CALLS[function](Q, Q, Q, **{name: True})
    assert str(error.value) == f"{function}() got an unexpected keyword argument {name!r}{said}"


# ------------------------------------------------------------------------------------------------- simulate


@pytest.mark.parametrize(
    ("error", "options", "match"),
    [
        (LayoutError, {"ranks": 0}, "ranks must be a whole number of at least 1, got 0"),
        (LayoutError, {"ranks": -2}, "ranks must be a whole number of at least 1, got -2"),
        (LayoutError, {"ranks": 2.0}, "ranks must be a whole number of at least 1, got 2.0"),
        (LayoutError, {"layout": "spiral"}, "layout must be one of .*got 'spiral'"),
        (LayoutError, {"layout": "dealt"}, "layout 'dealt' balances documents and needs documents"),
        (LayoutError, {"align": 0}, "align must be a whole number of at least 1, got 0"),
        (LayoutError, {"layout": "striped", "align": 4}, "align=4 cannot be kept by layout 'striped'"),
        (ScheduleRefusal, {"schedule": "bus"}, "schedule must be one of"),
        (KernelRefusal, {"kernel": "magic"}, "kernel must be one of"),
        (ArgumentError, {"scale": float("nan")}, "scale must be a finite number"),
    ],
)
def test_simulate(error, options, match):
    refused(error, match, lr.simulate, Q, Q, Q, **{"ranks": 2, **options})


def test_simulate_with_half_a_position():
    refused(ArgumentError, "query_offset must be a whole number", lr.simulate, Q, Q, Q, ranks=2, query_offset=1.5)


# ------------------------------------------------------------------------------------------------- sharding


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"length": 0}, "length must be a whole number of at least 1, got 0"),
        ({"length": 8.0}, "length must be a whole number of at least 1, got 8.0"),
        ({"layout": "spiral"}, "layout must be one of auto, contiguous, zigzag, striped, dealt; got 'spiral'"),
        ({"layout": "auto"}, "layout='auto' needs pattern"),
        ({"layout": "dealt"}, "layout 'dealt' balances documents and needs documents"),
        ({"layout": "dealt", "documents": [0, 4]}, "documents must end at length 8"),
        ({"layout": "zigzag", "documents": [0, 8]}, "layout 'zigzag' does not look at documents"),
        ({"align": 0}, "align must be a whole number of at least 1, got 0"),
        ({"align": -4}, "align must be a whole number of at least 1, got -4"),
        ({"layout": "striped", "align": 2}, "align=2 cannot be kept by layout 'striped'"),
        ({"layout": "ranges"}, "layout must be one of auto, contiguous, zigzag, striped, dealt; got 'ranges'"),
        ({"layout": ["zigzag"]}, "layout must be one of auto, contiguous, zigzag, striped, dealt; got"),
    ],
)
def test_sharding(options, match):
    refused(LayoutError, match, lr.Sharding, **{"length": 8, **options})


@pytest.mark.parametrize("layout", ["auto", "zigzag"])
def test_a_sharding_for_what_is_no_pattern(layout):
    refused(ArgumentError, "pattern must be longring.Dense", lr.Sharding, 8, layout=layout, pattern="causal")


@pytest.mark.parametrize("layout", ["zigzag", "ranges"])
def test_shards_that_are_not_what_the_sharding_says(layout):
    """Three positions of eight: neither to be replaced in silence nor to be taken as they are."""
    refused(LayoutError, "shards", lr.Sharding, 8, layout=layout, shards=((range(3),),))


def test_a_group_that_is_none_of_ours():
    refused(ArgumentError, "group must be a longring transport, .* got 'nccl'", lr.Sharding, 8, "nccl")


@pytest.mark.parametrize(
    ("shards", "match"),
    [
        ([[range(4)], [range(4, 8)]], "shards name 2 ranks, but the group has 1"),
        ([[range(4), range(5, 9)]], "rank 0 holds range.5, 9., but the 8 positions dealt are 0..7"),
        ([[range(4), range(3, 8)]], "rank 0 must hold its positions in rising order"),
        ([[range(4, 8), range(4)]], "rank 0 must hold its positions in rising order"),
        ([], "shards must name at least one rank"),
        ([[]], "shards hold no position at all"),
    ],
)
def test_from_ranges(shards, match):
    refused(LayoutError, match, lr.Sharding.from_ranges, shards)


@pytest.mark.parametrize("shards", [[range(8)], [[0, 1, 2]]], ids=["a range instead of a list", "positions"])
def test_from_ranges_of_what_are_no_lists_of_ranges(shards):
    refused(LayoutError, "rank 0 must hold ranges", lr.Sharding.from_ranges, shards)


def test_shard_and_unshard_of_another_length():
    refused(LayoutError, "rank 0: x has 7 tokens along dim 1, but whole holds 8", lr.Sharding(8).shard, tokens(7))
    refused(LayoutError, "rank 0: x has 9 tokens along dim 1, but this rank's part", ONE_RANK.unshard, tokens(9))
    refused(ArgumentError, "rank 0: x must be a tensor with a dimension 7", ONE_RANK.shard, tokens(8), dim=7)
    refused(ArgumentError, r"rank 0: x must be a tensor with a dimension 1, got \[1\]", ONE_RANK.shard, [1])


@pytest.mark.parametrize("timeout", [-3, 0, True, "1 s", float("nan")])
def test_a_timeout_is_checked_on_one_rank_too(timeout):
    for function in (lr.Sharding(9).shard, lr.Sharding(9).unshard):
        refused(ArgumentError, "timeout must be a positive number of seconds", function, tokens(9), timeout=timeout)
    logits, targets = torch.zeros(1, 4, 3), torch.zeros(1, 4, dtype=torch.int64)
    refused(ArgumentError, "timeout must be", lr.nn.cross_entropy, logits, targets, timeout=timeout)


def test_a_rank_is_named_where_there_are_several():
    def program(transport):
        sharding = lr.Sharding(9, transport, "contiguous")  # 5 and 4
        refused(LayoutError, f"rank {transport.rank}: x has 8 tokens", sharding.shard, tokens(8))
        refused(ArgumentError, f"rank {transport.rank}: q must be a tensor", lr.attention, 1, Q, Q, sharding=sharding)

    on_two_ranks(program)


def test_a_local_length_that_the_sharding_does_not_deal():
    def program(transport):
        sharding = lr.Sharding(9, transport, "contiguous")
        want = sharding.local_length
        match = f"rank {transport.rank}: q holds 8 tokens, but contiguous deals {want} of 9 to this rank; shard with"
        refused(LayoutError, match, lr.attention, Q, Q, Q, sharding=sharding)
        match = f"rank {transport.rank}: k holds 8 tokens, but contiguous deals {want} of 9.* pass kv_sharding"
        refused(LayoutError, match, lr.attention, tokens(want), Q, Q, sharding=sharding)

    on_two_ranks(program)


def test_shardings_over_different_groups():
    def program(transport):
        mine, alone = lr.Sharding(16, transport), lr.Sharding(8)
        match = f"rank {transport.rank}: kv_sharding is over 1 ranks and sharding over 2; use one group"
        refused(LayoutError, match, lr.attention, Q, Q, Q, sharding=mine, kv_sharding=alone)

    on_two_ranks(program)


def test_a_group_without_a_layout_and_the_reverse():
    def program(transport):
        refused(ArgumentError, f"rank {transport.rank}: group needs layout", lr.attention, Q, Q, Q, group=transport)
        refused(LayoutError, "layout must be one of", lr.attention, Q, Q, Q, group=transport, layout="spiral")

    on_two_ranks(program)


def test_ranks_that_disagree_are_told_so_instead_of_hanging():
    def program(transport):
        q = tokens(8, heads=1 + transport.rank)
        return lr.ring_attention(q, q, q, group=transport, layout="contiguous")

    refused(TransportError, r"rank \d and rank \d disagree .*kv heads: .*; all ranks must", on_two_ranks, program)


# --------------------------------------------------------------------------------------------- and what is fine


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("schedule", ["ring", "exchange", "gather"])
def test_a_rank_that_holds_nothing_is_fine(layout, schedule):
    q = torch.randn(1, 3, 2, 4, requires_grad=True)
    found = lr.simulate(q, q, q, ranks=5, layout=layout, schedule=schedule)
    torch.testing.assert_close(found.out, lr.attention(q, q, q))
    found.out.sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def test_lengths_of_zero_are_fine():
    """A row without keys sees nothing: 0, and -inf."""
    q = torch.randn(2, 4, 1, 4)
    out, lse = lr.attention(q, q, q, pattern=lr.Dense(lengths=[0, 4]), return_lse=True)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    assert out[1].isfinite().all()


def test_rates_that_leave_rows_out_are_warned_about():
    call._warn_of_rows_left_out.cache_clear()  # others may have been warned of the same rates before
    pattern = lr.Dilated([8], [3])
    with pytest.warns(lr.RowsLeftOut, match=r"every dilation rate of \[3\] is above 1"):
        lr.attention(Q, Q, Q, pattern=pattern)
    lr.attention(Q, Q, Q, pattern=pattern)  # once: a second warning would be an error here
    module = lr.nn.Attention(lr.Dilated([8], [5]))
    with pytest.warns(lr.RowsLeftOut) as seen:
        torch.nn.Sequential(Thrice(module))(Q)
    assert [warning.filename for warning in seen] == [__file__]  # and not that of a module of torch


class Thrice(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x, x, x)


@pytest.mark.parametrize("name", ["layout", "schedule", "kernel"])
def test_a_list_is_no_name(name):
    with pytest.raises(lr.ArgumentError, match=f"{name} must be one of"):
        lr.simulate(Q, Q, Q, ranks=2, **{name: ["ring"]})


def test_simulate_refuses_what_is_not_built():
    with pytest.raises(lr.NotBuilt, match=r"dropout=0\.1"):
        lr.simulate(Q, Q, Q, ranks=2, dropout=0.1)


def test_documents_beside_a_pattern_with_others():
    with pytest.raises(lr.LayoutError, match="documents are"):
        lr.Sharding(8, layout="dealt", documents=[0, 4, 8], pattern=lr.Dense(documents=[0, 2, 8]))


def test_one_process_is_not_called_a_rank():
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(lr.ArgumentError, match=r"^scale must be a finite number"):
        lr.attention(x, x, x, scale="x")
    with pytest.raises(lr.LayoutError, match=r"^layout must be one of"):
        lr.Sharding(4, layout="spiral")
