"""What a CUDA graph saves: calls of a fixed shape by the wall clock, launched one by one and replayed.

python benchmarks/graphs.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import longring as lr

SEGMENTS, RATES = [2048 << i for i in range(5)], [1 << i for i in range(5)]


class Case(NamedTuple):
    name: str
    tokens: int
    heads: int
    d: int
    call: Callable[[Tensor, Tensor, Tensor], Tensor]

    def tensor(self) -> Tensor:
        return torch.randn(1, self.tokens, self.heads, self.d, device="cuda", dtype=torch.bfloat16)


def longnet(branches: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    words = {"segment_lengths": SEGMENTS[:branches], "dilation_rates": RATES[:branches], "causal": True}
    return lambda q, k, v: lr.dilated_attention(q, k, v, **words)


CASES = [
    Case("LongNet", 1 << 16, 12, 64, longnet(5)),
    Case("LongNet", 1 << 14, 12, 64, longnet(4)),
    Case("dense", 1 << 12, 16, 128, lambda q, k, v: lr.attention(q, k, v, pattern=lr.Dense(causal=True))),
]


def milliseconds(call: Callable[[], object], times: int = 20) -> float:
    """A call of many in a row, the median of five such rows."""
    call()
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(times):
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / times * 1e3)
    return statistics.median(found)


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # whatever is compiled or looked up at a first call is not to be captured
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@torch.no_grad()
def forward(case: Case) -> str:
    q, k, v = (case.tensor() for _ in "qkv")
    graph, out = captured(lambda: case.call(q, k, v))
    graph.replay()
    assert torch.equal(out, case.call(q, k, v))
    eager, replayed = milliseconds(lambda: case.call(q, k, v)), milliseconds(graph.replay)
    return f"forward {eager:.3f} ms, replayed {replayed:.3f}, the same bits"


def both(case: Case) -> str:
    q, k, v = (case.tensor().requires_grad_() for _ in "qkv")
    upstream = case.tensor()
    examples = tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
    graphed = torch.cuda.make_graphed_callables(case.call, examples)

    def gradients(call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(q, k, v), (q, k, v), upstream)

    pairs = zip(gradients(graphed), gradients(case.call), strict=True)
    off = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
    eager, replayed = milliseconds(lambda: gradients(case.call)), milliseconds(lambda: gradients(graphed))
    return f"forward and backward {eager:.3f} ms, graphed {replayed:.3f}, gradients off by at most {off:.1e}"


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for case in CASES:
        for passes in (forward, both):
            print(f"{case.name}, {case.tokens} tokens, {case.heads} heads of {case.d}: {passes(case)}", flush=True)


if __name__ == "__main__":
    main()
