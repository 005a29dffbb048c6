"""Write the tables of the documents anew from the data they show: python docs/write_tables.py"""

import json
import re
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from longring.bench.gpu.scenarios import SCENARIOS
from longring.bench.gpu.tables import goal_table, machine_table, markdown
from longring.bench.ranks.tables import markdown as ranks_markdown
from longring.bench.records import Record
from longring.plan.advice import milestone_table, variable_table
from longring.plan.quantities import spoken_bytes, spoken_seconds

DOCS = Path(__file__).parent
DOCUMENTS = ("networks.md", "benchmarks.md", "bench.md", "replay.md")
GPU_RECORD = DOCS / "records" / "h200.json"
RANKS_RECORD = DOCS / "records" / "bench.json"


@lru_cache(maxsize=1)
def _gpu() -> Record | None:
    return Record.load(GPU_RECORD) if GPU_RECORD.exists() else None


def _of_gpu(table: Callable[[Record], str]) -> str:
    record = _gpu()
    return "Not measured yet.\n" if record is None else table(record)


def _of_ranks(table: Callable[[Record], str]) -> str:
    return table(Record.load(RANKS_RECORD)) if RANKS_RECORD.exists() else "Not measured yet.\n"


def _replays() -> str:
    """What one rank of a large world did on a GPU, pass by pass."""
    lines = [
        "| replayed | pass | time of the engine | most bytes held | predicted | checks that hold | largest error |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for name in ("replay_dilated", "replay_dense"):
        record = json.loads((DOCS / "records" / f"{name}.json").read_text())
        asked = record["arguments"]
        pattern = "dilated" if asked["dilated"] else "causal"
        what = f"{pattern}, {count_in_words(asked['tokens'])} tokens, rank {record['rank']} of {record['ranks']:,}"
        right = [check for check in record["checks"] if check["ok"]]
        worst = max(record["checks"], key=lambda check: check["error"])
        for phase, of in record["phases"].items():
            shown = (
                f"{what} | {phase} | {spoken_seconds(of['seconds'])} | {spoken_bytes(of['peak_bytes'])} | "
                f"{spoken_bytes(of['predicted_bytes'])} | {len(right)} of {len(record['checks'])} | "
                f"{worst['error']:.1e} ({worst['quantity']})"
            )
            lines.append(f"| {shown} |")
    return "\n".join(lines) + "\n"


def count_in_words(tokens: int) -> str:
    return f"{tokens >> 30} Gi" if tokens >= 1 << 30 else f"{tokens >> 20} Mi"


def _symmetric_memory() -> str:
    record = json.loads((DOCS / "records" / "symmetric_memory.json").read_text())
    lines = [f"{record['shapes']}; torch {record['versions']['torch']}, commit {record['commit']}.", ""]
    lines.append("| schedule | ranks | most bytes of a rank | of one rank's | of the sum of its components |")
    lines.append("|---|---|---|---|---|")
    for run in record["runs"]:
        name, share = run["schedule"] if run["ranks"] > 1 else "one call", run["of one rank's peak"]
        lines.append(
            f"| {name} | {run['ranks']} | {spoken_bytes(run['peak'])} | {share:.3f} | "
            f"{run['of the sum of components']:.3f} |"
        )
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "variables": variable_table,
    "milestones": milestone_table,
    "machine": partial(_of_gpu, machine_table),
    "goals": partial(_of_gpu, goal_table),
    "replays": _replays,
    "symmetric memory": _symmetric_memory,
    "ranks_machine": partial(_of_ranks, machine_table),
    "ranks": partial(_of_ranks, partial(ranks_markdown, scenario="report")),
    **{name: partial(_of_gpu, partial(markdown, scenario=name)) for name in SCENARIOS},
}


def renewed(text: str) -> str:
    """The text, with every marked table as the data has it now."""

    def fill(found: re.Match[str]) -> str:
        return f"{found['begin']}\n{TABLES[found['name']]()}{found['end']}"

    return re.sub(
        r"(?P<begin><!-- (?P<name>[\w ]+): from .*? -->)\n.*?(?P<end><!-- end -->)", fill, text, flags=re.DOTALL
    )


def main() -> None:
    for name in DOCUMENTS:
        path = DOCS / name
        path.write_text(renewed(path.read_text()))


if __name__ == "__main__":
    main()
