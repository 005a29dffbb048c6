"""Write the files beside this one: the SHA-256 hashes of every file of every release that constraints.txt pins.

    make hashes

uv resolves the dependencies for all platforms and Python versions at once, and takes the hashes from the package index.
Each group is installed on top of the ones before it, so it lists only what is new, or is new on some platform.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
PYTHON = "3.11.5"  # the oldest Python for which every pinned release has a file

GROUPS = {  # extras, in the order in which they are installed
    "dev": ("plot", "dev"),
    "frameworks": ("transformers", "lightning", "deepspeed", "fairscale"),
    "docs": ("docs",),
    "flash": ("flash",),
}
FROM_SOURCE = {"deepspeed", "fairscale"}  # their builds import torch, so they are installed last
OLDEST = "tests/oldest_transformers.txt"
TORCH = re.compile(r"torch|nvidia-.*|cuda-.*")  # which torch build pip finds, and so its hash, depends on the machine
HEADERS = {
    "torch": "PyTorch as the package index has it, and its CUDA libraries; make installs them with VERIFY_TORCH=1",
    "dev": "make demo, make check",
    "frameworks": "make test",
    "sources": "make test: built from source",
    "docs": "make docs",
    "flash": "the extra `flash`; not installed by make",
    "tools": "make hashes",
    "oldest_transformers": "make test: for the tests of the oldest transformers",
}


def resolved(*wanted: str, read: str = "", pins: str = "constraints.txt") -> dict[str, str]:
    """The requirement with its hashes, by name, of everything that these need."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes"]
    command += ["--no-annotate", "--no-header", "--python-version", PYTHON, "--constraint", pins, *wanted]
    text = subprocess.run(command, cwd=ROOT, check=True, input=read, stdout=subprocess.PIPE, text=True).stdout
    entries = re.split(r"^(?=\S)", text, flags=re.MULTILINE)[1:]
    return {entry.partition("==")[0]: entry for entry in entries}


def write(group: str, entries: dict[str, str]) -> None:
    text = f"# {HEADERS[group]}. Written by make hashes.\n" + "".join(entries[name] for name in sorted(entries))
    (HERE / f"{group}.txt").write_text(text, encoding="utf-8")


def main() -> None:
    done: set[str] = set()  # entries, with their platforms
    torch = {name: entry for name, entry in resolved("-", read="torch").items() if TORCH.fullmatch(name)}
    write("torch", torch)
    for group, extras in GROUPS.items():
        found = resolved("pyproject.toml", *(word for extra in extras for word in ("--extra", extra)))
        new = {name: entry for name, entry in found.items() if name not in torch and entry not in done}
        done |= set(new.values())
        if sources := {name: entry for name, entry in new.items() if name in FROM_SOURCE}:
            write("sources", sources)
        write(group, {name: entry for name, entry in new.items() if name not in sources})
    write("tools", resolved("-", read="uv"))
    write("oldest_transformers", resolved(OLDEST, "--no-deps", pins=OLDEST))


if __name__ == "__main__":
    main()
