"""What ranks in processes of their own compute with modules that the factories made."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor

import longring as lr
from longring.factory import create_dilated_attention, create_multihead_dilated_attention

LENGTH, HEADS, DIM = 23, 5, 20
BRANCHES = {"segment_lengths": [4, 8, 32], "dilation_rates": [1, 2, 4]}


def tokens() -> Tensor:
    return torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def modules(names: list[str]) -> list[torch.nn.Module]:
    torch.manual_seed(2)
    words = {**BRANCHES, "embed_dim": DIM, "num_heads": HEADS, "dtype": torch.float64}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return [
            create_multihead_dilated_attention(name, **words, head_split=split, causal=split)
            for name in names
            for split in (False, True)
        ]


def learned(module: torch.nn.Module, x: Tensor, sharding: lr.Sharding | None = None) -> list[Tensor]:
    """Output, and the gradient of every parameter; over ranks each has its part of that."""
    out = module(x, sharding=sharding)[0]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(module.parameters()))]


def learn_over_ranks(names: list[str]) -> list[list[Tensor]]:
    s = lr.Sharding(LENGTH, dist.group.WORLD, "contiguous")
    found = []
    for module in modules(names):
        out, *gradients = learned(module, s.shard(tokens()), s)
        for gradient in gradients:
            dist.all_reduce(gradient)
        found.append([s.unshard(out), *gradients])
    return found


def differ(group) -> None:
    """Rank 1 alone has a branch for each head."""
    s = lr.Sharding(LENGTH, group, "contiguous")
    x = s.shard(tokens().unflatten(-1, (HEADS, -1)))
    create_dilated_attention(**BRANCHES, head_split=s.rank == 1)(x, x, x, sharding=s)
