"""What compute-sanitizer is to watch: our Triton kernels, and under torchrun the transport through symmetric memory.

compute-sanitizer python benchmarks/sanitized.py
compute-sanitizer --tool racecheck python benchmarks/sanitized.py
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 compute-sanitizer --target-processes all \
    torchrun --nproc-per-node 2 benchmarks/sanitized.py   # and 3: a rank that is neither first nor last
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

import longring as lr

SEGMENTS, RATES = [512, 2048], [1, 4]
SHAPES = [(4099, 4, 4, 64), (3000, 4, 2, 128), (8192, 4, 4, 64), (8192, 4, 2, 128)]  # tokens, heads, kv heads, d


def tensors(tokens: int, heads: int, kv_heads: int, d: int) -> list[Tensor]:
    """The same on every rank."""
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, tokens, h, d) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16, generator=draw).requires_grad_() for s in shapes]


def one_process() -> None:
    """Tiles by our own kernel and by the fastest; parts merged and added, of lengths that come out even and do not."""
    for kernel in ("triton", "auto"):
        for shape in SHAPES:
            q, k, v = tensors(*shape)
            words = {"segment_lengths": SEGMENTS, "dilation_rates": RATES, "kernel": kernel}
            lr.dilated_attention(q, k, v, **words).sum().backward()
            packed = lr.Dense(causal=True, documents=[0, 700, 1900, shape[0]])
            for pattern in (packed, lr.Dense(window=(300, 0))):
                lr.attention(q, k, v, pattern=pattern, kernel=kernel).sum().backward()
            torch.cuda.synchronize()
            print(kernel, shape, q.grad.float().norm().item(), flush=True)
    lr.simulate(*tensors(5001, 4, 2, 64), ranks=4).out.sum().backward()
    torch.cuda.synchronize()
    print("a ring of four, one after the other", flush=True)


def ranks() -> None:
    """Each compares its part of the gradients with those of the whole on one rank: what moved is right."""
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    for layout, pattern in (("zigzag", lr.Dense(causal=True)), ("contiguous", lr.Dilated(SEGMENTS, RATES))):
        sharding = lr.Sharding(4099, dist.group.WORLD, layout)
        whole = tensors(4099, 4, 2, 64)
        mine = [sharding.shard(x.detach()).requires_grad_() for x in whole]
        lr.attention(*whole, pattern=pattern).sum().backward()
        lr.attention(*mine, pattern=pattern, sharding=sharding, schedule="ring").sum().backward()
        torch.cuda.synchronize()
        off = [_distance(sharding.shard(x.grad), y.grad) for x, y in zip(whole, mine, strict=True)]
        if sharding.transport.symmetric_bytes == 0 or not max(off) < 0.01:
            raise SystemExit(f"not what was to be watched: {sharding.transport}, off by {off}")
        print(f"rank {sharding.rank} of {sharding.ranks}, {layout}: dq, dk, dv off by {off}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _distance(want: Tensor, got: Tensor) -> float:
    return ((got - want).float().norm() / want.float().norm()).item()


if __name__ == "__main__":
    ranks() if "RANK" in os.environ else one_process()
