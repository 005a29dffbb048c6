"""Losses of tokens that are dealt over ranks: the number, and the gradients, of one process that holds them all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..autograd import not_compiled
from ..errors import ArgumentError, Disagreement, LayoutError, naming_rank
from ..geometry.patterns import Dense, Problem
from ..numerics.online_softmax import accumulator_dtype
from ..sharding import Sharding
from ..tensors import spoken
from ..transport.contract import Transport, check_timeout
from ..transport.select import transport_for

NUMBERS_AT_A_TIME = 1 << 24  # logits that are there in the accumulator's dtype at once: 64 MiB in float32


def next_tokens(tokens: Tensor, *, documents: Any = None, lengths: Any = None, ignore_index: int = -100) -> Tensor:
    """What each token of the whole sequence is to predict, [batch, n] as `tokens`: the token after it.

    Shift first, then deal: the last token of a shard predicts one that another rank holds. `ignore_index` stands
    where there is nothing to predict: at the last token, at the last of each document (boundaries
    [0, b1, ..., n], one list or one per row), and from the last token of a row's length on. `tokens` may be
    labels that hold `ignore_index` already.

    >>> next_tokens(torch.tensor([[5, 6, 7, 8, 9]]), documents=[0, 3, 5]).tolist()
    [[6, 7, -100, 9, -100]]
    """
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.is_floating_point():
        raise ArgumentError(f"tokens must be whole numbers [batch, n], got {spoken(tokens)}")
    batch, n = tokens.shape
    pattern = Dense(documents=documents, lengths=lengths)
    pattern.check(Problem(batch, n, n, 1, 0))
    targets = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1).long()
    ends = pattern.documents or ((0, n),)
    for row, target in enumerate(targets):
        target[[end - 1 for end in ends[row % len(ends)][1:] if end]] = ignore_index
        if pattern.lengths is not None:
            target[max(0, pattern.lengths[row] - 1) :] = ignore_index
    return targets


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    sharding: Sharding | None = None,
    group: Any = None,
    ignore_index: int = -100,
    gradients: Literal["sum", "mean"] = "sum",
    timeout: float | None = None,
) -> Tensor:
    """The mean cross-entropy over the tokens of all ranks, the same number on every rank.

    logits are [batch, n, vocabulary], targets [batch, n]: this rank's part, or the whole where nothing is dealt.
    float32, or float64 where the logits are. Where no token of any rank counts it is 0, and so are the gradients:
    a step with nothing to learn from changes nothing.

    sharding:   how the tokens are dealt; the mean is over its ranks.
    group:      the ranks of the mean, where they are not those of the sharding alone: all of a mesh of data and
                context, to weigh every token of every sequence alike.
    gradients:  a rank's backward gives the part of its own tokens. "sum": summed over the ranks, parameter gradients
                are those of one process. "mean": averaged they are, as DDP, FSDP and DeepSpeed do.
    timeout:    seconds after which a silent rank is an error.
    """
    if sharding is not None and not isinstance(sharding, Sharding):
        raise ArgumentError(f"sharding must be a longring.Sharding, got {sharding!r}")
    group = sharding.group if group is None and sharding is not None else group
    return not_compiled(_mean)(logits, targets, sharding, group, ignore_index, gradients, timeout)


def _mean(
    logits: Tensor,
    targets: Tensor,
    sharding: Sharding | None,
    group: Any,
    ignore_index: int,
    gradients: str,
    timeout: float | None,
) -> Tensor:
    transport = transport_for(group)
    try:
        with naming_rank(transport.rank, transport.size):
            _check(logits, targets, sharding, ignore_index, gradients)
            check_timeout(timeout)
    except ArgumentError as error:
        transport.decline(error)  # or the others would wait
        raise
    factor = transport.size if gradients == "mean" else 1
    mine = SumOfLosses.apply(logits.flatten(0, -2), targets.flatten(), ignore_index, factor)
    counted = (targets != ignore_index).sum()
    asked = mine.new_tensor([gradients == "mean", ignore_index])
    numbers = torch.cat([torch.stack([mine, counted.double()]), asked])
    totals, counts, means, ignored = _of_all_ranks(numbers, transport, timeout)
    alike = _are_alike("gradients", means, ("sum", "mean")) & _are_alike("ignore_index", ignored)
    mean = totals.sum() / counts.sum().clamp(min=1)  # in the order of ranks, so to the bit the same on all of them
    return mean.where(alike, torch.nan).to(accumulator_dtype(logits.dtype))


def _of_all_ranks(mine: Tensor, transport: Transport, timeout: float | None) -> Tensor:
    """Every rank's numbers, [numbers, ranks]."""
    row_per_rank = Sharding(transport.size, transport, "contiguous")
    return row_per_rank.unshard(mine.unsqueeze(0), dim=0, timeout=timeout).T


def _are_alike(name: str, values: Tensor, words: tuple[str, ...] = ()) -> Tensor:
    """Whether all ranks gave the same. On a GPU looking would wait for it: there the loss is nan instead."""
    alike = (values == values[0]).all()
    if values.device.type == "cpu" and not alike:
        given = [repr(words[int(value)]) if words else str(int(value)) for value in values.tolist()]
        said = [f"{value} on rank {rank}" for rank, value in enumerate(given)]
        raise Disagreement(f"ranks disagree: {name} is {', '.join(said)}; all ranks must make the same call")
    return alike


class SumOfLosses(torch.autograd.Function):
    """The sum over rows of -log softmax(logits)[target]; no more than a few rows are ever wide or exponentiated."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, factor: int) -> Tensor:
        wide = accumulator_dtype(logits.dtype)
        lse = torch.empty(len(logits), dtype=wide, device=logits.device)
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        for rows in _chunks(logits):
            target = targets[rows].unsqueeze(1)
            x, counts = logits[rows].to(wide), target != ignore_index
            lse[rows] = x.logsumexp(1)
            losses = lse[rows].unsqueeze(1) - x.gather(1, target.where(counts, 0))
            total += losses.where(counts, 0).sum(dtype=torch.float64)
        ctx.save_for_backward(logits, targets, lse)
        ctx.ignore_index, ctx.factor = ignore_index, factor
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        logits, targets, lse = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in _chunks(logits):
            target = targets[rows].unsqueeze(1)
            counts = target != ctx.ignore_index
            x = (logits[rows].to(lse.dtype) - lse[rows].unsqueeze(1)).exp_()
            x.scatter_add_(1, target.where(counts, 0), -torch.ones_like(target, dtype=x.dtype))
            x.mul_((upstream * ctx.factor).to(x.dtype))
            gradient[rows] = x.masked_fill_(~counts, 0)  # not times 0: what does not count may be inf
        return gradient, None, None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    step = max(1, NUMBERS_AT_A_TIME // logits.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


# ------------------------------------------------------------------------------------------ what users got wrong


def _check(logits: Tensor, targets: Tensor, sharding: Sharding | None, ignore_index: int, gradients: str) -> None:
    if not isinstance(logits, Tensor) or logits.ndim != 3 or not logits.is_floating_point() or not logits.shape[2]:
        raise ArgumentError(f"logits must be floating-point [batch, n, vocabulary], got {spoken(logits)}")
    if not isinstance(targets, Tensor) or targets.dtype != torch.int64 or targets.shape != logits.shape[:2]:
        raise ArgumentError(f"targets must be int64 {list(logits.shape[:2])} as the logits, got {spoken(targets)}")
    if targets.device != logits.device:
        raise ArgumentError(f"logits are on {logits.device} and targets on {targets.device}; they must be on one")
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise ArgumentError(f"ignore_index must be a whole number, got {ignore_index!r}")
    if gradients not in ("sum", "mean"):
        raise ArgumentError(f'gradients must be "sum" or "mean", got {gradients!r}')
    if sharding is not None and logits.shape[1] != sharding.local_length:
        raise LayoutError(
            f"logits hold {logits.shape[1]} tokens, but {sharding.layout} deals {sharding.local_length} of "
            f"{sharding.length} to this rank"
        )
    if targets.device.type == "cpu":  # on a GPU looking would wait for it, and torch's kernels look themselves
        _check_range(targets, ignore_index, logits.shape[2])


def _check_range(targets: Tensor, ignore_index: int, vocabulary: int) -> None:
    wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))]
    if len(wrong):
        raise ArgumentError(
            f"targets must be from 0 to {vocabulary - 1}, or {ignore_index} where nothing is to be predicted; got "
            f"{wrong[0].item()}"
        )
