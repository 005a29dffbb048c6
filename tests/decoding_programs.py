"""What the ranks of worlds do that decode: functions of (group, ...), found by name in a process of their own."""

from __future__ import annotations

from typing import Any

import torch

import longring as lr
from longring.geometry.layouts import replicated
from longring.geometry.patterns import Problem
from longring.geometry.task import Task
from longring.models import Decoder, DecoderConfig
from longring.plan.traffic import forward_bytes
from longring.transport.select import transport_for
from programs import strike_oneself

WORDS, PROMPT = 31, 19


def model(timeout: float | None = 20.0) -> Decoder:
    torch.manual_seed(3)
    return Decoder(DecoderConfig(vocab_size=WORDS, dim=32, layers=2, heads=4, kv_heads=2), timeout=timeout)


def generate(group: Any, *, timeout: float | None = 20.0, **words: Any) -> list[list[int]]:
    s = lr.Sharding(PROMPT, group, "zigzag")
    tokens = torch.randint(WORDS, (1, PROMPT), generator=torch.Generator().manual_seed(5))
    return model(timeout).generate(s.shard(tokens), sharding=s, **words).tolist()


def generate_with_a_victim(group: Any, victim: int, token: int, how: str, timeout: float) -> list[list[int]]:
    """`victim` is struck when it is about to read that many tokens."""
    honest = Decoder.forward

    def forward(self: Decoder, tokens: Any, **words: Any) -> Any:
        if transport_for(group).rank == victim and words["cache"].length == token:
            strike_oneself(how)
        return honest(self, tokens, **words)

    Decoder.forward = forward  # type: ignore[method-assign]
    return generate(group, timeout=timeout, new_tokens=20)


def generate_with_other_words(group: Any, odd: int, name: str, ours: Any, theirs: Any) -> list[list[int]]:
    words = {"new_tokens": 6, "temperature": 1.0, "seed": 1}
    return generate(group, **{**words, name: theirs if transport_for(group).rank == odd else ours})


def generate_with_another_weight(group: Any, odd: int) -> list[list[int]]:
    """The odd rank's head has other numbers: it comes to other tokens than the rest, and attention is as theirs."""
    honest = Decoder.forward

    def forward(self: Decoder, tokens: Any, **words: Any) -> Any:
        logits = honest(self, tokens, **words)
        return -logits if transport_for(group).rank == odd else logits

    Decoder.forward = forward  # type: ignore[method-assign]
    return generate(group, new_tokens=1)


def counted(group: Any, pattern: lr.Dense | lr.Dilated, n: int) -> tuple[list[int], list[int], list[list[float]]]:
    """(bytes that were sent, bytes that the plan says, the answers) of a cache that grows."""
    transport, draw = transport_for(group), torch.Generator().manual_seed(1)
    s = lr.Sharding(n, group, "contiguous")
    k = torch.randn(1, n + 10, 2, 8, generator=draw)
    mine = s.shard(k[:, :n])
    sent, planned, found = [], [], []
    for token in range(10):
        s = s.extend(token % 3, 1)
        if transport.rank == token % 3:
            mine = torch.cat([mine, k[:, n + token : n + token + 1]], 1)
        q = torch.randn(1, 1, 4, 8, generator=draw)
        before = transport.bytes_sent
        out = lr.attention(q, mine, mine, pattern=pattern, sharding="replicated", kv_sharding=s, timeout=20.0)
        sent.append(transport.bytes_sent - before)
        problem = Problem(1, 1, s.length, 2, s.length - 1)
        task = Task(pattern, problem, replicated(1, transport.size), s.dealt, 4)
        planned.append(forward_bytes(task, "replicated", transport.rank, head_dim=8, itemsize=4))
        found.append(out.flatten().tolist())
    return sent, planned, found


def generate_sharded_by_fsdp(group: Any, new_tokens: int) -> list[list[int]]:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    made = model()
    for layer in made.stack.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    s = lr.Sharding(PROMPT, group, "zigzag")
    tokens = torch.randint(WORDS, (1, PROMPT), generator=torch.Generator().manual_seed(5))
    return made.generate(s.shard(tokens), sharding=s, new_tokens=new_tokens).tolist()
