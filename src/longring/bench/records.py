"""The record of a benchmark: a row for each competitor in each case, and all that is needed to judge or repeat it."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError
from ..plan.user_files import read_text

SCHEMA = "longring bench, 2"
FIRST_SCHEMA = "longring gpu benchmark, 1"  # milliseconds, with the least and the most; rows by scenario
QUARTILES, EXTREMES = "quartiles", "least and most"  # what the low and the high of a time are
KINDS = ("ours", "kernel", "package", "re-created")
PHASES = ("forward", "backward", "both")
PACKAGES = (
    *("longring", "torch", "triton", "flash-attn-4", "flash-attn", "nvidia-cutlass-dsl", "einops"),
    *("deepspeed", "ring-flash-attn", "yunchang", "torchscale", "dilated-attention-pytorch"),
)


class Spread(NamedTuple):
    """Seconds: the median, and the quartiles around it."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, times: list[float]) -> Spread:
        if len(times) == 1:
            return cls(times[0], times[0], times[0], 1)
        low, median, high = statistics.quantiles(times, n=4, method="inclusive")
        return cls(median, low, high, len(times))


@dataclass
class Row:
    """One competitor in one case of a scenario."""

    case: str
    phase: str  # of PHASES
    name: str
    kind: str = "ours"  # "ours", "kernel" (called directly), "package" (its own code), "re-created"
    time: Spread | None = None
    tflops: float | None = None  # of useful work, per second, all ranks together
    ratios: dict[str, float] = field(default_factory=dict)  # what it is compared with: how many times that
    errors: dict[str, float] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)  # of those errors; nothing where none was judged
    extra_memory: float | None = None  # beyond inputs and outputs, in units of one tensor
    note: str = ""
    tokens: int | None = None
    ranks: int = 1
    schedule: str | None = None
    layout: str | None = None
    kernel: str | None = None
    peak_bytes: list[int] | None = None  # that each rank held at most, inputs and outputs included: measured
    components: dict[str, int] = field(default_factory=dict)  # of the fullest rank's peak: measured
    predicted_bytes: int | None = None  # of the fullest rank, by the plan
    predicted_components: dict[str, int] = field(default_factory=dict)
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    nodes: int = 1  # that the ranks pass for
    causal: bool | None = None
    window: int | None = None  # tokens to each side, the query itself included
    dilated: str | None = None  # LENGTH:RATE,... of LongNet's branches
    rounds: tuple[float, ...] = ()  # seconds in each round, for comparisons; a record has `time` alone

    @property
    def is_wrong(self) -> bool:
        """Judged, and beyond what is allowed; nan is beyond everything."""
        return any(not self.errors.get(name, 0.0) <= most for name, most in self.allowed.items())

    @property
    def most_bytes(self) -> int | None:
        return max(self.peak_bytes) if self.peak_bytes else None

    def to_json(self) -> dict[str, Any]:
        told = asdict(self) | {"time": self.time and self.time._asdict()}
        del told["rounds"]
        return told


@dataclass
class Record:
    line: str  # the command, as it was typed
    arguments: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str
    real: str  # what really ran, in words
    simulated: str  # and what did not
    is_quick: bool
    is_complete: bool = False  # False in one that was cut short
    spread: str = QUARTILES
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
        same = ("machine", "versions", "commit", "is_quick", "spread")
        if earlier is None or any(getattr(earlier, name) != getattr(self, name) for name in same):
            return False
        self.line = f"{earlier.line}; {self.line}"
        self.seconds, self.scenarios = earlier.seconds, earlier.scenarios
        self.missing, self.failures = earlier.missing, earlier.failures
        return True

    def to_json(self) -> dict[str, Any]:
        told = {name: value for name, value in self.__dict__.items() if name != "scenarios"}
        rows = [{"scenario": name} | row.to_json() for name, rows in self.scenarios.items() for row in rows]
        return _plain({"schema": SCHEMA, "command": "bench"} | told | {"rows": rows})

    def save(self, path: Path) -> None:
        """Whole or not at all: whoever is interrupted keeps the file of the row before."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")
        beside.replace(path)

    @classmethod
    def load(cls, path: Path) -> Record:
        return _Reader(path).record()


# ------------------------------------------------------------------------------------------------------- reading


MOST_BYTES = 1 << 22  # of a record's file
LARGEST = 1e300  # beyond, a whole number may be no float


def _number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= LARGEST  # nan is not


def _count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x <= LARGEST


def _text(x: Any) -> bool:
    return isinstance(x, str)


def _list(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, list) and all(map(of, x))


def _table(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, dict) and all(map(of, x.values()))


def _maybe(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: x is None or of(x)


def _time(x: Any) -> bool:
    if not (isinstance(x, dict) and x.keys() == set(Spread._fields) and all(map(_number, x.values()))):
        return False
    return 0 < x["low"] <= x["median"] <= x["high"] and _count(x["runs"]) and x["runs"] > 0


def _flag(x: Any) -> bool:
    return isinstance(x, bool)


def _anything(_: Any) -> bool:
    return True


RECORD_FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("line", "commit", "real", "simulated"), _text),
    **dict.fromkeys(("arguments", "machine"), _table(_anything)),
    "versions": _table(_text),
    **dict.fromkeys(("is_quick", "is_complete"), _flag),
    "spread": (QUARTILES, EXTREMES).__contains__,
    **dict.fromkeys(("missing", "failures"), _list(_text)),
    "seconds": _table(_number),
    "rows": _list(_table(_anything)),
}
ROW_FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("scenario", "case", "name", "note"), _text),
    "phase": PHASES.__contains__,
    "kind": KINDS.__contains__,
    "time": _maybe(_time),
    **dict.fromkeys(("tflops", "extra_memory"), _maybe(_number)),
    "ratios": _table(_maybe(_number)),
    **dict.fromkeys(("errors", "allowed"), _table(_maybe(_number))),  # null: not finite
    **dict.fromkeys(("tokens", "heads", "kv_heads", "head_dim", "window", "predicted_bytes"), _maybe(_count)),
    **dict.fromkeys(("ranks", "nodes"), _count),
    **dict.fromkeys(("schedule", "layout", "kernel", "dilated"), _maybe(_text)),
    "causal": _maybe(_flag),
    "peak_bytes": _maybe(_list(_count)),
    **dict.fromkeys(("components", "predicted_components"), _table(_number)),
}


class _Reader:
    """Reads what somebody may have cut, edited or made with another program; says what is wrong, and where."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def record(self) -> Record:
        told = _from_first_form(self._parsed())
        if told.pop("schema", None) != SCHEMA:
            raise self._refused(f"is not a record of the form {SCHEMA!r}; make one by longring bench --out FILE")
        told.pop("command", None)
        self._check(told, RECORD_FIELDS, "")
        scenarios: dict[str, list[Row]] = {}
        for number, row in enumerate(told.pop("rows")):
            self._check(row, ROW_FIELDS, f"row {number}: ")
            scenarios.setdefault(row.pop("scenario"), []).append(_row(row))
        return Record(**told, scenarios=scenarios)

    def _parsed(self) -> dict[str, Any]:
        try:
            told = json.loads(read_text(self._path, str(self._path), most=MOST_BYTES))
        except ArgumentError:
            raise
        except (ValueError, RecursionError) as error:
            line = getattr(error, "lineno", 1)
            raise self._refused(f"is no JSON, or was cut short: {error.args[0]}, in line {line}") from None
        if not isinstance(told, dict):
            raise self._refused(f"is no record: it holds a {type(told).__name__} where an object should be")
        return told

    def _check(self, told: dict[str, Any], wanted: dict[str, Callable[[Any], bool]], where: str) -> None:
        if missing := sorted(wanted.keys() - told.keys()):
            raise self._refused(f"is damaged: {where}{missing[0]!r} is missing")
        if unknown := sorted(told.keys() - wanted.keys()):
            raise self._refused(f"is of another version, or damaged: {where}{unknown[0]!r} is not known")
        for name, is_right in wanted.items():
            if not is_right(told[name]):
                raise self._refused(f"is damaged: {where}{name!r} is {str(told[name])[:60]!r}")

    def _refused(self, why: str) -> ArgumentError:
        return ArgumentError(f"{self._path} {why}")


def _row(told: dict[str, Any]) -> Row:
    time = told.pop("time")
    for name in ("ratios", "errors", "allowed"):
        told[name] = {what: math.inf if x is None else x for what, x in told[name].items()}
    return Row(**told, time=Spread(**time) if time else None)


def _from_first_form(told: dict[str, Any]) -> dict[str, Any]:
    """What the first form has as the second says it; whatever is not of that form comes back as it is."""
    scenarios: Any = told.get("scenarios")
    if told.get("schema") != FIRST_SCHEMA or not _table(_list(_table(_anything)))(scenarios):
        return told
    unsaid = Record("", {}, {}, {}, "", "", "", is_quick=False, is_complete=True, spread=EXTREMES).to_json()
    kept = {name: value for name, value in told.items() if name not in ("schema", "command", "scenarios")}
    rows = [_row_from_first_form(name, row) for name, rows in scenarios.items() for row in rows]
    return unsaid | kept | {"line": told.get("command"), "rows": rows}


def _row_from_first_form(scenario: str, told: dict[str, Any]) -> dict[str, Any]:
    ms: Any = told.get("ms")
    kept = {name: value for name, value in told.items() if name != "ms"}
    time = ms  # if it is no time, whoever checks the row says so
    if _table(_number)(ms) and ms.keys() == {"median", "min", "max", "repeats"}:
        time = {"median": ms["median"] / 1e3, "low": ms["min"] / 1e3, "high": ms["max"] / 1e3, "runs": ms["repeats"]}
    return {"scenario": scenario} | Row("", "", "").to_json() | kept | {"time": time}


# ------------------------------------------------------------------------------------------------------- making


def new_record(
    line: str,
    device: torch.device,
    is_quick: bool,
    *,
    real: str,
    simulated: str,
    arguments: dict[str, Any] | None = None,
) -> Record:
    return Record(line, arguments or {}, machine(device), versions(), commit(), real, simulated, is_quick)


def machine(device: torch.device) -> dict[str, Any]:
    told: dict[str, Any] = {"host": f"{platform.system()} {platform.machine()}"}
    if device.type != "cuda":
        return told | {"device": str(device), "processor": _processor(), "cores": cores(), "memory in GiB": _memory()}
    properties = torch.cuda.get_device_properties(device)
    return told | {
        "device": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "memory in GiB": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "driver": _told_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown")


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (AttributeError, ValueError, OSError):  # not every system says
        return None


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found | {package: version_of(package) for package in PACKAGES} | {"torch": torch.__version__}


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """With a word where the tree differs from it; a copy without its history says so."""
    here = ("git", "-C", str(Path(__file__).parent))
    if _told_by(*here, "ls-files", "--error-unmatch", Path(__file__).name) == "unknown":
        return "unknown"  # installed into somebody's tree, whose commits say nothing of this code
    name = _told_by(*here, "rev-parse", "--short", "HEAD")
    changed = _told_by(*here, "status", "--porcelain", "--untracked-files=no")
    return f"{name} and changes" if name != "unknown" and changed not in ("", "unknown") else name


def _told_by(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _plain(value: Any) -> Any:
    """Five digits: more would be noise. What is not finite is null, since JSON knows nothing of it."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value
