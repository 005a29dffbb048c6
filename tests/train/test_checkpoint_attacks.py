"""Whoever wrote a checkpoint, reading it runs nothing, changes nothing, takes little memory, and says what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RANDOM = 60
KINDS = {"code": 50, "changes": 40, "large": 30, "broken": 20, "index": 45, "tensor": 40, "value": 20, "manifest": 90}
KINDS |= {"tampered": 40, "random": RANDOM}
"""How many attacks of each kind there are at least."""


@pytest.fixture(scope="module")
def outcomes():
    """Of all of them, in a process of their own: what they would change or take would be this one's."""
    paths = os.pathsep.join(str(path) for path in (HERE, HERE.parent))
    command = [sys.executable, HERE / "checkpoint_attacks.py", "--json", "--random", str(RANDOM)]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_no_attack_does_anything_but_to_be_refused(kind, outcomes):
    tried = [outcome for outcome in outcomes if outcome["name"].startswith(f"{kind}: ")]
    assert len(tried) >= KINDS[kind]
    wrong = [f"{one['name']}: {one['wrong']}: {one['said']}" for one in tried if one["wrong"]]
    assert not wrong, "\n".join(wrong)
    if kind in ("manifest", "tampered"):
        assert all(one["said"].startswith("went on to step 1: ") for one in tried)
