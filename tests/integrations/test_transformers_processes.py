"""Real processes over Gloo: logits, loss and every gradient of stock models are those of sdpa in one process."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import longring as lr
from hugging import MODELS, Case, check, of_one_process, of_ranks

pytestmark = pytest.mark.processes

ASKED = list(product(MODELS, ["plain", "padded", "packed"]))
CASES = [
    *(Case(*asked, ("zigzag", "contiguous")[number % 2]) for number, asked in enumerate(ASKED)),
    Case("llama", "packed", checkpointing=True),
    Case("bert", "padded", checkpointing=True),
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_logits_loss_and_gradients_of_one_process(ranks):
    """A start is dear, since every rank loads transformers: one for all cases."""
    outcomes = lr.launch(of_ranks, CASES, ranks=ranks, timeout=110)
    for number, case in enumerate(CASES):
        check([outcome[number] for outcome in outcomes], of_one_process(case), case.name)
