"""Write the tables of the documents anew from the data they show: python docs/write_tables.py"""

import re
from pathlib import Path

from longring.plan.advice import milestone_table, variable_table

DOCS = Path(__file__).parent
TABLES = {"variables": variable_table, "milestones": milestone_table}


def renewed(text: str) -> str:
    """The text, with every marked table as the data has it now."""

    def fill(found: re.Match[str]) -> str:
        return f"{found['begin']}\n{TABLES[found['name']]()}{found['end']}"

    return re.sub(r"(?P<begin><!-- (?P<name>\w+): from .*? -->)\n.*?(?P<end><!-- end -->)", fill, text, flags=re.DOTALL)


def main() -> None:
    path = DOCS / "networks.md"
    path.write_text(renewed(path.read_text()))


if __name__ == "__main__":
    main()
