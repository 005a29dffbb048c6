"""What nvidia-smi knows and torch does not."""

from __future__ import annotations

import shutil
import subprocess

PATIENCE = 10.0  # seconds: a driver in trouble may never answer


def ask_nvidia(*arguments: str, lines: int | None = None) -> str | None:
    """What it prints, or the first lines of that; None where it is absent, fails or stays silent."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return "\n".join(done.stdout.strip().splitlines()[:lines]) or None


def gpu_names() -> list[str]:
    """Of all GPUs of the machine, whether or not torch may use them."""
    listed = ask_nvidia("--query-gpu=name", "--format=csv,noheader")
    return [] if listed is None else listed.splitlines()
