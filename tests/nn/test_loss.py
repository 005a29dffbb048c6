"""The loss of shards is the loss of the whole: its number, and every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import longring as lr
from longring.nn import loss as losses
from longring.nn.loss import cross_entropy, next_tokens
from longring.testing import run_ranks

BATCH, LENGTH, VOCABULARY, WIDTH = 2, 23, 11, 5
LAYOUTS = ["contiguous", "zigzag", "striped"]


def problem(dtype=torch.float64, seed=0):
    """Inputs of a layer that gives logits, its weights, and what is to be predicted."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    weights = torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    targets = next_tokens(torch.randint(VOCABULARY, (BATCH, LENGTH), generator=draw))
    return x, weights, targets


def of_one_process(x, weights, targets):
    """(loss, its gradient by the weights), by torch."""
    weights = weights.clone().requires_grad_()
    loss = F.cross_entropy((x @ weights.T).flatten(0, 1), targets.flatten())
    return loss.detach(), torch.autograd.grad(loss, weights)[0]


def of_ranks(ranks, layout, x, weights, targets, **options):
    def program(group):
        s = lr.Sharding(x.shape[1], group, layout)
        mine = weights.clone().requires_grad_()
        loss = cross_entropy(s.shard(x) @ mine.T, s.shard(targets), sharding=s, **options)
        return loss.detach(), torch.autograd.grad(loss, mine)[0]

    return run_ranks(ranks, program)


# --------------------------------------------------------------------------------------------------- the next token


def test_every_token_predicts_the_next_and_the_last_nothing():
    tokens = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    assert next_tokens(tokens).tolist() == [[6, 7, 8, -100], [2, 3, 4, -100]]
    assert next_tokens(tokens, ignore_index=0).tolist() == [[6, 7, 8, 0], [2, 3, 4, 0]]
    assert tokens.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]


def test_no_document_predicts_the_next():
    tokens = torch.arange(1, 7).repeat(2, 1)
    assert next_tokens(tokens, documents=[0, 2, 3, 6]).tolist() == [[2, -100, -100, 5, 6, -100]] * 2
    of_rows = next_tokens(tokens, documents=[[0, 2, 6], [0, 5, 6]])
    assert of_rows.tolist() == [[2, -100, 4, 5, 6, -100], [2, 3, 4, 5, -100, -100]]


def test_padding_predicts_nothing_and_is_not_predicted():
    tokens = torch.arange(1, 5).repeat(4, 1)
    got = next_tokens(tokens, lengths=[4, 3, 1, 0]).tolist()
    assert got == [[2, 3, 4, -100], [2, 3, -100, -100], [-100] * 4, [-100] * 4]


def test_labels_that_ignore_some_tokens_are_shifted_with_them():
    assert next_tokens(torch.tensor([[-100, -100, 7, 8]])).tolist() == [[-100, 7, 8, -100]]


def test_a_single_token_and_none():
    assert next_tokens(torch.tensor([[3]])).tolist() == [[-100]]
    assert next_tokens(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)


def test_narrow_tokens_give_targets_that_cross_entropy_takes():
    assert next_tokens(torch.tensor([[3, 4]], dtype=torch.uint8)).tolist() == [[4, -100]]


@pytest.mark.parametrize(
    ("tokens", "options", "said"),
    [
        (torch.zeros(4, dtype=torch.int64), {}, r"\[batch, n\], got torch.int64 \[4\]"),
        (torch.zeros(1, 4), {}, r"whole numbers .*, got torch.float32"),
        (torch.zeros(1, 4, dtype=torch.int64), {"documents": [0, 2, 5]}, "end at the 4 keys"),
        (torch.zeros(2, 4, dtype=torch.int64), {"lengths": [4]}, "each of 2 rows"),
        (torch.zeros(1, 4, dtype=torch.int64), {"lengths": [5]}, "must not exceed the 4"),
    ],
)
def test_what_cannot_be_shifted_is_refused(tokens, options, said):
    with pytest.raises(lr.ArgumentError, match=said):
        next_tokens(tokens, **options)


# ---------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("chunk", [1, 5 * VOCABULARY, 1 << 24])
def test_alone_it_is_torchs(monkeypatch, chunk):
    """Whole, or a few tokens at a time."""
    monkeypatch.setattr(losses, "NUMBERS_AT_A_TIME", chunk)
    x, weights, targets = problem()
    logits = (x @ weights.T).requires_grad_()
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    got = cross_entropy(logits, targets)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)
    got, want = (torch.autograd.grad(3 * loss, logits)[0] for loss in (got, want))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-16)


def test_gradcheck():
    logits = torch.randn(2, 4, 3, dtype=torch.float64).requires_grad_()
    targets = torch.tensor([[0, -100, 2, 1], [1, 1, -100, 0]])
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, targets), (logits,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_widened_before_anything_is_summed(dtype):
    """So the loss is that of the rounded logits in float32, and gradients are rounded once."""
    x, weights, targets = problem()
    logits = (x @ weights.T).to(dtype).requires_grad_()
    wide = logits.detach().float().requires_grad_()
    got, want = cross_entropy(logits, targets), F.cross_entropy(wide.flatten(0, 1), targets.flatten())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    (got,), (want,) = torch.autograd.grad(got, logits), torch.autograd.grad(want, wide)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)


def test_any_index_can_be_the_ignored_one():
    x, weights, targets = problem()
    logits = x @ weights.T
    assert (targets == 3).any()
    targets = targets.where(targets != -100, 3)
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=3)
    torch.testing.assert_close(cross_entropy(logits, targets, ignore_index=3), want, rtol=1e-14, atol=0)


def test_what_does_not_count_may_be_anything():
    logits = torch.randn(1, 4, 3, dtype=torch.float64)
    logits[0, 1] = torch.inf
    logits[0, 2] = torch.nan
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.tensor([[0, -100, -100, 2]]))
    gradient = torch.autograd.grad(loss, logits)[0]
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[0, 1:3].any()


def test_large_logits_do_not_overflow():
    logits, targets = torch.randn(1, 4, 3) * 1e4, torch.tensor([[0, 1, 2, 0]])
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(cross_entropy(logits, targets), want)


def test_where_nothing_counts_the_loss_and_its_gradients_are_zero():
    logits = torch.randn(2, 4, 3).requires_grad_()
    loss = cross_entropy(logits, torch.full((2, 4), -100))
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, logits)[0].any()


def test_a_second_derivative_is_refused_not_zero():
    logits = torch.randn(1, 4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(cross_entropy(logits, torch.zeros(1, 4).long()), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# ------------------------------------------------------------------------------------------------------ over ranks


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 30])
def test_ranks_have_one_loss_and_their_gradients_add_up(ranks, layout):
    """With 30 ranks some hold nothing."""
    x, weights, targets = problem()
    want, gradient = of_one_process(x, weights, targets)
    got = of_ranks(ranks, layout, x, weights, targets)
    assert len({loss.item() for loss, _ in got}) == 1
    torch.testing.assert_close(got[0][0], want, rtol=1e-14, atol=0)
    torch.testing.assert_close(sum(part for _, part in got), gradient, rtol=1e-12, atol=1e-15)


def test_or_their_mean_is_the_gradient():
    x, weights, targets = problem()
    want, gradient = of_one_process(x, weights, targets)
    got = of_ranks(4, "zigzag", x, weights, targets, gradients="mean")
    torch.testing.assert_close(got[0][0], want, rtol=1e-14, atol=0)
    torch.testing.assert_close(sum(part for _, part in got) / 4, gradient, rtol=1e-12, atol=1e-15)


def test_a_rank_may_hold_only_what_is_ignored():
    """An average of averages would be nan, or weigh its tokens too much."""
    x, weights, targets = problem()
    targets[:, 6:] = -100  # of the four ranks the first alone has something to predict
    want, gradient = of_one_process(x, weights, targets)
    got = of_ranks(4, "contiguous", x, weights, targets)
    torch.testing.assert_close(got[3][0], want, rtol=1e-14, atol=0)
    torch.testing.assert_close(got[0][1], gradient, rtol=1e-12, atol=1e-15)
    assert not any(part.any() for _, part in got[1:])


def test_no_rank_may_hold_anything_that_counts():
    x, weights, targets = problem()
    for loss, gradient in of_ranks(3, "zigzag", x, weights, torch.full_like(targets, -100)):
        assert loss.item() == 0
        assert not gradient.any()


@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_a_group_wider_than_the_sharding_weighs_all_its_tokens_alike(gradients):
    """Four ranks: two sequences of unequal length, each dealt to two of them; what is averaged counts all four."""
    x, weights, targets = problem()
    short = 9
    shares = [(0, slice(0, 12)), (0, slice(12, LENGTH)), (1, slice(0, 4)), (1, slice(4, short))]
    targets[1, short:] = -100
    want, gradient = of_one_process(x, weights, targets)

    def program(group):
        row, tokens = shares[group.rank]
        s = lr.Sharding(tokens.stop - tokens.start)  # of a ring of two this rank's part; with the loss over all four
        mine = weights.clone().requires_grad_()
        logits = x[row : row + 1, tokens] @ mine.T
        loss = cross_entropy(logits, targets[row : row + 1, tokens], sharding=s, group=group, gradients=gradients)
        return loss.detach(), torch.autograd.grad(loss, mine)[0]

    got = run_ranks(4, program)
    torch.testing.assert_close(got[2][0], want, rtol=1e-14, atol=0)
    summed = sum(part for _, part in got) / (4 if gradients == "mean" else 1)
    torch.testing.assert_close(summed, gradient, rtol=1e-12, atol=1e-15)


# -------------------------------------------------------------------------------------------------- what is refused


LOGITS, TARGETS = torch.zeros(1, 4, 3), torch.zeros(1, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("logits", "targets", "options", "said"),
    [
        (LOGITS[0], TARGETS, {}, r"\[batch, n, vocabulary\], got torch.float32 \[4, 3\]"),
        (LOGITS.long(), TARGETS, {}, "floating-point"),
        (LOGITS, TARGETS[:, :3], {}, r"int64 \[1, 4\] as the logits, got torch.int64 \[1, 3\]"),
        (LOGITS, TARGETS.int(), {}, "got torch.int32"),
        (LOGITS, TARGETS + 3, {}, "from 0 to 2, or -100 .*; got 3"),
        (LOGITS, TARGETS - 1, {}, "got -1"),
        (LOGITS, TARGETS, {"ignore_index": None}, "ignore_index must be a whole number"),
        (LOGITS, TARGETS, {"gradients": "none"}, '"sum" or "mean", got \'none\''),
        (LOGITS, TARGETS, {"timeout": -1}, "timeout must be a positive number"),
        (LOGITS, TARGETS, {"sharding": 4}, "must be a longring.Sharding"),
        (LOGITS, TARGETS, {"sharding": lr.Sharding(5)}, "hold 4 tokens, but zigzag deals 5 of 5"),
    ],
)
def test_what_has_no_loss_is_refused(logits, targets, options, said):
    with pytest.raises(lr.ArgumentError, match=said):
        cross_entropy(logits, targets, **options)


def test_ranks_that_do_not_call_are_named_in_time():
    def program(group):
        if group.rank != 1:
            s = lr.Sharding(8, group, "contiguous")
            cross_entropy(LOGITS[:, :4], TARGETS[:, :4], sharding=s, timeout=0.2)

    with pytest.raises(lr.PeerLost, match="rank 1"):
        run_ranks(2, program)


def test_the_wait_for_other_ranks_has_the_timeout_that_was_given(monkeypatch):
    waits, unshard = [], lr.Sharding.unshard
    monkeypatch.setattr(
        lr.Sharding, "unshard", lambda s, x, **options: waits.append(options["timeout"]) or unshard(s, x, **options)
    )
    cross_entropy(LOGITS, TARGETS, timeout=7.0)
    assert waits == [7.0]


def test_ranks_that_mean_to_reduce_otherwise_are_told_so():
    def program(group):
        s = lr.Sharding(12, group, "contiguous")
        with pytest.raises(lr.Disagreement, match="gradients is 'sum' on rank 0, 'mean' on rank 1, 'sum' on rank 2"):
            cross_entropy(LOGITS, TARGETS, sharding=s, gradients=("sum", "mean")[s.rank % 2])

    run_ranks(3, program)


def refused_on_the_second_rank():
    """(which rank, what it heard)"""
    rank, s = dist.get_rank(), lr.Sharding(8, dist.group.WORLD, "contiguous")
    try:
        cross_entropy(LOGITS, TARGETS + 3 * rank, sharding=s, timeout=30.0)
    except lr.LongringError as error:
        return type(error), str(error)


@pytest.mark.processes
def test_what_one_rank_refuses_the_others_hear_of():
    (kind, heard), (refusal, said) = lr.launch(refused_on_the_second_rank, ranks=2, timeout=20)
    assert kind is lr.Disagreement
    assert "an argument was refused (rank 1: targets must be from 0 to 2" in heard
    assert issubclass(refusal, lr.ArgumentError)
    assert said.startswith("rank 1: targets must be from 0 to 2")
