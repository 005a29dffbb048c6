"""longring on one device beside torch's own attention: checked before timed, ratios in one run, medians with spread.

python benchmarks/one_device.py > docs/records/one_device.json
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import longring as lr
from longring.testing import relative_error

HEADS, D, REPEATS = 8, 64, 5


def tensors(n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, n, HEADS, D).to(dtype).requires_grad_() for _ in range(3)]


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def timed(functions: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """In turns, so that a slow moment of the machine falls on all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(REPEATS + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if round_:  # the first is warm-up
                seconds[name].append(time.perf_counter() - start)
    return {name: {"median": statistics.median(s), "min": min(s), "max": max(s)} for name, s in seconds.items()}


def forward_and_backward(attend: Callable[..., torch.Tensor], qkv: list[torch.Tensor], dout: torch.Tensor) -> Any:
    out = attend(*qkv)
    return out, torch.autograd.grad(out, qkv, dout)


def dense(n: int, dtype: torch.dtype) -> dict[str, Any]:
    """Causal attention: longring's call is torch's kernel and nothing else."""
    qkv = tensors(n, dtype)
    dout = torch.randn(qkv[0].shape).to(dtype)
    assert relative_error(lr.attention(*qkv), torch_attention(*qkv)) < 2 * torch.finfo(dtype).eps
    found = timed(
        {
            "torch forward": lambda: torch_attention(*qkv),
            "longring forward": lambda: lr.attention(*qkv),
            "torch both": lambda: forward_and_backward(torch_attention, qkv, dout),
            "longring both": lambda: forward_and_backward(lr.attention, qkv, dout),
        }
    )
    ratios = {
        part: found[f"longring {part}"]["median"] / found[f"torch {part}"]["median"] for part in ("forward", "both")
    }
    return {"what": f"causal, n = {n}, {dtype}", "seconds": found, "longring / torch": ratios}


def dilated(n: int) -> dict[str, Any]:
    """LongNet's branches, beside the fused operation alone on contiguous tensors of the same shapes."""
    qkv = [x.detach() for x in tensors(n, torch.float32)]
    segments, rates = [n >> s for s in (4, 3, 2, 1, 0)], [1, 2, 4, 8, 16]
    shapes = [(n // w, HEADS, w // r, D) for w, r in zip(segments, rates, strict=True)]
    bare = [[torch.randn(shape) for _ in range(3)] for shape in shapes]
    operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found = timed(
        {
            "longring forward": lambda: lr.dilated_attention(*qkv, segment_lengths=segments, dilation_rates=rates),
            "the operation alone": lambda: [operation(*three, 0.0, True) for three in bare],
        }
    )
    ratio = found["longring forward"]["median"] / found["the operation alone"]["median"]
    return {"what": f"dilated, n = {n}, segments {segments}, rates {rates}, float32", "seconds": found, "ratio": ratio}


def main() -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    record = {
        "commit": commit.stdout.strip(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "longring": lr.__version__},
        "machine": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.machine()}",
        "shapes": f"batch 1, {HEADS} heads, d = {D}; medians of {REPEATS}",
        "runs": [dense(1024, torch.float32), dense(4096, torch.float32), dense(4096, torch.bfloat16), dilated(16384)],
    }
    json.dump(record, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
