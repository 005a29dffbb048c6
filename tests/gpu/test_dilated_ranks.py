"""LongNet over virtual ranks at the sizes at which its backward once read out of bounds, judged on sampled rows."""

from __future__ import annotations

import pytest
import torch

from random_configurations import RIGHT, Configuration, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def case(index, n, ranks, schedule, heads=16, kv_heads=4, d=64, dtype="bfloat16", **options):
    branches = {"segments": [n // 64, n // 16, n // 4, n], "rates": [1, 2, 4, 8]}
    told = {"batch": 1, "causal": True, "layout": "contiguous", "with_dlse": index % 2 == 1, **branches, **options}
    return Configuration(23, index, "dilated mod", n, n, heads=heads, kv_heads=kv_heads, d=d, dtype=dtype, ranks=ranks,
                         schedule=schedule, **told)  # fmt: skip


CASES = [
    case(0, 1024, 4, "exchange"),
    case(1, 4096, 4, "exchange"),
    case(2, 4096, 4, "ring"),
    case(3, 4096, 2, "ring", kv_heads=16),
    case(4, 4096, 8, "exchange", heads=4),
    case(5, 8192, 4, "ring", heads=8, kv_heads=2, d=128),
    case(6, 8192, 8, "exchange", dtype="float16"),
    case(7, 8192, 2, "exchange", dtype="float32"),
    case(8, 16384, 4, "ring", dtype="float32", heads=4),
    case(9, 16384, 8, "ring", kv_heads=16, d=128),
    case(10, 32768, 4, "exchange", kv_heads=16),
    case(11, 32768, 4, "hybrid", node_ranks=2),
    case(12, 65536, 8, "ring", phase="block", kv_heads=8),
    case(13, 65536, 2, "exchange", causal=False, d=128),
    case(14, 131072, 4, "exchange"),
    case(15, 131072, 8, "ring", heads=8, kv_heads=8, d=128),
]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("at", CASES, ids=lambda at: f"{at.n_q}-{at.ranks}-{at.schedule}-{at.heads}-{at.dtype}")
def test_is_exact(at):
    found = run(at, "cuda")
    assert found.outcome == RIGHT, f"{found.outcome}: {found.message}"
