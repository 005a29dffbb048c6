"""What only a GPU can show, run in at most 8 minutes, and a receipt of it in docs/records/gpu: make gpu

python benchmarks/gpu_receipt.py --commit 1a2b3c4                 where there is no git
python benchmarks/gpu_receipt.py --out DIR --jobs 4               the receipt elsewhere, fewer processes at a time
python benchmarks/gpu_receipt.py --only nccl --whole-nccl --minutes 10

Three parts, one after another: a smoke test of NCCL with ranks that share the GPU (tests/gpu/nccl), random
configurations of a seed that no record has (benchmarks/random_gpu.py), and tests/gpu. Each has a time limit; one that
it cuts off is incomplete, which is not passed. The exit status is 0 only if all that ran passed. Needs PyTorch, Triton,
pytest and hypothesis; takes pytest-xdist and pytest-timeout where they are. Nothing is installed or fetched.

Whether a receipt still holds for the sources of today is what docs/write_status.py says, in docs/status.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from longring.sources import sources  # noqa: E402

SCHEMA = "longring gpu receipt, 1"
RECORDS = ROOT / "docs" / "records"
PASSED, FAILED, INCOMPLETE, NOT_RUN = "passed", "failed", "incomplete", "not run"
PARTS = ("nccl", "random", "tests")  # in this order: the last may take what the others left
LIMITS = {"nccl": 75.0, "random": 120.0, "tests": 330.0}  # seconds
ENDING = 12.0  # seconds in which what was cut off may tell what it has, and the receipt is written
RANDOM_GRACE = 45.0  # of a random run's limit: for processes to start and for what was begun to end
CONFIGURATIONS = 100
ALL_TESTS = "tests/gpu"
NO_GPU = "needs a CUDA device"  # why tests are skipped where there is none
MESSAGE = 1500  # characters of a failure that are kept


@dataclass
class Part:
    """What one part found."""

    status: str
    reason: str = ""  # of a status that is not "passed"
    seconds: float = 0.0
    limit: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    skips: dict[str, int] = field(default_factory=dict)  # by reason
    failures: list[dict[str, str]] = field(default_factory=list)
    random: dict[str, Any] | None = None  # the run as benchmarks/random_gpu.py records it


def main(arguments: Sequence[str] | None = None) -> int:
    told = parsed(arguments)
    start = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of every `finally`
    facts = facts_of(told.device)
    if "refused" in facts:
        told_why = f"make gpu needs a CUDA device, torch and pytest: {facts['refused']}"
        print(f"{told_why}; name another Python with make gpu GPU_PYTHON=...", file=sys.stderr)
        return 2
    receipt = {
        "schema": SCHEMA,
        "command": "python benchmarks/gpu_receipt.py " + " ".join(sys.argv[1:] if arguments is None else arguments),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": told.commit or commit(),
        "sources": sources(ROOT / "src" / "longring"),
        "hardware": facts["hardware"],
        "versions": facts["versions"],
        "seed": told.seed if told.seed is not None else new_seed(int(time.time())),
    }
    parts = run_parts(told, receipt, start)
    receipt["seconds"] = round(time.monotonic() - start, 1)
    receipt["parts"] = {name: asdict(part) for name, part in parts.items()}
    receipt["status"] = status_of(receipt)
    path = save(receipt, told.out)
    print(f"{receipt['status']} in {receipt['seconds']:.0f} s; receipt: {path}")
    if told.out == RECORDS / "gpu":
        subprocess.run([sys.executable, str(ROOT / "docs" / "write_status.py")], check=True, timeout=60)
        print("docs/status.md is written; commit both")
    found = {part_status(part) for part in receipt["parts"].values()}
    return 0 if PASSED in found and found <= {PASSED, NOT_RUN} else 1


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything")
    parser.add_argument("--limits", nargs="*", default=[], metavar="PART=SECONDS", help=f"default: {LIMITS}")
    parser.add_argument("--together", action="store_true", help="the parts at once, where that is faster")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="the others are recorded as not run")
    parser.add_argument("--jobs", type=int, help="processes at a time (half the cores, at most 8)")
    parser.add_argument("--most", type=int, default=CONFIGURATIONS, help="random configurations")
    parser.add_argument("--seed", type=int, help="of the random configurations (by default one that no record has)")
    parser.add_argument("--tests", nargs="+", default=[ALL_TESTS], help="what pytest is to run")
    parser.add_argument("--whole-nccl", action="store_true", help="all of tests/gpu/nccl, not its smoke test alone")
    parser.add_argument("--commit", default=os.environ.get("LONGRING_COMMIT"), help="where there is no git")
    parser.add_argument("--out", type=Path, default=RECORDS / "gpu", help="folder of the receipt")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries this program, needs --out")
    told = parser.parse_args(arguments)
    told.limits = LIMITS | limits_named(parser, told.limits)
    told.jobs = told.jobs or max(1, min(8, cores() // 2))
    told.out = told.out.resolve()
    if told.device == "cpu" and told.out == RECORDS / "gpu":
        parser.error("what a CPU did is no receipt of a GPU: give --out another folder")
    if min(told.jobs, told.most) < 1 or told.minutes <= 0:
        parser.error(f"--jobs, --most and --minutes must be positive, got {told.jobs}, {told.most}, {told.minutes}")
    if told.seed in set(seeds(RECORDS)):
        parser.error(f"--seed {told.seed} is in a record already: the same configurations would count twice")
    return told


def limits_named(parser: argparse.ArgumentParser, asked: list[str]) -> dict[str, float]:
    found = dict(re.findall(rf"({'|'.join(PARTS)})=([\d.]+)", " ".join(asked)))
    if len(found) != len(asked):
        parser.error(f"--limits are PART=SECONDS of {', '.join(PARTS)}, got {' '.join(asked)}")
    return {name: float(seconds) for name, seconds in found.items()}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ------------------------------------------------------------------------------------------------- what is recorded

FACTS = """
import importlib.metadata, json, platform, sys
try:
    import pytest, torch
except ImportError as error:
    sys.exit(print(json.dumps({"refused": f"{error} in {sys.executable}"})))
device = sys.argv[1]
if device == "cuda" and not torch.cuda.is_available():
    sys.exit(print(json.dumps({"refused": f"torch {torch.__version__} of {sys.executable} sees none"})))
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
versions = {"python": platform.python_version(), "torch": torch.__version__}
versions |= {name: version(name) for name in ("triton", "flash-attn-4", "pytest", "pytest-xdist", "pytest-timeout")}
hardware = {"gpu": "cpu", "gpus": 0, "system": platform.platform()}
if device == "cuda":
    gpu = torch.cuda.get_device_properties(0)
    hardware |= {"gpu": gpu.name, "gpus": torch.cuda.device_count(), "compute capability": f"{gpu.major}.{gpu.minor}"}
    hardware["memory in GiB"] = round(gpu.total_memory / 2**30, 1)
    versions["cuda"] = torch.version.cuda or f"hip {torch.version.hip}"
    versions["cudnn"] = str(torch.backends.cudnn.version())
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none"
sys.path.insert(0, "tests")
import shared_gpu
if path := shared_gpu.library():  # instead of torch's, for ranks that share a GPU
    try:
        number = shared_gpu.version_of(path)
        found = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    except (OSError, AttributeError) as error:
        found = f"none: {error}"
    versions["nccl of tests/gpu/nccl"] = found
print(json.dumps({"hardware": hardware, "versions": versions}))
"""


def facts_of(device: str) -> dict[str, Any]:
    """Found in a process of its own: this one never opens the GPU."""
    command = [sys.executable, "-W", "ignore", "-c", FACTS, device]
    asked = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    done = subprocess.run(command, cwd=ROOT, env=environment(1), **asked)
    if not done.stdout.startswith("{"):
        return {"refused": f"torch cannot be asked ({(done.stderr.strip() or 'no output').splitlines()[-1]})"}
    found = json.loads(done.stdout)
    if "hardware" in found:
        asked = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        found["hardware"] |= {"driver": said_by(*asked) if device == "cuda" else "none", "cores": cores()}
    return found


def said_by(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def commit() -> str:
    return said_by("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*")


def new_seed(seed: int, records: Path = RECORDS) -> int:
    """This one or the next that no record has."""
    known = set(seeds(records))
    while seed in known:
        seed += 1
    return seed


def seeds(records: Path) -> Iterator[int]:
    for path in sorted((records / "gpu").glob("*.json")):
        yield json.loads(path.read_text())["seed"]
    if (path := records / "random_gpu.json").exists():
        yield from (run["seed"] for run in json.loads(path.read_text())["runs"])


def save(receipt: dict[str, Any], folder: Path) -> Path:
    """Whole or not at all."""
    gpu = re.sub(r"\W+", "-", receipt["hardware"]["gpu"]).strip("-").lower()
    path = folder / f"{re.sub(r'[^0-9T]', '', receipt['started'].partition('+')[0])}-{gpu}.json"
    folder.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    lines = json.dumps(receipt, indent=1)
    innermost = re.compile(r"[{\[][^{}\[\]]*[}\]]")  # on one line each
    beside.write_text(innermost.sub(lambda found: re.sub(r"\n *", " ", found[0]), lines) + "\n")
    beside.replace(path)
    return path


# -------------------------------------------------------------------------------------------------- how it is judged


def status_of(receipt: dict[str, Any]) -> str:
    """Of its parts, whatever it says itself: passed if all passed; NCCL may be not run."""
    parts = receipt.get("parts", {})
    found = [part_status(parts.get(name, {})) for name in PARTS]
    needed = [one for name, one in zip(PARTS, found, strict=True) if name != "nccl" or one != NOT_RUN]
    return FAILED if FAILED in found else PASSED if all(one == PASSED for one in needed) else INCOMPLETE


def part_status(part: dict[str, Any]) -> str:
    """As it says, unless what it counted says otherwise."""
    said, counts = part.get("status"), part.get("counts", {})
    if said == FAILED or part.get("failures") or counts.get("failed") or counts.get("errors"):
        return FAILED
    if said == NOT_RUN:
        return NOT_RUN
    return PASSED if said == PASSED and counts.get("passed") and not counts.get("unfinished") else INCOMPLETE


# --------------------------------------------------------------------------------------------------------- the parts


def run_parts(told: argparse.Namespace, receipt: dict[str, Any], start: float) -> dict[str, Part]:
    """One after another, or with --together at once."""
    with tempfile.TemporaryDirectory(prefix="gpu_receipt_") as folder:

        def run(name: str) -> Part:
            left = 60 * told.minutes - ENDING - (time.monotonic() - start)
            return run_part(name, told, receipt, Path(folder), left)

        if not told.together:  # without a thread, so that ending this program ends what it started
            return {name: run(name) for name in PARTS}
        with ThreadPoolExecutor(len(PARTS)) as pool:
            return dict(zip(PARTS, pool.map(run, PARTS), strict=True))


def run_part(name: str, told: argparse.Namespace, receipt: dict[str, Any], folder: Path, left: float) -> Part:
    """Its limit is its own, or what is left of the whole; alone, or beside others, it may take all of that."""
    if name not in told.only:
        return Part(NOT_RUN, "not asked for")
    limit = round(left if told.together or list(told.only) == [name] else min(left, told.limits[name]), 1)
    if limit < 1:
        return Part(INCOMPLETE, f"no time was left of {told.minutes:g} minutes", limit=limit)
    print(f"{name}: begins, at most {limit:.0f} s", flush=True)
    since = time.monotonic()
    part = RUNS[name](told, receipt, folder, limit)
    part.seconds, part.limit = round(time.monotonic() - since, 1), limit
    tell(name, part)
    return part


def tell(name: str, part: Part) -> None:
    counts = ", ".join(f"{count} {what}" for what, count in part.counts.items())
    reason = f": {part.reason}" if part.reason else ""
    print(f"{name}: {part.status}{reason} ({counts or 'nothing counted'}; {part.seconds:.0f} s)", flush=True)
    for failure in part.failures[:12]:
        print(f"  {failure['name']}: {failure['message'][:600]}", flush=True)


def run_tests(told: argparse.Namespace, receipt: dict[str, Any], folder: Path, limit: float) -> Part:
    part = run_pytest(["--ignore=tests/gpu/nccl", *told.tests], told.jobs, folder / "tests.xml", limit)
    if part.status == PASSED and told.device == "cuda" and (blind := part.skips.get(NO_GPU)):
        part.status, part.reason = INCOMPLETE, f"{blind} tests saw no CUDA device"
    if part.status == PASSED and told.tests != [ALL_TESTS]:
        part.status, part.reason = INCOMPLETE, f"only {' '.join(told.tests)}"
    return part


def run_nccl(told: argparse.Namespace, receipt: dict[str, Any], folder: Path, limit: float) -> Part:
    """Serial: its ranks fill the GPU by themselves. What it cannot do here is not run, never passed."""
    where = "tests/gpu/nccl"
    if not (ROOT / where).is_dir():
        return Part(NOT_RUN, f"there is no {where}")
    asked = [where] if told.whole_nccl else [where, "-m", "smoke"]
    part = run_pytest(asked, 1, folder / "nccl.xml", limit)
    if part.status == INCOMPLETE and part.counts and not part.counts["passed"] and "cut off" not in part.reason:
        part.status = NOT_RUN  # all skipped, or none selected
    return part


def run_random(told: argparse.Namespace, receipt: dict[str, Any], folder: Path, limit: float) -> Part:
    record = folder / "random.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "random_gpu.py"), "--seed", str(receipt["seed"])]
    command += ["--most", str(told.most), "--jobs", str(told.jobs), "--device", told.device, "--record", str(record)]
    command += ["--minutes", f"{max(limit - RANDOM_GRACE, limit / 2) / 60:.3f}", "--commit", receipt["commit"]]
    code, output = bounded(command, limit, environment(told.jobs))
    run = json.loads(record.read_text())["runs"][-1] if record.exists() else None
    return random_part(code, output, run, told.most)


RUNS = {"nccl": run_nccl, "random": run_random, "tests": run_tests}


def random_part(code: int | None, output: str, run: dict[str, Any] | None, most: int) -> Part:
    """Of its record; one that was cut off, or ended before all were run, is incomplete."""
    if run is None:
        why = "cut off by the time limit" if code is None else f"ended with status {code} and no record"
        return Part(INCOMPLETE if code is None else FAILED, f"{why}: {output[-MESSAGE:].strip()}")
    outcomes = run["outcomes"]
    right, refused = outcomes.get("right", 0), outcomes.get("refused", 0)
    counts = {"passed": right, "failed": sum(outcomes.values()) - right - refused, "refused": refused}
    counts["unfinished"] = most - sum(outcomes.values())
    part = Part(PASSED, counts=counts, skips=run["refusals"], random=run)
    for each in run["failures"]:
        told = f"{each['message']} {json.dumps(each['configuration'])}"
        part.failures.append({"name": each["outcome"], "message": told[: 2 * MESSAGE]})
    if counts["failed"] or part.failures or code:
        part.status, part.reason = FAILED, "" if part.failures else f"ended with status {code}: {output[-MESSAGE:]}"
    elif counts["unfinished"] > 0:
        part.status, part.reason = INCOMPLETE, f"{most - counts['unfinished']} of {most} in the time there was"
    elif most < CONFIGURATIONS:
        part.status, part.reason = INCOMPLETE, f"only {most} of {CONFIGURATIONS} were asked for"
    elif right < most / 2:
        part.status, part.reason = INCOMPLETE, f"{refused} of {most} were refused"
    return part


# ------------------------------------------------------------------------------------------------------------ pytest


def run_pytest(asked: list[str], shards: int, report: Path, limit: float) -> Part:
    """Plugins are those that the tests need: what else is installed may warn, and warnings are errors."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    if find_spec("pytest_timeout"):
        command += ["-p", "pytest_timeout"]
    if shards > 1 and find_spec("xdist"):
        command += ["-p", "xdist.plugin", "-n", str(shards), "--dist", "worksteal"]
    else:
        shards = 1
    code, output = bounded([*command, *asked], limit, environment(shards))
    return pytest_part(code, output, report)


def pytest_part(code: int | None, output: str, report: Path) -> Part:
    """Of the report, and of the exit status where the report knows less; None is one that was cut off."""
    try:
        part = read_junit(report)
    except (OSError, ElementTree.ParseError) as error:
        part = Part(INCOMPLETE, f"no report ({type(error).__name__}): {output[-MESSAGE:].strip()}")
        if code is not None:
            part.status = FAILED
            part.reason = f"pytest ended with status {code}, {part.reason}"
            return part
    if code is None:  # the report has tests that had begun like those that passed
        under_way = "those under way count as passed" if part.counts else ""
        part.reason = "; ".join(filter(None, ["cut off by the time limit", under_way, part.reason]))
    if part.failures:
        part.status = FAILED
    elif code is None:
        part.status = INCOMPLETE
    elif code not in (0, NO_TESTS):
        part.status, part.reason = FAILED, f"pytest ended with status {code}: {output[-MESSAGE:].strip()}"
    elif not part.counts["passed"]:
        why = "; ".join(f"{reason} ({count})" for reason, count in part.skips.items())
        part.status, part.reason = INCOMPLETE, f"every test was skipped: {why}" if why else "no test was selected"
    return part


NO_TESTS = 5  # pytest's exit status


def read_junit(report: Path) -> Part:
    counts, skips = Counter(passed=0, failed=0, errors=0, skipped=0), Counter[str]()
    part = Part(PASSED)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("::")
        found = {each.tag: each for each in case if each.tag in ("failure", "error", "skipped")}
        for tag, what in (("failure", "failed"), ("error", "errors")):
            if tag in found:
                counts[what] += 1
                told = f"{found[tag].get('message', '')}\n{(found[tag].text or '')[-MESSAGE:]}"
                part.failures.append({"name": name, "message": told[: 2 * MESSAGE]})
        if "skipped" in found and len(found) == 1:
            counts["skipped"] += 1
            skips[found["skipped"].get("message", "no reason")] += 1
        elif not found:
            counts["passed"] += 1
    part.counts, part.skips = dict(counts), dict(skips)
    return part


# --------------------------------------------------------------------------------------------------- bounded commands


def environment(shards: int) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "HYPOTHESIS_PROFILE")}
    path = [str(ROOT / "src"), *filter(None, [found.get("PYTHONPATH")])]
    found |= {"PYTHONPATH": os.pathsep.join(path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    found["OMP_NUM_THREADS"] = str(max(1, cores() // shards))
    found.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "longring_triton"))  # parts share kernels
    return found


def bounded(command: list[str], limit: float, env: dict[str, str]) -> tuple[int | None, str]:
    """Its exit status, None if it was cut off, and what it printed. Nothing that it started outlives it."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        code: int | None = None
        family: set[tuple[int, str]] = set()
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            family = descendants(process.pid)
            process.send_signal(signal.SIGINT)  # pytest writes the report of what is over
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING / 2)
        finally:
            end(process, family | descendants(process.pid))
        output.seek(0)
        return code, output.read().decode(errors="replace")


def end(process: subprocess.Popen[bytes], family: set[tuple[int, str]]) -> None:
    if process.poll() is None:
        process.kill()
    for pid, began in family:
        with contextlib.suppress(OSError):
            if stat(pid)[1] == began:  # not another process of the same number
                os.kill(pid, signal.SIGKILL)
    process.wait(30)


def descendants(pid: int) -> set[tuple[int, str]]:
    """(pid, when it began) of what a process started, and of all in its session."""
    parents: dict[int, list[int]] = {}
    found: set[tuple[int, str]] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields, _ = stat(int(folder.name))
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
            if int(fields[3]) == pid:
                parents.setdefault(pid, []).append(int(folder.name))
    todo, seen = [pid], {pid}
    while todo:
        for child in set(parents.get(todo.pop(), ())) - seen:
            seen.add(child)
            todo.append(child)
            with contextlib.suppress(OSError):
                found.add((child, stat(child)[1]))
    return found


def stat(pid: int) -> tuple[list[str], str]:
    """State, parent, group, session and so on; and when it began."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields, fields[19]


if __name__ == "__main__":
    sys.exit(main())
