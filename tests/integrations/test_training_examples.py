"""The examples of training run as their first lines say, each by another launcher, with one process's losses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"


def check_losses(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    pairs = re.findall(r"^step \d: loss ([\d.]+), of one process ([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(pairs) == 3
    for found, alone in pairs:
        assert float(found) == pytest.approx(float(alone), abs=1e-4)


def test_fsdp_by_launch():
    check_losses(sys.executable, EXAMPLES / "train_fsdp.py")


@pytest.mark.parametrize("name", ["lightning", "deepspeed"])
def test_by_torchrun(name):
    pytest.importorskip(name)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4]
    check_losses(*torchrun, EXAMPLES / f"train_{name}.py")


@pytest.mark.slow
def test_deepspeed_by_its_launcher():
    pytest.importorskip("deepspeed")
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank", "--num_gpus", 4]
    check_losses(*launcher, EXAMPLES / "train_deepspeed.py")
