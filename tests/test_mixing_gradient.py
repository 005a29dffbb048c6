"""mixing_gradient=False: the same outputs, and gradients in which the mixing weights are constants."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
import torch

import longring as lr
from longring.branches import Part, mixed
from longring.testing import Result, relative_error, run_ranks
from longring.testing.budgets import distance
from mixing import Ask, allowed, answer, answers, detached, together

DETACHED = {"mixing_gradient": False}
PATTERNS = {
    "causal": {"segment_lengths": [8, 16, 64], "dilation_rates": [1, 2, 4]},
    "not causal, in blocks": {
        "segment_lengths": [8, 16, 64],
        "dilation_rates": [1, 2, 4],
        "causal": False,
        "phase": "block",
    },
    "one branch": {"segment_lengths": [16], "dilation_rates": [1]},
    "twice the same": {"segment_lengths": [16, 16], "dilation_rates": [1, 1]},
    "nothing divides": {"segment_lengths": [7, 20], "dilation_rates": [1, 3], "causal": False},
    "documents": {"segment_lengths": [8, 16], "dilation_rates": [1, 2], "documents": [0, 5, 6, 30, 45]},
    "rows that nobody keeps": {"segment_lengths": [8, 32], "dilation_rates": [2, 6], "causal": False},
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def check(got: Result, ask: Ask) -> None:
    q, k, v, dout, dlse = ask.whole()
    want = detached(q, k, v, ask.pattern, dout, dlse)
    budget = allowed(detached, q, k, v, ask.pattern, dout, dlse)
    for name, ours, theirs, most in zip(Result._fields, got, want, budget, strict=True):
        assert distance(ours, theirs) <= most, (ask, name, distance(ours, theirs), most)


@pytest.mark.filterwarnings("ignore::longring.RowsLeftOut")
@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_it_is_the_definition(pattern, dtype, kernel):
    ask = Ask({**PATTERNS[pattern], **DETACHED}, dtype=dtype, kernel=kernel)
    check(answer(ask), ask)


@pytest.mark.filterwarnings("ignore::longring.RowsLeftOut")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_outputs_are_those_of_one_softmax(pattern):
    fused, apart = (answer(Ask({**PATTERNS[pattern], **words})) for words in ({}, DETACHED))
    for name in ("out", "lse"):
        assert relative_error(getattr(apart, name), getattr(fused, name)) < 1e-14, name


def test_gradients_are_not():
    """By much more than rounding, so that no test here could pass with the true derivative."""
    fused, apart = (answer(Ask({**PATTERNS["causal"], **words}, with_lse=False)) for words in ({}, DETACHED))
    assert relative_error(apart.dq, fused.dq) > 0.05
    assert relative_error(apart.dk, fused.dk) > 0.05
    assert relative_error(apart.dv, fused.dv) < 1e-14  # of which the weights do not depend


def test_one_branch_has_nothing_to_mix():
    fused, apart = (answer(Ask({**PATTERNS["one branch"], **words})) for words in ({}, DETACHED))
    for name, ours, theirs in zip(Result._fields, apart, fused, strict=True):
        assert relative_error(ours, theirs) < 1e-15, name


def test_lse_keeps_its_derivative():
    q, k, v = (x.requires_grad_() for x in Ask({}, n=9, heads=4, kv_heads=2).whole()[:3])

    def lse(q, k):
        words = {"segment_lengths": [3, 8], "dilation_rates": [1, 2], **DETACHED}
        return lr.dilated_attention(q, k, v.detach(), return_lse=True, **words)[1]

    assert torch.autograd.gradcheck(lse, (q, k))


def test_rows_that_nobody_keeps_are_zero_and_never_nan():
    ask = Ask({"segment_lengths": [8, 32], "dilation_rates": [3, 5], **DETACHED}, heads=2, kv_heads=1)
    with pytest.warns(lr.RowsLeftOut, match=r"every dilation rate of \[3, 5\] is above 1"):
        got = answer(ask)
    unseen = got.lse[0, 0] == -torch.inf
    assert unseen.any()
    assert (got.out[:, unseen] == 0).all()
    assert (got.dq[:, unseen] == 0).all()
    assert all(x.isfinite().all() for x in (got.out, got.dq, got.dk, got.dv))
    answer(ask)  # warned about once: again would be an error here


def test_no_branch_is_given_nan_for_a_gradient():
    """Not even where its kernel would not look."""
    out, lse = torch.zeros(2, 1, 3, 1, 4), torch.tensor([[[[0.5, -torch.inf, 1.0]]], [[[2.0, -torch.inf, -torch.inf]]]])
    parts = [Part(*(x.clone().requires_grad_() for x in pair)) for pair in zip(out, lse, strict=True)]
    found = mixed(parts)
    leaves = [x for part in parts for x in part]
    gradients = torch.autograd.grad(found, leaves, [torch.ones_like(x) for x in found])
    assert all(x.isfinite().all() for x in gradients)
    assert found.lse[0, 0, 1] == -torch.inf


def test_out_and_lse_have_the_promised_dtypes():
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        q, k, v = Ask({}, dtype=dtype).whole()[:3]
        out, lse = lr.dilated_attention(q, k, v, return_lse=True, **PATTERNS["causal"], **DETACHED)
        assert (out.dtype, out.shape) == (dtype, q.shape)
        assert (lse.dtype, lse.shape) == (wide, (2, 6, 45))
        assert isinstance(lr.dilated_attention(q, k, v, **PATTERNS["causal"], **DETACHED), torch.Tensor)


def test_fewer_queries_than_keys():
    q, k, v = Ask({}).whole()[:3]
    words = {"segment_lengths": [8, 64], "dilation_rates": [1, 2]}
    want = lr.dilated_attention(q[:, -5:], k, v, **words)
    torch.testing.assert_close(lr.dilated_attention(q[:, -5:], k, v, **words, **DETACHED), want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    "words",
    [DETACHED, {**DETACHED, "return_lse": True}, {"compat": "torchscale"}, {"compat": "torchscale", "causal": False}],
    ids=str,
)
def test_compiled_without_a_graph_break(words):
    q, k, v = (x.requires_grad_() for x in Ask({}, n=13, heads=4, kv_heads=4).whole()[:3])

    def attend(q, k, v):
        return lr.dilated_attention(q, k, v, **PATTERNS["causal"], **words)

    def results(function):
        found = function(q, k, v)
        found = found if isinstance(found, tuple) else (found,)
        return *found, *torch.autograd.grad(found, (q, k, v), [torch.ones_like(x) for x in found])

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(*pair) for pair in zip(results(compiled), results(attend), strict=True))


# ---------------------------------------------------------------------------------------------------- over ranks


@pytest.mark.filterwarnings("ignore::longring.RowsLeftOut")
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_give_what_one_process_gives(ranks, layout):
    schedules = ("auto", "ring", "bidirectional", "exchange", "gather", "ulysses")
    for schedule, pattern in zip(schedules, cycle(("causal", "nothing divides", "rows that nobody keeps"))):
        ask = Ask({**PATTERNS[pattern], **DETACHED}, layout=layout, schedule=schedule)
        check(together(ask, run_ranks(ranks, lambda group, ask=ask: answer(ask, group))), ask)


def test_more_ranks_than_tokens():
    ask = Ask({"segment_lengths": [2, 4], "dilation_rates": [1, 2], **DETACHED}, n=3)
    check(together(ask, run_ranks(5, lambda group: answer(ask, group))), ask)


def test_a_group_with_its_layout():
    ask = Ask({**PATTERNS["causal"], **DETACHED}, n=44, layout="zigzag")
    q, k, v = ask.whole()[:3]

    def program(group):
        s = lr.Sharding(44, group, "zigzag")
        mine = [s.shard(x) for x in (q, k, v)]
        return s.unshard(lr.dilated_attention(*mine, **ask.options, group=group, layout="zigzag"))

    assert relative_error(run_ranks(2, program)[0], answer(ask).out) < 1e-14


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::longring.RowsLeftOut")
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_give_what_one_process_gives(ranks):
    base = Ask({**PATTERNS["causal"], **DETACHED}, dtype=torch.float32)
    layouts = ("contiguous", "zigzag", "striped")
    schedules = ("auto", "ring", "double_ring", "exchange", "ulysses", "hybrid")
    asks = [replace(base, layout=layout, schedule=schedule) for layout in layouts for schedule in schedules]
    asks.append(replace(base, options={**PATTERNS["nothing divides"], **DETACHED}))
    parts = lr.launch(answers, asks, ranks=ranks, timeout=100)
    for number, ask in enumerate(asks):
        check(together(ask, [part[number] for part in parts]), ask)


def test_ranks_that_differ_in_it_are_told_so():
    q, k, v = Ask({}, n=10).whole()[:3]

    def program(group):
        words = {**PATTERNS["causal"], "mixing_gradient": group.rank == 0, "group": group, "layout": "contiguous"}
        return lr.dilated_attention(q, k, v, **words)

    with pytest.raises(lr.TransportError, match=r"disagree .*pattern: "):
        run_ranks(2, program)


def test_ranks_that_differ_in_a_later_branch_are_told_so_at_the_first():
    q, k, v = Ask({}, n=10).whole()[:3]

    def program(group):
        words = {"segment_lengths": [8, 16 + group.rank], "dilation_rates": [1, 2], **DETACHED}
        return lr.dilated_attention(q, k, v, **words, group=group, layout="contiguous")

    with pytest.raises(lr.TransportError, match=r"disagree .*pattern: .*segment_lengths=\(8,\)"):
        run_ranks(2, program)


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("value", [1, 0, "no", 0.5])
def test_neither_true_nor_false(value):
    q = torch.zeros(1, 8, 1, 4)
    with pytest.raises(lr.ArgumentError, match="mixing_gradient must be True or False"):
        lr.dilated_attention(q, q, q, segment_lengths=[4], dilation_rates=[1], mixing_gradient=value)


@pytest.mark.parametrize("words", [{}, DETACHED], ids=str)
def test_return_lse_neither_true_nor_false(words):
    q = torch.zeros(1, 8, 1, 4)
    with pytest.raises(lr.ArgumentError, match="return_lse must be True or False"):
        lr.dilated_attention(q, q, q, segment_lengths=[4], dilation_rates=[1], return_lse=None, **words)


@pytest.mark.parametrize("function", [lr.attention, lr.ring_attention, lr.explain])
def test_where_nothing_is_mixed_it_is_no_word(function):
    q = torch.zeros(1, 8, 1, 4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'mixing_gradient'"):
        function(q, q, q, mixing_gradient=False)


def test_what_attention_refuses_is_refused():
    q = torch.zeros(1, 8, 1, 4)
    words = {"segment_lengths": [4], "dilation_rates": [1], **DETACHED}
    with pytest.raises(lr.NotBuilt, match="dropout"):
        lr.dilated_attention(q, q, q, **words, dropout=0.1)
    with pytest.raises(lr.ArgumentError, match="q must be a tensor"):
        lr.dilated_attention(None, q, q, **words)
    with pytest.raises(lr.PatternError, match="phase must be 'mod' or 'block', got ''"):
        lr.dilated_attention(q, q, q, **words, phase="")
