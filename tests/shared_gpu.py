"""Several NCCL ranks on one GPU, for tests: NCCL can from 2.30 on, as an experiment, and torch may bring an older one.

A newer library is found by LONGRING_TEST_NCCL=/path/to/libnccl.so.2, or in the nvidia-nccl wheels of the environment;
it comes before torch's by LD_PRELOAD. With LONGRING_TEST_MPS=1 ranks compute side by side through NVIDIA's MPS, started
for the tests and ended with them; without it they take turns on the GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

LIBRARY, MPS = "LONGRING_TEST_NCCL", "LONGRING_TEST_MPS"
BACKEND = "cpu:gloo,cuda:nccl"  # as longring.launch has it
LEAST = 2_30_00  # as ncclGetVersion counts: 2.30
BLOCKS = {2: "8"}  # of the GPU for each rank's messages; with more ranks 4 each, or their kernels do not fit at once
STARTING = 120.0  # seconds that ranks may take to load torch, open the GPU and meet

MEET = """
import os, torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
x = torch.ones(1, device="cuda")
dist.all_reduce(x)
os.write(1, f"met {int(x)} {torch.cuda.nccl.version()}\\n".encode())  # at once: two ranks write to one pipe
os._exit(0)
"""


def library() -> str | None:
    """The newer NCCL, or None where torch's own is to do."""
    if path := os.environ.get(LIBRARY):
        return path
    found = importlib.util.find_spec("nvidia")
    places = list(found.submodule_search_locations or []) if found else []
    wheels = [path for place in places for path in Path(place).glob("nccl/lib/libnccl.so.2")]
    return next((str(path) for path in wheels if version_of(str(path)) >= LEAST), None)


def version_of(path: str) -> int:
    version = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(version))
    return version.value


def environment(ranks: int) -> dict[str, str]:
    """What ranks that share a GPU need, but for what is loaded before all else."""
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": BLOCKS.get(ranks, "4"), "OMP_NUM_THREADS": "1"}
    pipes = {name: os.environ[name] for name in ("CUDA_MPS_PIPE_DIRECTORY",) if name in os.environ}
    return {"NCCL_SOCKET_IFNAME": "lo", **shared, **pipes}


def preload() -> str:
    return library() or ""


def world(ranks: int) -> dict[str, object]:
    """The words of `worlds.World` for such ranks."""
    return {"backend": BACKEND, "environment": environment(ranks), "preload": preload()}


def command(ranks: int) -> dict[str, str]:
    """The environment of a command that starts such ranks."""
    before = {"LD_PRELOAD": preload()} if preload() else {}
    return {**os.environ, **environment(ranks), **before, "NO_COLOR": "1"}


@cache
def refusal() -> str | None:
    """Why ranks cannot share the GPU here; None where two of them have met."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    path = library()
    try:
        version = version_of(path) if path else 0
    except (OSError, AttributeError) as error:
        return f"{LIBRARY}={path} is no NCCL: {error}"
    if path and version < LEAST:
        return f"{path} is NCCL {version}, and ranks share a GPU from {LEAST} on"
    with tempfile.TemporaryDirectory(prefix="longring_nccl_") as folder:
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        program = Path(folder) / "meet.py"
        program.write_text(MEET)
        try:
            done = subprocess.run(
                [*torchrun, str(program)], capture_output=True, text=True, timeout=STARTING, env=command(2)
            )
        except subprocess.TimeoutExpired:
            return f"two ranks on the GPU did not meet in {STARTING:g} s"
    if done.stdout.count("met 2") == 2:
        return None
    own = torch.cuda.nccl.version()
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "Duplicate GPU" in line or "Error" in line]
    why = lines[0][:200] if lines else f"exit code {done.returncode}"
    return f"two ranks could not meet on one GPU ({why}); torch has NCCL {own}; name a newer one with {LIBRARY}"


@contextlib.contextmanager
def multi_process_service() -> Iterator[None]:
    """MPS for the tests, if they were told to start it and it can be."""
    if os.environ.get(MPS) != "1" or shutil.which("nvidia-cuda-mps-control") is None:
        yield
        return
    folder = tempfile.mkdtemp(prefix="longring_mps_")
    own = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    for path in own.values():
        Path(path).mkdir()
    os.environ.update(own)
    control = ["nvidia-cuda-mps-control"]
    alone = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    try:
        subprocess.run([*control, "-d"], env=alone, check=True, timeout=30)
        time.sleep(1.0)  # until it listens
        yield
    finally:
        subprocess.run(control, input="quit -t 5\n", text=True, env=alone, timeout=60, capture_output=True)
        for name in own:
            del os.environ[name]
        shutil.rmtree(folder, ignore_errors=True)
