"""A hash of the engine's sources, for records: does what was seen then hold for the code of now?

The engine is what a call of `attention`, `ring_attention` or `simulate` runs through, and `testing`, which judges it.
What stands on top of it (modules, models, integrations, training, benchmarks, the command line) is left out: no result
of the engine depends on it, and the CPU tests show it as well as a GPU would. Of `plan`, what `auto` chooses by counts;
the rest predicts. A package or root module that is not named here counts. Bytes count, comments too: what a comment
cannot change is not worth deciding. Neither git, nor the path of a checkout, nor its line endings play a part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

OUTSIDE = {"__main__.py", "bench", "cli", "factory.py", "integrations", "models", "nn", "sources.py", "train"}
CHOOSING = {
    "__init__.py",
    "choose.py",
    "cost.py",
    "event_pace.py",
    "hardware.py",
    "hardware.toml",
    "links.py",
    "user_files.py",
    "work.py",
}
IN_PLAN = CHOOSING | {"traffic.py"}
SUFFIXES = {".py", ".toml"}
ROOT_MODULES = "root modules"  # under which their hash goes, beside the packages'
DIGITS = 16


class Sources(TypedDict):
    """As records have it: one hash of all, and of each package, to say what has changed."""

    engine: str
    packages: dict[str, str]


def sources(root: Path = Path(__file__).parent) -> Sources:
    """Of the engine under `root`, a folder `longring`."""
    hashes: dict[str, hashlib._Hash] = {}
    for name in sorted(engine_files(root)):
        text = (root / name).read_bytes().replace(b"\r\n", b"\n")
        package = name.partition("/")[0] if "/" in name else ROOT_MODULES
        hashes.setdefault(package, hashlib.sha256()).update(f"{name}\0{len(text)}\0".encode() + text)
    packages = {name: each.hexdigest()[:DIGITS] for name, each in hashes.items()}
    return {"engine": hashlib.sha256(json.dumps(packages).encode()).hexdigest()[:DIGITS], "packages": packages}


def engine_files(root: Path) -> Iterator[str]:
    """Their names, with slashes, relative to `root`."""
    for path in root.rglob("*"):
        inside = path.relative_to(root).parts
        if path.suffix not in SUFFIXES or inside[0] in OUTSIDE or not path.is_file():
            continue
        if inside[0] != "plan" or inside[1] in IN_PLAN:
            yield "/".join(inside)
