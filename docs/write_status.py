"""Write docs/status.md from the records of what ran, and on which hardware: python docs/write_status.py (make status)

It says "not run at these sources" where the engine's sources (longring.sources) have changed since. A record that does
not name its sources is taken to be of others; one that failed, or was cut off, is never said to have passed.

    records/gpu/*.json        receipts of benchmarks/gpu_receipt.py
    records/random_gpu.json   runs of benchmarks/random_gpu.py; compute-sanitizer's among them
    records/verify/*.json     what `longring verify` wrote on a cluster, see `Verified`
    records/*.json            measurements: those of MEASURED
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
RECORDS = DOCS / "records"
sys.path[:0] = [str(DOCS.parent / "benchmarks"), str(DOCS.parent / "src")]

from gpu_receipt import FAILED, INCOMPLETE, NOT_RUN, PARTS, PASSED, part_status, status_of  # noqa: E402

from longring.sources import Sources, sources  # noqa: E402

STALE = "*not run at these sources*"
NAMES = {"tests": "`tests/gpu`", "random": "random configurations", "nccl": "NCCL, ranks that share the GPU"}
MEASURED = {
    "h200.json": "speed, memory and errors beside other kernels ([benchmarks](benchmarks.md))",
    "symmetric_memory.json": "memory of 1 to 8 processes that share the GPU through symmetric memory",
    "replay_dense.json": "one rank of 64, replayed ([replay](replay.md))",
    "replay_dilated.json": "one rank of 1,024, replayed",
    "bench.json": "ring, exchange and their peers, on processes of one machine over Gloo",
    "train_soak.json": "training on 1 to 3 processes over Gloo, stalled, killed and resumed",
}

HEAD = """\
# What has been run where

Written by `make status` from the records in `docs/records`; a test says when it has to be written again. What a GPU
shows, CI cannot: `make gpu` runs it in at most 8 minutes on one GPU and writes a receipt, which holds as long as the
engine's sources are those it names. After a change in them this page says *not run at these sources*, and which
packages changed ([how to run it, and what counts](contributing.md#receipts-of-a-gpu)).
"""
REAL = ("what", "hardware", "found", "when, commit", "at these sources")
ON_CPUS = (
    "processes on CPUs over Gloo: every schedule and pattern, faults, training (`make test`)",
    *("CPUs", "passed, or the commit is not taken", "CI, at every commit", "yes"),
)
NO_RECEIPT = ("one GPU: `make gpu`", "none", "no receipt yet", "", STALE)
SIMULATED = (
    ("any number of ranks, `simulate`", "real messages between threads of one process", "time; processes; a network"),
    (
        "one rank of 64, and one of 1,024 ([replay](replay.md))",
        "its whole share computed on one H200, the others' keys and values generated",
        "links, and waiting for others",
    ),
    (
        "time of up to 4,096 ranks ([events](events.md))",
        "the engine's own plans, played through a model of links and GPUs",
        "a real network",
    ),
    (
        "memory of many ranks ([state](state.md))",
        "counted on the plans, compared with what a few real ranks held",
        "allocators at that size",
    ),
)
VERIFY = """
`torchrun --nproc-per-node 8 -m longring verify` shows it on yours; its JSON file goes to `docs/records/verify`.
"""


# ------------------------------------------------------------------------------------------------------------ records


@dataclass(frozen=True)
class Line:
    """Something that ran once."""

    what: str
    hardware: str
    status: str  # as part_status has it
    found: str  # in words
    when: str
    commit: str
    changed: tuple[str, ...] | None  # packages since then; None where it is not known; empty: it still holds

    @property
    def holds(self) -> bool:
        return self.changed == ()

    @property
    def row(self) -> str:
        told = {PASSED: "passed", FAILED: "**failed**", INCOMPLETE: "**incomplete**", NOT_RUN: "not run"}[self.status]
        cells = [self.what, self.hardware, f"{told}: {self.found}", f"{self.when[:10]}, {self.commit}", self.at_these]
        return row(*cells)

    @property
    def at_these(self) -> str:
        if self.holds:
            return {PASSED: "yes", NOT_RUN: "not run"}.get(self.status, "**no**")
        return f"{STALE}: {'sources unknown' if self.changed is None else ', '.join(self.changed) + ' changed'}"


def changed_since(then: Any, now: Sources) -> tuple[str, ...] | None:
    """Packages of which a record names other sources than those of now; all it has may be the engine's one hash."""
    if isinstance(then, dict) and isinstance(then.get("packages"), dict):
        before, after = then["packages"], now["packages"]
        return tuple(sorted(name for name in before | after if before.get(name) != after.get(name)))
    engine = then.get("engine") if isinstance(then, dict) else then
    return None if engine is None else () if engine == now["engine"] else ("engine",)


def row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def table(head: Iterable[str], rows: Iterable[str]) -> str:
    names = list(head)
    return "\n".join([row(*names), "|" + "---|" * len(names), *rows]) + "\n"


def loaded(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Records by name; what cannot be read says so, since a damaged record must not vanish from the page."""
    for path in sorted(folder.glob("*.json")):
        try:
            told = json.loads(path.read_text())
        except ValueError as error:
            raise SystemExit(f"{path} is no JSON: {error}") from None
        yield path.name, told if isinstance(told, dict) else {"results": told}


# ----------------------------------------------------------------------------------------------------- receipts: a GPU


def of_receipt(receipt: dict[str, Any], now: Sources) -> Iterator[tuple[str, Line]]:
    changed = changed_since(receipt.get("sources"), now)
    hardware, versions = receipt["hardware"], receipt.get("versions", {})
    where = f"{hardware['gpu']}, torch {versions.get('torch', '?')}"
    for name in PARTS:
        part = receipt.get("parts", {}).get(name, {"status": INCOMPLETE, "reason": "the receipt does not have it"})
        found = counted(part.get("counts", {}), part.get("reason", ""))
        if name == "random":
            found = f"{found}; seed {receipt.get('seed')}"
        elif name == "nccl" and part_status(part) != NOT_RUN:
            library = versions.get("nccl of tests/gpu/nccl") or versions.get("nccl", "?")
            where = f"{where}, NCCL {library}"
        status = part_status(part)
        yield name, Line(NAMES[name], where, status, found, receipt["started"], receipt.get("commit", "?"), changed)


def counted(counts: dict[str, int], reason: str) -> str:
    some = [f"{count:,} {what}" for what, count in counts.items() if count or what in ("passed", "failed")]
    return "; ".join(filter(None, [", ".join(some), reason[:200]])) or "nothing counted"


def latest(receipts: list[dict[str, Any]], now: Sources) -> list[Line]:
    """Of each part on each GPU the last run at these sources; if there is none, the last that ran."""
    best: dict[tuple[str, str], Line] = {}
    failed: dict[tuple[str, str], int] = {}
    for receipt in sorted(receipts, key=lambda each: each["started"]):
        for name, line in of_receipt(receipt, now):
            key = (name, receipt["hardware"]["gpu"])
            known = best.get(key)
            if known is None or rank_of(line) >= rank_of(known):
                best[key] = line
            failed[key] = failed.get(key, 0) + (line.holds and line.status == FAILED)
    lines = []
    for key in sorted(best, key=lambda each: (each[1], PARTS[::-1].index(each[0]))):
        line, times = best[key], failed[key]
        if times and line.status != FAILED:  # the same sources, another outcome
            line = Line(**{**vars(line), "found": f"{line.found}; **{times} earlier at these sources failed**"})
        lines.append(line)
    return lines


def rank_of(line: Line) -> tuple[bool, bool]:
    return line.holds and line.status != NOT_RUN, line.status != NOT_RUN


def is_fresh(receipt: dict[str, Any], now: Sources) -> bool:
    """Whether it passed, all of it, and the engine's sources are what they were."""
    return status_of(receipt) == PASSED and changed_since(receipt.get("sources"), now) == ()


# --------------------------------------------------------------------------------------------------- random, over runs


def random_lines(runs: list[dict[str, Any]], now: Sources) -> Iterator[Line]:
    """All runs at one set of sources together: of different seeds, so that they add up."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        changed = changed_since(run.get("sources"), now)
        key = (bool(run.get("sanitizer")), changed == (), run.get("facts", {}).get("device", "?"))
        groups.setdefault(key, []).append(run)
    for (is_watched, holds, device), of in sorted(groups.items()):
        total = sum(sum(run["outcomes"].values()) for run in of)
        right, refused = (sum(run["outcomes"].get(name, 0) for run in of) for name in ("right", "refused"))
        watched = [run["sanitizer"] for run in of if run.get("sanitizer")]
        errors = sum(each["errors"] for each in watched)
        unwatched = sum(each["processes"] - each["summaries"] for each in watched)
        far = sum(run.get("dilated_over_ranks_from_32768_tokens", 0) for run in of)
        wrong = total - right - refused
        found = f"{total:,} configurations of {len(of)} seeds: {right:,} right, {refused:,} refused, {wrong:,} wrong"
        found += f"; {errors} errors of memcheck" if is_watched else f"; {far} LongNet over ranks from 32,768 tokens"
        status = FAILED if wrong or errors else PASSED if right and not unwatched else INCOMPLETE
        last = max(of, key=lambda run: run["started"])
        what = "compute-sanitizer's memcheck over random configurations" if is_watched else "more random configurations"
        yield Line(
            what, device, status, found, last["started"], last["commit"], () if holds else changed_in_any(of, now)
        )


def changed_in_any(runs: list[dict[str, Any]], now: Sources) -> tuple[str, ...] | None:
    """Packages that have changed since one of the runs; None where one does not name its sources."""
    found = [changed_since(run.get("sources"), now) for run in runs]
    known = [each for each in found if each is not None]
    return tuple(sorted(set().union(*known))) if len(known) == len(found) else None


# ------------------------------------------------------------------------------------------------------------- verify


@dataclass(frozen=True)
class Verified:
    """A JSON file of `longring verify`. Its keys: `what`, `hardware`, `ranks`, `nodes`, `backend`, `shares_a_gpu`,
    `started`, `commit`, `sources` (of longring.sources), and `results`: a list, or a table of lists, of cases with
    `status` ("passed", "failed" or "not run"), or `ok` or `passed`. A failed case, or `ok: false` of the whole: failed.
    None that passed, one that says nothing, or `is_complete: false`: incomplete."""

    told: dict[str, Any]

    @property
    def outcomes(self) -> list[str | None]:
        return [outcome(case) for case in cases_of(self.told.get("results"))]

    @property
    def status(self) -> str:
        found = self.outcomes
        if FAILED in found or outcome(self.told) == FAILED:
            return FAILED
        is_whole = PASSED in found and None not in found and self.told.get("is_complete") is not False
        return PASSED if is_whole else INCOMPLETE

    @property
    def hardware(self) -> str:
        named = self.told.get("hardware", "?")
        return str(named.get("gpu") or named.get("device") or "?") if isinstance(named, dict) else str(named)

    @property
    def is_over_nccl(self) -> bool:
        return "nccl" in str(self.told.get("backend")).lower()

    @property
    def is_many_gpus(self) -> bool:
        return self.told.get("shares_a_gpu") is False and self.is_over_nccl and self.told.get("ranks", 1) > 1

    def line(self, name: str, now: Sources) -> Line:
        told, found = self.told, self.outcomes
        counts = {PASSED: "right", FAILED: "wrong", NOT_RUN: "not run", None: "without a result"}
        words = ", ".join(f"{found.count(each):,} {what}" for each, what in counts.items() if each in found)
        share = ", some sharing a GPU" if told.get("shares_a_gpu") else ""
        nodes = f" on {told['nodes']} nodes" if told.get("nodes", 1) != 1 else ""
        where = f"{self.hardware}, {told.get('ranks', '?')} ranks{nodes} over {told.get('backend', '?')}{share}"
        changed = changed_since(told.get("sources"), now)
        what = f"`longring verify` ([record](records/verify/{name}))"
        when = str(told.get("started", "date unknown"))
        return Line(what, where, self.status, words or "no case", when, str(told.get("commit", "?")), changed)


def cases_of(results: Any) -> Iterator[Any]:
    """Cases, however they are grouped."""
    if isinstance(results, dict) and outcome(results) is None:
        for each in results.values():
            yield from cases_of(each) if isinstance(each, (dict, list)) else [each]
    elif isinstance(results, list):
        for each in results:
            yield from cases_of(each) if isinstance(each, list) else [each]
    elif results is not None:
        yield results


def outcome(case: Any) -> str | None:
    """PASSED, FAILED or NOT_RUN; None of what does not say."""
    told = case if isinstance(case, dict) else {}
    if "status" in told:
        return told["status"] if told["status"] in (PASSED, FAILED, NOT_RUN) else None
    said = [told[name] for name in ("ok", "passed") if isinstance(told.get(name), bool)]
    return None if not said else PASSED if all(said) else FAILED


# ------------------------------------------------------------------------------------------------------------ the page


def measured(records: Path, now: Sources) -> Iterator[str]:
    for name, what in MEASURED.items():
        if not (records / name).exists():
            continue
        told = json.loads((records / name).read_text())
        holds = Line("", "", PASSED, "", "", "", changed_since(told.get("sources"), now)).at_these
        yield row(f"{what} ([record](records/{name}))", machine_of(told.get("machine")), told.get("commit", "?"), holds)


def machine_of(machine: Any) -> str:
    """Records of different programs have it as text, or as different tables."""
    if not isinstance(machine, dict):
        return str(machine)
    gpus, device = machine.get("gpus"), machine.get("device", "cpu")
    return gpus[0] if gpus else f"CPU, {machine.get('cores', '?')} cores" if device == "cpu" else device


def not_seen(verified: list[Verified], gpus: set[str], now: Sources) -> Iterator[str]:
    passed = [one for one in verified if one.status == PASSED and changed_since(one.told.get("sources"), now) == ()]
    if not any(one.is_many_gpus for one in passed):
        yield "Several GPUs, a rank each: NVLink, PCI, InfiniBand, and what overlaps with what there."
    if not any(one.is_many_gpus and one.told.get("nodes", 1) > 1 for one in passed):
        yield "Several machines over a real network."
    if not any(word in gpu for gpu in gpus for word in ("AMD", "MI2", "MI3", "Radeon")):
        yield "GPUs of any vendor but NVIDIA."
    yield f"Any GPU but {', '.join(sorted(gpus)) or 'those of the measurements'}."


def receipts_of(records: Path) -> Iterator[dict[str, Any]]:
    for name, told in loaded(records / "gpu"):
        if not told["hardware"].get("gpus"):
            raise SystemExit(f"{records / 'gpu' / name} is no receipt of a GPU, but of a trial on a CPU: remove it")
        yield told | {"file": name}


def history(receipts: list[dict[str, Any]], now: Sources) -> str:
    """Every receipt, the last first: those that failed, too; with what was skipped, and why."""
    rows = []
    for receipt in sorted(receipts, key=lambda each: each["started"], reverse=True):
        changed = changed_since(receipt.get("sources"), now)
        holds = Line("", "", status_of(receipt), "", "", "", changed).at_these
        skips = [
            f"{shortened(why)} ({count})"
            for part in receipt["parts"].values()
            for why, count in part.get("skips", {}).items()
        ]
        when = f"[{receipt['started'][:16].replace('T', ' ')}](records/gpu/{receipt['file']})"
        told = [when, receipt["hardware"]["gpu"], receipt["commit"]]
        spent = f"{receipt.get('seconds', 0):.0f} s"
        rows.append(row(*told, status_of(receipt), spent, "; ".join(skips) or "nothing", holds))
    head = ("when", "GPU", "commit", "all of it", "took", "skipped or refused", "at these sources")
    return table(head, rows) if rows else "None yet: `make gpu` writes one.\n"


def shortened(why: str) -> str:
    """A reason without its remedy in brackets."""
    return textwrap.shorten(why.partition(" (")[0], 80, placeholder=" ...")


def page(records: Path = RECORDS, now: Sources | None = None) -> str:
    now = now or sources(DOCS.parent / "src" / "longring")
    receipts = list(receipts_of(records))
    verified = [(name, Verified(told)) for name, told in loaded(records / "verify")]
    runs = json.loads(path.read_text())["runs"] if (path := records / "random_gpu.json").exists() else []
    lines = [*latest(receipts, now), *random_lines(runs, now), *(one.line(name, now) for name, one in verified)]
    real = [row(*ON_CPUS), *([] if receipts else [row(*NO_RECEIPT)]), *(line.row for line in lines)]
    gpus = {receipt["hardware"]["gpu"] for receipt in receipts}
    gpus |= {one.hardware for _, one in verified if one.is_over_nccl}
    unseen = not_seen([one for _, one in verified], gpus, now)
    return "\n".join(
        (
            *(HEAD, "## What ran for real\n", table(REAL, real)),
            *("## Receipts\n", history(receipts, now)),
            *("## Measurements\n", table(("measured", "on", "commit", "at these sources"), measured(records, now))),
            "## Only simulated, or replayed\n",
            table(("what", "how", "what it does not show"), (row(*cells) for cells in SIMULATED)),
            *("## Not seen\n", *(f"- {what}" for what in unseen)),
        )
    ) + ("\n" + VERIFY)


def main() -> None:
    (DOCS / "status.md").write_text(page())


if __name__ == "__main__":
    main()
