"""Language models that generate, and the slow way to the same tokens: everything computed anew for each of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from model_cases import ONE_DRAWS
from torch import Tensor

import longring as lr
from longring.models import Decoder, DecoderConfig, LongNetConfig, LongNetLM

WORDS, PROMPT, NEW = 61, 23, 200
SMALL = {"vocab_size": WORDS, "dim": 32, "layers": 2, "heads": 4}
BRANCHES = {"segment_lengths": (8, 32, 256), "dilation_rates": (1, 2, 4)}
CONFIGS = {
    "dense": (Decoder, DecoderConfig(**SMALL, kv_heads=2)),
    "window": (Decoder, DecoderConfig(**SMALL, kv_heads=2, window=(9, 0))),
    "dilated": (Decoder, DecoderConfig(**SMALL, **BRANCHES)),
    "longnet": (
        LongNetLM,
        LongNetConfig(**SMALL, **BRANCHES, kv_heads=2, positions="xpos", max_length=PROMPT + NEW, phase="block"),
    ),
}


def made(name: str, **options: Any) -> Decoder | LongNetLM:
    kind, config = CONFIGS[name]
    with ONE_DRAWS, torch.no_grad():
        torch.manual_seed(3)
        model = kind(config, **options)
        for parameter in model.parameters():  # loud enough that tokens do not just repeat
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def prompt(batch: int = 2, length: int = PROMPT) -> Tensor:
    return torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def greedy_without_cache(model: Decoder | LongNetLM, tokens: Tensor, new_tokens: int) -> Tensor:
    for _ in range(new_tokens):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens[:, -new_tokens:]


def generated(group: Any, name: str, *, layout: Any = "zigzag", new_tokens: int = NEW, **words: Any) -> Tensor:
    """On one rank; `layout` is a name, or ranges of every rank."""
    tokens = prompt()
    s = lr.Sharding(PROMPT, group, layout) if isinstance(layout, str) else lr.Sharding.from_ranges(layout, group=group)
    return made(name).generate(s.shard(tokens), sharding=s, new_tokens=new_tokens, **words)


def generated_in_a_process(names: list[str]) -> list[Tensor]:
    torch.set_num_threads(1)
    return [generated(dist.group.WORLD, name) for name in names]
