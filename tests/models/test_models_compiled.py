"""torch.compile around whole models on one process: no graph break, the same bits."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from model_cases import CASES, inputs, made

pytestmark = [  # what the compiler says to its authors
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["longnet, language", "decoder, again"])  # the latter recomputes activations
def test_compiled_without_a_break(name):
    case, (x, _) = CASES[name], inputs(CASES[name])
    model = made(case)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for each in (model, compiled):
        out = each(x, **case.told)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
