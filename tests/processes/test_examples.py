"""The examples run as their first lines say, alone, on local ranks and under torchrun, and give the same numbers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def said(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def norms(text):
    return {name: float(norm) for name, norm in re.findall(r"^(\w+) +norm +([\d.]+)", text, re.MULTILINE)}


def errors(text):
    return [float(error) for error in re.findall(r"one process (\S+)$", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def ring_alone():
    return said(sys.executable, EXAMPLES / "ring.py")


def test_a_ring_of_one(ring_alone):
    assert "2001 tokens on 1 ranks" in ring_alone
    assert errors(ring_alone) == [0.0] * 4


@pytest.mark.parametrize(
    ("ranks", "command"),
    [
        (3, [sys.executable, EXAMPLES / "ring.py", "--ranks", 3]),
        (2, [*TORCHRUN, "--nproc-per-node", 2, EXAMPLES / "ring.py"]),
    ],
    ids=["launch", "torchrun"],
)
def test_a_ring_gives_the_numbers_of_one_process(ring_alone, ranks, command):
    text = said(*command)
    assert f"2001 tokens on {ranks} ranks" in text
    assert norms(text) == pytest.approx(norms(ring_alone), rel=1e-5)
    assert len(errors(text)) == 4
    assert max(errors(text)) < 1e-5


@pytest.mark.parametrize(
    "command",
    [[sys.executable, EXAMPLES / "mesh.py"], [*TORCHRUN, "--nproc-per-node", 4, EXAMPLES / "mesh.py"]],
    ids=["launch", "torchrun"],
)
def test_rings_beside_each_other(command):
    text = said(*command)
    assert sorted(re.findall(r"sequence (\d), rank (\d)", text)) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert max(errors(text)) < 1e-5
