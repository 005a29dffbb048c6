"""The record: one row for each competitor in each case, and all that is needed to judge or repeat it."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import LongringError
from .check import Errors
from .clock import Spread

SCHEMA = "longring gpu benchmark, 1"
REAL = (
    "One GPU, one process. Every time is measured on it with CUDA events; every result was compared with float64 on "
    "sampled rows before it was timed; errors and memory are measured."
)
SIMULATED = (
    "Rings: the ranks are virtual and take turns on the one GPU. Each computes, merges and adds exactly what it would "
    "on a machine of its own, but nothing travels: messages are in place beforehand, and no link is timed "
    "(`simulated` rows: messages are copied within the GPU). Rows marked re-created are a peer's published algorithm "
    "written anew over torch's kernels, not its package."
)
PACKAGES = ("longring", "torch", "triton", "flash-attn-4", "flash-attn", "nvidia-cutlass-dsl", "einops")


@dataclass
class Row:
    """One competitor in one case of a scenario."""

    case: str
    phase: str  # "forward", "backward", or "both"
    name: str
    kind: str = "ours"  # "ours", "kernel" (called directly), "package" (its own code), "re-created"
    ms: Spread | None = None
    tflops: float | None = None  # of useful work, per second
    ratios: dict[str, float] = field(default_factory=dict)  # what it is compared with: how many times that
    errors: Errors = field(default_factory=dict)
    extra_memory: float | None = None  # beyond inputs and outputs, in units of one tensor
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        told = asdict(self) | {"ms": self.ms and self.ms._asdict()}
        return {name: _rounded(value) for name, value in told.items() if value not in (None, {}, "")}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Row:
        ms = told.pop("ms", None)
        return cls(**told, ms=Spread(**ms) if ms else None)


@dataclass
class Record:
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str
    is_quick: bool
    missing: list[str] = field(default_factory=list)  # peers that could not be run, and why
    failures: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # that a scenario took, all in all
    scenarios: dict[str, list[Row]] = field(default_factory=dict)

    def rows(self, scenario: str, **wanted: str) -> list[Row]:
        rows = self.scenarios.get(scenario, [])
        return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]

    def continues(self, path: Path) -> bool:
        """Take over what an earlier record has, if it was made of the same code on the same machine; say whether."""
        earlier = Record.load(path) if path.exists() else None
        same = ("machine", "versions", "commit", "is_quick")
        if earlier is None or any(getattr(earlier, name) != getattr(self, name) for name in same):
            return False
        self.command = f"{earlier.command}; {self.command}"
        self.seconds, self.scenarios = earlier.seconds, earlier.scenarios
        return True

    def save(self, path: Path) -> None:
        told = {"schema": SCHEMA, "real": REAL, "simulated": SIMULATED} | self.__dict__
        told["scenarios"] = {name: [row.to_json() for row in rows] for name, rows in self.scenarios.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Record:
        told = json.loads(path.read_text())
        if told.pop("schema", None) != SCHEMA:
            raise LongringError(f"{path} is not a record of the form {SCHEMA!r}; run python -m longring.bench.gpu anew")
        told = {name: value for name, value in told.items() if name not in ("real", "simulated")}
        told["scenarios"] = {name: [Row.from_json(row) for row in rows] for name, rows in told.pop("scenarios").items()}
        return cls(**told)


def new_record(command: str, device: torch.device, is_quick: bool) -> Record:
    return Record(command, machine(device), versions(), commit(), is_quick)


def machine(device: torch.device) -> dict[str, Any]:
    told: dict[str, Any] = {"host": f"{platform.system()} {platform.machine()}"}
    if device.type != "cuda":
        return told | {"device": str(device)}
    properties = torch.cuda.get_device_properties(device)
    return told | {
        "device": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "memory in GiB": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "driver": _told_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found | {"torch": torch.__version__}


def commit() -> str:
    """With a word where the tree differs from it; a copy without its history says so."""
    name = _told_by("git", "rev-parse", "--short", "HEAD")
    changed = _told_by("git", "status", "--porcelain", "--untracked-files=no")
    return f"{name} and changes" if name != "unknown" and changed not in ("", "unknown") else name


def _told_by(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _rounded(value: Any) -> Any:
    """Five digits: more would be noise."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return value
