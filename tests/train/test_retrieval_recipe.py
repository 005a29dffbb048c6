"""The recipe of examples/retrieval, with a few steps instead of all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "retrieval" / "recipe.py"


@pytest.mark.slow
@pytest.mark.processes
def test_the_recipe_runs(tmp_path):
    words = ("--out", tmp_path / "runs", "--share", 0.001, "--trials", 1)
    done = subprocess.run([sys.executable, RECIPE, *map(str, words)], capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("$ longring train ") == 9
    assert done.stdout.count("$ longring eval ") == 3
    told = json.loads((tmp_path / "runs" / "retrieval.json").read_text())
    assert told["results"].keys() == {"dense", "dilated", "window"}
    assert (tmp_path / "runs" / "retrieval.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
