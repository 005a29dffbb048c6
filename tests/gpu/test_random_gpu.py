"""Random configurations of one seed, of bounded size; benchmarks/random_gpu.py runs as many as one likes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from random_configurations import REFUSED, RIGHT, Limits, draw, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LIMITS = replace(Limits(), most_tokens=20_000, numbers=1 << 23, flops=1e11, tiles=1_000, odd_heads=0.1)


@pytest.mark.parametrize("part", range(6))
def test_random_configurations_are_right(part):
    found = [run(draw(23, index, LIMITS), "cuda") for index in range(10 * part, 10 * part + 10)]
    wrong = [f"{one.outcome}: {one.message} {one.configuration.to_json()}" for one in found if one.outcome != REFUSED]
    assert not [each for each in wrong if not each.startswith(f"{RIGHT}: ")], "\n".join(wrong)
