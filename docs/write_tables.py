"""Write the tables of the documents anew from the data they show: python docs/write_tables.py"""

import re
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from longring.bench.gpu.scenarios import SCENARIOS
from longring.bench.gpu.tables import goal_table, machine_table, markdown
from longring.bench.ranks.tables import markdown as ranks_markdown
from longring.bench.records import Record
from longring.plan.advice import milestone_table, variable_table

DOCS = Path(__file__).parent
DOCUMENTS = ("networks.md", "benchmarks.md", "bench.md")
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


TABLES: dict[str, Callable[[], str]] = {
    "variables": variable_table,
    "milestones": milestone_table,
    "machine": partial(_of_gpu, machine_table),
    "goals": partial(_of_gpu, goal_table),
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
