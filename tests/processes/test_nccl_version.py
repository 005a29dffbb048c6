"""Which NCCL runs: one that comes before torch's by LD_PRELOAD is the one that counts."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

import shared_gpu
from longring import launching

NEWER = "int ncclGetVersion(int *version) { *version = 23203; return 0; }"
ASKED = "import torch, longring.launching as launching; print(launching.nccl_version())"


@pytest.mark.skipif(not shutil.which("cc") or sys.platform != "linux", reason="needs a C compiler and LD_PRELOAD")
def test_a_library_loaded_before_all_else_is_the_one_that_runs(tmp_path):
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text(NEWER)
    subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", source, "-o", library], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", ASKED], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "(2, 32, 3)\n", done.stderr


@pytest.mark.parametrize(("version", "devices"), [((2, 28, 9), 1), ((2, 30, 0), 4)])
def test_ranks_share_a_gpu_from_2_30_on(version, devices, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launching.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(launching, "nccl_version", lambda: version)
    assert launching.ranks_on_gpus(4) == devices


def test_the_program_in_which_two_ranks_meet_can_be_compiled():
    compile(shared_gpu.MEET, "meet.py", "exec")
