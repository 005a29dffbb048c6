"""What the soak says of memory, handles and processes: right on samples that are known, and of this very process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("train_soak", Path(__file__).parents[2] / "benchmarks" / "train_soak.py")
assert _spec is not None
assert _spec.loader is not None
soak = importlib.util.module_from_spec(_spec)
sys.modules["train_soak"] = soak  # dataclasses look for it there
_spec.loader.exec_module(soak)


def life(height: float, mib_per_hour: float, *, warm_up: float = 0.0, begins: float = 0.0):
    """A sample every four seconds for 400 seconds; the first 20 samples are of a process that loads."""
    return [
        soak.Sample(begins + t, int((height + mib_per_hour * t / 3600 - warm_up * (t < 80)) * soak.MIB), 10, 3)
        for t in range(0, 400, 4)
    ]


def test_the_slope_is_that_within_lives_and_not_between_them():
    found = soak.slope([life(200, 36, warm_up=50), life(300, 36, begins=500), life(90, 36, begins=900)])
    assert found.mib_per_hour == pytest.approx(36, abs=1e-3)
    assert found.standard_error == pytest.approx(0, abs=1e-3)
    assert found.lives == 3


def test_lives_that_differ_have_a_standard_error():
    found = soak.slope([life(200, 10), life(200, 20), life(200, 30)])
    assert found.mib_per_hour == pytest.approx(20, abs=1e-3)
    assert found.standard_error == pytest.approx((100 / 3) ** 0.5, abs=1e-3)  # 10 / sqrt(3), that of their mean
    assert soak.slope([life(200, 10)]) is None


def test_handles_grow_only_if_they_stay():
    samples = life(200, 0)
    busy = [one._replace(handles=14 if n % 7 == 0 else 10) for n, one in enumerate(samples)]
    leaking = [one._replace(handles=10 + n // 30) for n, one in enumerate(samples)]
    loading = [one._replace(handles=5 if n < 20 else 10) for n, one in enumerate(samples)]
    assert [soak.growth(one, "handles") for one in (busy, leaking, loading)] == [0, 2, 0]


def test_processes_of_a_session_are_found_and_sampled(tmp_path):
    (tmp_path / "data").write_text("mapped")
    wait = [sys.executable, "-c", f"file = open({str(tmp_path / 'data')!r}); print('opened', flush=True); input()"]
    with subprocess.Popen(wait, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        (process,) = soak.session(child.pid)
        assert process.pid == child.pid
        assert soak.named({process: f"{os.getpid()} python"}, child.pid) == {"command": process}
        found = soak.sample(process, 0.0, tmp_path)
        assert found.rss > soak.MIB
        assert found.threads == 1
        assert found.handles == soak.sample(process, 0.0, tmp_path / "other").handles - 1 >= 3
        child.communicate(b"\n")
    assert soak.session(child.pid) == {}
    assert soak.sample(process, 0.0, tmp_path) is None
