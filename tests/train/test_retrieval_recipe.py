"""The recipe of examples/retrieval: with a few steps instead of all, and what a record of all of them has."""

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
    assert done.stdout.count("$ longring train ") == 12
    assert done.stdout.count("$ longring eval ") == 3
    told = json.loads((tmp_path / "runs" / "retrieval.json").read_text())
    assert told["results"].keys() == {"dense", "dilated", "window"}
    assert (tmp_path / "runs" / "retrieval.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def found(told, kind, nearest, furthest=2048):
    """The share of the keys that stand so many tokens back."""
    those = [depth for depth in told["results"][kind]["depths"] if nearest <= depth["tokens_back"] <= furthest]
    return sum(depth["found"] for depth in those) / sum(depth["trials"] for depth in those)


def test_the_record_has_what_the_recipe_promises():
    told = json.loads((ROOT / "docs" / "records" / "retrieval.json").read_text())
    assert all(seconds < 20 * 60 for seconds in told["training_seconds"].values())
    assert all(told["results"][kind]["context"] == 2048 for kind in ("dense", "dilated", "window"))
    assert found(told, "dense", 257) == 1
    assert found(told, "dilated", 257) > 0.95
    assert found(told, "window", 0, 256) == 1
    assert found(told, "window", 766) == 0  # further than three layers of it see
