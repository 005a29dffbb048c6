"""The integration's tests with the oldest transformers that the extra takes; the others run with the pinned one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv" / "oldest_transformers"
PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "tests" / "oldest_transformers.txt").read_text(), re.MULTILINE))
TESTS = ("test_transformers.py", "test_transformers_trainer.py")
NOT_THERE = (  # refused there too, in other words: by the time it is built, or because it works on its mask itself
    "test_static_caches_are_refused_where_masks_are_made_in_advance",
    "test_softcaps_and_sinks_and_biases_are_refused",
    "RecurrentGemmaModel",
    "four_ranks",  # a start is expensive, and has nothing to do with a version
    "two_rows_of_two_ranks",
)


def test_the_extra_takes_what_is_tested():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"transformers>={PINS['transformers'].removesuffix('.0')}" in extras["transformers"]


@pytest.mark.processes
@pytest.mark.timeout(500)
def test_the_integration_with_the_oldest_transformers():
    if not (FOLDER / ".installed").exists():
        pytest.skip(f"transformers {PINS['transformers']} is not in {FOLDER.relative_to(ROOT)}; make check installs it")
    paths = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    said = "import torch, transformers; print(torch.__file__, transformers.__version__)"
    loaded = subprocess.run([sys.executable, "-c", said], env=environment, capture_output=True, text=True, timeout=60)
    torch_file, version = loaded.stdout.split()
    assert version == PINS["transformers"], loaded.stderr
    assert FOLDER not in Path(torch_file).parents
    without = " and ".join(f"not {name}" for name in NOT_THERE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", without]
    files = [str(ROOT / "tests" / "integrations" / name) for name in TESTS]
    done = subprocess.run([*command, *files], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, done.stdout[-5000:]
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert passed is not None, done.stdout[-5000:]
    assert int(passed[1]) > 170
