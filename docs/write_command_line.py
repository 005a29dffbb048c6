"""Write what commands print anew into docs/command_line.md and docs/plan.md: python docs/write_command_line.py"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

DOCUMENTS = [Path(__file__).parent / name for name in ("command_line.md", "plan.md")]
SHOWN = re.compile(r"(?P<begin><!-- printed by: (?P<command>.*?) -->\n```text\n).*?(?P<end>```\n)", flags=re.DOTALL)


def printed_by(command: str) -> str:
    """What the command prints, on a terminal of 80 columns; what it says on stderr comes last."""
    name, *arguments = shlex.split(command)
    assert name == "longring"
    done = subprocess.run(
        [sys.executable, "-m", "longring", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "80"},
    )
    return done.stdout + done.stderr


def renewed(text: str) -> str:
    """The text, with every output that is marked so as the command prints it now."""
    return SHOWN.sub(lambda found: found["begin"] + printed_by(found["command"]) + found["end"], text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(renewed(document.read_text()))
