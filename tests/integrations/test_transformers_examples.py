"""The examples run as their first lines say, and their losses do not depend on the number of ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(example, *options):
    command = [sys.executable, EXAMPLES / example, "--steps", "3", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=115)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^(?:step \d|evaluation) loss (\S+)$", done.stdout, re.MULTILINE)]


@pytest.mark.parametrize(
    ("example", "ranks", "printed"), [("transformers_trainer.py", "2", 4), ("transformers_accelerate.py", "4", 3)]
)
def test_training_gives_the_losses_of_one_process(example, ranks, printed):
    """Of three steps, and of the Trainer's evaluation behind them."""
    alone = losses(example)
    assert len(alone) == printed
    assert alone[2] < alone[0]
    assert losses(example, "--ranks", ranks) == pytest.approx(alone, rel=1e-4)
