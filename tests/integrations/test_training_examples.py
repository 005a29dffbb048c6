"""The examples of training run as their first lines say, each by another launcher, with one process's losses."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from training_runs import CONTEXT, DATA, LENGTH, made, whole_batch

import longring as lr
from documents import code_of
from longring.nn import cross_entropy, next_tokens

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"


def check_losses(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    pairs = re.findall(r"^step \d: loss ([\d.]+), of one process ([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(pairs) == 3
    for found, alone in pairs:
        assert float(found) == pytest.approx(float(alone), abs=1e-4)


def skip_without(name):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


def test_fsdp_by_launch():
    check_losses(sys.executable, EXAMPLES / "train_fsdp.py")


@pytest.mark.parametrize("name", ["lightning", "deepspeed"])
def test_by_torchrun(name):
    skip_without(name)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4]
    check_losses(*torchrun, EXAMPLES / f"train_{name}.py")


@pytest.mark.slow
def test_deepspeed_by_its_launcher():
    skip_without("deepspeed")
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank", "--num_gpus", 4]
    check_losses(*launcher, EXAMPLES / "train_deepspeed.py")


def what_the_page_shows():
    """Its one block of code, on whole sequences of the same length, and the gradients of one process."""
    (code,) = code_of("training.md")
    model, whole = made(torch.float64), whole_batch(0)[0]
    names = {"lr": lr, "init_device_mesh": init_device_mesh, "next_tokens": next_tokens, "cross_entropy": cross_entropy}
    names |= {"data": DATA, "context": CONTEXT, "n": LENGTH, "model": model}
    row = torch.distributed.get_rank() // CONTEXT
    names["tokens"] = whole[row : row + 1]
    exec(code.replace('"cuda"', '"cpu"'), names)
    want = torch.autograd.grad(cross_entropy(model(whole), next_tokens(whole)), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        torch.distributed.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad / (DATA * CONTEXT), gradient)
    return names["loss"].item(), cross_entropy(model(whole), next_tokens(whole)).item()


def test_the_page_shows_the_loss_and_the_gradients_of_one_process():
    for found, expected in lr.launch(what_the_page_shows, ranks=4, timeout=60):
        assert found == pytest.approx(expected, rel=1e-12)
