"""On a real GPU: kernels called directly are right, also with an out and lse of more keys, and the command runs."""

import pytest
import torch

from longring.bench.gpu.__main__ import main
from longring.bench.gpu.check import Result, check
from longring.bench.gpu.contest import Directly
from longring.bench.gpu.direct import direct_kernels
from longring.bench.gpu.given import Place, Shape, given
from longring.bench.gpu.recreated import RingFlashAttention, TransformerEngine, Ulysses
from longring.bench.gpu.scenarios import SCENARIOS
from longring.bench.records import Record
from longring.geometry.patterns import Dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KERNELS = ("cudnn", "flash", "efficient", "flash_attn_4")


def kernel_called(name):
    kernels = direct_kernels(torch.device("cuda"))
    if name not in kernels:
        pytest.skip(f"{name} is not installed")
    return kernels[name]


def inputs():
    return given(Shape(1024, 8, 8, 64), Place(torch.device("cuda"), torch.bfloat16))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_called_directly(name, causal):
    x = inputs()
    check(x, Dense(causal=causal), Directly(kernel_called(name), x, causal).result())


@pytest.mark.parametrize("ring", [RingFlashAttention, TransformerEngine, Ulysses])
@pytest.mark.parametrize("name", KERNELS)
def test_its_backward_takes_what_others_found(name, ring):
    x = inputs()
    found = ring(x, 2, kernel_called(name)).result()
    check(x, Dense(causal=True), Result(found.out, found.lse.float(), *found[2:]))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_command_runs(name, tmp_path, capsys):
    path = tmp_path / "record.json"
    assert main(["--quick", "--only", name, "--out", str(path)]) == 0, capsys.readouterr().out
    assert Record.load(path).scenarios[name]
